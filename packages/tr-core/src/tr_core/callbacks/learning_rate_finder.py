"""Find a learning rate: raise it from step to step, and see where the loss falls and where it breaks out."""

from __future__ import annotations

import math
from typing import Any

from tr_args import TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.state import TrainerControl, TrainerState
from tr_log import get_logger

logger = get_logger(__name__)

_NEEDED = {"logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False, "save_strategy": "no"}
_KEPT = 0.9  # share of the running mean of losses that a step keeps
_BESIDE = 5  # steps on either side whose losses are averaged to find the lowest
_BROKEN_OUT = 4.0  # times the lowest running mean


class LearningRateFinder(TrainerCallback):
    """Raise the learning rate over a run of its own, from `lowest` to `highest`, and suggest one from the losses.

    Each step multiplies the rate by the same number; the schedule of the arguments has no effect, and parameter groups
    keep the ratios of their rates. The run ends when the running mean of the losses is four times its lowest, or not
    finite. Its weights are of no use afterwards: build the model and the Trainer again.

    Args:
        lowest: learning rate of the first step.
        highest: learning rate of the last step, `max_steps`.

    Attributes:
        rates: the learning rate of each step.
        losses: the loss of each step.
        suggestion: a tenth of the rate at which the loss was lowest, as a mean over five steps before and after; None
            before the end of the run, and if the loss never fell or never rose again.

    Raises:
        ValueError: the rates are out of range; or, at the beginning of training, the arguments do not log every step,
            or would save the weights, or the run is resumed.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3, where the rate grows
    linearly. The equal ratios, the smoothing, the end and the tenth are those of Gugger 2018, "How do you find a good
    learning rate".
    """

    def __init__(self, lowest: float = 1e-7, highest: float = 1.0) -> None:
        if not 0 < lowest < highest < math.inf:
            raise ValueError(f"lowest={lowest} and highest={highest} must be positive, and the first the smaller one")
        self.lowest, self.highest = lowest, highest
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None
        self._average, self._lowest_average, self._broke_out = 0.0, math.inf, False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the arguments, and set the rate of the first step."""
        wrong = [f"{name}={getattr(args, name)!r}" for name, value in _NEEDED.items() if getattr(args, name) != value]
        if wrong:
            needed = ", ".join(f"{name}={value!r}" for name, value in _NEEDED.items())
            raise ValueError(
                f"LearningRateFinder needs the loss of every step, and its weights are not to be saved: set {needed}; "
                f"given is {', '.join(wrong)}"
            )
        if state.global_step:
            raise ValueError(
                f"LearningRateFinder begins at step 0, and this run goes on from step {state.global_step}; leave "
                "resume_from_checkpoint out"
            )
        self.rates, self.losses, self.suggestion = [], [], None
        self._average, self._lowest_average, self._broke_out = 0.0, math.inf, False
        rates = [group["lr"] for group in kwargs["optimizer"].param_groups]
        self._ratios = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
        self._set_rate(state, kwargs["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the rate of the next step, after the schedule has set its own."""
        self._set_rate(state, kwargs["optimizer"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the loss of the step that has ended, and end the run if it has broken out."""
        if "loss" not in kwargs["logs"]:
            return  # of an evaluation
        loss = kwargs["logs"]["loss"]
        self._average = _KEPT * self._average + (1 - _KEPT) * loss
        average = self._average / (1 - _KEPT ** (len(self.losses) + 1))  # as if it had not begun at 0
        self._lowest_average = min(self._lowest_average, average)
        if not math.isfinite(average) or average > _BROKEN_OUT * self._lowest_average > 0:
            self._broke_out = control.should_training_stop = True
        if math.isfinite(loss):
            self.losses.append(loss)
            self.rates.append(kwargs["logs"]["learning_rate"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Suggest a rate, or say why there is none."""
        windows = [self.losses[max(0, n - _BESIDE) : n + _BESIDE + 1] for n in range(len(self.losses))]
        means = [sum(window) / len(window) for window in windows]
        best = means.index(min(means)) if means else 0
        if best == 0:
            logger.warning(
                "no learning rate found: the loss did not fall from %g on; begin with a lower one", self.lowest
            )
        elif best == len(means) - 1 and not self._broke_out:
            logger.warning("no learning rate found: the loss still fell at %g; end with a higher one", self.highest)
        else:
            self.suggestion = self.rates[best] / 10
            logger.info("learning rate %.2g suggested: loss lowest at %.2g", self.suggestion, self.rates[best])

    def _set_rate(self, state: TrainerState, optimizer: Any) -> None:
        """Set the rate of the next step, of which `max_steps` are planned."""
        growth = self.highest / self.lowest
        rate = self.lowest * growth ** (state.global_step / max(1, state.max_steps - 1))
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio
