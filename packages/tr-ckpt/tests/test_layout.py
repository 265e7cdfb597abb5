"""What docs/layout.md says of the files is so."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from ckpt_faults import Faults
from ckpt_parts import Run, State, rewritten

from tr_ckpt import Checkpointer, codec, files, manifest

LAYOUT = (Path(__file__).parent.parent / "docs" / "layout.md").read_text(encoding="utf-8")


def section(heading):
    return LAYOUT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_script_reads_a_checkpoint_without_this_package(tmp_path, monkeypatch, capsys):
    run = Run()
    run.train(3)
    Checkpointer(tmp_path / "run").save(30, run.parts())
    monkeypatch.chdir(tmp_path)
    [script] = re.findall(r"```python\n(.*?)```", LAYOUT, re.DOTALL)
    imported = re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE)
    assert set(imported) == {"json", "pathlib", "safetensors"}
    names = {}
    exec(compile(script, "layout.md", "exec"), names)
    assert names["step"] == 30
    assert set(names["weights"]) == set(run.model.state_dict())
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(names["weights"][name], tensor)
    state = run.optimizer.state_dict()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(state["state"])
    for index, moments in state["state"].items():
        assert torch.equal(names["tensors"][f"state.{index}.exp_avg"], moments["exp_avg"])
        assert lines[index].startswith(f"30 {index} ({moments['exp_avg'].shape[0]},")
        assert lines[index].endswith(str(state["param_groups"][0]["lr"]))


def test_the_manifest_holds_the_keys_that_are_listed(tmp_path):
    folder = Checkpointer(tmp_path).save(1, {"model": State(x=torch.zeros(2)), "plain": State(n=1)})
    listed = re.findall(r"^\| `(\w+)` \|", section("The manifest"), re.MULTILINE)
    held = json.loads((folder / "manifest.json").read_text())
    assert listed == list(held)
    assert held["format"] == 1 == manifest.FORMAT
    assert set(held["files"]["model.safetensors"]) == {"bytes", "sha256"}


def test_every_tag_is_listed():
    tags = {*codec._TAGS, "$metadata", *codec._LEAF_DECODERS}
    assert set(re.findall(r'"(\$\w+)":', section("Parts"))) == tags


def without_repeats(names):
    return [name for name, _ in itertools.groupby(names)]


def test_a_save_does_the_operations_that_are_listed_in_that_order(tmp_path, monkeypatch):
    """A save that adds a file, replaces a checkpoint of its step and removes one beyond the limit."""
    steps = re.findall(r"^\| (\d+) \| (.*?) \|", section("What a save does, and what a crash leaves"), re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 13))
    named = [re.findall(r"`(\w+)`", text) for _, text in steps]
    listed = [[name for name in of_step if name in files.OPERATIONS] for of_step in named]
    monkeypatch.setattr(files, "_AT_ONCE", 1)  # or the order of what is done at once is by chance
    keeper = Checkpointer(tmp_path, keep_last=2)
    for step in (10, 30):
        keeper.save(step, {"part": State(n=step)})
    keeper.keep_last = 1
    with Faults() as counted:
        keeper.save(30, {"part": State(n=1)}, write_extra=lambda folder: (folder / "config.json").write_text("{}"))
    assert without_repeats(counted.log) == without_repeats(name for of_step in listed for name in of_step)


@pytest.mark.parametrize("missing", ["files", "parts", "saved_at", "sections", "sequence", "step", "versions"])
def test_a_manifest_that_lacks_a_key_is_damage(tmp_path, missing, caplog):
    checkpointer = Checkpointer(tmp_path)
    rewritten(checkpointer.save(1, {"part": State(n=7)}), drop=[missing])
    assert checkpointer.restore({"part": State()}) is None
    [skipped] = checkpointer.restored.skipped
    assert skipped == f"checkpoint-1: manifest.json lacks required content: KeyError('{missing}')"
    assert skipped in caplog.text


def test_keys_that_are_not_known_are_ignored(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    rewritten(checkpointer.save(1, {"part": State(n=7)}), colour="blue")
    assert checkpointer.restore({"part": State()}) == 1
