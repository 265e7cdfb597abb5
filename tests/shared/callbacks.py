"""Callbacks that end a run, and that keep what it had."""

import torch

from tr_core import TrainerCallback


class Stop(Exception):
    """Stands for whatever ends a process."""


class StopAt(TrainerCallback):
    """Ends a run at the beginning of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop


class KeepWeights(TrainerCallback):
    """Keeps weights and states of the optimizer after each step, and whether it was applied."""

    def __init__(self):
        self.weights, self.states, self.applied = [], [], []

    def on_optimizer_step(self, args, state, control, *, model, optimizer, applied, **kwargs):
        self.applied.append(applied)
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        self.states.append([value.clone() for held in optimizer.state.values() for value in held.values()])


class Clears(TrainerCallback):
    """Drops the gradients so far between micro-batches, by the method of `owner`."""

    def __init__(self, owner="optimizer"):
        self.owner = owner

    def on_substep_end(self, args, state, control, **kwargs):
        kwargs[self.owner].zero_grad()
