"""A small model, its data, the loop written by hand that a run is compared with, and callbacks made of functions."""

import pytest
import torch
from torch import nn

from tr_core import TrainerCallback

RATE = 0.1


def rows(number=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 4, generator=generator)
    return [{"x": row, "labels": row.sum() + 1} for row in features]


class Net(nn.Module):
    """Two layers and a mean squared error: what it returns is a mapping, as models of transformers do."""

    def __init__(self, dropout=0.0, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        logits = self.head(self.dropout(torch.tanh(self.body(x)))).squeeze(-1)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def stack(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def batches(data, size=2):
    """Return the batches of data in its own order."""
    return [stack(data[start : start + size]) for start in range(0, len(data), size)]


def own_loss(model, batch):
    return model(**batch)["loss"]


def by_hand(model, steps, *, rate=RATE, loss=own_loss, max_norm=None, before=None, after=None):
    """Train with plain gradient descent, one step a list of batches or a batch; return the loss of each step.

    Args:
        model: what is trained.
        steps: the batches.
        rate: the learning rate, or what gives it for the number of the step.
        loss: `(model, batch)` → loss.
        max_norm: norm to which gradients are clipped.
        before: called with the number of the step and the model before it is applied, gradients being there.
        after: called with the number of steps made and the model.
    """
    seen = []
    for number, step in enumerate(steps):
        parts = step if isinstance(step, list) else [step]
        model.zero_grad()
        seen.append(0.0)
        for batch in parts:
            share = loss(model, batch) / len(parts)
            share.backward()
            seen[-1] += share.item()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if before is not None:
            before(number, model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= (rate(number) if callable(rate) else rate) * parameter.grad
        if after is not None:
            after(number + 1, model)
    return seen


def hand(steps=None, *, model=None, first=None, **how):
    """Return what makes a model and the losses of its loop by hand, which a run is to equal.

    Args:
        steps: the batches; those of `rows()` by default.
        model: makes the model.
        first: called with it before training.
        how: see `by_hand`.
    """

    def run():
        trained = (model or Net)()
        if first is not None:
            first(trained)
        return trained, by_hand(trained, batches(rows()) if steps is None else steps, **how)

    return run


def assert_equals(trainer, expected):
    """Train, and check losses and weights against what `hand` returned."""
    trainer.train()
    model, losses = expected()
    assert logged(trainer) == pytest.approx(losses)
    assert_same(trainer.model, model)


def logged(trainer, name="loss"):
    """Return what was logged under a name, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same(model, other):
    """Check that two models have the same weights."""
    expected = other.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def when(**events):
    """Make a callback of functions by event, called with `args`, `state`, `control` and the rest; none answers."""
    return answering(**{event: _silent(function) for event, function in events.items()})


def answering(**events):
    """Make a callback of functions by event, whose answers are the callback's."""
    methods = {event: _method(function) for event, function in events.items()}
    return type("Habit", (TrainerCallback,), methods)()


def at_step(number, function):
    """Make a callback that calls a function at the end of one step."""

    def call(state, **rest):
        if state.global_step == number:
            function(state=state, **rest)

    return when(on_step_end=call)


def _method(function):
    return lambda self, args, state, control, **rest: function(args=args, state=state, control=control, **rest)


def _silent(function):
    def call(**given):
        function(**given)

    return call
