"""Files whose content is made to mislead their reader are refused by name, and the checkpoint skipped."""

import hashlib
import json
import logging

import pytest
from ckpt_malice import refused, rewritten, saved_twice, vouched
from ckpt_parts import parts

from tr_ckpt import manifest
from tr_ckpt.sharded import exporting


@pytest.fixture
def saved(tmp_path):
    return saved_twice(tmp_path / "run")


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


def test_the_command_shows_what_cannot_be_loaded(saved, trainer_ckpt):
    folder = saved.path(30)
    (folder / "model.json").write_bytes(BOMBS["an unknown tag"])
    vouched(folder)
    shown = trainer_ckpt("verify", folder, code=1).out
    assert "not readable" in shown
    assert "model.json cannot be loaded" in shown


@pytest.mark.parametrize("kind", [kind for kind in BOMBS if "$" not in BOMBS[kind].decode("latin-1")])
def test_a_hostile_manifest_is_refused_and_passed_over(kind, saved):
    (saved.path(30) / "manifest.json").write_bytes(BOMBS[kind])
    refused(saved, saved.path(30), "manifest.json")


OUTSIDE = ("../../secret", "/etc/passwd", "a/../../../secret", "", "a\0b", "\ud800", "sub\\..\\x", "NUL", "\x1b[31mx")


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
    assert "skipped checkpoint-30: manifest.json" in caplog.text


NO_NUMBERS = (
    {"step": 1e308 * 10}, {"step": None}, {"step": "many"}, {"world_size": []}, {"versions": 3},
    {"sequence": "many"}, {"sequence": None}, {"sequence": [1]},
    {"files": []}, {"files": {"model.json": 1}}, {"files": {"a": {"bytes": 1e308 * 10, "sha256": ""}}},
    {"sections": {"model.json": {"a": "1"}}}, {"sections": []}, {"sections": {"model.json": [1]}},
    {"parts": [1]}, {"parts": {"model": 3}},
)  # fmt: skip


@pytest.mark.parametrize("changes", NO_NUMBERS, ids=repr)
def test_a_manifest_whose_numbers_are_none_is_refused(changes, saved):
    rewritten(saved.path(30), **changes)
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


ONE_FILE = (("a.json", "A.json"), ("caf\u00e9", "cafe\u0301"), ("a", "a/b"), ("stra\u00dfe", "STRASSE"))


@pytest.mark.parametrize("names", ONE_FILE)
def test_a_manifest_of_names_that_some_systems_make_one_is_refused(names, saved):
    folder = saved.path(30)
    described = json.loads((folder / "manifest.json").read_text())["files"]
    described |= {key: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()} for key in names}
    rewritten(folder, files=described)
    refused(saved, folder, "manifest.json names")


def test_manifests_of_real_saves_pass_all_these_checks(saved):
    assert manifest.read(saved.path(30)).parts.keys() == {"model", "extra"}
    assert saved.restore(parts()) == 30


def test_a_configuration_imports_nothing(monkeypatch):
    """Attributes of torch are made when they are asked for: a name in a file must not be."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"torch.{name} was asked for"), raising=False)
    raw = json.dumps({"dtype": "_dynamo", "torch_dtype": "float32"}).encode()
    assert json.loads(exporting.config_with_dtype(raw, torch.bfloat16)) == {
        "dtype": "_dynamo",
        "torch_dtype": "bfloat16",
    }
