"""Every damage is found, named, and skipped."""

import json
import logging
import re
import shutil

import pytest
import torch
from ckpt_parts import Holding, flip, number_of, parts, restored, rewritten, save_steps

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, discovery, files


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - size)


DAMAGES = {
    "short": (
        lambda f: cut(f / "model.safetensors", 5),
        r"model.safetensors is 5 bytes short: cut in tensor tensor \(bytes 104 to 132\)",
    ),
    "long": (lambda f: (f / "extra.json").write_bytes(b"x" * 2000), r"extra.json is 1,\d\d\d bytes too long"),
    "missing": (lambda f: (f / "model.json").unlink(), "model.json is missing"),
    "flipped": (
        lambda f: flip(f / "model.safetensors", -3),
        r"model.safetensors was changed after it was written: its SHA-256 differs, first in tensor tensor \(bytes",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing, so it is incomplete"),
    "manifest cut": (lambda f: cut(f / "manifest.json", 5), "manifest.json is not valid JSON"),
    "manifest empty": (lambda f: (f / "manifest.json").write_bytes(b""), "manifest.json is not valid JSON"),
    "manifest binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not valid JSON"),
    "manifest list": (lambda f: (f / "manifest.json").write_text("[]"), "does not match its digest"),
    "manifest edited": (lambda f: flip(f / "manifest.json", 200), "manifest.json"),
    "a folder": (lambda f: ((f / "model.json").unlink(), (f / "model.json").mkdir()), "model.json"),
    "manifest folder": (
        lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()),
        "manifest.json is not a plain file",
    ),
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    return save_steps(tmp_path, (20, 30))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(kind, saved, caplog):
    damage, message = DAMAGES[kind]
    damage(saved.path(30))
    with caplog.at_level(logging.WARNING):
        assert restored(saved) == (20, 20)
    assert re.search(f"skipped checkpoint-30: .*{message}", caplog.text)
    # One that was asked for is an error. Without its manifest a folder is not a checkpoint, damaged or not.
    expected = message if (saved.path(30) / "manifest.json").exists() else "it holds neither a manifest.json nor"
    into = parts()
    with pytest.raises(ValueError, match=expected):
        saved.restore(into, saved.path(30))
    assert number_of(into) == 0


def test_the_error_says_what_to_give_instead(saved):
    cut(saved.path(30) / "model.json", 1)
    with pytest.raises(DamagedCheckpointError) as caught:
        saved.restore(parts(), saved.path(30))
    assert str(caught.value) == (
        f"{saved.path(30)}: model.json is 1 bytes short — give another checkpoint, "
        f"or {saved.directory} for the newest valid one in it; a change on purpose is accepted by "
        f"`trainer ckpt seal {saved.path(30)}`"
    )
    cut(saved.path(20) / "extra.safetensors", 7)
    with pytest.raises(DamagedCheckpointError, match="the newest valid one in it$"):
        saved.restore(parts(), saved.path(20))


def test_all_damage_is_named_at_once(saved, caplog):
    (saved.path(30) / "model.json").unlink()
    cut(saved.path(30) / "extra.safetensors", 7)
    saved.restore(parts())
    assert (
        "extra.safetensors is 7 bytes short: cut in tensor tensor (bytes 104 to 132); model.json is missing"
        in caplog.text
    )


def test_with_all_damaged_there_is_nothing_to_restore(saved, caplog):
    for step in (20, 30):
        flip(saved.path(step) / "model.safetensors", -3)
    assert saved.restore(parts()) is None
    assert caplog.text.count("skipped") == 2


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(saved, caplog):
    shutil.copytree(saved.path(20), saved.path(40))
    assert saved.restore(parts()) == 30
    assert "skipped checkpoint-40: its manifest.json is that of step 20" in caplog.text
    assert saved.steps() == [20, 30]


def test_steps_lists_complete_checkpoints_only(saved):
    (saved.directory / "checkpoint-40").mkdir()
    (saved.directory / "checkpoint-x").mkdir()
    (saved.directory / "checkpoint-007").mkdir()
    cut(saved.path(30) / "model.json", 1)
    assert saved.steps() == [20]


