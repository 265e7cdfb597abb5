"""Whatever somebody puts into a checkpoint: reading it executes nothing and touches nothing outside."""

import hashlib
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
from ckpt_malice import Watching, refused, rewritten, saved_twice, vouched
from ckpt_parts import number_of, parts, restored

from tr_ckpt import CheckpointError


def test_the_watch_sees_what_it_is_there_for(tmp_path):
    (tmp_path / "in").mkdir()
    with Watching() as watching:
        (tmp_path / "out").write_text("")
    with pytest.raises(AssertionError, match="out"):
        watching.judge(tmp_path / "in")
    with Watching() as watching:
        pickle.loads(pickle.dumps(os.getcwd))
    with pytest.raises(AssertionError):
        watching.judge(tmp_path)


class Payload:
    def __init__(self, path):
        self.path = str(path)


class Opens(Payload):
    def __reduce__(self):
        return Path.touch, (Path(self.path),)


class Runs(Payload):
    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Executes(Payload):
    def __reduce__(self):
        return exec, (f"open({self.path!r}, 'w').close()",)


def saved_by_torch(payload):
    buffer = io.BytesIO()
    torch.save({"state": payload, "tensor": torch.ones(2)}, buffer)
    return buffer.getvalue()


def packed(payload):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        content = pickle.dumps(payload)
        entry = tarfile.TarInfo("pickle")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


PAYLOADS = {
    "pickle that opens": lambda path: pickle.dumps(Opens(path)),
    "old pickle that runs": lambda path: pickle.dumps(Runs(path), protocol=0),
    "pickle that executes": lambda path: pickle.dumps(Executes(path)),
    "saved by torch": lambda path: saved_by_torch(Opens(path)),
    "in an archive": lambda path: packed(Runs(path)),
}
PLACES = {
    "in place of it": lambda content, payload: payload,
    "after it": lambda content, payload: content + payload,
    "before it": lambda content, payload: payload + content,
    "cut to its length": lambda content, payload: (payload + content)[: len(content)],
}
TEMPTING = (
    "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "model.ckpt",
    "pytorch_model.bin", "model.pt", "model.pkl", "state.pickle", "__init__.py", "conftest.py", "sitecustomize.py",
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    return saved_twice(tmp_path / "run")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_malicious_pickle_in_any_file_executes_nothing(payload, place, saved, tmp_path, caplog):
    marker = tmp_path / "executed"
    content = PAYLOADS[payload](marker)
    folder = saved.path(30)
    for path in sorted(folder.iterdir()):
        original, described = path.read_bytes(), (folder / "manifest.json").read_bytes()
        path.write_bytes(PLACES[place](original, content))
        refused(saved, folder, path.name)
        if path.name not in ("manifest.json", "config.json"):
            vouched(folder)  # also where the manifest vouches for it
            refused(saved, folder, path.name, vouched=True)
        (folder / "manifest.json").write_bytes(described)
        path.write_bytes(original)
    assert saved.restore(parts()) == 30
    assert not marker.exists()


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("listed", [False, True])
def test_a_malicious_file_beside_the_others_is_not_looked_at(payload, listed, saved, tmp_path):
    marker = tmp_path / "executed"
    for name in TEMPTING:
        (saved.path(30) / name).write_bytes(PAYLOADS[payload](marker))
    if listed:
        vouched(saved.path(30), *TEMPTING)
    into = parts()
    with Watching() as watching:
        assert saved.restore(into) == 30
    watching.judge(saved.directory)
    assert number_of(into) == 30
    assert not marker.exists()


@pytest.mark.parametrize("name", ["manifest.json", "model.json", "model.safetensors", "extra.json"])
@pytest.mark.parametrize("target", ["another checkpoint", "outside", "nothing", "itself", "a device"])
def test_a_link_in_place_of_a_file_is_not_followed(name, target, saved, tmp_path):
    folder = saved.path(30)
    secret = tmp_path / "outside" / name
    secret.parent.mkdir()
    secret.write_bytes((folder / name).read_bytes())  # the very same content: only the link tells
    (folder / name).unlink()
    (folder / name).symlink_to(
        {
            "another checkpoint": saved.path(20) / name,
            "outside": secret,
            "nothing": tmp_path / "nothing",
            "itself": folder / name,
            "a device": "/dev/zero",
        }[target]
    )
    if name == "manifest.json" and target in ("nothing", "itself"):  # as if there were none
        refused(saved, folder, "it holds neither a manifest.json nor")
    else:
        message = f"{name} is a link, which may lead anywhere; copy the checkpoint with its links followed"
        refused(saved, folder, message)


def test_a_folder_that_is_a_link_is_not_followed(saved, tmp_path):
    def write_extra(folder):
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "words.txt").write_text("words")

    folder = saved.save(40, parts(40), write_extra=write_extra)
    (folder / "tokenizer").rename(tmp_path / "elsewhere")
    (folder / "tokenizer").symlink_to(tmp_path / "elsewhere")
    refused_by = "tokenizer/words.txt is a link"
    with pytest.raises(CheckpointError, match=refused_by):
        saved.restore(parts(), folder)


def test_a_linked_file_that_the_manifest_does_not_list_is_not_followed(saved, tmp_path):
    """A part without tensors has no such file: one that is put there is not read, or refused."""
    folder = saved.path(30)
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    described = json.loads((folder / "manifest.json").read_text())
    del described["files"]["model.safetensors"]
    described["parts"]["model"].remove("model.safetensors")
    rewritten(folder, files=described["files"], parts=described["parts"])
    refused(saved, folder, "model.safetensors is a link", vouched=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes in the file system")
def test_a_pipe_in_place_of_a_file_does_not_hang(saved):
    folder = saved.path(30)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    described = json.loads((folder / "manifest.json").read_text())["files"]
    described["config.json"] = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    rewritten(folder, files=described)
    refused(saved, folder, "config.json is not a plain file")
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    refused(saved, folder, "manifest.json is not a plain file")


def test_a_checkpoint_reached_through_a_link_is_read(saved, tmp_path):
    """What the user names may be a link: only inside of it nothing is followed."""
    (tmp_path / "alias").symlink_to(saved.path(30))
    assert restored(saved, tmp_path / "alias") == (30, 30)


def test_the_payloads_do_what_they_say_where_they_are_unpickled(tmp_path):
    """Or the tests above would show nothing."""
    for number, payload in enumerate((Opens, Runs, Executes)):
        pickle.loads(pickle.dumps(payload(tmp_path / str(number))))
        assert (tmp_path / str(number)).exists()


def test_nothing_that_is_refused_is_changed(saved):
    """Refusing writes nothing: what is there may be evidence."""
    before = {path: path.stat().st_mtime_ns for path in saved.directory.rglob("*")}
    (saved.path(30) / "model.json").write_bytes(b"[" * 1000)
    before[saved.path(30) / "model.json"] = (saved.path(30) / "model.json").stat().st_mtime_ns
    saved.restore(parts())
    assert {path: path.stat().st_mtime_ns for path in saved.directory.rglob("*")} == before
