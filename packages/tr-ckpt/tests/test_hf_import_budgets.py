"""What a foreign file stands for is bounded by what it holds; what is shared stays shared; nothing hangs."""

import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict

import ckpt_foreign
import pytest
import torch
from ckpt_foreign import View

from tr_ckpt import CheckpointError, hf_import
from tr_ckpt.hf_import import state_files


@pytest.fixture
def read(tmp_path):
    return lambda program: ckpt_foreign.read_program(program, tmp_path)


def laughs(depth, width=10, kind="list"):
    """A pickle of `width` ** `depth` values, in a few bytes a level."""
    opening, closing = {"list": (b"](", b"e"), "tuple": (b"(", b"t"), "dict": (b"}(", b"u")}[kind]
    program = b"\x80\x02(]q\x00"
    for level in range(depth):
        program += opening
        for number in range(width):
            program += (b"K" + bytes([number]) if kind == "dict" else b"") + b"h" + bytes([level])
        program += closing + b"q" + bytes([level + 1])
    return program + b"t."


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_shared_values_that_stand_for_more_than_a_memory_holds_are_refused(kind, read):
    assert len(laughs(30, kind=kind)) < 1500
    with pytest.raises(CheckpointError, match=r"it stands for .* values .* the same ones are in it again and again"):
        read(laughs(30, kind=kind))


def test_a_text_that_is_referred_to_again_and_again_is_refused(read):
    program = b"\x80\x02(X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x00](" + b"h\x00" * 10_000 + b"et."
    with pytest.raises(CheckpointError, match="the same ones are in it again and again"):
        read(program)


def test_what_was_shared_is_shared_and_read_once(read):
    shared = [1, 2, (3, {"a": [torch.float32]})]
    state = read(pickle.dumps({"one": shared, "two": [shared], "three": shared[2]}, protocol=2))
    assert state == {"one": shared, "two": [shared], "three": shared[2]}
    assert state["one"] is state["two"][0]
    assert state["one"][2] is state["three"]
    assert state["one"][2][1] is state["three"][1]


def test_a_small_multiple_of_the_file_is_read(read):
    shared = list(range(1000))
    assert read(pickle.dumps([shared] * 900, protocol=2)) == [shared] * 900


CYCLES = {
    "a list in itself": b"]q\x00h\x00a.",
    "a dict in itself": b"}q\x00K\x01h\x00s.",
    "two lists in each other": b"]q\x00]q\x01h\x00aa.",
    "a tuple in its list": b"]q\x00h\x00\x85a.",
    "metadata that is its own": b"ccollections\nOrderedDict\n)Rq\x00}X\x09\x00\x00\x00_metadatah\x00sb.",
}


@pytest.mark.parametrize("program", CYCLES.values(), ids=CYCLES)
def test_what_contains_itself_is_refused_in_words(program, read):
    with pytest.raises(CheckpointError, match="it contains itself; a state must be a tree"):
        read(program)


@pytest.mark.parametrize("step", [b"\x85", b"]q\x01h\x00a", b"(t"])
def test_what_is_nested_deeply_is_refused_in_words(step, read):
    nested = {b"\x85": b")" + b"\x85" * 200_000, b"(t": b"(" * 200_000 + b"t" * 200_000}.get(step)
    nested = nested or b"]" * 200_000 + b"a" * 199_999
    with pytest.raises(CheckpointError, match="it is nested more than 100 deep"):
        read(nested + b".")


DECLARED = {
    "a place in the memo": b"Nr\xff\xff\xff\xff0.",
    "bytes": b"B\xff\xff\xff\xff.",
    "many bytes": b"\x8e" + struct.pack("<Q", 2**62) + b".",
    "a text": b"X\xff\xff\xff\x7f.",
    "a long text": b"\x8d" + struct.pack("<Q", 2**63) + b".",
    "a number": b"\x8b\xff\xff\xff\x7f.",
    "a negative number": b"\x8b\xff\xff\xff\xff.",
    "an array of bytes": b"\x96" + struct.pack("<Q", 2**62) + b".",
    "a frame": b"\x95" + struct.pack("<Q", 2**63) + b"N.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "a number of a megabyte": b"\x8b" + struct.pack("<I", 2**20) + b"\x7f" * 2**20 + b".",
}


