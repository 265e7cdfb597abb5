"""Record what happens in a run: its events, and the batches that the model is given."""

from typing import Any

import torch
from torch import nn

EVENTS = (
    "init_end",
    "train_begin",
    "train_end",
    "epoch_begin",
    "epoch_end",
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "evaluate",
    "predict",
    "prediction_step",
    "save",
    "log",
)


class Recorder:
    """A callback for both trainers: it inherits from neither one's base class, and listens to every event.

    Attributes:
        events: name of each event, with the step and the flags that it was given.
        logs: the dict of every `on_log`, as it was then.
        metrics: the dict of every `on_evaluate` and `on_predict`.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float | None, str]] = []
        self.logs: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []

    def names(self) -> list[str]:
        """Return the names of the events in order, without those of construction."""
        return [name for name, *_ in self.events if name != "init_end"]

    def _note(self, name: str, state: Any, control: Any, **extra: Any) -> None:
        flags = [flag for flag, is_set in vars(control).items() if is_set]
        self.events.append((name, state.global_step, state.epoch, " ".join(sorted(flags))))
        if "logs" in extra:
            self.logs.append(dict(extra["logs"]))
        if "metrics" in extra:
            self.metrics.append(dict(extra["metrics"]))


def _listener(name: str) -> Any:
    def listen(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(name, state, control, **kwargs)

    return listen


for _name in (*EVENTS, "push_begin"):
    setattr(Recorder, f"on_{_name}", _listener(_name))


class BatchRecorder:
    """What a model was given, in training and in evaluation mode: one dict of tensors for each forward.

    Args:
        model: whose forwards are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.train: list[dict[str, torch.Tensor]] = []
        self.eval: list[dict[str, torch.Tensor]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # num_items_in_batch is not of the data: whether it is passed is compared where it matters, in the losses.
        given = {**dict(enumerate(args)), **kwargs}
        tensors = {
            str(key): value.clone()
            for key, value in given.items()
            if isinstance(value, torch.Tensor) and key != "num_items_in_batch"
        }
        (self.train if model.training else self.eval).append(tensors)
