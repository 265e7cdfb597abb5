"""What is seen of a run, and the first thing in which two runs differ."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

TIMES = ("_runtime", "_per_second", "_time")


def figures(prediction: Any) -> dict[str, float]:
    """Compute metrics that do not depend on padding."""
    labels = prediction.label_ids
    parts = labels if isinstance(labels, list) else [torch.as_tensor(labels)]
    return {"targets": float(sum((part != -100).sum() for part in parts))}


@dataclass
class Trace:
    """What is seen of a run.

    Attributes:
        batches: what the model was given in training mode, and whether each of its modules was in that mode.
        steps: loss, gradient norm and learning rate of each step, where they are known by step.
        evaluations: step and metrics of each evaluation.
        logs: every entry of the log without times.
        events: every event with step and flags.
        weights: the model's state at the end.
        moments: the optimizer's state at the end.
        predictions: what the model predicts at the end, if it is asked.
        arguments: all arguments at the end.
        error: what ended the run, if that was an exception.
    """

    batches: list[Any] = field(default_factory=list)
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: list[torch.Tensor] = field(default_factory=list)
    predictions: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    def watch(self, model):
        """Note what a model is given from now on."""
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model, args, given):
        if torch.is_grad_enabled():
            tensors = {name: value for name, value in given.items() if name not in ("num_items_in_batch", "labels")}
            mode = "train" if model.training else "eval"
            self.batches.append((mode, {name: v.clone() for name, v in tensors.items() if isinstance(v, torch.Tensor)}))

    def finish(self, model, optimizer):
        """Note the end."""
        state = model.state_dict().items()
        self.weights = {n: v.detach().clone() for n, v in state if not isinstance(v, DTensor)}  # of a mesh: all of it
        states = optimizer.state_dict()["state"].values() if optimizer is not None else ()
        tensors = [value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
        self.moments = [value.to_local() if isinstance(value, DTensor) else value.clone() for value in tensors]

    def take(self, history):
        """Take over the entries of a Trainer's log."""
        self.logs = [{n: v for n, v in entry.items() if not n.endswith(TIMES)} for entry in history]


class Tolerance:
    """How near two numbers are to be.

    Args:
        relative: of numbers that are logged; 0 means bit for bit.
        weights: of tensors, relative to the largest in them.
        few: share of the elements that may be ten times as far away: Adam makes a good part of a whole step of
            a gradient that is no larger than its epsilon, of which rounding is a good part.
    """

    def __init__(self, relative, weights, few=0.0):
        self.relative, self.weights, self.few = relative, weights, few

    def numbers(self, a, b):
        """Whether two numbers are as near as that."""
        if isinstance(a, float) and isinstance(b, float):
            return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=self.relative, abs_tol=self.relative)
        return a == b

    def tensors(self, a, b):
        """Whether two tensors are as near as that."""
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if self.weights == 0 or not a.is_floating_point():
            return bool(((a == b) | ((a != a) & (b != b))).all())
        scale = float(a.abs().max()) if a.numel() else 0.0
        near = self.weights * max(scale, 1e-3)
        far = ~torch.isclose(a, b, rtol=0, atol=near, equal_nan=True)
        is_near = torch.allclose(a, b, rtol=0, atol=10 * near, equal_nan=True)
        return is_near and int(far.sum()) <= math.ceil(self.few * a.numel())


EXACT = Tolerance(0.0, 0.0)
NEAR = Tolerance(2e-5, 2e-5)
ROUNDED = Tolerance(2e-5, 2e-3, few=1e-3)
LOOSE = Tolerance(2e-3, 2e-2)


def tolerance_of(run):
    """Return how near two ways to compute a run can come.

    Where the last bits of a gradient differ, an adaptive optimizer makes whole steps of what is left of a zero.
    """
    if run.optimizer == "adafactor":
        return LOOSE
    return ROUNDED if run.loss == "smoothing" or run.ranks > 1 else NEAR


def difference_of_batches(expected, found):
    """Say where two runs gave their models something else, or None."""
    for number, (one, other) in enumerate(zip(expected.batches, found.batches, strict=False), start=1):
        if one[0] != other[0]:
            return f"forward {number} was in {other[0]} mode instead of {one[0]}"
        if one[1].keys() != other[1].keys() or not all(EXACT.tensors(v, other[1][n]) for n, v in one[1].items()):
            return f"forward {number} was given {_brief(other[1])} instead of {_brief(one[1])}"
    if len(expected.batches) != len(found.batches):
        return f"{len(found.batches)} forwards instead of {len(expected.batches)}"
    return None


