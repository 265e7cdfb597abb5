"""Every damage is found, named, and passed over."""

import hashlib
import json
import logging
import pickle
import re
import shutil

import pytest
from ckpt_parts import Values, number_of, parts

from tr_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, files, manifest


@pytest.fixture
def saved(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(20, parts(20))
    checkpointer.save(30, parts(30))
    return checkpointer


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - size)


def flip(path, at=-3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "short": (lambda f: cut(f / "model.safetensors", 5), "model.safetensors is 5 bytes short"),
    "long": (lambda f: (f / "extra.json").write_bytes(b"x" * 2000), r"extra.json is 1,\d\d\d bytes too long"),
    "missing": (lambda f: (f / "model.json").unlink(), "model.json is missing"),
    "flipped": (lambda f: flip(f / "model.safetensors"), "model.safetensors was changed after it was written"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing, so it is incomplete"),
    "manifest cut": (lambda f: cut(f / "manifest.json", 5), "manifest.json is no valid JSON"),
    "manifest empty": (lambda f: (f / "manifest.json").write_bytes(b""), "manifest.json is no valid JSON"),
    "manifest binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is no valid JSON"),
    "manifest list": (lambda f: (f / "manifest.json").write_text("[]"), "does not match its digest"),
    "manifest edited": (lambda f: flip(f / "manifest.json", 200), "manifest.json"),
    "a folder": (lambda f: ((f / "model.json").unlink(), (f / "model.json").mkdir()), "model.json"),
    "manifest folder": (
        lambda f: ((f / "manifest.json").unlink(), (f / "manifest.json").mkdir()),
        "manifest.json cannot be read: Is a directory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(kind, saved, caplog):
    damage, message = DAMAGES[kind]
    damage(saved.path(30))
    into = parts()
    with caplog.at_level(logging.WARNING):
        assert saved.restore(into) == 20
    assert number_of(into) == 20
    assert re.search(f"passed over checkpoint-30: .*{message}", caplog.text)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(kind, saved):
    damage, message = DAMAGES[kind]
    damage(saved.path(30))
    into = parts()
    # Without its manifest a folder is no checkpoint, damaged or not.
    expected = message if (saved.path(30) / "manifest.json").exists() else "it holds neither a manifest.json nor"
    with pytest.raises(ValueError, match=expected):
        saved.restore(into, saved.path(30))
    assert number_of(into) == 0


def test_the_error_says_what_to_give_instead(saved):
    cut(saved.path(30) / "model.json", 1)
    with pytest.raises(DamagedCheckpointError) as caught:
        saved.restore(parts(), saved.path(30))
    assert str(caught.value) == (
        f"checkpoint-30: model.json is 1 bytes short — give another checkpoint, "
        f"or {saved.directory} for the newest valid one in it"
    )


def test_all_damage_is_named_at_once(saved, caplog):
    (saved.path(30) / "model.json").unlink()
    cut(saved.path(30) / "extra.safetensors", 7)
    saved.restore(parts())
    assert "extra.safetensors is 7 bytes short; model.json is missing" in caplog.text


def test_with_all_damaged_there_is_nothing_to_restore(saved, caplog):
    for step in (20, 30):
        flip(saved.path(step) / "model.safetensors")
    assert saved.restore(parts()) is None
    assert caplog.text.count("passed over") == 2


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(saved, caplog):
    shutil.copytree(saved.path(20), saved.path(40))
    assert saved.restore(parts()) == 30
    assert "passed over checkpoint-40: its manifest.json is that of step 20" in caplog.text
    assert saved.steps() == [20, 30]


def test_steps_lists_complete_checkpoints_only(saved):
    (saved.directory / "checkpoint-40").mkdir()
    (saved.directory / "checkpoint-x").mkdir()
    (saved.directory / "checkpoint-007").mkdir()
    cut(saved.path(30) / "model.json", 1)
    assert saved.steps() == [20]


def test_every_bit_that_flips_in_any_file_is_found(tmp_path):
    """Each byte of each file of a checkpoint, one bit at a time in turn."""
    checkpointer = Checkpointer(tmp_path)
    folder = checkpointer.save(1, {"m": Values(3)})
    count = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
            with pytest.raises(DamagedCheckpointError, match=re.escape(path.name)):
                checkpointer.restore({"m": Values()}, folder)
            count += 1
        path.write_bytes(content)
    assert count > 900
    assert checkpointer.restore({"m": Values()}, folder) == 1


def test_every_length_that_a_file_is_cut_to_is_found(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    folder = checkpointer.save(1, {"m": Values(3)})
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for length in range(0, len(content), 7):
            path.write_bytes(content[:length])
            with pytest.raises(DamagedCheckpointError, match=re.escape(path.name)):
                checkpointer.restore({"m": Values()}, folder)
        path.write_bytes(content)


def rewritten(folder, **changes):
    """Write a manifest that is whole but says something else."""
    content = json.loads((folder / "manifest.json").read_text()) | changes
    content["manifest_sha256"] = "0" * 64
    text = json.dumps(content)
    own = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace("0" * 64, own, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "many"}, "manifest.json lacks what it must hold"),
        ({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}, "names the file '../../secret', which lies outside"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "names the file '/etc/passwd', which lies outside"),
    ],
    ids=["no number", "above", "absolute"],
)
def test_a_manifest_that_is_whole_but_wrong_is_refused(changes, message, saved, caplog):
    rewritten(saved.path(30), **changes)
    assert saved.restore(parts()) == 20
    assert message in caplog.text


def test_a_checkpoint_of_a_newer_version_is_an_error_and_not_passed_over(saved):
    """It may be the most progress there is: going on from an older one would quietly lose it."""
    rewritten(saved.path(30), format=2)
    message = "checkpoint-30: its format is 2; this version reads 1 — install a newer tr-ckpt"
    with pytest.raises(CheckpointError, match=message):
        saved.restore(parts())
    with pytest.raises(CheckpointError, match=message):
        saved.restore(parts(), saved.path(30))
    assert saved.steps() == [20]


def test_a_file_that_cannot_be_read_is_damage(saved, monkeypatch, caplog):
    original = files.record

    def record(path):
        if path.parent.name == "checkpoint-30" and path.name == "model.safetensors":
            raise OSError(5, "Input/output error")
        return original(path)

    monkeypatch.setattr(files, "record", record)
    assert saved.restore(parts()) == 20
    assert "passed over checkpoint-30: model.safetensors cannot be read: Input/output error" in caplog.text


def test_a_malicious_pickle_in_any_file_executes_nothing(saved, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    for path in saved.path(30).iterdir():
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Malicious()))
        assert saved.restore(parts()) == 20
        if path.name != "manifest.json":
            # Also where the manifest vouches for it.
            described = json.loads((saved.path(30) / "manifest.json").read_text())
            held = files.record(path)
            described["files"][path.name] = {"bytes": held.bytes, "sha256": held.sha256}
            kept = (saved.path(30) / "manifest.json").read_bytes()
            rewritten(saved.path(30), files=described["files"])
            assert manifest.read(saved.path(30)).step == 30
            with pytest.raises(CheckpointError, match=re.escape(path.name)):
                saved.restore(parts(), saved.path(30))
            (saved.path(30) / "manifest.json").write_bytes(kept)
        path.write_bytes(content)
    assert saved.restore(parts()) == 30
    assert not (tmp_path / "executed").exists()
