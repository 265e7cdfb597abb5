"""Whatever somebody puts into a checkpoint: reading it executes nothing and touches nothing outside."""

import hashlib
import io
import json
import logging
import os
import pickle
import re
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import torch
from ckpt_parts import Values, number_of, parts
from safetensors import safe_open

from tr_ckpt import Checkpointer, CheckpointError, files, manifest

# What opens files here that is not the code under test: imports.
OF_PYTHON = tuple({*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(files.__file__).parents[1])})
EXECUTING = (
    "exec",
    "os.system",
    "os.posix_spawn",
    "os.exec",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
WRITING = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)

_events: list[tuple[str, tuple]] | None = None


def _audit(event, arguments):
    if _events is not None and (event in (*EXECUTING, *WRITING) or event == "open"):
        _events.append((event, arguments))


sys.addaudithook(_audit)


class Watching:
    """Note what the interpreter is about to open and to run; `judge` says whether all of it lay in one folder."""

    def __enter__(self):
        global _events
        _events = self.events = []
        return self

    def __exit__(self, *_):
        global _events
        _events = None

    def judge(self, folder):
        for event, arguments in self.events:
            if event in EXECUTING:
                called = arguments[0]
                # Python's own: dataclasses and named tuples of what is imported.
                assert event == "exec"
                assert getattr(called, "co_filename", "").startswith((*OF_PYTHON, "<frozen", "<string>"))
                continue
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
            allowed = (str(folder), *OF_PYTHON)
            assert not path or path.startswith(allowed), (event, path)
            assert event == "open"
            mode = arguments[1] if isinstance(arguments[1], str) else ""
            assert not set(mode) & set("wax+")


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


def rewritten(folder, **changes):
    """Write a manifest that is whole but says something else, as anybody can."""
    content = json.loads((folder / "manifest.json").read_text()) | changes
    content["manifest_sha256"] = "0" * 64
    text = json.dumps(content)
    own = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace("0" * 64, own, 1))


def vouched(folder, *added):
    """Have the manifest give the size and digest that each file has now."""
    described = json.loads((folder / "manifest.json").read_text())["files"]
    for name in (*described, *added):
        held = files.record(folder / name)
        described[name] = {"bytes": held.bytes, "sha256": held.sha256}
    rewritten(folder, files=described, sections={})


