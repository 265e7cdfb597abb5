"""Callbacks that act at a step: they call a function, end the run, or send a signal to their own process."""

import signal

from tr_core import TrainerCallback


class Stop(Exception):
    """Stands for whatever ends a process."""


class StopAt(TrainerCallback):
    """Raises `Stop` before the step after `step`."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


def on(event, act):
    """Return a callback that calls a function at an event, with what the event gives by its names."""

    def method(self, args, state, control, **kwargs):
        act(args=args, state=state, control=control, **kwargs)

    return type("On", (TrainerCallback,), {event: method})()


class At(TrainerCallback):
    """Calls a function with the arguments when a step has ended."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(args)


class Looks(TrainerCallback):
    """Notes what a function returns after every step and every batch of an evaluation."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.look())

    def on_prediction_step(self, args, state, control, **kwargs):
        self.seen.append(self.look())


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


def evaluated(watch):
    return [step for event, step in watch.noted if event == "evaluate"]
