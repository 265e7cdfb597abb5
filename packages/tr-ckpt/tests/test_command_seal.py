"""`trainer ckpt seal` accepts what was changed on purpose, and nothing else."""

import builtins
import json
import sys

import pytest
import torch
from ckpt_parts import State, foreign, model, save

from tr_ckpt import Checkpointer, DamagedCheckpointError, manifest, tensor_file
from tr_ckpt.command import main


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "run", 5)


def restore(folder):
    parts = {"model": model(), "scheduler": State(), "trainer_state": State()}
    assert Checkpointer(folder.parent).restore(parts, str(folder)) == 5
    return {name: part.state for name, part in parts.items()}


def change_schedule(folder):
    path = folder / "scheduler.json"
    path.write_text(path.read_text().replace("0.1", "0.25"))


def test_a_changed_checkpoint_is_refused_and_the_message_says_how_to_accept_it(folder):
    change_schedule(folder)
    with pytest.raises(DamagedCheckpointError, match=r"scheduler.json is 1 .* `trainer ckpt seal .*checkpoint-5`"):
        restore(folder)


def test_what_was_changed_is_shown_and_then_restored(folder, trainer_ckpt):
    change_schedule(folder)
    weights = tensor_file.read(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensor_file.write(folder / "model.safetensors", {**weights, "bias": torch.full((4,), 7.0)})
    (folder / "config.json").write_text("{}")
    before = manifest.read(folder)
    shown = trainer_ckpt("seal", folder, "--yes").out
    for name in ("scheduler.json", "model.safetensors", "config.json"):
        assert f"{name} " in shown.split("accepted: ")[0]
    state = restore(folder)
    assert state["scheduler"]["base_lrs"] == [0.25]
    assert state["model"]["bias"].tolist() == [7.0] * 4
    after = manifest.read(folder)
    assert (after.step, after.sequence, after.parts, after.saved_at) == (
        before.step,
        before.sequence,
        before.parts,
        before.saved_at,
    )
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-5"]
    assert main(["verify", str(folder)]) == 0


def test_a_file_that_belongs_to_no_part_may_be_gone(folder, trainer_ckpt):
    (folder / "config.json").unlink()
    assert "config.json is missing" in trainer_ckpt("seal", folder, "--yes").out
    assert main(["verify", str(folder)]) == 0


def test_where_nothing_was_changed_nothing_is_written(folder, trainer_ckpt):
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert "nothing was changed" in trainer_ckpt("seal", folder).out
    assert (folder / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(("answer", "accepted"), [("y", True), ("yes", True), ("", False), ("n", False)])
def test_it_asks_before(folder, monkeypatch, answer, accepted, capsys):
    change_schedule(folder)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda question: answer)
    assert main(["seal", str(folder)]) == 0
    assert main(["verify", str(folder)]) == (0 if accepted else 1)


def test_without_a_terminal_it_needs_yes(folder, monkeypatch, trainer_ckpt):
    change_schedule(folder)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert "no terminal to ask on; give --yes" in trainer_ckpt("seal", folder, code=2).err


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def lose(folder):
    (folder / "model.safetensors").unlink()


def break_json(folder):
    (folder / "scheduler.json").write_text('{"base_lrs": [0.1')


def link(folder):
    (folder / "scheduler.json").rename(folder.parent / "elsewhere.json")
    (folder / "scheduler.json").symlink_to(folder.parent / "elsewhere.json")


def change_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 6}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors cannot be read"),
        (lose, "model.safetensors is missing, and belongs to a part of it"),
        (break_json, "scheduler.json cannot be read"),
        (link, "scheduler.json "),
        (change_manifest, "manifest.json was changed after it was written"),
    ],
)
def test_what_is_no_change_on_purpose_is_refused(folder, trainer_ckpt, damage, message):
    damage(folder)
    before = (folder / "manifest.json").read_bytes()
    assert message in trainer_ckpt("seal", folder, "--yes", code=2).err
    assert (folder / "manifest.json").read_bytes() == before


def test_what_is_none_of_our_checkpoints_is_refused(tmp_path, trainer_ckpt):
    assert "written by another program" in trainer_ckpt("seal", foreign(tmp_path, 3), "--yes", code=2).err


def test_a_copy_under_another_step_is_refused(folder, trainer_ckpt):
    change_schedule(folder)
    copy = folder.rename(folder.with_name("checkpoint-9"))
    assert "is a copy of step 5" in trainer_ckpt("seal", copy, "--yes", code=2).err
