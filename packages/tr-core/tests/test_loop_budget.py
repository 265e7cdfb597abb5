"""Count what the framework does between two forward passes: calls, functions, files, and reads of the device."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import tr_args
import tr_core
import tr_log
from tr_core.loss import LossRule

FRAMEWORK = tuple(str(Path(package.__file__).parent) for package in (tr_core, tr_args, tr_log))


class Watched(nn.Module):
    """Calls `on_forward` at the beginning of every forward."""

    def __init__(self, inner, on_forward):
        super().__init__()
        self.inner, self.on_forward = inner, on_forward

    def forward(self, x, labels=None):
        self.on_forward()
        return self.inner(x, labels=labels)


class CallCounter:
    """Counts calls of framework functions from one forward to the next."""

    def __init__(self):
        self.forwards, self.calls, self.above_forward = 0, Counter(), 0

    def on_forward(self):
        self.forwards += 1
        if self.forwards == 5:  # the first steps build what later ones reuse
            self.above_forward = self._frames_above()
            sys.setprofile(self._count)
        elif self.forwards == 6:
            sys.setprofile(None)

    def _count(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(FRAMEWORK):
            self.calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    @staticmethod
    def _frames_above():
        frame, depth = sys._getframe(2), 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(FRAMEWORK)
            frame = frame.f_back
        return depth


def count_a_step(make_trainer, model, **changes):
    counter = CallCounter()
    trainer = make_trainer(40, model=Watched(model, counter.on_forward), logging_steps=500, **changes)
    trainer.remove_callback(tr_log.EventsFile)  # it writes by the clock: on a slow machine, in the step that is counted
    trainer.train()
    report = "\n".join(f"{n:3d} {Path(file).name}:{name}" for (file, name), n in counter.calls.most_common())
    return counter, len({file for file, _ in counter.calls}), report


def test_a_step_stays_within_its_budget_of_calls_functions_and_files(make_trainer, model):
    """Data is loaded by a worker process here, so that what is counted is the step."""
    counter, files, report = count_a_step(make_trainer, model, dataloader_num_workers=1)
    assert sum(counter.calls.values()) <= 40, report
    # Three of them are the order of a step's micro-batches, which a strategy may replace.
    assert len(counter.calls) <= 29, report
    assert files <= 10, report
    assert counter.above_forward <= 8


def test_a_step_that_loads_its_own_data_stays_within_the_budget_of_calls(make_trainer, model):
    counter, files, report = count_a_step(make_trainer, model)
    assert sum(counter.calls.values()) <= 40, report
    assert len(counter.calls) <= 35, report
    assert files <= 12, report


class CountsTokens(nn.Module):
    """Divides a summed loss by the number of items it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.inner(x)["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


@pytest.mark.parametrize("counts", [False, True], ids=["mean loss", "counted loss"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_steps_between_logs_read_nothing_from_the_device(
    make_trainer, model, read_counter, monkeypatch, counts, accumulation, bf16
):
    reads_at_step_end = []

    class Recorder(tr_core.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            reads_at_step_end.append(len(read_counter.reads))

    count = LossRule.count

    def on_the_host(self, micro_batches):
        before = len(read_counter.reads)
        result = count(self, micro_batches)  # of batches that have not been moved to the device yet
        del read_counter.reads[before:]
        return result

    monkeypatch.setattr(LossRule, "count", on_the_host)
    trainer = make_trainer(
        80,
        model=CountsTokens(model) if counts else model,
        callbacks=[Recorder()],
        logging_steps=1000,
        gradient_accumulation_steps=accumulation,
        bf16=bf16,
    )
    with read_counter:
        trainer.train()
    steps = reads_at_step_end[2:]
    assert len(steps) >= 8
    assert steps[-1] - steps[0] == 0, Counter(read_counter.reads[steps[0] : steps[-1]])


def test_the_counter_of_reads_sees_a_read(read_counter):
    with read_counter:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.ones(2).tolist()
    assert len(read_counter.reads) == 3


def test_every_log_reads_loss_and_norm_once(make_trainer, read_counter):
    trainer = make_trainer(40, logging_steps=1)
    with read_counter:
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert read_counter.reads.count("_local_scalar_dense") <= 2 * len(logs) + 2


@pytest.mark.cuda
def test_steps_on_a_cuda_device_do_not_wait_for_it(make_trainer, model, no_sync):
    trainer = make_trainer(80, callbacks=[no_sync], logging_steps=1000, use_cpu=False)
    assert trainer.train().global_step == 20
