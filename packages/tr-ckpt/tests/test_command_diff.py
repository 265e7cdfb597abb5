"""`trainer ckpt diff` says of each part of two checkpoints how much differs, and what first."""

import json
import math
import re
import weakref

import ckpt_shards
import ckpt_workers
import pytest
import torch
from ckpt_parts import State, flip, foreign, model, rewritten, save

from tr_ckpt import Checkpointer, RNGState
from tr_ckpt.command import comparing, main
from tr_ckpt.command.comparing import compare_values
from tr_ckpt.reader import CheckpointReader


def saved(folder, step=1, extra=None, **parts):
    """Save parts whose states are given."""
    given = {name: State(**state) for name, state in parts.items()}
    return Checkpointer(folder).save(step, given, write_extra=extra)


@pytest.fixture
def diff(tmp_path, capsys):
    """Return a function that saves two states of a part, compares them and returns the exit code and the output."""

    def diff(first, second, *words):
        one, other = saved(tmp_path / "a", part=first), saved(tmp_path / "b", part=second)
        code = main(["diff", str(one), str(other), *words])
        output = capsys.readouterr()
        assert output.err == ""
        return code, output.out

    return diff


def lines_of(output):
    """Return the lines that stand under the part."""
    body = output.split("\npart: ")[1].split("\n\nequal")[0]
    return [line.strip() for line in body.splitlines()[1:] if line.strip()]


def test_equal_checkpoints_are_equal_whenever_they_were_saved(tmp_path, trainer_ckpt):
    one, other = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    rewritten(other, saved_at="2020-01-01T00:00:00+00:00", versions={"torch": "1.0"}, sequence=7)
    output = trainer_ckpt("diff", one, other).out
    assert output == (f"A: {one}\nB: {other}\n\nequal: manifest, model, scheduler, trainer_state, config.json\n")
    output = trainer_ckpt("diff", one, other, "--manifest", "--all", code=1).out
    assert "manifest.sequence: 1 -> 7" in output
    assert 'manifest.versions.torch: "' in output
    assert 'manifest.saved_at: "' in output


def test_two_steps_of_a_run_differ_by_part(tmp_path, trainer_ckpt):
    one, other = (save(tmp_path, step) for step in (10, 20))
    output = trainer_ckpt("diff", one, other, code=1).out
    assert "\nmanifest: 1 value differs\n  manifest.step: 10 -> 20\n" in output
    assert "\nscheduler: 1 value differs\n  scheduler.last_epoch: 10 -> 20\n" in output
    assert "\nmodel: 1 of 2 tensors differ\n  model.weight: float32 [3, 4], 12 of 12 elements, by up to 10\n" in output
    assert output.endswith("\nequal: config.json\n")


def test_of_an_output_folder_the_newest_is_compared(tmp_path, trainer_ckpt):
    save(tmp_path / "a", 1)
    newest = save(tmp_path / "a", 2)
    other = save(tmp_path / "b", 2)
    assert trainer_ckpt("diff", tmp_path / "a", tmp_path / "b").out.startswith(f"A: {newest}\nB: {other}\n")


VALUES = [
    ({"a": 1}, {"a": 2}, ["part.a: 1 -> 2"]),
    ({"a": 1}, {"a": 1.0}, ["part.a: 1 -> 1.0"]),
    ({"a": 1}, {"a": True}, ["part.a: 1 -> true"]),
    ({"a": None}, {"a": "x"}, ['part.a: null -> "x"']),
    ({"a": 1}, {"b": 1}, ["part.a: only in A: 1", "part.b: only in B: 1"]),
    ({"a": {"b c": {"d": 1}}}, {"a": {"b c": {"d": 2}}}, ["part.a[b c].d: 1 -> 2"]),
    ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ["part.a[1].b: 2 -> 3"]),
    ({"a": [1, 2]}, {"a": [1, 2, 3, 4]}, ["part.a: 2 items -> 4 items"]),
    ({"a": [1]}, {"a": []}, ["part.a: 1 item -> 0 items"]),
    ({"a": (0.9, 0.99)}, {"a": (0.9, 0.999)}, ["part.a[$tuple][1]: 0.99 -> 0.999"]),
    ({"a": {0: "x"}}, {"a": {0: "y"}}, ['part.a[$dict][0][1]: "x" -> "y"']),
    ({"a": math.nan}, {"a": 1.5}, ['part.a: {"$float": "nan"} -> 1.5']),
    ({"a": math.inf}, {"a": -math.inf}, ['part.a[$float]: "inf" -> "-inf"']),
    ({"a": b"hi"}, {"a": b"ho"}, ['part.a[$bytes]: "aGk=" -> "aG8="']),
    ({"a": torch.float32}, {"a": torch.bfloat16}, ['part.a[$dtype]: "float32" -> "bfloat16"']),
    ({"a": {}}, {"a": []}, ["part.a: {} -> []"]),
    ({"a": {"b": 1}}, {"a": 3}, ['part.a: {"b": 1} -> 3']),
]


