import copy
import os
import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tr_dist import DDP
from tr_dist.testing import run_ranks

STEPS, SAMPLES, WIDTH = 5, 12, 6


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def _train(strategy, micro_batches, max_norm):
    """Train on this rank's part of each batch; return losses, norms and weights."""
    model = strategy.prepare(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        parts = [t[strategy.rank :: strategy.world_size].chunk(micro_batches) for t in _batch(step)]
        step_loss = torch.zeros(())
        for index, (x, y) in enumerate(zip(*parts, strict=True)):
            with strategy.accumulate(model, sync=index == micro_batches - 1):
                with strategy.autocast():
                    loss = nn.functional.mse_loss(model(x), y) / micro_batches
                strategy.backward(loss)
            step_loss += loss.detach()
        norms.append(strategy.clip_grad_norm(model, optimizer, max_norm))
        assert strategy.step(optimizer) is True
        optimizer.zero_grad()
        losses.append(strategy.sum(step_loss) / strategy.world_size)
    weights = copy.deepcopy(strategy.state_parts(model, optimizer)["model"].state_dict())
    return torch.stack(losses), torch.stack(norms), weights


def _train_rank(precision, micro_batches, max_norm):
    torch.manual_seed(0)
    with DDP(precision=precision, use_cpu=True) as strategy:
        return _train(strategy, micro_batches, max_norm)


def _by_hand(precision, max_norm):
    """The same training without any of the package: one process, whole batches."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = _batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), model.state_dict()


# Ranks add what one process adds, in another order: float32 differs in the last bits, bfloat16 in its eighth.
@pytest.mark.parametrize(
    ("world_size", "precision", "micro_batches", "max_norm", "tolerance"),
    [
        (2, "no", 1, None, 1e-6),
        (3, "no", 2, 0.5, 1e-6),
        (2, "no", 3, 0.5, 1e-6),
        (2, "bf16", 1, 0.5, 2e-2),
        (1, "no", 2, 0.5, 1e-6),
    ],
)
def test_ranks_train_as_one_process_on_the_whole_batch(world_size, precision, micro_batches, max_norm, tolerance):
    results = run_ranks(_train_rank, world_size, precision, micro_batches, max_norm)
    expected_losses, expected_norms, expected_weights = _by_hand(precision, max_norm)
    for losses, norms, weights in results:
        torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(norms, expected_norms, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(weights, results[0][2], rtol=0, atol=0)
    if max_norm is not None:
        assert (expected_norms > max_norm).all(), "clipping must have had something to do"


def test_one_process_without_a_launcher_trains():
    with DDP(use_cpu=True) as strategy:
        assert (strategy.rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
        losses, _, weights = _train(strategy, 1, None)
    expected_losses, _, expected_weights = _by_hand("no", None)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


def _count_reductions(micro_batches, steps):
    calls = []

    def hook(state, bucket):
        calls.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(_model())
        model.register_comm_hook(None, hook)
        counts = []
        for _ in range(steps):
            for index in range(micro_batches):
                with strategy.accumulate(model, sync=index == micro_batches - 1):
                    strategy.backward(model(torch.ones(2, WIDTH) * strategy.rank).mean())
            counts.append(len(calls))
        return counts


def test_gradients_travel_once_a_step_whatever_the_accumulation():
    assert run_ranks(_count_reductions, 2, 4, 3) == [[1, 2, 3]] * 2  # the model fits one bucket


def _accumulated(rank_value):
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(1, 1, bias=False))
        local = torch.full((1, 1), float(strategy.rank + 1))
        seen = []
        for sync in (False, True):
            with strategy.accumulate(model, sync=sync):
                strategy.backward(model(local).sum() * rank_value)
            seen.append(strategy.unwrap(model).weight.grad.item())
        return seen


def test_gradients_stay_local_until_the_last_micro_batch_and_are_then_the_mean():
    assert run_ranks(_accumulated, 2, 1.0) == [[1.0, 3.0], [2.0, 3.0]]


def _start_weights():
    torch.manual_seed(int(os.environ["RANK"]))
    with DDP(use_cpu=True) as strategy:
        inner = nn.Linear(3, 3)
        model = strategy.prepare(inner)
        assert strategy.unwrap(model) is inner
        assert strategy.unwrap(inner) is inner
        return inner.weight.detach()


def test_every_rank_starts_from_the_weights_of_rank_0():
    first, second = run_ranks(_start_weights, 2)
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(3, 3).weight)
    assert torch.equal(first, second)


def _uneven_evaluation():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model.eval()
        with torch.no_grad():
            for _ in range(1 + strategy.rank):
                model(torch.ones(4, 2))
        return strategy.gather_objects(strategy.rank)


def test_ranks_may_evaluate_unequal_numbers_of_batches_on_a_model_with_buffers():
    assert run_ranks(_uneven_evaluation, 2) == [[0, 1], [0, 1]]


def _buffers(broadcast):
    with DDP(use_cpu=True, broadcast_buffers=broadcast) as strategy:
        model = strategy.prepare(nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)))
        for _ in range(2):
            with strategy.accumulate(model, sync=True):
                strategy.backward(model(torch.full((4, 1), float(strategy.rank))).sum())
        return strategy.unwrap(model)[0].running_mean.item()


def test_buffers_are_those_of_rank_0_after_each_step_unless_that_is_switched_off():
    momentum = 0.1
    assert run_ranks(_buffers, 2, True) == [0.0, 0.0]
    assert run_ranks(_buffers, 2, False) == pytest.approx([0.0, 1 - (1 - momentum) ** 2])


def _broadcasts():
    """Return how often buffers have travelled after each of three steps of two micro-batches."""
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
        travel, calls, counts = model._sync_buffers, [], []
        model._sync_buffers = lambda: calls.append(travel())
        for _ in range(3):
            for sync in (False, True):
                with strategy.accumulate(model, sync=sync):
                    strategy.backward(model(torch.full((4, 1), float(strategy.rank))).sum())
            counts.append(len(calls))
        return counts


def test_buffers_travel_once_a_step_and_before_the_first():
    assert run_ranks(_broadcasts, 2) == [[2, 3, 4]] * 2


def test_arguments_reach_the_strategy():
    given = {
        "bf16": True,
        "fp16": False,
        "use_cpu": True,
        "ddp_find_unused_parameters": None,
        "ddp_bucket_cap_mb": 7,
        "ddp_broadcast_buffers": False,
        "ddp_static_graph": True,
        "ddp_backend": "gloo",
        "ddp_timeout": 30,
    }
    with DDP.from_arguments(types.SimpleNamespace(**given)) as strategy:
        model = strategy.prepare(_model())
        assert (model.bucket_bytes_cap, model.broadcast_buffers, model.static_graph) == (7 * 2**20, False, True)
        assert model.find_unused_parameters is False
        with strategy.autocast():
            assert model(torch.ones(1, WIDTH)).dtype == torch.bfloat16
    unused = types.SimpleNamespace(**{**given, "ddp_find_unused_parameters": True, "ddp_static_graph": None})
    with DDP.from_arguments(unused) as strategy:
        assert strategy.prepare(_model()).find_unused_parameters is True


def test_a_checkpoint_holds_the_unwrapped_model_and_the_optimizer():
    with DDP(use_cpu=True) as strategy:
        inner = _model()
        model = strategy.prepare(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = strategy.state_parts(model, optimizer)
        assert parts == {"model": inner, "optimizer": optimizer}
        assert list(strategy.state_parts(model, None)) == ["model"]


def test_the_norm_without_gradients_is_zero():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert strategy.clip_grad_norm(model, optimizer, None).item() == 0.0


def test_a_compiled_model_is_still_recognised():
    with DDP(use_cpu=True) as strategy:
        inner = _model()
        model = torch.compile(strategy.prepare(inner), backend="eager")
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.ones(2, WIDTH)).mean())
        assert strategy.unwrap(model) is inner


def _gradients(first_step, options):
    """Return the averaged gradients of some steps, by step, of steps that begin at one with the same weights."""
    with DDP(use_cpu=True, **options) as strategy:
        model = strategy.prepare(_model())
        gradients = {}
        for step in range(first_step, STEPS):
            x, y = (part[strategy.rank :: strategy.world_size] for part in _batch(step))
            with strategy.accumulate(model, sync=True):
                strategy.backward(nn.functional.mse_loss(model(x), y))
            gradients[step] = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return gradients


# Two ranks add up alike in any order.
@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-4}]
)
def test_the_first_step_of_a_replica_sums_over_the_ranks_as_later_ones_do(options):
    whole, resumed = run_ranks(_gradients, 3, 0, options)[0], run_ranks(_gradients, 3, 2, options)[0]
    for step, gradients in resumed.items():
        assert all(map(torch.equal, gradients, whole[step])), step


def _buckets(options):
    """Return how many gradients travel together, in the order of their travels, in two steps."""
    sizes = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    with DDP(use_cpu=True, bucket_cap_mb=1e-4, **options) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7)))
        model.register_comm_hook(None, hook)
        for _ in range(2):
            with strategy.accumulate(model, sync=True):
                strategy.backward(model(torch.ones(2, 4)).mean())
        return sizes


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [49, 36, 25]), ({"static_graph": True}, [49, 36, 25]), ({"find_unused_parameters": True}, [7, 48, 55])],
)
def test_gradients_of_the_last_layers_travel_first_from_the_first_step_on(options, sizes):
    assert run_ranks(_buckets, 2, options) == [sizes * 2] * 2
