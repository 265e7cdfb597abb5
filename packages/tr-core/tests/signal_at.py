"""Send a signal at an event of a step, and look at how the run ended and how the next one goes on."""

import signal

import pytest
import torch
from memory_checkpointer import MemoryCheckpointer
from small_models import Classifier, samples

from tr_core import TrainerCallback
from tr_core.preemption.signals import SIGNALS, Interrupted

WATCHED = ("on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end")


class SignalAt(TrainerCallback):
    """Sends a signal to its own process at an event of a step, and notes what the run does."""

    def __init__(self, event, step, number=signal.SIGTERM):
        self.event, self.step, self.number, self.noted, self.error = event, step, number, [], None

    def on_train_begin(self, args, state, control, **kwargs):
        self._see("on_train_begin", state)

    def on_step_begin(self, args, state, control, **kwargs):
        self._see("on_step_begin", state)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._see("on_pre_optimizer_step", state)

    def on_step_end(self, args, state, control, **kwargs):
        self._see("on_step_end", state)

    def on_log(self, args, state, control, **kwargs):
        self._see("on_log", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._see("on_prediction_step", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._see("on_evaluate", state)

    def on_save(self, args, state, control, **kwargs):
        self._see("on_save", state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._see("on_epoch_end", state)

    def on_train_end(self, args, state, control, error=None, **kwargs):
        self.error = error
        self._see("on_train_end", state)

    def _see(self, event, state):
        if event in WATCHED:
            self.noted.append((event.removeprefix("on_"), state.global_step))
        if (event, state.global_step) == (self.event, self.step):
            self.step = None
            signal.raise_signal(self.number)


def saving_trainer(make_trainer, folder, *callbacks, checkpointer=None, **changes):
    """Build a Trainer of ten steps that keeps its checkpoints in memory."""
    torch.manual_seed(0)
    options = {
        "model": Classifier(),
        "save_strategy": "steps",
        "save_steps": 100,
        "logging_steps": 3,
        "eval_dataset": samples(12),
        "per_device_eval_batch_size": 4,
    }
    return make_trainer(
        40,
        callbacks=list(callbacks),
        checkpointer=MemoryCheckpointer(folder) if checkpointer is None else checkpointer,
        **{**options, **changes},
    )


class Heard:
    """Stands for a logger: keeps what it is told, whatever the level."""

    def __init__(self):
        self.lines = []

    def info(self, text, *args):
        self.lines.append(text % args if args else text)

    debug = warning = error = info

    def listen_to(self, logger, monkeypatch):
        """Keep what a logger is given, whoever holds it."""
        for level in ("debug", "info", "warning", "error"):
            monkeypatch.setattr(logger, level, getattr(self, level))

    def isEnabledFor(self, level):  # noqa: N802  the name of logging.Logger
        return True

    def log(self, level, text, *args, stacklevel=1):
        self.info(text, *args)

    def said(self, text):
        return any(text in line for line in self.lines)


def interrupt(trainer, kind=Interrupted, **how):
    with pytest.raises(kind) as caught:
        trainer.train(**how)
    return caught.value


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def weights(trainer):
    return [value.clone() for value in trainer.model.state_dict().values()]


def assert_ends_alike(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        assert torch.equal(mine, theirs)
    timings = ("runtime", "per_second")
    histories = [
        [
            {name: value for name, value in entry.items() if not name.endswith(timings)}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ]
        for trainer in (one, other)
    ]
    assert histories[0] == histories[1]
    assert one.state.best_metric == other.state.best_metric


def evaluated(watch):
    return [step for event, step in watch.noted if event == "evaluate"]