# Several tensors, of several sizes, one of them empty.
LAYERS = {
    "layers": {"0": {"weight": torch.arange(6.0), "bias": torch.ones(2, dtype=torch.float64)}},
    "counts": [torch.arange(3), torch.empty(0), torch.tensor(True)],
    "name": "x",
}


@pytest.fixture
def layered(tmp_path):
    """A checkpoint before, and the folder of one whose files are to be damaged."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"m": Holding(LAYERS)})
    return checkpointer, checkpointer.save(2, {"m": Holding(LAYERS)})


def damage_named(checkpointer, folder):
    """Return what is said of the checkpoint that is skipped for the one before."""
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpointer.restore({"m": Holding(LAYERS)}, folder)
    return str(caught.value).partition(" — ")[0]


def sections_of(path):
    """Return name, start and end of each stretch of a safetensors file, as its own header has them."""
    raw = path.read_bytes()
    before = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:before])
    del header["__metadata__"]
    tensors = sorted((before + e["data_offsets"][0], before + e["data_offsets"][1], n) for n, e in header.items())
    whole = [("its header", 0, before), *((f"tensor {name}", start, end) for start, end, name in tensors)]
    return [section for section in whole if section[2] > section[1]]


def test_every_byte_that_changes_in_any_file_is_found_and_its_tensor_named(layered):
    checkpointer, folder = layered
    count = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        sections = sections_of(path) if path.suffix == ".safetensors" else []
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
            said = damage_named(checkpointer, folder)
            assert said.startswith(f"{path.parent}: {path.name} ")
            named = [f", first in {name} (bytes {a:,} to {b:,})" for name, a, b in sections if a <= at < b]
            assert said.endswith(f"its SHA-256 differs{''.join(named)}") or path.suffix == ".json"
            count += 1
        path.write_bytes(content)
        assert len(sections) in (0, 5)
    assert count > 1600
    assert checkpointer.restore({"m": Holding(LAYERS)}) == 2


def test_every_length_that_a_file_is_cut_to_is_found_and_the_first_tensor_that_is_cut_named(layered):
    checkpointer, folder = layered
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        sections = sections_of(path) if path.suffix == ".safetensors" else []
        for length in range(len(content)):
            path.write_bytes(content[:length])
            said = damage_named(checkpointer, folder)
            assert said.startswith(f"{path.parent}: {path.name} ")
            if path.name == "manifest.json":
                continue
            named = [f": cut in {name} (bytes {a:,} to {b:,})" for name, a, b in sections if length < b][:1]
            assert said == f"{path.parent}: {path.name} is {len(content) - length:,} bytes short{''.join(named)}"
        path.write_bytes(content)


def test_of_several_changes_the_first_is_named(layered):
    checkpointer, folder = layered
    _, _, first, *_, last = [start for _, start, _ in sections_of(folder / "m.safetensors")]
    for at in (last, first):
        flip(folder / "m.safetensors", at)
    assert "first in tensor layers.0.bias (bytes " in damage_named(checkpointer, folder)


def test_a_tensor_larger_than_a_block_is_named_too(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 16)
    monkeypatch.setattr(discovery, "_BLOCK_BYTES", 24)
    checkpointer = Checkpointer(tmp_path)
    folder = checkpointer.save(1, {"m": Holding(LAYERS)})
    name, start, end = sections_of(folder / "m.safetensors")[3]
    flip(folder / "m.safetensors", end - 1)
    assert f"first in {name} (bytes {start:,} to {end:,})" in damage_named(checkpointer, folder)


def test_a_checkpoint_of_a_newer_version_is_an_error_and_not_passed_over(saved):
    """It may be the most progress there is: going on from an older one would quietly lose it."""
    rewritten(saved.path(30), format=2)
    message = "checkpoint-30: its format is 2; this version reads 1 — install a newer tr-ckpt"
    with pytest.raises(CheckpointError, match=message):
        saved.restore(parts())
    with pytest.raises(CheckpointError, match=message):
        saved.restore(parts(), saved.path(30))
    assert saved.steps() == [20]
