"""A loop written for accelerate.Accelerator keeps working with checkpoints, an optimizer and logs of these packages."""

import json

import pytest
from launched_jobs import said
from workplace import Workplace

pytestmark = [pytest.mark.launcher, pytest.mark.slow]


def test_two_processes_that_are_killed_go_on_as_one_that_was_left_alone(tmp_path, tiny_bert, accelerate_alone):
    """Started by `trainer launch`, which tells Accelerate that there is no GPU: nothing else is set."""
    place = Workplace(tmp_path, tiny_bert)
    code, output, errors = place.run_in_shell("trainer launch --nproc 2 train.py", 2, STOP_AT="4")
    assert code != 0
    assert said(output) == [], errors
    code, output, errors = place.run_in_shell("trainer launch --nproc 2 train.py", 2)
    assert code == 0, errors
    (end,) = said(output)
    assert (end["world_size"], end["begin"]) == (2, 4)
    assert end["losses"] == pytest.approx(accelerate_alone["losses"][4:], abs=1e-5)
    assert end["weights"] == pytest.approx(accelerate_alone["weights"], abs=1e-4)
    for row, expected in zip(end["predictions"], accelerate_alone["predictions"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [entry for entry in entries if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx(accelerate_alone["losses"], abs=1e-5)