@pytest.mark.parametrize("program", DECLARED.values(), ids=DECLARED)
def test_a_length_that_is_declared_takes_no_memory(program, read):
    with pytest.raises(CheckpointError):
        read(program)


def test_a_place_in_the_memo_beyond_all_takes_no_memory(read):
    assert read(b"K\x07r\xff\xff\xff\xff.") == 7


def same_hash(count):
    """Keys that are different and have one hash, which is that of each number modulo a prime."""
    return [number * sys.hash_info.modulus for number in range(1, count + 1)]


def test_keys_that_are_made_to_be_slow_are_refused(read):
    assert len({hash(key) for key in same_hash(100)}) == 1
    program = b"\x80\x02}(" + b"".join(
        b"\x8a" + bytes([len(raw := key.to_bytes(12, "little"))]) + raw + b"N" for key in same_hash(10_000)
    )
    with pytest.raises(CheckpointError, match="they are made to be slow"):
        read(program + b"u.")
    assert len(read(pickle.dumps(dict.fromkeys(range(10_000)), protocol=2))) == 10_000
    assert len(read(pickle.dumps({(n, str(n)): n / 7 for n in range(5_000)}, protocol=2))) == 5_000


@pytest.mark.parametrize(
    "program",
    [
        b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.",
        b"ccollections\nOrderedDict\n)R}}X\x05\x00\x00\x00itemsNs\x86b.",
        b"ccollections\nCounter\n)R}X\x05\x00\x00\x00itemsNsb.",
        b"]}X\x05\x00\x00\x00itemsNsb.",
    ],
)
def test_a_value_is_given_no_attributes(program, read):
    with pytest.raises(CheckpointError, match=r"it gives a .* attributes, which are not read|x\.pt cannot be read"):
        read(program)


@pytest.mark.parametrize(
    "program",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00f8K\x00K\x01tR.",
        b"](ccollections\nCounter\ne.",
    ],
)
def test_what_a_name_stands_for_is_no_value(program, read):
    with pytest.raises(CheckpointError, match="where a value must be"):
        read(program)


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_protocol_that_torch_does_not_write_is_refused_in_words(protocol, read):
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read as plain state: .* pickle_protocol"):
        read(pickle.dumps({"a": 1}, protocol=protocol))


def test_plain_values_are_read(read):
    value = {
        "a": [1, -1, 255, 65536, 2**31, -(2**80), 0.5, None, True, False, b"bytes", "text \u65e5 \ud800"],
        "ordered": OrderedDict(x=1, y=OrderedDict()),
        "counter": Counter("aab"),
        (1, "x"): (1, (2,), (1, 2, 3, 4), ()),
        1.5: None,
        "many": list(range(3000)),
    }
    result = read(pickle.dumps(value, protocol=2))
    assert result == value
    assert repr(result) == repr(value)


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((10**12,), (0,)),
        ((2**40, 2**40), (0, 0)),
        ((10**6, 10**6, 2), (0, 0, 1)),
        ((2**62, 0, 2**62), (1, 1, 1)),
        ((2**70,), (0,)),
        ((1,) * 65, (1,) * 65),
    ],
)
def test_a_tensor_that_repeats_its_numbers_makes_no_file_of_any_size(size, stride, tmp_path):
    torch.save({"x": View(size, stride)}, tmp_path / "x.pt")
    if 0 in size:
        assert state_files.read_archive(tmp_path / "x.pt")["x"].numel() == 0
        return
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: "):
        state_files.read_archive(tmp_path / "x.pt")


