"""Log the learning rates of parameter rules."""

from __future__ import annotations

from typing import Any

from tr_args import TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.optim.parameter_rules import learning_rates
from tr_core.state import TrainerControl, TrainerState


class RuleRatesCallback(TrainerCallback):
    """Add `learning_rate/<name of the rule>`, as the last step used it, to every log entry with a `learning_rate`.

    It runs before the callbacks that write logs. Every checkpoint holds the rates, because a log right after a resume
    describes a step before the checkpoint.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the rates before the schedule changes them."""
        self._rates = learning_rates(kwargs["optimizer"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rates to the entry, in the history too."""
        logs = kwargs["logs"]
        if "learning_rate" in logs:
            logs.update(self._rates)
            state.log_history[-1].update(self._rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the rates."""
        return {"rates": self._rates}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the rates."""
        self._rates = dict(state_dict["rates"])
