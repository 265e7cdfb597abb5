"""`trainer blame` names exactly the samples that were planted to spoil a step."""

import contextlib
import hashlib
import io
import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from blamed_run import FAULTS, main

from tr_dist.testing import run_ranks

SCRIPT = Path(__file__).parent / "blamed_run.py"
STEPS = {"nan": 1, "label": 3, "gradient": 2, "spike": 3}
"""The first is that in which a strategy looks at what it need not look at again."""
PLANTED = [(1, 1), (1, 2), (2, 2), (1, 4), (3, 4), (2, 8), (7, 8), (1, 16), (5, 16), (16, 16)]
SPIKES = [(1, 16), (3, 16), (5, 16), (7, 16), (1, 20), (2, 24), (11, 24), (1, 32), (9, 32), (15, 32)]
CASES = [(kind, *case) for kind in FAULTS for case in (SPIKES if kind == "spike" else PLANTED)]


def blame(folder, plan, *words):
    """Return the exit code and what is printed."""
    command = next(iter(entry_points(group="tr.commands", name="blame"))).load()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command([*words, str(SCRIPT), str(folder), json.dumps(plan)])
    return code, out.getvalue() or err.getvalue()


def places(epoch=0, number=200, seed=42):
    """Return the samples in the order of an epoch."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def planned(kind, bad, samples, ranks=1):
    """Return a plan with so many bad samples in a step of so many, and which they are."""
    drawn = torch.Generator().manual_seed(bad + samples)
    chosen = torch.randperm(samples, generator=drawn)[:bad].tolist()
    guilty = [places()[(STEPS[kind] - 1) * samples + place] for place in chosen]
    micro_batches = 2 if samples // ranks % 2 == 0 and samples > ranks else 1
    options = {
        "per_device_train_batch_size": samples // ranks // micro_batches,
        "gradient_accumulation_steps": micro_batches,
    }
    return {"number": 200, "faults": dict.fromkeys(map(str, guilty), kind), "options": options}, sorted(guilty)


def named(told):
    """Return the samples that a report calls guilty."""
    part = told.partition("guilty: ")[2].partition("highest losses")[0]
    return sorted(map(int, re.findall(r"^  sample (\d+) ", part, re.MULTILINE)))


@pytest.mark.parametrize("kind", FAULTS)
def test_exactly_the_planted_samples_are_named(kind, tmp_path):
    for each, bad, samples in CASES:
        if each == kind:
            plan, guilty = planned(kind, bad, samples)
            code, told = blame(tmp_path / "run", plan, "--step", str(STEPS[kind]))
            assert (code, named(told)) == (0, guilty), told
    assert not (tmp_path / "run").exists()


def blame_all(folder, cases):
    return [blame(folder, planned(*case, ranks=2)[0], "--step", str(STEPS[case[0]])) for case in cases]


SOME = [("nan", 3, 4), ("label", 1, 16), ("gradient", 1, 2), ("spike", 5, 16)]


@pytest.mark.parametrize("cases", [SOME, pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_they_are_named_on_two_ranks(cases, tmp_path):
    cases = [case for case in cases if case[2] > 1]
    first, second = run_ranks(blame_all, 2, str(tmp_path), cases)
    for case, (code, told), (other_code, other) in zip(cases, first, second, strict=True):
        guilty = planned(*case, ranks=2)[1]
        assert (code, other_code, named(told)) == (0, 0, guilty), f"{case}: {told}"
        assert not named(other)
        assert "world size 2" in told


def files(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("size", [1, 2])
def test_each_step_is_replayed_to_the_bit_and_leaves_nothing(size, tmp_path):
    """Short batches at the ends of epochs, dropout, and checkpoints in between."""
    plan = {"number": 10, "faults": {}, "options": {"gradient_accumulation_steps": size}}
    main(str(tmp_path), plan)
    before = files(tmp_path)
    losses = {
        entry["step"]: entry["loss"]
        for entry in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "loss" in entry
    }
    assert set(losses) == set(range(1, 7))
    for step, loss in losses.items():
        code, told = blame(tmp_path, plan, "--step", str(step))
        assert code == 0
        assert f"its loss is {loss:g}:" in told
        nearest = (step - 1) // 2 * 2
        assert told.splitlines()[0].endswith(f"checkpoint-{nearest}" if nearest else "the first step")
        assert "no sample stands out" in told
    assert files(tmp_path) == before


def test_the_first_module_and_the_values_are_told(tmp_path):
    guilty = places()[9]
    plan = {"number": 200, "faults": {str(guilty): "nan"}, "named": True}
    told = blame(tmp_path, plan, "--step", "3")[1]
    assert f"sample {guilty} (place 9 in the order, rank 0, micro-batch 1)" in told
    assert "its loss is nan; the output of body.0 (Linear) is not finite, and neither is its input" in told
    assert re.search(r"x: float32 \(1, 6\), \S+ to \S+, 1 not finite", told)
    assert "text: 'a row of 6'" in told
    plan["faults"] = {str(guilty): "gradient"}
    assert "the gradient of the output of body.2 (Dropout) is not finite" in blame(tmp_path, plan, "--step", "3")[1]


def test_samples_that_are_no_rows_are_collated_alone(tmp_path):
    guilty = places()[9]
    plan = {"number": 200, "faults": {str(guilty): "nan"}, "flat": True, "options": {"remove_unused_columns": False}}
    told = blame(tmp_path, plan, "--step", "3")[1]
    assert named(told) == [guilty]


def test_a_run_that_rewinds_is_replayed_as_it_was(tmp_path):
    """Two steps are spoilt: the second has the number that it has without the first."""
    order = places()
    plan = {"number": 200, "faults": {str(order[4]): "nan", str(order[16]): "nan"}, "options": {"on_spike": "rewind"}}
    main(str(tmp_path), plan | {"options": {"on_spike": "rewind", "save_steps": 500, "logging_steps": 500}})
    assert named(blame(tmp_path, plan, "--step", "4")[1]) == [order[16]]
    assert named(blame(tmp_path, plan, "--step", "2")[1]) == [order[4]]


def test_the_listed_samples_are_left_out_by_the_next_run(tmp_path):
    """To the end through the command line: a run, who spoilt it, and a run without them."""
    order, path = places(), tmp_path / "guilty.json"
    bad = sorted([order[9], order[10]])
    plan = {"number": 200, "faults": dict.fromkeys(map(str, bad), "nan")}
    main(str(tmp_path / "run"), plan)
    assert blame(tmp_path / "run", plan, "--step", "0") == blame(tmp_path / "run", plan)
    code, told = blame(tmp_path / "run", plan)
    assert code == 1
    assert "give --step, a number from 1; the first loss or gradient norm that is not finite, by the log of" in told
    assert told.rstrip().endswith("step 3")
    code, told = blame(tmp_path / "run", plan, "--step", "4")
    assert code == 1
    assert "weights of body.0.weight are not finite before step 4" in told
    assert blame(tmp_path / "run", plan, "--step", "3", "--leave-out", str(path))[0] == 0
    held = json.loads(path.read_text())
    assert [entry["index"] for entry in held["samples"]] == bad
    assert held["number_of_samples"] == 200
    assert all("step 3: its loss is nan" in entry["reason"] for entry in held["samples"])

    plan["options"] = {"leave_out_samples": str(path)}
    main(str(tmp_path / "next"), plan)
    log = (tmp_path / "next" / "metrics.jsonl").read_text()
    assert "NaN" not in log
    # A third one, blamed in the run without the two: its index is that of the whole data.
    left = [index for index in range(200) if index not in bad]
    third = left[places(number=198)[5]]
    plan["faults"][str(third)] = "label"
    assert named(blame(tmp_path / "third", plan, "--step", "2", "--leave-out", str(path))[1]) == [third]
    assert [entry["index"] for entry in json.loads(path.read_text())["samples"]] == sorted([*bad, third])


REFUSED = {
    "updates": ({"options": {"optim": "lomo"}}, "1", "changes weights in the backward pass"),
    "beyond": ({}, "9", "step 9 is none of this run, which ends at step 6"),
    "own step": ({"trainer": "own step"}, "3", "training_step is overridden"),
    "evaluates": ({"evaluates": True}, "3", "the script calls another method of the Trainer before it"),
    "search of sizes": ({"options": {"auto_find_batch_size": True}}, "3", "give the size that it found"),
    "dev run": ({"options": {"fast_dev_run": 2}}, "3", "a fast_dev_run has no checkpoints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_blamed_is_refused(case, tmp_path):
    plan, step, words = REFUSED[case]
    code, told = blame(tmp_path, {"number": 200, "faults": {}} | plan, "--step", step)
    assert code == 1
    assert words in told


def test_a_loader_of_ones_own_names_places_and_lists_nothing(tmp_path):
    plan = {"number": 200, "faults": {"9": "nan"}, "trainer": "own batches"}
    code, told = blame(tmp_path, plan, "--step", "3", "--leave-out", str(tmp_path / "guilty.json"))
    assert code == 0
    assert "a sample of unknown index (place 9 in the order" in told
    assert "nothing is listed" in told
    assert not (tmp_path / "guilty.json").exists()


def test_samples_without_a_target_are_innocent(tmp_path):
    script = tmp_path / "classes.py"
    script.write_text(
        "import torch, blamed_run\n"
        "from shared.models import Classifier\n"
        "from tr_core import Trainer, TrainingArguments\n"
        "rows = [{'x': torch.randn(8), 'labels': torch.tensor(-100 if i % 2 == 0 else 1)} for i in range(40)]\n"
        "rows[9]['x'][0] = torch.inf\n"
        "args = TrainingArguments('out', max_steps=4, use_cpu=True, report_to='none', log_level='error',\n"
        "    train_sampling_strategy='sequential', per_device_train_batch_size=4)\n"
        "Trainer(Classifier(), args, train_dataset=rows).train()\n"
    )
    command = next(iter(entry_points(group="tr.commands", name="blame"))).load()
    out = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(out):
        assert command(["--step", "3", str(script)]) == 0
    assert named(out.getvalue()) == [9]
    assert os.listdir(tmp_path) == ["classes.py"]
    assert out.getvalue().count("no target") == 2  # 8 and 10
