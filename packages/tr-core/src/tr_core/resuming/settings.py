"""Remember in a checkpoint what a run is trained with, and compare it with what a resumed run is given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tr_args.fields.hub import HubFields
from tr_args.fields.logging import LoggingFields
from tr_args.fields.saving import SavingFields
from tr_args.fields.script import ScriptFields
from tr_core.data.loaders import has_length
from tr_core.resuming.frozen_weights import check_frozen, fingerprint
from tr_core.resuming.groups import read_groups
from tr_core.resuming.schedule import describe_schedule

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer

FORMAT = 1

# Arguments that change no number of a run, beside whole groups of them. Every other one is compared.
_NO_NUMBERS = {
    "output_dir",
    "overwrite_output_dir",
    "max_time",
    "fast_dev_run",
    "skip_memory_metrics",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    "ddp_backend",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_static_graph",
    "local_rank",
    "debug",
    "torch_empty_cache_steps",
    "auto_find_batch_size",
}
_NO_NUMBERS |= {
    field.name for group in (HubFields, LoggingFields, SavingFields, ScriptFields) for field in fields(group)
}
# And those of such groups that do.
_NO_NUMBERS -= {"on_nonfinite", "metric_for_best_model", "greater_is_better"}


@dataclass(frozen=True)
class Difference:
    """One argument, or figure of the run, that is another than when the checkpoint was saved.

    Attributes:
        name: what it is called.
        then: its value in the checkpoint.
        now: its value now.
    """

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.then)} -> {_shown(self.now)}"


class Settings:
    """What a run is trained with, as the part `settings` of its checkpoints: plain JSON, without secrets.

    Args:
        trainer: what trains.
        run: the call of `train` that begins; its optimizer and schedule were just built.

    Attributes:
        groups: the optimizer's parameter groups, as they were built.
        steps: optimizer steps that the schedule was built for.
        saved: what a checkpoint holds; None before one was restored, and where it holds none.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self.groups = read_groups(run.optimizer, trainer.model)
        self.steps = run.plan.max_steps
        self.saved: dict[str, Any] | None = None
        self._described, self._schedule = run.schedule, describe_schedule(run.schedule)
        self._frozen: dict[str, Any] | None = None

    def note_changes(self) -> None:
        """Take in groups that were added to the optimizer, and another schedule, since the run began."""
        self.groups += read_groups(self._run.optimizer, self._trainer.model)[len(self.groups) :]
        if self._run.schedule is not self._described:  # one that has made steps is not as it was built
            self._described, self._schedule = self._run.schedule, describe_schedule(self._run.schedule)

    def state_dict(self) -> dict[str, Any]:
        """Return it. The first call reads the frozen weights of a model with an adapter."""
        trainer, run = self._trainer, self._run
        if self._frozen is None:
            self._frozen = _frozen_weights(trainer)
        return {
            "format": FORMAT,
            "arguments": shaping_arguments(trainer.args),
            "figures": figures(trainer),
            "groups": [group.plain() for group in self.groups],
            "optimizer": type(run.optimizer).__name__,
            "schedule": self._schedule,
            "steps": self.steps,
            "samples_per_step": run.plan.per_step,
            "is_between_passes": run.position.samples == 0 or run.is_pass_complete(),
            "frozen": self._frozen,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over what a checkpoint holds.

        Raises:
            ValueError: its optimizer state, or its adapter, cannot be that of this run.
        """
        kind, args = type(self._run.optimizer).__name__, self._trainer.args
        if state_dict["optimizer"] != kind:
            then = state_dict["arguments"].get("optim")
            raise ValueError(
                f"its optimizer was {state_dict['optimizer']} (optim={then!r}) and is {kind} now "
                f"(optim={str(args.optim)!r}): what the one remembers means nothing to the other. Resume with the "
                "optimizer of then, or begin a new run from the weights in the checkpoint"
            )
        own, saved = ([group.parameters for group in self.groups], [g["parameters"] for g in state_dict["groups"]])
        if len(saved) > len(own) and saved[: len(own)] == own:
            raise ValueError(
                f"its optimizer had {len(saved)} parameter groups, and this run's has {len(own)}: groups that were "
                "added during the run have to be there when it resumes; add them in an override of create_optimizer, "
                "or to what create_optimizer() returns before train()"
            )
        self._frozen = _frozen_weights(self._trainer)
        check_frozen(state_dict["frozen"], self._frozen)
        self.saved = state_dict

    def differences(self) -> list[Difference]:
        """Return what differs from the checkpoint that was restored, in the order of the arguments."""
        if self.saved is None:
            return []
        then = {**self.saved["arguments"], **self.saved["figures"]}
        now = {**shaping_arguments(self._trainer.args), **figures(self._trainer)}
        # An argument that only one of two versions has is not known to have changed.
        return [Difference(name, then[name], now[name]) for name in now if name in then and then[name] != now[name]]


def shaping_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that the numbers of a run depend on, as JSON has them; secret ones are not among them."""
    passed_over = _NO_NUMBERS if args.eval_strategy == "steps" else {*_NO_NUMBERS, "eval_steps"}
    return {name: value for name, value in args.to_dict().items() if name not in passed_over}


PROCESSES, SAMPLES = "number of processes", "samples of the training data"


def figures(trainer: Trainer) -> dict[str, Any]:
    """Return what else the numbers of a run depend on: how many processes and samples there are."""
    dataset: Any = trainer.train_dataset
    if dataset is None or isinstance(dataset, dict):
        dataset = getattr(trainer.loaders["train_dataloader"], "dataset", None)
    return {PROCESSES: trainer.strategy.world_size, SAMPLES: len(dataset) if has_length(dataset) else None}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)


def _frozen_weights(trainer: Trainer) -> dict[str, Any] | None:
    """Return what tells the weights under an adapter from others. Collective where they are divided."""
    gathered = getattr(trainer.strategy, "gathered", None)
    return fingerprint(trainer.model) if gathered is None else fingerprint(trainer.model, gathered)