@pytest.fixture
def saved(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(20, parts(20))
    checkpointer.save(30, parts(30), write_extra=write_configuration)
    return checkpointer


def write_configuration(folder):
    (folder / "config.json").write_text("{}")


def refused(saved, folder, name, *, vouched=False):
    """Restore from a checkpoint that must be refused by the name of its file."""
    into = parts()
    with Watching() as watching, pytest.raises(CheckpointError, match=re.escape(name)):
        saved.restore(into, folder)
    watching.judge(saved.directory)
    assert number_of(into) == 0
    if not vouched:
        assert saved.restore(into) == 20


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


def header(content, size=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


def entry(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "nothing": b"",
    "a header longer than the file": header(b"{}", 2**32),
    "a header as long as numbers go": header(b"{}", 2**64 - 1),
    "a header of no JSON": header(b"\x80\x04\x95"),
    "a deep header": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "overlapping tensors": header({"tensor": entry(0, 28, (7,)), "other": entry(4, 32, (7,))}) + bytes(32),
    "a tensor beyond the end": header({"tensor": entry(0, 2**40, (2**38,))}) + bytes(28),
    "a tensor that ends before it begins": header({"tensor": entry(28, 0, (7,))}) + bytes(28),
    "a negative offset": header({"tensor": {"dtype": "F32", "shape": [7], "data_offsets": [-28, 0]}}) + bytes(28),
    "a shape whose product is too large": header({"tensor": entry(0, 28, (2**62, 2**62))}) + bytes(28),
    "a shape that does not fit": header({"tensor": entry(0, 28, (8,))}) + bytes(28),
    "a negative shape": header({"tensor": {"dtype": "F32", "shape": [-7], "data_offsets": [0, 28]}}) + bytes(28),
    "an unknown dtype": header({"tensor": entry(0, 28, (7,), "OBJECT")}) + bytes(28),
    "bytes that belong to nothing": header({"tensor": entry(0, 28, (7,))}) + bytes(280),
    "names like paths": header({"../../outside": entry(0, 28, (7,)), "/etc/passwd": entry(28, 56, (7,))}) + bytes(56),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_tensor_file_is_refused_by_name(kind, saved):
    folder = saved.path(30)
    (folder / "model.safetensors").write_bytes(HEADERS[kind])
    vouched(folder)
    refused(saved, folder, "model", vouched=True)


BOMBS = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "just deep enough to be read": b'{"$tuple": [' * 900 + b"]}" * 900,
    "a number of many digits": b'{"number": ' + b"9" * 100_000 + b"}",
    "a name twice": b'{"number": 1, "number": 2}',
    "NaN": b'{"number": NaN}',
    "infinity": b'{"number": -Infinity}',
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "an unknown tag": b'{"$python": "print(1)"}',
    "a tensor that is not there": b'{"$tensor": "other"}',
    "a dtype that is a module": b'{"$dtype": "_dynamo"}',
    "a dtype that is a function": b'{"$dtype": "load"}',
    "a device of no kind": b'{"$device": "../../device"}',
    "an array of objects": b'{"$array": {"tensor": "tensor", "dtype": "|O", "shape": [1]}}',
    "an array of a made-up dtype": b'{"$array": {"tensor": "tensor", "dtype": "os.system", "shape": [1]}}',
    "an array of another shape": b'{"$array": {"tensor": "tensor", "dtype": "<f4", "shape": [1000000000000]}}',
    "a scalar of objects": b'{"$numpy": {"dtype": "|O", "data": "AAAAAAAAAAA="}}',
    "a size beyond all": b'{"$size": [1e999]}',
    "a key that is none": b'{"$dict": [[{"$dict": []}, 1]]}',
    "a pair that is none": b'{"$dict": [[1]]}',
    "an integer that is none": b'{"$int": "__import__"}',
}


@pytest.mark.parametrize("kind", BOMBS)
def test_hostile_json_is_refused_by_name(kind, saved):
    pytest.importorskip("numpy", reason="arrays are of it")
    folder = saved.path(30)
    (folder / "model.json").write_bytes(BOMBS[kind])
    vouched(folder)
    refused(saved, folder, "model.json", vouched=True)


@pytest.mark.parametrize("kind", [kind for kind in BOMBS if "$" not in BOMBS[kind].decode("latin-1")])
def test_a_hostile_manifest_is_refused_and_passed_over(kind, saved):
    (saved.path(30) / "manifest.json").write_bytes(BOMBS[kind])
    refused(saved, saved.path(30), "manifest.json")


OUTSIDE = (
    "../../secret",
    "/etc/passwd",
    "a/../../../secret",
    "..",
    ".",
    "",
    "a\0b",
    "\ud800",
    "sub/../../checkpoint-20/model.json",
)


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["files", "parts", "names of parts"])
def test_a_manifest_that_names_what_lies_outside_is_refused(name, where, saved, tmp_path, caplog):
    (tmp_path / "secret").write_text("secret")
    folder = saved.path(30)
    described = json.loads((folder / "manifest.json").read_text())
    if where == "files":
        described["files"][name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    elif where == "parts":
        described["parts"]["model"] = [name]
    else:
        described["parts"][name] = ["model.json"]
    rewritten(folder, files=described["files"], parts=described["parts"])
    refused(saved, folder, "manifest.json")
    with caplog.at_level(logging.WARNING):
        assert saved.restore(parts()) == 20
    assert "passed over checkpoint-30: manifest.json" in caplog.text


NO_NUMBERS = (
    {"step": 1e308 * 10}, {"step": None}, {"world_size": []}, {"sequence": {}}, {"versions": 3},
    {"files": []}, {"files": {"model.json": 1}}, {"files": {"a": {"bytes": 1e308 * 10, "sha256": ""}}},
    {"sections": {"model.json": {"a": "1"}}}, {"sections": []}, {"sections": {"model.json": [1]}},
    {"parts": [1]}, {"parts": {"model": 3}},
)  # fmt: skip


@pytest.mark.parametrize("changes", NO_NUMBERS, ids=repr)
def test_a_manifest_whose_numbers_are_none_is_refused(changes, saved):
    text = json.loads((saved.path(30) / "manifest.json").read_text()) | changes | {"manifest_sha256": "0" * 64}
    content = json.dumps(text).replace("Infinity", "1e999")
    own = hashlib.sha256(content.encode()).hexdigest()
    (saved.path(30) / "manifest.json").write_text(content.replace("0" * 64, own, 1))
    refused(saved, saved.path(30), "manifest.json")


def test_sections_that_lie_name_some_tensor_and_read_no_further(saved):
    path = saved.path(30) / "model.safetensors"
    for sections in ({"x": "999999999999 00"}, {"x": "-5 00"}, {"x": "5 zz", "y": "5 "}, {"\n": "0 "}):
        rewritten(saved.path(30), sections={"model.safetensors": sections})
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"\x7f")
        refused(saved, saved.path(30), "model.safetensors was changed")
        path.write_bytes(content[:-1])
        refused(saved, saved.path(30), "model.safetensors is 1 bytes short")
        path.write_bytes(content)


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
    refused(saved, folder, "config.json is no plain file")
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    refused(saved, folder, "manifest.json is no plain file")


def test_a_checkpoint_reached_through_a_link_is_read(saved, tmp_path):
    """What the user names may be a link: only inside of it nothing is followed."""
    (tmp_path / "alias").symlink_to(saved.path(30))
    into = parts()
    assert saved.restore(into, tmp_path / "alias") == 30
    assert number_of(into) == 30


def test_the_payloads_do_what_they_say_where_they_are_unpickled(tmp_path):
    """Or the tests above would show nothing."""
    for number, payload in enumerate((Opens, Runs, Executes)):
        pickle.loads(pickle.dumps(payload(tmp_path / str(number))))
        assert (tmp_path / str(number)).exists()
    with pytest.raises(Exception, match="."):
        safe_open(tmp_path / "0", "pt")


def test_nothing_that_is_refused_is_changed(saved):
    """Refusing writes nothing: what is there may be evidence."""
    before = {path: path.stat().st_mtime_ns for path in saved.directory.rglob("*")}
    (saved.path(30) / "model.json").write_bytes(b"[" * 1000)
    before[saved.path(30) / "model.json"] = (saved.path(30) / "model.json").stat().st_mtime_ns
    saved.restore(parts())
    assert {path: path.stat().st_mtime_ns for path in saved.directory.rglob("*")} == before


def test_manifests_of_real_saves_pass_all_these_checks(saved):
    assert manifest.read(saved.path(30)).parts.keys() == {"model", "extra"}
    assert Values(3).number == 3
