"""Save the settings of a run, and compare them with the settings of a resumed run.

A checkpoint of an adapter does not hold the frozen weights under it. A fingerprint of them checks whether the adapter
was trained on these weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_args.constraints import Numbers
from tr_args.schema import facts
from tr_core.checkpoint.adapters import is_adapter
from tr_core.checkpoint.optimizer_groups import read_groups
from tr_core.checkpoint.schedule_state import describe_schedule
from tr_core.data.batches import Batches
from tr_core.data.left_out import NOTHING, left_out_of
from tr_core.data.position import DataPosition
from tr_core.data.sampler import has_length
from tr_core.plan import TrainingPlan
from tr_core.protocols import Strategy
from tr_core.trainer_methods import TrainerMethods

FORMAT = 1


@dataclass(frozen=True)
class Difference:
    """Describe one argument, or figure of the run, that changed since the checkpoint was saved."""

    name: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.saved)} -> {_shown(self.current)}"


class DescribedRun(Protocol):
    """Define the fields of `Run` that the settings read, and that changes apply to."""

    strategy: Strategy
    plan: TrainingPlan
    data: Batches
    position: DataPosition
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler

    @property
    def methods(self) -> TrainerMethods:
        """The Trainer."""
        ...

    def is_epoch_complete(self) -> bool:
        """Whether the epoch has no batch left."""
        ...


class Settings:
    """Save a run's settings as the part `settings` of its checkpoints: plain JSON, without secrets.

    Attributes:
        groups: the optimizer's parameter groups at their construction.
        saved: the settings in the checkpoint; None before a restore, and if the checkpoint holds none.
    """

    def __init__(self, run: DescribedRun) -> None:
        self._run = run
        self.groups = read_groups(run.optimizer, run.methods.model)
        self.steps = run.plan.max_steps
        self.saved: dict[str, Any] | None = None
        self._described, self._schedule = run.schedule, describe_schedule(run.schedule)
        self._frozen: dict[str, Any] | None = None
        lengths = run.strategy.data.gather_objects(number_of_samples(run))
        # Of ranks with parts of their own. This rank's part may grow, and is counted when it is asked for.
        rank = run.strategy.data.rank
        others = lengths[:rank] + lengths[rank + 1 :]
        self._samples_elsewhere = 0 if None in lengths or len(set(lengths)) == 1 else sum(others)

    def record_changes(self) -> None:
        """Record groups that were added to the optimizer, and a new schedule, since the run began."""
        self.groups += read_groups(self._run.optimizer, self._run.methods.model)[len(self.groups) :]
        if self._run.schedule is not self._described:  # a schedule changes with its steps
            self._described, self._schedule = self._run.schedule, describe_schedule(self._run.schedule)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings. The first call reads the frozen weights of a model with an adapter."""
        run = self._run
        if self._frozen is None:
            self._frozen = fingerprint(run.methods.model, run.strategy.gathered)
        return {
            "format": FORMAT,
            "arguments": shaping_arguments(run.methods.args),
            "figures": self._figures(),
            "groups": [group.plain() for group in self.groups],
            "optimizer": type(run.optimizer).__name__,
            "schedule": self._schedule,
            "steps": self.steps,
            "samples_per_step": run.plan.samples_per_step,
            "is_between_epochs": run.position.samples == 0 or run.is_epoch_complete(),
            "frozen": self._frozen,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the settings of a checkpoint."""
        kind, args = type(self._run.optimizer).__name__, self._run.methods.args
        if state_dict["optimizer"] != kind:
            before = state_dict["arguments"].get("optim")
            raise ValueError(
                f"its optimizer was {state_dict['optimizer']} (optim={before!r}) and is {kind} now "
                f"(optim={str(args.optim)!r}): what the one remembers means nothing to the other. Resume with the "
                "optimizer as saved, or begin a new run from the weights in the checkpoint"
            )
        own, saved = ([group.parameters for group in self.groups], [g["parameters"] for g in state_dict["groups"]])
        if len(saved) > len(own) and saved[: len(own)] == own:
            raise ValueError(
                f"its optimizer had {len(saved)} parameter groups, and this run's has {len(own)}: groups that were "
                "added during the run have to be there when it resumes; add them in an override of create_optimizer, "
                "or to what create_optimizer() returns before train()"
            )
        self._frozen = fingerprint(self._run.methods.model, self._run.strategy.gathered)
        check_fingerprint(state_dict["frozen"], self._frozen)
        self.saved = state_dict

    def differences(self) -> list[Difference]:
        """Return the differences from the restored checkpoint, in the order of the arguments."""
        if self.saved is None:
            return []
        saved = {LEFT_OUT: NOTHING, **self.saved["arguments"], **self.saved["figures"]}
        current = {**shaping_arguments(self._run.methods.args), **self._figures()}
        # Skips an argument that only one of two versions has: whether it changed is unknown.
        return [Difference(n, saved[n], v) for n, v in current.items() if n in saved and saved[n] != v]

    def _figures(self) -> dict[str, Any]:
        """Return the figures that the numbers of a run depend on: of processes, of samples, and which are left out."""
        own = number_of_samples(self._run)
        return {
            PROCESSES: self._run.strategy.data.world_size,
            SAMPLES: None if own is None else own + self._samples_elsewhere,
            LEFT_OUT: left_out_of(self._run.methods.train_dataset),
        }


def shaping_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that the numbers of a run depend on, as plain JSON values, without secrets."""
    skipped = {*facts(type(args), Numbers.UNCHANGED), *(() if args.eval_strategy == "steps" else ("eval_steps",))}
    return {name: value for name, value in args.to_dict().items() if name not in skipped}


PROCESSES, SAMPLES = "number of processes", "samples of the training data"
LEFT_OUT = "samples left out"


def number_of_samples(run: DescribedRun) -> int | None:
    """Return the number of samples of this rank's training data; None if it is unknown."""
    dataset: Any = run.methods.train_dataset
    if dataset is None or isinstance(dataset, dict):
        dataset = getattr(run.methods.loaders["train_dataloader"], "dataset", None)
    return len(dataset) if has_length(dataset) else None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)