def test_many_tensors_of_the_same_numbers_count_together(tmp_path):
    numbers = torch.zeros(300_000)
    torch.save([numbers[n:] for n in range(2000)], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="its tensors come to more than 16 times its"):
        state_files.read_archive(tmp_path / "x.pt")
    torch.save([numbers[n : n + 100] for n in range(2000)], tmp_path / "y.pt")
    assert len(state_files.read_archive(tmp_path / "y.pt")) == 2000


def test_a_view_that_repeats_a_few_numbers_is_read(tmp_path):
    torch.save(torch.ones(1).expand(1000), tmp_path / "x.pt")
    assert torch.equal(state_files.read_archive(tmp_path / "x.pt"), torch.ones(1000))


def test_entries_of_an_archive_that_lie_over_each_other_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    place = data.rindex(b"PK\x01\x02")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        [entry] = [each for each in file.infolist() if each.filename.endswith("data/0")]
    for size in (2**31, 2**32 - 2):
        for each in (place,):
            data[each + 20 : each + 28] = struct.pack("<II", size, size)
        (tmp_path / "y.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"y\.pt"):
            state_files.read_archive(tmp_path / "y.pt")
    assert entry.file_size == 4000


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\\b", "con", "a//b"])
def test_an_archive_with_a_name_that_leads_elsewhere_is_refused(name, tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as file:
        file.writestr(name, b"")
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: it has "):
        state_files.read_archive(tmp_path / "x.pt")


@pytest.mark.parametrize("file", ["optimizer.pt", "model.safetensors", "trainer_state.json", "rng_state.pth"])
def test_a_link_in_place_of_a_file_of_another_program_is_not_followed(file, left, tmp_path):
    (left / file).rename(tmp_path / file)
    (left / file).symlink_to(tmp_path / file)
    with pytest.raises(CheckpointError, match=f"{file} is a link, which may lead anywhere"):
        hf_import.convert(left, tmp_path / "ours")


def test_a_rank_beyond_all_does_not_hang(left, tmp_path, read):
    (left / "rng_state.pth").rename(left / "rng_state_0.pth")
    (left / "rng_state_999999999999.pth").write_bytes(b"")
    assert hf_import.read(left).world_size == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"global_step": 10**30},
        {"stateful_callbacks": [1]},
        {"stateful_callbacks": 7},
        {"log_history": "x"},
        {"log_history": {"a": 1}},
    ],
)
def test_a_state_of_a_trainer_that_is_none_is_refused_in_words(changes, left, tmp_path):
    import json

    (left / "trainer_state.json").write_text(json.dumps(ckpt_foreign.trainer_state(3, **changes)))
    with pytest.raises(CheckpointError, match="trainer_state.json holds"):
        hf_import.convert(left, tmp_path / "ours")


def test_the_best_folder_of_a_trainer_may_have_any_name(left, tmp_path, read):
    import json

    for name in ("checkpoint-" + "9" * 5000, "a\0b", "\ud800", "checkpoint-07"):
        changes = {"best_model_checkpoint": name, "best_global_step": None}
        (left / "trainer_state.json").write_text(json.dumps(ckpt_foreign.trainer_state(3, **changes)))
        assert hf_import.read(left).states["trainer_state"]["best_global_step"] is None


@pytest.mark.parametrize("state", [{"param_groups": [{"params": 3}]}, {"param_groups": [3]}, {"param_groups": []}, {}])
def test_the_state_of_an_optimizer_that_is_none_is_refused_in_words(state, left, tmp_path):
    from tr_ckpt import Checkpointer

    torch.save(state, left / "optimizer.pt")
    with pytest.raises(CheckpointError, match="optimizer"):
        Checkpointer(tmp_path / "ours").restore(ckpt_foreign.make(), left)


@pytest.mark.parametrize("words", [10**30, "x", [[1]], None])
def test_random_states_that_are_none_are_refused_in_words(words, left, tmp_path):
    torch.save({**ckpt_foreign.random_states(), "python": (3, (words,), None)}, left / "rng_state.pth")
    with pytest.raises(CheckpointError, match=r"rng_state\.pth lacks required content"):
        hf_import.convert(left, tmp_path / "ours")
