"""A run of two ranks is killed and goes on with one, three or four: the same rows in each step, the same losses."""

import json
import shutil

import pytest
from kills import LIMIT_S, read_end
from sample_records import read_starts, rows_of_steps

pytestmark = pytest.mark.slow

ROWS, PER_STEP = 96, 12
# 32-bit sums in another order, over eight steps.
TOLERANCE = 5e-6


def options(strategy, world_size):
    """Return the options of a run that takes the same rows in each step, whatever the number of ranks."""
    arguments = {"per_device_train_batch_size": PER_STEP // world_size, "logging_steps": 1, "eval_strategy": "no"}
    shared = ["--rows", ROWS, "--dropout", 0, "--strategy", strategy]
    return [*shared, "--arguments", json.dumps({**arguments, "save_steps": 2, "learning_rate": 0.05})]


def losses(out):
    return [entry["loss"] for entry in read_end(out)["history"] if "loss" in entry]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_of_two_goes_on_with_another_number_of_ranks(nursery, tmp_path, strategy):
    alone = tmp_path / "alone"
    assert nursery.run(1, [alone, *options("ddp", 1)], tmp_path / "job", LIMIT_S)[0].code == 0
    kill = ["--place", "step", "--times", 5, "--how", "kill"]
    ends = nursery.run(2, [tmp_path / "two", *options(strategy, 2), *kill], tmp_path / "job-2", LIMIT_S)
    assert [end.code for end in ends] == [1, -9], ends[0].said
    for world_size in (1, 2, 3, 4):
        out = shutil.copytree(tmp_path / "two", tmp_path / f"on-{world_size}")
        folder = tmp_path / f"job-on-{world_size}"
        ends = nursery.run(world_size, [out, *options(strategy, world_size)], folder, LIMIT_S)
        assert [end.code for end in ends] == [0] * world_size, ends[0].said
        [*_, (began, *_)] = [start for start in read_starts(out) if start]
        assert (began["begin"], began["world_size"]) == (4, world_size)
        assert rows_of_steps(out) == rows_of_steps(alone)
        assert losses(out) == pytest.approx(losses(alone), abs=TOLERANCE)
    assert sorted(row for rows in rows_of_steps(alone).values() for row in rows) == list(range(ROWS))