@pytest.mark.parametrize(("first", "second", "shown"), VALUES)
def test_values_that_differ_are_shown_with_their_place(first, second, shown, diff):
    code, output = diff(first, second, "--all")
    assert code == 1
    assert lines_of(output) == shown


@pytest.mark.parametrize(
    "state",
    [{"a": math.nan}, {"a": {(1, "b"): (1, [2, {3: None}])}}, {"a": 2**80}, {"a": torch.device("cpu")}, {}],
)
def test_a_state_equals_itself(state, diff):
    code, output = diff(state, state)
    assert code == 0
    assert "equal: manifest, part\n" in output


def test_json_of_other_programs_is_compared_whatever_it_holds():
    """What looks like a tag of ours, and is none, is a value like any other."""
    for value in (
        {"$schema": "x", "a": 1},
        {"$dict": 3},
        {"$dict": [1]},
        {"$tuple": 1},
        {"$float": [1]},
        {"$unknown": {}},
    ):
        assert list(compare_values(value, json.loads(json.dumps(value)), "p")) == []
        assert list(compare_values(value, {"z": 1}, "p"))


def test_the_first_difference_is_shown_and_all_are_counted(diff):
    first = {f"v{index:02d}": 100.0 for index in range(30)} | {"x": torch.zeros(2), "y": torch.zeros(2)}
    second = {f"v{index:02d}": 100.0 + index for index in range(30)} | {"x": torch.zeros(2), "y": torch.ones(2)}
    code, output = diff(first, second)
    assert code == 1
    assert lines_of(output) == ["part.v01: 100.0 -> 101.0", "part.y: float32 [2], 2 of 2 elements, by up to 1"]
    assert "\npart: 29 values and 1 of 2 tensors differ\n" in output
    assert output.endswith("28 more differences are not shown; --all shows them\n")
    _, output = diff(first, second, "--all")
    assert len(lines_of(output)) == 30
    assert "--all" not in output


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "float32 [2, 3] -> float32 [3, 2]"),
        (torch.ones(2), torch.ones(2).bfloat16(), "float32 [2] -> bfloat16 [2]"),
        (torch.zeros(2), torch.tensor([0.0, math.nan]), "float32 [2], 1 of 2 elements, by up to nan"),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.5]), "float32 [2], 1 of 2 elements, by up to 0.5"),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 3.0]), "float32 [2], 1 of 2 elements, by up to 2"),
        (torch.tensor([math.inf]), torch.tensor([1.0]), "float32 [1], 1 of 1 elements, by up to inf"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "float32 [1], 1 of 1 elements, by up to 0"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "bool [2], 1 of 2 elements, by up to 1"),
        (torch.tensor(3), torch.tensor(5), "int64 [], 1 of 1 elements, by up to 2"),
        (torch.tensor([255]).byte(), torch.tensor([5]).byte(), "uint8 [1], 1 of 1 elements, by up to 250"),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), "complex64 [1], 1 of 1 elements, by up to 2"),
        (torch.ones(1).to(FLOAT8), torch.tensor([2.0]).to(FLOAT8), "float8_e4m3fn [1], 1 of 1 elements, by up to 1"),
    ],
)
def test_tensors_of_every_kind_are_compared(one, other, shown, diff):
    code, output = diff({"x": one}, {"x": other})
    assert code == 1
    assert lines_of(output) == [f"part.x: {shown}"]


