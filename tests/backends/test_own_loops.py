"""A loop written by hand, with four lines changed: the numbers of one process, every row once."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "tr-dist" / "tests"))

from loop_runs import distributed, plain, strategy_named
from torch import nn
from torch.utils.data import DataLoader

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


def skip_a_step(strategy, at):
    """Leave out a step whose last micro-batch fails at its first layer or in its backward; return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    data = [(torch.sin(torch.arange(4.0) + number), number % 2) for number in range(64)]
    with Loop(strategy_named(strategy), gradient_accumulation_steps=2) as loop:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer, loader = loop.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for number, (x, y) in enumerate(loader):
            try:
                output = wrapped(x)
                if number == 3:
                    if at == "forward":
                        raise ArithmeticError
                    output.register_hook(fail)
                loop.backward(nn.functional.cross_entropy(output, y))
            except ArithmeticError:
                optimizer.zero_grad()
                continue
            if at is not None or number not in (2, 3):
                optimizer.step()
            optimizer.zero_grad()
        return loop.strategy.full_state_dict(wrapped)


def fail(gradient):
    raise ArithmeticError


@pytest.mark.column("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_step_that_failed_and_was_cleared_leaves_no_gradient(strategy, at):
    wanted = run_ranks(skip_a_step, 2, strategy, None, timeout_s=100)[0]
    found = run_ranks(skip_a_step, 2, strategy, at, timeout_s=100)[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def accumulate_otherwise():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 in the DeepSpeed configuration, and 2"):
        Loop(strategy_named("zero 1/2"), gradient_accumulation_steps=2)


@pytest.mark.column("deepspeed")
@needs_deepspeed
@pytest.mark.row("refused")
def test_a_loop_that_accumulates_otherwise_than_the_configuration_is_refused():
    run_ranks(accumulate_otherwise, 1, timeout_s=120)
