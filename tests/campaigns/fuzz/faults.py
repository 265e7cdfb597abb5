"""Plant faults in our code, one at a time: random runs must find each, or they would not find such a one of our own."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import fuzz_check
import torch
from fuzz_families import draw
from runner import Case, Tally
from torch import nn

import tr_core
from tr_core import loss, loss_look, trainer
from tr_core.data import sampler
from tr_core.evaluation.metrics import EvaluationLoss
from tr_core.random_state import RandomState
from tr_core.rollback import Rollback
from tr_core.run import Run as OurRun
from tr_core.single_device import SingleDevice

FAULTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager], str | None]] = {}


def fault(family=None):
    """Register a generator function that plants a fault and takes it out again; its first line says what it is.

    Args:
        family: of the runs that are to find it; None draws from all.
    """

    def register(plant):
        FAULTS[plant.__doc__.strip(".").lower()] = (contextlib.contextmanager(plant), family)
        return plant

    return register


def _wrapped(owner, name, around):
    """Return a patch that calls `around` with what was there and the arguments."""
    before = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **options: around(before, *args, **options))


@fault()
def _shift():
    """The first label of a row is taken for a target."""
    with patch.object(loss_look, "first_is_target", lambda *given: True):
        yield


@fault()
def _zero_grad():
    """Gradients are never cleared."""
    nothing = lambda *args, **options: None  # noqa: E731
    with patch.object(torch.optim.Optimizer, "zero_grad", nothing), patch.object(nn.Module, "zero_grad", nothing):
        yield


@fault("habits")
def _frozen_list():
    """What is clipped is what the model had when it was first prepared."""

    def prepare(before, self, model):
        prepared = before(self, model)
        vars(self).setdefault("frozen", list(prepared.parameters()))
        return prepared

    def clip(before, self, model, optimizer, max_norm):
        held = nn.ParameterList(p for p in self.frozen if p.grad is not None)
        return nn.utils.clip_grad_norm_(held, max_norm or float("inf"))

    with _wrapped(SingleDevice, "prepare", prepare), _wrapped(SingleDevice, "clip_grad_norm", clip):
        yield


@fault()
def _undivided():
    """A loss is not divided by the micro-batches of its step."""

    def share(before, self, value, division, size, weight):
        return before(self, value, division, 1, weight)

    with _wrapped(loss.LossRule, "share", share):
        yield


@fault("divisions")
def _taken_for_a_mean():
    """A loss that is divided by the count is taken for a mean."""
    with patch.object(loss, "compare", lambda pairs: "mean"):
        yield


@fault("divisions")
def _drawn_while_looking():
    """What is drawn while a loss is looked at stays drawn."""
    with patch.object(Rollback, "restore", lambda self: None):
        yield


@fault()
def _order():
    """Every epoch has the order of the first."""
    with _wrapped(sampler, "permutation", lambda before, count, seed, epoch: before(count, seed, 0)):
        yield


@fault("resumes")
def _position():
    """A resumed run begins its epoch again."""

    def load(before, self, state):
        before(self, {**state, "samples": 0})

    with _wrapped(OurRun, "load_state_dict", load):
        yield


@fault()
def _decay():
    """Biases and norms decay too."""
    everything = lambda model: [name for name, _ in model.named_parameters()]  # noqa: E731
    with patch.object(trainer, "decay_parameter_names", everything):
        yield


@fault()
def _schedule():
    """The schedule goes on with every micro-batch."""

    def step(before, self, *args, **named):
        if self.scope.size > 1:
            self.lr_scheduler.step()
        return before(self, *args, **named)

    with _wrapped(tr_core.Trainer, "training_step", step):
        yield


@fault()
def _evaluation():
    """Every batch of an evaluation weighs the same."""

    def add(before, self, *args, **named):
        before(self, *args, **named)
        for weights in (self._samples, self._targets):
            weights[-1:] = [torch.ones(()) for _ in weights[-1:]]

    with _wrapped(EvaluationLoss, "add", add):
        yield


@fault()
def _dropout():
    """The model stays in evaluation mode after an evaluation."""

    @contextlib.contextmanager
    def mode(model):
        model.eval()
        yield
        model.stays = True

    def train(before, self, mode=True):
        return self if getattr(self, "stays", False) else before(self, mode)

    with patch.object(trainer, "evaluation_mode", mode), _wrapped(nn.Module, "train", train):
        yield


@fault()
def _norm():
    """The gradient's norm is logged as it is after clipping."""

    def clip(before, self, model, optimizer, max_norm):
        norm = before(self, model, optimizer, max_norm)
        return norm if max_norm is None else norm.clamp(max=max_norm)

    with _wrapped(SingleDevice, "clip_grad_norm", clip):
        yield


@fault("arguments")
def _comes_back():
    """What follows from others takes the place of what was assigned."""

    def follow(before, self, name, value):
        before(self, name, value)
        object.__setattr__(self, name, value)

    with _wrapped(tr_core.TrainingArguments, "_follow", follow):
        yield


@fault("changed")
def _epochs_of_today():
    """A resumed run ends with the epochs of its batch size."""

    def has_left(before, self):
        return before(self) and self.position.epoch < self.plan.num_epochs

    with _wrapped(OurRun, "has_epoch_left", has_left):
        yield


@fault("changed")
def _batches_done():
    """The place in an epoch is the number of today's batches."""

    def load(before, self, state):
        size = state["samples"] // max(self.methods.state.global_step, 1) or 1
        before(self, {**state, "samples": state["samples"] // size * self.data.samples_per_micro_batch})

    with _wrapped(OurRun, "load_state_dict", load):
        yield


@fault("resumes")
def _moments():
    """A resumed run begins with empty moments."""

    def load(before, self, state):
        before(self, {**state, "state": {}})

    with _wrapped(torch.optim.Optimizer, "load_state_dict", load):
        yield


@fault("resumes")
def _random_state():
    """A resumed run begins with other random numbers."""
    with patch.object(RandomState, "load_state_dict", lambda self, state: None):
        yield


@fault()
def _short_step():
    """The short last step of an epoch is divided as if it were full."""

    def share(before, self, value, division, size, weight):
        vars(self)["largest"] = max(size, vars(self).get("largest", 1))
        return before(self, value, division, self.largest, weight)

    with _wrapped(loss.LossRule, "share", share):
        yield


def runs_until_found(name, most, seed=1) -> int | None:
    """Make random runs with a fault planted; return how many it takes to find it, None if `most` do not."""
    for number in range(most):
        run = draw(seed, number, FAULTS[name][1])
        if run.ranks > 1 or run.workers or run.loader == "own_workers":
            continue  # the fault is in this process alone
        with _planted(name):
            _, found = fuzz_check.check(run)
        if found and not fuzz_check.check(run)[1]:
            return number + 1
    return None


@contextlib.contextmanager
def _planted(name) -> Iterator[None]:
    """Plant a fault for as long as ours trains, and not where the others do."""

    def train(before, side, *args, **named):
        with FAULTS[name][0]() if side is fuzz_check.OURS else contextlib.nullcontext():
            return before(side, *args, **named)

    with _wrapped(fuzz_check, "train", train):
        yield


def cases(options) -> Iterator[Case]:
    """Yield each fault, which random runs must find."""
    for name in FAULTS:
        yield Case(name, partial(_must_be_found, name, options.n, options.seed))


def _must_be_found(name, most, seed, folder) -> Tally:
    runs = runs_until_found(name, most, seed)
    if runs is None:
        return Tally.of(f"not found in {most} runs")
    return Tally(1, Counter({f"{name}: found after {runs} runs of {FAULTS[name][1] or 'all'}": 1}))
