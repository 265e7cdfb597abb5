"""Hooks that subclasses written for transformers override or call, with the meaning that they have there.

A run calls them where transformers would. `tr_core.trainer.refused_hooks` lists those that have no place here.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tr_core.checkpoint import own_layout, saving
from tr_core.checkpoint.adapters import restore_parts
from tr_core.checkpoint.own_loading import OwnLoading
from tr_core.checkpoint.restoring import Resume, find_checkpoint, source_of
from tr_core.checkpoint.saving import readable_model_parts
from tr_core.data.loaders import SeededLoader, eval_loader, keeping_columns, train_loader
from tr_core.data.sampler import call_sampler_method
from tr_core.evaluation.gather import gather_tree
from tr_core.model import place_on_device
from tr_core.model_io import kept_columns, main_input_name, map_items, to_device
from tr_core.protocols import Restored, Strategy
from tr_core.signatures import takes_argument
from tr_core.trainer.attributes import Attributes

# Overrides of these write files beside what a checkpoint holds.
_SAVED_BESIDE = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class OwnClipping:
    """A strategy whose gradients an override of `_clip_grad_norm` clips; all else is the strategy's."""

    def __init__(self, strategy: Strategy, clip: Callable[[nn.Module], Any]) -> None:
        self._strategy, self._clip = strategy, clip

    def clip_grad_norm(self, model: nn.Module, optimizer: Any, max_norm: float | None) -> torch.Tensor:
        """Call the override; `max_norm` is the arguments', which it reads itself."""
        return torch.as_tensor(self._clip(model), device=self._strategy.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


class Hooks(Attributes):
    """Hooks of transformers, called where it calls them."""

    _signature_columns: list[str] | None = None
    _saved_run: Any = None
    _begun_folder: Path | None = None
    _is_saving_beside = False
    _state_to_save: dict[str, Any] | None = None
    _loadings: Mapping[str, OwnLoading] = {}
    _found_at: Mapping[str, str] = {}  # in a resume: what the folder that an override gets is read from

    # Processes

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare what accelerate's functions need; called at construction, once the processes are known.

        Libraries that subclass the Trainer call them, and rely on the `Accelerator` that transformers builds.
        """
        state = sys.modules.get("accelerate.state")
        if state is not None and type(self) is not self.own_class and not state.is_initialized():
            sys.modules["accelerate"].Accelerator(cpu=self.args.use_cpu)

    def get_tp_size(self) -> int:
        """Return 1: no strategy divides tensors between processes."""
        return 1

    get_sp_size = get_cp_size = get_tp_size

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to a device, unless its loader placed it; an override is called before a model is first used."""
        place_on_device(model, device)

    # Steps

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; an override may build the inputs of the model from it."""
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Return a part of a batch on the device. An override is called for each, inside mappings, lists and tuples."""
        if isinstance(data, Mapping | list | tuple) and self.overrides("_prepare_input"):
            return map_items(self._prepare_input, data)
        return to_device(data, self.strategy.device)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Callable[[], Any], Any]:
        """Return what opens a block for loss and backward, here without effect, and the batch for it."""
        return nullcontext, inputs

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`, and return their norm before that, on the device."""
        limit = self.args.max_grad_norm
        optimizer = cast("torch.optim.Optimizer", self.optimizer)
        return self.strategy.clip_grad_norm(model, optimizer, limit if limit and limit > 0 else None)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Join tensors of all processes along their first dimension. Collective."""
        return gather_tree(tensors, self.strategy, None)

    # Data

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`, the columns that a collator sees, unless they are set; None shows all."""
        if self._signature_columns is None:
            self._set("_signature_columns", kept_columns(self.model, self.label_names))

    def _shown_columns(self) -> list[str] | None:
        columns = self._signature_columns
        if columns is None:
            self._set_signature_columns_if_needed()
            columns = self._signature_columns
            if not self.overrides("_set_signature_columns_if_needed"):
                self._set("_signature_columns", None)  # found again for each loader: the model may be another one
        return columns

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a dataset of the library `datasets` without the columns that the model does not take."""
        columns = self._shown_columns() if self.args.remove_unused_columns else None
        names = getattr(dataset, "column_names", None)
        if columns is None or not names or not hasattr(dataset, "remove_columns"):
            return dataset
        return dataset.remove_columns([name for name in names if name not in columns])

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Return a collator that sees only the columns that the model takes."""
        if not self.args.remove_unused_columns:
            return data_collator
        return keeping_columns(data_collator, self._shown_columns(), self.model, self.logged_columns)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: Any = None,
    ) -> SeededLoader:
        """Build a loader of this rank's batches.

        Args:
            dataset: map-style or iterable data.
            description: what the data are for.
            batch_size: samples of a batch of this process.
            sampler_fn: `(dataset)` → a sampler, or None for the order of the arguments.
            is_training: whether the data are in the seeded order of training, not in their own.
            dataloader_key: a name under which a loader with persistent workers is kept.
        """
        if self.overrides("_remove_unused_columns"):
            dataset = self._remove_unused_columns(dataset, description=description)
        sampler = None if sampler_fn is None else call_sampler_method(sampler_fn, dataset)
        collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        given = (dataset, collate, self.args, self.strategy)
        if is_training:
            name = main_input_name(self.model, self.processing_class)
            return train_loader(*given, name, sampler=sampler, batch_size=batch_size)
        build = partial(eval_loader, *given, sampler=sampler, batch_size=batch_size)
        if dataloader_key is None:
            return build()
        return self.kept_loaders.get((dataloader_key, batch_size), (dataset, self.data_collator, self.model), build)

    # Checkpoints

    def save_checkpoint(self, run: Any) -> None:
        """Save everything that the run needs to resume from here. Collective."""
        if self.overrides("_save_checkpoint"):
            folder = self.checkpointer().path(self.state.global_step)
            self._set("_begun_folder", None if folder.exists() else folder)  # the override may make it, and write files
        with self.saving(run):
            self._save_checkpoint(self.model_wrapped, self.trial)

    @contextmanager
    def saving(self, run: Any) -> Iterator[None]:
        """Return a block in which `_save_checkpoint` saves this run."""
        before = self._saved_run
        self._set("_saved_run", run)
        try:
            yield
        finally:
            self._set("_saved_run", before)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint of the current step; called by the run. Collective."""
        if self._saved_run is None:
            raise RuntimeError(
                "_save_checkpoint was called outside a save of the run; set control.should_save in a callback, or call "
                "save_model(folder)"
            )
        try:
            if self.has_own_layout or self.overrides("_save_checkpoint", *_SAVED_BESIDE):
                self._save_with_own_files()
            else:
                saving.save_checkpoint(self._saved_run, self._save_companions)
            if self.args.push_to_hub and self.overrides("_push_from_checkpoint"):
                checkpointer = self.checkpointer()
                checkpointer.wait()
                self._push_from_checkpoint(str(checkpointer.path(self.state.global_step)))
        finally:
            self._set("_state_to_save", None)
            self._set("_begun_folder", None)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the Hub's callback pushes. An override is called for each checkpoint with `push_to_hub`."""

    @property
    def has_own_layout(self) -> bool:
        """Whether an override writes the model's files, also those of checkpoints."""
        return self.overrides("_save", "save_model")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds both. The files that an override writes are part of it."""
        self._check_is_saving("_save_optimizer_and_scheduler")

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds it. The files that an override writes are part of it."""
        self._check_is_saving("_save_scaler")

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds it. The files that an override writes are part of it."""
        self._check_is_saving("_save_rng_state")

    def _check_is_saving(self, name: str) -> None:
        if not self._is_saving_beside:
            raise RuntimeError(
                f"{name} was called outside a save, as by a copy of transformers' _save_checkpoint, and would write "
                "nothing: call super()._save_checkpoint(model, trial) in place of the copy, and write other files "
                "before or after it"
            )

    def _save_with_own_files(self) -> None:
        name, run = self.checkpointer().path(self.state.global_step).name, self._saved_run
        folder = Path(self.args.output_dir, own_layout.FOLDER, name)
        with ExitStack() as saved:
            with self.optimizer_in_evaluation():  # the weights that the checkpoint holds
                if self.has_own_layout:
                    self._set("_state_to_save", self.strategy.full_state_dict(self.model_wrapped))
                files = own_layout.written_files(
                    folder, self._save_own_files, self.strategy, writes=self.args.should_save
                )
                move = saved.enter_context(files)

            def write(into: Path) -> None:
                if not self.has_own_layout:
                    self._save_companions(into)
                move(into)

            with own_layout.set_aside(self._begun_folder if self.args.should_save else None, folder):
                saving.save_checkpoint(run, write)

    def _save_own_files(self, folder: Path) -> None:
        if self._begun_folder is not None and self._begun_folder.is_dir() and self.args.should_save:
            shutil.copytree(self._begun_folder, folder, dirs_exist_ok=True)
        if self.overrides("save_model"):
            internal = {"_internal_call": True} if takes_argument(self.save_model, "_internal_call") else {}
            self.save_model(str(folder), **internal)
        elif self.overrides("_save"):
            self._save(str(folder), state_dict=self._state_to_save)
        self._set("_is_saving_beside", True)
        try:
            for name in () if self.args.save_only_model else _SAVED_BESIDE:
                if self.overrides(name):
                    getattr(self, name)(str(folder))
        finally:
            self._set("_is_saving_beside", False)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write weights, configuration and tokenizer into a folder, on the main process; called on all."""
        if not self.args.should_save:
            return
        state = dict(self._state_to_save or self.model.state_dict() if state_dict is None else state_dict)
        saving.save_model(self.model, state, Path(output_dir or self.args.output_dir), self._save_companions)

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder of the checkpoints, for `trial` of a search."""
        return str(self.args.output_dir)

    @property
    def loads_model_first(self) -> bool:
        """Whether an override loads the model of a resume before there is an optimizer, as under transformers."""
        strategy = self.strategy
        is_divided = strategy.binds_optimizer or strategy.forward_is_collective
        return self.overrides("_load_from_checkpoint") and not is_divided

    def load_model(self, resume: Resume) -> Restored | None:
        """Have an override load the model of a checkpoint, and return that; None if `auto` found none."""
        found = find_checkpoint(self.checkpointer(), self.args.output_dir, resume)
        if found.step is None:
            return None
        folder = str(found.source)
        self._set("_found_at", {folder: source_of(resume) or folder})
        try:
            self._load_from_checkpoint(folder)
        finally:
            self._set("_found_at", {})
        self.prepare()  # it may have put modules into the model
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint, and nothing else. Collective; a resume calls an override of this.

        Raises:
            ValueError: there is no checkpoint, or `model` is not the Trainer's.
        """
        if "_load_from_checkpoint" in self._loadings:
            self._loadings["_load_from_checkpoint"].load()
            return
        wrapped = self.prepare()
        if model is not None and model is not self.model and model is not wrapped:
            raise ValueError(
                f"_load_from_checkpoint loads into trainer.model; this {type(model).__name__} is another model: call "
                "its load_state_dict"
            )
        source = self._found_at.get(resume_from_checkpoint, resume_from_checkpoint)
        restore_parts(self.checkpointer(), readable_model_parts(self.strategy, self.model, wrapped), source)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from the checkpoint that a resume has read; called by a resume, if it is overridden."""
        if "_load_optimizer_and_scheduler" in self._loadings:
            self._loadings["_load_optimizer_and_scheduler"].load()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log the names that were missing or unexpected when an override loaded weights by itself."""
        for kind in ("missing", "unexpected"):
            if names := getattr(load_result, f"{kind}_keys"):
                self.logger.warning("the loaded weights have %s names: %s", kind, ", ".join(names))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: a resume has restored the generators when it calls this, for overrides that load more."""

    @contextmanager
    def loading(self, optimizer: Any, schedule: Any) -> Iterator[Callable[[str], None]]:
        """Return a block for a resume, with what calls the overrides of the methods above afterwards."""
        parts = {
            **({} if self.loads_model_first else {"_load_from_checkpoint": {"the model": self.model}}),
            "_load_optimizer_and_scheduler": {"the optimizer": optimizer, "the schedule": schedule},
            "_load_rng_state": {},
        }
        can_put_back = not self.strategy.binds_optimizer
        self._set(
            "_loadings",
            {
                name: OwnLoading(name, held, can_put_back=can_put_back)
                for name, held in parts.items()
                if self.overrides(name)
            },
        )
        try:
            yield self._load_by_overrides
        finally:
            self._set("_loadings", {})

    def _load_by_overrides(self, folder: str) -> None:
        for name, loading in self._loadings.items():
            loading.put_back()
            getattr(self, name)(folder)
            if name != "_load_rng_state":
                loading.check()
