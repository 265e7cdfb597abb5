"""Memory for gradients to be averaged in is there once they are to be, and not before."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tr_dist import DDP
from tr_dist.testing import run_ranks

WIDTH, LAYERS = 1024, 32
MIB = 2**20
GRADIENTS_MIB = WIDTH * WIDTH * 4 * LAYERS / MIB


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)], nn.BatchNorm1d(WIDTH))


def _peak_mib():
    """Return the most memory that this process has had at a time since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _forget_peak():
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mib()


def _train(averages):
    """Train two micro-batches; gradients that are not to be averaged are freed as they come."""
    torch.set_num_threads(1)
    with DDP(use_cpu=True) as strategy:
        module = _model()
        model = strategy.prepare(module)
        before, had_buckets = _forget_peak(), [model.has_buckets]
        if not averages:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        module[-1].running_mean.fill_(float(strategy.rank))
        for _ in range(2):
            with strategy.accumulate(model, sync=averages):
                strategy.backward(model(torch.ones(2, WIDTH) * (1 + strategy.rank)).square().mean())
            had_buckets.append(model.has_buckets)
            if len(had_buckets) == 2:  # the first micro-batch has compared the ranks' weights, which takes memory once
                _forget_peak()
        model.share_buffers()
        return _peak_mib() - before, had_buckets, module[-1].running_mean.clone()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of a process's memory")
def test_who_averages_gradients_itself_and_frees_them_needs_memory_neither_for_them_nor_for_buckets():
    own, theirs = run_ranks(_train, 2, False), run_ranks(_train, 2, True)
    for (less_mib, had_none, mean), (more_mib, had_buckets, _) in zip(own, theirs, strict=True):
        assert had_none == [False] * 3
        assert had_buckets == [False, True, True]
        assert more_mib - less_mib > 1.6 * GRADIENTS_MIB
        assert torch.equal(mean, own[0][2])  # buffers are shared as ever


def _buffers_of_ranks():
    with DDP(use_cpu=True) as strategy:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = strategy.prepare(module)
        module[1].running_mean.fill_(float(strategy.rank))  # as user code does after prepare
        with strategy.accumulate(model, sync=False):
            model.eval()  # which leaves the means as the first forward finds them
            strategy.backward(model(torch.ones(2, 2)).sum())
        return module[1].running_mean.tolist(), model.has_buckets


def test_the_first_forward_shares_buffers_without_buckets_too():
    assert run_ranks(_buffers_of_ranks, 2) == [([0.0, 0.0], False)] * 2


def _accumulated(asks_first):
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(3, 1, bias=False))
        if asks_first:
            model._get_ddp_logging_data()  # whatever asks the base for its reducer or its log finds them
            assert model.has_buckets
        for sync in (False, False, True):
            with strategy.accumulate(model, sync=sync):
                strategy.backward(model(torch.full((1, 3), 1.0 + strategy.rank)).sum())
        return model.module.weight.grad.tolist()


def test_micro_batches_from_before_the_buckets_were_there_are_averaged_with_the_last():
    assert run_ranks(_accumulated, 2, False) == [[[4.5] * 3]] * 2
    assert run_ranks(_accumulated, 2, True) == [[[4.5] * 3]] * 2


def _static_graph():
    with DDP(use_cpu=True, static_graph=True) as strategy:
        model = strategy.prepare(nn.Linear(3, 1, bias=False))
        found = [model.static_graph]
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.ones(1, 3)).sum())
        return [*found, model.static_graph, model._get_ddp_logging_data()["static_graph"]]


def test_a_static_graph_is_told_to_the_reducer_when_there_is_one():
    assert run_ranks(_static_graph, 2) == [[True, True, 1]] * 2