def difference_of_steps(by_hand, found, tolerance):
    """Say in which log entry a run differs from the steps of a loop by hand, or None."""
    before = 0
    for entry in found.logs:
        if "loss" not in entry:
            continue
        step, steps = entry["step"], by_hand.steps
        if step > len(steps):
            return f"a log at step {step} instead of an end after {len(steps)}"
        window = [loss for loss, _, _ in steps[before:step]]
        before = step
        expected = {
            "loss": sum(window) / len(window),
            "grad_norm": steps[step - 1][1],
            "learning_rate": steps[step - 1][2],
        }
        for name, value in expected.items():
            if name in entry and not tolerance.numbers(value, entry[name]):
                return f"{name} of step {step} is {entry[name]!r} instead of {value!r}"
    return None


def difference_of_evaluations(by_hand, found, tolerance):
    """Say in which evaluation two runs differ, or None."""
    entries = [entry for entry in found.logs if any(name.endswith("_loss") and "train" not in name for name in entry)]
    steps, expected = [entry["step"] for entry in entries], [step for step, _ in by_hand.evaluations]
    if steps != expected:
        return f"evaluations after steps {steps} instead of {expected}"
    for entry, (step, metrics) in zip(entries, by_hand.evaluations, strict=True):
        for name, value in metrics.items():
            if not tolerance.numbers(value, entry.get(name)):
                return f"{name} after step {step} is {entry.get(name)!r} instead of {value!r}"
    return None


def difference_of_logs(expected, found, tolerance):
    """Say in which log entry two runs differ, or None."""
    for number, (one, other) in enumerate(zip(expected.logs, found.logs, strict=False)):
        if one.keys() != other.keys():
            return f"log entry {number} has {sorted(other)} instead of {sorted(one)}"
        for name, value in one.items():
            if not tolerance.numbers(value, other[name]):
                return f"{name} after step {one.get('step')} is {other[name]!r} instead of {value!r}"
    if len(expected.logs) != len(found.logs):
        return f"{len(found.logs)} log entries instead of {len(expected.logs)}"
    return None


def difference_of_ends(expected, found, tolerance):
    """Say which weight or state of the optimizer differs at the end, or None."""
    if expected.predictions is not None and not tolerance.tensors(expected.predictions, found.predictions):
        return f"predictions are {_first(found.predictions, expected.predictions)}"
    if expected.weights.keys() != found.weights.keys():
        return f"weights {sorted(found.weights)} instead of {sorted(expected.weights)}"
    for name, value in expected.weights.items():
        if tolerance is not EXACT and name.endswith(("key.bias", "c_attn.bias")):
            continue  # its gradient is nothing but rounding: a softmax does not see it
        if not tolerance.tensors(value, found.weights[name]):
            return f"weight {name} ends with {_first(found.weights[name], value)}"
    if len(expected.moments) != len(found.moments):
        return f"{len(found.moments)} tensors in the optimizer instead of {len(expected.moments)}"
    if tolerance is EXACT:
        for number, (one, other) in enumerate(zip(expected.moments, found.moments, strict=True)):
            if not tolerance.tensors(one, other):
                return f"state {number} of the optimizer ends with {_first(other, one)}"
    return None


def difference_of_events(expected, found):
    """Say at which event two runs differ, or None."""
    for number, (one, other) in enumerate(zip(expected.events, found.events, strict=False)):
        if one[0] == other[0] == "epoch_begin":  # there a log that nobody needed may still be asked for
            one, other = one[:3], other[:3]
        if one != other:
            return f"event {number} is {other} instead of {one}"
    if len(expected.events) != len(found.events):
        return f"{len(found.events)} events instead of {len(expected.events)}"
    return None


def _brief(tensors):
    return {name: value.flatten()[:3].tolist() for name, value in tensors.items() if name in ("x", "input_ids")}


def _first(found, expected):
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    place = int((found.double() - expected.double()).abs().argmax())
    return f"{found.flatten()[place].item()!r} instead of {expected.flatten()[place].item()!r}"
