"""A loop written by hand, with four lines changed: the numbers of one process, every row once."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "tr-dist" / "tests"))

from loop_runs import distributed, plain, strategy_named

from tr_dist import Loop
from tr_dist.testing import run_ranks

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
TOLERANCE = 1e-5  # sums of 32 bits in another order, over two epochs of Adam


def strategies():
    """Return the strategies, each with its column."""
    for name in ("ddp", "fsdp", "zero 1/0", "zero 1/2", "zero 3/2", "zero 1/3"):
        of_deepspeed = name.startswith("zero")
        marks = [pytest.mark.column("deepspeed"), needs_deepspeed] if of_deepspeed else pytest.mark.column(name)
        yield pytest.param(name, marks=marks)


@pytest.mark.column("cpu")
@pytest.mark.row("own loop")
def test_one_process_needs_no_launcher():
    weights, predictions = plain(23, 6, accumulation=2)
    alone = distributed("ddp", 23, 6, {"accumulation": 2, "shuffle": True})
    torch.testing.assert_close(alone[0], weights)
    torch.testing.assert_close(alone[1], predictions)


@pytest.mark.row("own loop")
@pytest.mark.parametrize("strategy", list(strategies()))
def test_two_ranks_train_as_the_plain_loop_does_in_one_process(strategy):
    accumulation = int(strategy[-3]) if strategy.startswith("zero") else 3
    weights, predictions = plain(29, 6, accumulation=accumulation)
    options = {"accumulation": accumulation, "shuffle": True}
    ranks = run_ranks(distributed, 2, strategy, 29, 3, options, timeout_s=180)
    torch.testing.assert_close(ranks[0][0], weights, rtol=TOLERANCE, atol=TOLERANCE)
    for rank in ranks:
        torch.testing.assert_close(rank[1], predictions, rtol=TOLERANCE, atol=TOLERANCE)
    assert sorted(ranks[0][2] + ranks[1][2]) == sorted([*range(29)] * 2)


def accumulate_otherwise():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 in the DeepSpeed configuration, and 2"):
        Loop(strategy_named("zero 1/2"), gradient_accumulation_steps=2)


@pytest.mark.column("deepspeed")
@needs_deepspeed
@pytest.mark.row("refused")
def test_a_loop_that_accumulates_otherwise_than_the_configuration_is_refused():
    run_ranks(accumulate_otherwise, 1, timeout_s=120)