@pytest.mark.parametrize("same", [torch.tensor([math.nan, math.inf]), torch.empty(0, 3), torch.tensor(True)])
def test_tensors_with_the_same_bits_are_equal(same, diff):
    assert diff({"x": same}, {"x": same.clone()})[0] == 0


def test_a_tensor_that_only_one_has_is_named(diff):
    x = torch.zeros(2)
    code, output = diff({"x": x, "y": x + 1}, {"x": x, "z": x + 2}, "--all")
    assert code == 1
    assert lines_of(output)[-2:] == ["part.y: only in A: float32 [2]", "part.z: only in B: float32 [2]"]


def test_large_tensors_are_compared_in_blocks(diff, monkeypatch):
    one = torch.arange(1000.0)
    other = one.clone()
    other[[0, 333, 999]] += torch.tensor([1.0, 3.0, 2.0])
    monkeypatch.setattr(comparing, "_BLOCK", 7)
    _, output = diff({"x": one}, {"x": other})
    assert lines_of(output) == ["part.x: float32 [1000], 3 of 1,000 elements, by up to 3"]


def test_comparing_takes_no_memory_for_all_tensors_at_once(tmp_path, monkeypatch):
    state = {f"t{index}": torch.full((500,), float(index)) for index in range(40)}
    one, other = saved(tmp_path / "a", part=state), saved(tmp_path / "b", part=state)
    alive, most = weakref.WeakSet(), []
    load = CheckpointReader.tensor

    def counted(self, name, saved):
        tensor = load(self, name, saved)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(CheckpointReader, "tensor", counted)
    assert main(["diff", str(one), str(other)]) == 0
    assert len(most) == 80
    assert max(most) <= 4


def test_parts_and_files_that_only_one_has_are_named(tmp_path, trainer_ckpt):
    one = saved(tmp_path / "a", model={"x": 1}, optimizer={"y": 1}, extra=lambda f: (f / "vocab.txt").write_text("a"))
    other = saved(tmp_path / "b", model={"x": 1}, ema={"z": 1}, extra=lambda f: (f / "merges.txt").write_text("b"))
    output = trainer_ckpt("diff", one, other, code=1).out
    for name, side in {"optimizer": "A", "ema": "B", "vocab.txt": "A", "merges.txt": "B"}.items():
        assert f"\n{name}: 1 value differs\n  {name}: only in {side}\n" in output
    assert output.endswith("\nequal: manifest, model\n")


def test_added_files_are_compared_as_json_or_as_bytes(tmp_path, trainer_ckpt):
    def extra(number):
        def write(folder):
            (folder / "config.json").write_text(json.dumps({"layers": number}))
            (folder / "odd.json").write_text("{" * number)
            (folder / "vocab.txt").write_text("x" * number)
            (folder / "merges.txt").write_text(str(number))

        return write

    one, other = saved(tmp_path / "a", extra=extra(2), m={}), saved(tmp_path / "b", extra=extra(3), m={})
    output = trainer_ckpt("diff", one, other, code=1).out
    assert "  config.json.layers: 2 -> 3\n" in output
    assert "  odd.json: 2 bytes -> 3 bytes\n" in output
    assert "  vocab.txt: 2 bytes -> 3 bytes\n" in output
    assert "  merges.txt: other bytes\n" in output


def test_random_states_are_compared_rank_by_rank(tmp_path, trainer_ckpt):
    folders = []
    for name in ("a", "b"):
        folders.append(Checkpointer(tmp_path / name).save(1, {"rng": RNGState()}))
        torch.rand(1)
    assert re.search(r"\nrng: .*differ", trainer_ckpt("diff", *folders, code=1).out)


def test_only_one_part_can_be_compared(tmp_path, capsys, trainer_ckpt):
    one, other = save(tmp_path, 10), save(tmp_path, 20)
    output = trainer_ckpt("diff", one, other, "--part", "scheduler", code=1).out
    assert "manifest" not in output
    assert "model" not in output
    assert main(["diff", str(one), str(other), "--part", "optimiser"]) == 2
    expected = "neither has the part 'optimiser'; there are model, scheduler, trainer_state\n"
    assert capsys.readouterr().err == f"trainer ckpt diff: {expected}"


