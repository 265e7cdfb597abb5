"""What two runs logged and saved is compared to the bit, and known causes are rows of the table of differences."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tr_all.compare import report
from tr_all.comparison import compare
from tr_all.known_causes import CAUSES, causes_of

DIFFERENCES = Path(__file__).parents[2] / "tr-core" / "docs" / "differences.md"


@pytest.fixture
def compared(tmp_path):
    """Write what two runs recorded, and compare them."""

    def write(side, entries, facts, ends):
        folder = tmp_path / side
        folder.mkdir(exist_ok=True)
        lines = [{"event": "begin", "step": 0, "values": {"weights": "w", **facts}}]
        lines += [{"event": "log", "step": step, "values": values} for step, values in entries]
        lines += [{"event": "end", "step": 0, "values": {"weights": end}} for end in ends]
        text = "".join(json.dumps({"trainer": 0, **line}) + "\n" for line in lines)
        (folder / "recorded.jsonl").write_text(text)
        return folder

    def compared(theirs, ours, facts=None, ends=("e", "e")):
        sides = ("theirs", theirs, ends[0]), ("ours", ours, ends[1])
        return compare(*(write(side, entries, facts or {}, [end]) for side, entries, end in sides))

    return compared


def test_times_and_memory_are_not_compared(compared):
    theirs = {"loss": 1.0, "train_runtime": 3.0, "train_steps_per_second": 2.0, "train_mem_cpu_peaked_delta": 4}
    assert compared([(1, theirs)], [(1, {**theirs, "train_runtime": 9.0, "train_mem_cpu_peaked_delta": 5})]).equal


def test_a_loss_that_is_nan_in_both_is_equal(compared):
    assert compared([(1, {"loss": float("nan")})], [(1, {"loss": float("nan")})]).equal


def test_a_last_bit_is_a_difference(compared):
    comparison = compared([(1, {"loss": 0.3})], [(1, {"loss": 0.1 + 0.2})])
    assert not comparison.equal
    assert "0.30000000000000004" in report(comparison)


def test_the_largest_difference_is_shown_with_its_step(compared):
    comparison = compared([(1, {"loss": 1.0}), (2, {"loss": 4.0})], [(1, {"loss": 1.5}), (2, {"loss": 1.0})])
    assert comparison.parting.step == 1
    assert "3 (step 2)" in report(comparison)


def test_a_key_that_one_run_lacks_is_a_difference(compared):
    comparison = compared([(1, {"loss": 1.0, "more": 2})], [(1, {"loss": 1.0})])
    assert comparison.differing() == {"more"}
    assert "missing" in report(comparison)


def test_an_entry_that_one_run_lacks_is_a_difference(compared):
    comparison = compared([(1, {"loss": 1.0}), (2, {"loss": 1.0})], [(1, {"loss": 1.0})])
    assert "they part at step 2: ours has no entry 2 in the log" in report(comparison)


def test_an_entry_at_another_step_is_a_difference(compared):
    comparison = compared([(1, {"loss": 1.0})], [(2, {"loss": 1.0})])
    assert comparison.differing() == {"step"}


def test_weights_at_the_end_are_compared_where_none_are_saved(compared):
    comparison = compared([(1, {"loss": 1.0})], [(1, {"loss": 1.0})], ends=("e", "f"))
    assert not comparison.equal
    assert "weights at the end of training: different" in report(comparison)


def test_saved_weights_are_compared_whatever_files_they_are_split_into(compared, tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    for side in ("theirs", "ours"):
        (tmp_path / side / "out").mkdir(parents=True)
    save_file(tensors, tmp_path / "theirs/out/model.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"ours/out/model-0000{number}-of-00002.safetensors")
    assert compared([], []).equal
    save_file({"a": -0.0 * torch.ones(2)}, tmp_path / "ours/out/model-00000-of-00002.safetensors")
    (folder,) = compared([], []).folders
    assert (folder.name, folder.different, folder.count) == ("out", ["a"], 2)


def test_saved_weights_under_other_names_are_equal_and_said_to_be(compared, tmp_path):
    for side, name in (("theirs", "old.a"), ("ours", "new.a")):
        (tmp_path / side / "out").mkdir(parents=True)
        save_file({name: torch.ones(2), "b": torch.zeros(3)}, tmp_path / side / "out/model.safetensors")
    comparison = compared([], [])
    assert comparison.equal
    assert "saved weights in out: equal to the bit, 1 under other names" in report(comparison)


def test_weights_that_one_run_saved_are_named(compared, tmp_path):
    (tmp_path / "theirs/out").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "theirs/out/model.safetensors")
    comparison = compared([], [])
    assert not comparison.equal
    assert "saved weights in out (transformers only)" in report(comparison)


TRAINED = ([(1, {"loss": 2.0})], [(1, {"loss": 1.0})])
EVALUATED = ([(1, {"eval_loss": 2.0})], [(1, {"eval_loss": 1.0})])


@pytest.mark.parametrize(
    ("logs", "facts", "row"),
    [
        (TRAINED, {"model_draws": True}, "Dropout"),
        (TRAINED, {"loading_draws": True}, "Random numbers drawn while loading"),
        (TRAINED, {"seed_of_torch_is_the_arguments": False}, "Order of the data"),
        (TRAINED, {"gradient_accumulation_steps": 2}, "A model whose forward takes `**kwargs`"),
        (TRAINED, {"optim": "galore_adamw"}, "GaLore's basis"),
        (TRAINED, {"bf16": True}, "`bf16=True`"),
        (EVALUATED, {}, "Evaluation loss of a loss over tokens"),
        (([(1, {"eval_loss": 1.0})], [(1, {"eval_loss": 1.0000001})]), {}, "Rounding of an evaluation's mean loss"),
        (([(1, {"loss": 0.0})], [(1, {"loss": float("nan")})]), {}, "A loss that is NaN or infinite"),
    ],
)
def test_a_known_cause_is_named_where_it_applies_and_only_there(compared, logs, facts, row):
    assert [cause.row[: len(row)] for cause in causes_of(compared(*logs, facts=facts))] == [row]
    assert causes_of(compared(logs[0], logs[0], facts=facts)) == []


def test_each_known_cause_is_a_row_of_the_table_of_differences():
    rows = {line[2:].split(" | ")[0] for line in DIFFERENCES.read_text().splitlines() if line.startswith("| ")}
    assert [cause.row for cause in CAUSES if cause.row not in rows] == []
