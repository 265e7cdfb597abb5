"""The parts of the run that is attacked: every place in which code of a user runs tells that it is reached."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from rank_run import Record
from strikes import Striker
from torch import nn

from tr_core import Trainer, TrainerCallback
from tr_core.testing import EVENTS


class Rows(torch.utils.data.Dataset):
    """So many rows, each of which holds its number."""

    def __init__(self, count: int, striker: Striker, place: str) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        self._striker, self._place = striker, place

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = torch.utils.data.get_worker_info()
        self._striker.reach(self._place if worker is None else f"{self._place} worker")
        return {"x": self.x[index], "labels": torch.tensor(index % 3), "number": torch.tensor(index)}


class Network(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, striker: Striker, record: Record) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.second = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self._striker, self._record = striker, record

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self._record.rows += number.tolist()
        self._striker.reach("forward" if self.training else "evaluation forward")
        hidden = self.dropout(torch.tanh(self.first(x)))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._striker.reach("backward"))
        logits = self.second(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Steps(torch.optim.AdamW):
    """An optimizer that tells of its steps."""

    striker: Striker

    def step(self, closure: Any = None) -> Any:
        self.striker.reach("optimizer")
        return super().step(closure)


class Watch(TrainerCallback):
    """Tells of every event, and notes which rows each step used; has a state of its own."""

    def __init__(self, striker: Striker, record: Record) -> None:
        self._striker, self._record = striker, record
        self.gather: Any = lambda value: [value]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record.begin(state.global_step, self.gather)
        self._striker.reach("on_train_begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record.step(state.global_step)
        self._striker.reach("on_step_end")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.save_async:
            self._record._write(saved=state.global_step)
        self._striker.reach("on_save")

    def on_train_end(self, args: Any, state: Any, control: Any, error: Any = None, **kwargs: Any) -> None:
        self._record._write(ended=type(error).__name__)
        self._striker.reach("on_train_end")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing of worth."""
        self._striker.reach("state_dict")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that."""
        self._striker.reach("load_state_dict")


def _tells_of(event: str) -> Any:
    def method(self: Watch, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._striker.reach(event)

    return method


for _event in EVENTS:
    if _event not in vars(Watch):
        setattr(Watch, _event, _tells_of(_event))


class Attacked(Trainer):
    """A Trainer that tells where it is."""

    def attach(self, striker: Striker, record: Record) -> None:
        """Have the callback exchange what it notes, and the striker know the workers."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Watch):
                callback.gather = self.strategy.gather_objects
        striker.workers = lambda: [child.pid for child in multiprocessing.active_children() if child.pid is not None]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        striker = Steps.striker

        def share(step: int) -> float:
            if step > 0:
                striker.reach("schedule")
            return 1.0 / (1 + step)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler


def build_parts(striker: Striker, record: Record, rows: int) -> dict[str, Any]:
    """Return the Trainer's arguments."""
    Steps.striker = striker

    def model_init() -> nn.Module:
        striker.reach("model_init")
        return Network(striker, record)

    def collate(samples: list[Any]) -> Any:
        striker.reach("collator")
        return torch.utils.data.default_collate(samples)

    def metrics(prediction: Any) -> dict[str, float]:
        striker.reach("metrics")
        return {"rows": len(prediction.predictions)}

    def keep(logits: Any, labels: Any) -> Any:
        striker.reach("logits")
        return logits.argmax(-1)

    return {
        "model_init": model_init,
        "optimizer_cls_and_kwargs": (Steps, {"lr": 1e-2}),
        "train_dataset": Rows(rows, striker, "dataset"),
        "eval_dataset": Rows(6, striker, "evaluation dataset"),
        "data_collator": collate,
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": keep,
        "callbacks": [Watch(striker, record)],
    }