def test_what_is_to_be_ignored_is(tmp_path, trainer_ckpt):
    one, other = save(tmp_path, 10), save(tmp_path, 20)
    ignored = ["*.last_epoch", "manifest.step", "trainer_state.*", "model.weight"]
    words = [word for pattern in ignored for word in ("--ignore", pattern)]
    assert main(["diff", str(one), str(other), *words]) == 0
    assert "model.weight" in trainer_ckpt("diff", one, other, *words[:-2], code=1).out


@pytest.mark.parametrize("width", [120, 80, 50])
def test_it_fits_the_terminal(width, diff, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    long = "encoder.layers.0.attention.self.query_key_value_projection.weight"
    first = {long: torch.zeros(128, 64), "text": "x" * 300, "y": torch.zeros(2)}
    second = {long: torch.ones(128, 64), "text": "y" * 300, "y": torch.ones(2)}
    _, output = diff(first, second, "--all")
    assert max(map(len, output.splitlines()[2:])) <= width
    assert "8,192 elements, by up to 1" in output


def test_damaged_and_foreign_ones_are_refused_in_words(tmp_path, trainer_ckpt):
    one = save(tmp_path / "a", 10)
    damaged, other = save(tmp_path / "b", 10), foreign(tmp_path / "c", 10)
    (damaged / "model.json").unlink()
    assert main(["diff", str(one), str(damaged)]) == 2
    assert main(["diff", str(one), str(other)]) == 2
    first, second, third = trainer_ckpt("diff", tmp_path / "none", one, code=2).err.splitlines()
    assert first == f"trainer ckpt diff: {damaged}: model.json is missing"
    assert second.startswith(f"trainer ckpt diff: {other}: it was written by another program")
    assert second.endswith("`trainer ckpt import` makes one of ours of it")
    assert third.startswith(f"trainer ckpt diff: {tmp_path / 'none'} does not exist")


def test_a_bit_that_flipped_on_the_disk_shows(tmp_path, trainer_ckpt):
    one, other = save(tmp_path / "a", 10), save(tmp_path / "b", 10)
    flip(other / "model.safetensors")
    assert "model: 1 of 2 tensors differ" in trainer_ckpt("diff", one, other, code=1).out
    flip(other / "model.safetensors", at=0)  # the length of its header
    assert "model.safetensors is not a valid safetensors file" in trainer_ckpt("diff", one, other, code=2).err


def test_tied_tensors_are_compared_once(tmp_path, trainer_ckpt):
    shared = torch.ones(3)
    folders = []
    for name, tensor in (("a", shared), ("b", shared + 1)):
        part = model(1.0, head=tensor, embedding=tensor)
        folders.append(Checkpointer(tmp_path / name).save(1, {"model": part}))
    assert "model: 1 of 3 tensors differ" in trainer_ckpt("diff", *folders, code=1).out


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed makes no shards")
def test_what_was_saved_in_shards_equals_what_was_saved_whole(tmp_path, capsys, trainer_ckpt):
    sharded = {layout: str(tmp_path / layout) for layout in ("0", "1")}
    ckpt_workers.run(2, ckpt_shards.save_in, sharded)
    numbers = ckpt_shards.numbers()
    whole = saved(tmp_path / "whole", held={"held": [numbers], "count": 3})
    apart = [*sharded.values()]
    assert main(["diff", *apart]) == 0
    assert main(["diff", str(whole), apart[0], "--ignore", "manifest.world_size"]) == 0
    numbers["uneven"][4, 0] += 1
    other = saved(tmp_path / "other", held={"held": [numbers], "count": 3})
    capsys.readouterr()
    output = trainer_ckpt("diff", other, apart[1], "--part", "held", code=1).out
    assert "held: 1 of 7 tensors differ" in output
    assert "held.held.0.uneven: float32 [5, 7], 1 of 35 elements, by up to 1" in output