# Bytes per chunk, a multiple of 8. The temporaries of a chunk take three times as much, and stay in a CPU's cache.
_CHUNK_BYTES = {"cpu": 1 << 20}
_CHUNK_BYTES_ELSEWHERE = 1 << 26
# Constants of splitmix64, as signed numbers.
# Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", figure 16.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def fingerprint(
    model: nn.Module, gathered: Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]] = nullcontext
) -> dict[str, Any] | None:
    """Compute a fingerprint of the frozen weights of a model with an adapter; None for any other model.

    Every byte counts. Weights are summed on their device, in one read of all weights. The sums are read back after
    the last one.
    """
    if not is_adapter(model):
        return None
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    digest = hashlib.sha256()
    shapes, sums = [], []
    for parameter in frozen.values():
        with gathered(parameter) as whole:
            shapes.append(whole.shape)
            sums.append(_checksum(whole.detach()))
    for (name, parameter), shape, value in zip(frozen.items(), shapes, sums, strict=True):
        # An adapter moves the module one level down. Other settings name the adapter.
        name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        # sync: once a run, and not in a step
        digest.update(f"{name} {parameter.dtype} {tuple(shape)} {value.tolist()}\n".encode())
    count = sum(shape.numel() for shape in shapes)
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in frozen.values()})
    return {"digest": digest.hexdigest(), "weights": count, "dtypes": kinds}


def check_fingerprint(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> None:
    """Raise if an adapter would resume on other weights than those that it was trained on."""
    if saved is None or current is None or saved["digest"] == current["digest"]:
        return
    figures = [f"{side['weights']:,} of {', '.join(side['dtypes'])}" for side in (saved, current)]
    what = f"{figures[0]} then, {figures[1]} now" if figures[0] != figures[1] else f"{figures[0]}, with other values"
    raise ValueError(
        f"the frozen weights under the adapter are not those that it was trained on ({what}), and the checkpoint does "
        "not hold them; give the base model, its revision and dtype as saved, with the same layers frozen"
    )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a 64-bit sum of a tensor's bits on its device; each 8 bytes are mixed with their position.

    A plain weighted sum would not show that all weights change by the same amount, or that blocks swap positions.
    """
    if tensor.device.type not in ("cpu", "cuda"):  # others lack views of 64-bit integers
        tensor = tensor.cpu()
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for chunk in data.split(_CHUNK_BYTES.get(tensor.device.type, _CHUNK_BYTES_ELSEWHERE)):
        words = torch.cat([chunk, chunk.new_zeros(-len(chunk) % 8)]).view(torch.int64)
        words += torch.arange(start, start + len(words), device=tensor.device).mul_(_GOLDEN)
        for shift, factor in _MIXING:
            words ^= words >> shift
            words *= factor
        total += words.sum()
        start += len(words)
    return total
