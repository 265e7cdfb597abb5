"""How long backward passes wait for the gradients of other ranks, by torch's measurement of some of them."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_dist import DDP
from tr_dist.ddp import GradientWait
from tr_dist.testing import run_ranks


class Measured:
    """A replica as torch measures it: pass `n`, from 1, waits for `waits[n]` ns, measured in the next."""

    def __init__(self, waits, device_type="cpu"):
        self._waits, self.device_type, self.num_averaged = waits, device_type, 0
        self._every = 0

    def _set_ddp_runtime_logging_sample_rate(self, every):
        self._every = every

    def _get_ddp_logging_data(self):
        numbers = [n for n in range(1, self.num_averaged) if n <= 10 or n % self._every == 0]
        if not numbers:
            return {"backend_name": "gloo"}
        mean = sum(self._waits[n] for n in numbers) / len(numbers)
        return {
            "iteration": numbers[-1],
            "avg_backward_comm_time": int(mean) + 500,
            "avg_backward_compute_comm_overlap_time": 500,
        }


def test_the_passes_since_the_last_call_wait_as_long_as_those_that_were_measured():
    replica = Measured([0] + [2_000_000_000] * 10 + [1_000_000_000] * 90)
    wait = GradientWait(replica)
    taken = []
    for passes in (1, 3, 11, 15, 21, 31):
        replica.num_averaged = passes
        taken.append(wait.take(replica))
    # Nothing is measured yet; three passes; eight; four at the last mean; six and ten by the next tenth of all.
    assert taken[0] is None
    assert taken[1:] == pytest.approx([6.0, 16.0, 8.0, 6.0, 10.0])


def test_on_a_device_each_hundredth_pass_is_measured():
    replica = Measured([0] + [3_000_000_000] * 10 + [1_000_000_000] * 400, "cuda")
    wait = GradientWait(replica)
    replica.num_averaged = 101
    wait.take(replica)
    replica.num_averaged = 301
    assert wait.take(replica) == pytest.approx(200.0)


def _waits():
    torch.set_num_threads(1)
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(4, 4))
        known = [strategy.exchange_s(model)]
        for sync in (False, True, True, True):
            with strategy.accumulate(model, sync=sync):
                loss = model(torch.ones(2, 4)).square().mean()
                if strategy.rank == 1:
                    time.sleep(0.2)
                strategy.backward(loss)
            known.append(strategy.exchange_s(model))
        return known, model.num_averaged


def test_ranks_measure_how_long_they_wait_for_each_other():
    (first, averaged), _ = run_ranks(_waits, 2)
    assert first[:2] == [None, None]  # nothing was averaged yet
    assert first[2] is None  # a pass is measured when the next begins
    assert first[-1] > 0.0
    assert averaged == 3


def test_a_process_alone_waits_for_nobody():
    with DDP(use_cpu=True) as strategy:
        model = strategy.prepare(nn.Linear(4, 4))
        assert strategy.exchange_s(model) is None
        assert strategy.exchange_s(SimpleNamespace()) is None
