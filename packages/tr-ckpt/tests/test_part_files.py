"""What cannot be read back is refused when it is saved, and found by `verify`."""

import json
import logging

import pytest
import torch
from ckpt_malice import rewritten, vouched
from ckpt_parts import Holding, listed, parts, restored

from tr_ckpt import Checkpointer, CheckpointError, discovery, reader, tensor_file, untrusted
from tr_ckpt.discovery import Found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_more_names_than_can_be_read_back_are_refused_before_the_older_one_goes(tmp_path, monkeypatch, asynchronous):
    monkeypatch.setattr(tensor_file, "MOST_BYTES_OF_HEADER", 10_000)
    checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous)
    checkpointer.save(1, parts(1))
    checkpointer.wait()
    many = Holding({f"name-{number}": torch.zeros(1) for number in range(200)})

    def save():
        checkpointer.save(2, {**parts(2), "model": many})
        checkpointer.wait()

    message = "model.safetensors was not written: the names and shapes of its 200 tensors take .* reads at most 10,000;"
    with pytest.raises(CheckpointError, match=message):
        save()
    assert listed(tmp_path) == ["checkpoint-1"]
    assert restored(checkpointer) == (1, 1)


def test_the_limit_is_the_librarys(tmp_path):
    """A thousand bytes less, and the library opens the file."""
    tensor, long = torch.empty(0, dtype=torch.uint8), 10**6
    entry = len(json.dumps({"": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, separators=(",", ":"))) - 1

    def named(size):
        """Return tensors whose names and shapes take about so many bytes."""
        number, rest = divmod(size, long + entry)
        return {**{str(n).rjust(long, "x"): tensor for n in range(number)}, "y" * (rest - entry): tensor}

    with pytest.raises(CheckpointError, match="safetensors reads at most 100,000,000"):
        tensor_file.write(tmp_path / "a.safetensors", named(tensor_file.MOST_BYTES_OF_HEADER + 1000))
    assert not (tmp_path / "a.safetensors").exists()
    tensors = named(tensor_file.MOST_BYTES_OF_HEADER - 1000)
    tensor_file.write(tmp_path / "a.safetensors", tensors)
    assert len(tensor_file.read(tmp_path / "a.safetensors")) == len(tensors)


def test_a_name_of_half_a_character_is_saved_and_read_back(tmp_path):
    """JSON can hold one, and the header of a file of tensors cannot."""
    state = {"\ud800": torch.arange(3), "x": {"\udc80": torch.ones(2)}}
    Checkpointer(tmp_path).save(1, {"part": Holding(state)})
    into = Holding(None)
    assert Checkpointer(tmp_path).restore({"part": into}) == 1
    assert list(into.state) == list(state)
    assert torch.equal(into.state["\ud800"], state["\ud800"])
    assert torch.equal(into.state["x"]["\udc80"], torch.ones(2))


def test_more_json_than_is_read_back_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_JSON_BYTES", 1000)
    with pytest.raises(
        CheckpointError, match=r"what of part is not a tensor takes [\d,]+ bytes of JSON, and at most 1,000"
    ):
        Checkpointer(tmp_path).save(1, {"part": Holding({"list": list(range(1000))})})
    assert listed(tmp_path) == []
    (tmp_path / "x.json").write_bytes(b"[" + b" " * 1000 + b"]")
    with pytest.raises(CheckpointError, match="more than 1,000 bytes, and that much JSON is not read"):
        untrusted.read_json(tmp_path / "x.json")


def nested(depth):
    value = []
    for _ in range(depth):
        value = (value,)
    return value


def test_what_is_just_not_too_deep_is_read_back_deep_in_a_program(tmp_path):
    with pytest.raises(CheckpointError, match="part is nested too deeply to be saved: more than 100 deep"):
        Checkpointer(tmp_path).save(1, {"part": Holding(nested(101))})
    Checkpointer(tmp_path).save(1, {"part": Holding(nested(100))})
    into = Holding(None)

    def deep(left):
        return deep(left - 1) if left else Checkpointer(tmp_path).restore({"part": into})

    assert deep(400) == 1
    assert into.state == nested(100)


@pytest.fixture
def saved(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(1, parts(1))
    return checkpointer


def test_what_cannot_be_loaded_removes_no_older_one(saved, monkeypatch, caplog):
    checkpointer = Checkpointer(saved.directory, keep_last=1)
    checkpointer.restore(parts())

    def on_commit(folder):
        (folder / "model.json").write_bytes(b'{"$python": 1}')
        vouched(folder)

    with caplog.at_level(logging.ERROR):
        checkpointer.save(2, parts(2), on_commit=on_commit)
    assert (
        "nothing is removed: checkpoint-2, just saved, reads back damaged: model.json cannot be loaded" in caplog.text
    )
    assert saved.steps() == [1, 2]


def test_verify_reads_no_number_twice(saved, monkeypatch):
    described = discovery.check_quickly(Found(1, "checkpoint-1", saved.path(1)))
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: pytest.fail("a tensor was copied"))
    monkeypatch.setattr(tensor_file, "read", lambda path: pytest.fail("all of a file was read"))
    assert reader.problems(saved.path(1), described) == []


def test_arrays_are_checked_against_what_they_are_made_of(tmp_path):
    np = pytest.importorskip("numpy")
    checkpointer = Checkpointer(tmp_path)
    folder = checkpointer.save(1, {"part": Holding({"a": np.arange(6).reshape(2, 3), "b": np.float32(2)})})
    described = discovery.check_quickly(Found(1, "checkpoint-1", folder))
    assert reader.problems(folder, described) == []
    text = (folder / "part.json").read_text()
    (folder / "part.json").write_text(text.replace("<i8", "<i2"))
    vouched(folder)
    [damage] = reader.problems(folder, discovery.check_quickly(Found(1, "checkpoint-1", folder)))
    assert damage.text.startswith("part.json cannot be loaded: the content of '$array' cannot be read")


def test_one_tensor_is_not_the_content_of_two_arrays(tmp_path):
    """Each would copy it: a short text of many arrays would fill any memory."""
    np = pytest.importorskip("numpy")
    folder = Checkpointer(tmp_path).save(1, {"part": Holding([np.arange(6), np.arange(6)])})
    content = json.loads((folder / "part.json").read_text())
    content[1] = content[0]
    (folder / "part.json").write_text(json.dumps(content))
    vouched(folder)
    with pytest.raises(CheckpointError, match="is the content of two arrays"):
        Checkpointer(tmp_path).restore({"part": Holding(None)})


def test_keys_that_are_made_to_be_slow_are_refused(tmp_path):
    folder = Checkpointer(tmp_path).save(1, {"part": Holding({1: 2})})
    pairs = [[{"$int": hex(n * (2**61 - 1))}, 0] for n in range(1, 10_000)]
    (folder / "part.json").write_text(json.dumps({"$dict": pairs}))
    vouched(folder)
    with pytest.raises(CheckpointError, match="of its keys have one hash: they are made to be slow"):
        Checkpointer(tmp_path).restore({"part": Holding(None)})


def test_a_name_that_is_twice_among_many_is_found_at_once():
    text = "{" + ",".join(f'"{number}":0' for number in range(200_000)) + ',"7":1}'
    with pytest.raises(CheckpointError, match="the name '7' occurs twice in one object"):
        untrusted.parse_json(text)


def test_a_manifest_of_no_parts_is_verified(saved):
    rewritten(saved.path(1), parts={})
    described = discovery.check_quickly(Found(1, "checkpoint-1", saved.path(1)))
    assert reader.problems(saved.path(1), described) == []
