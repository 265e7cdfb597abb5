"""Save models and checkpoints to the output folder."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tr_args import TrainingArguments
from tr_core import plugins
from tr_core.callbacks.evaluation_weights import weight_parts
from tr_core.checkpoint.adapters import BESIDE_OWN_FILES, WHOLE, adapter_parts, is_adapter, write_adapter_config
from tr_core.checkpoint.log_files import FOLDER
from tr_core.model import model_part
from tr_core.model_io import base_model
from tr_core.protocols import Checkpointer, Stateful, Strategy
from tr_core.run import Run
from tr_core.runtime.run_context import UseCache
from tr_core.signatures import takes_argument
from tr_core.state import SavedState, TrainerState
from tr_log import get_logger
from tr_log.terminal import without_library_bars

logger = get_logger("tr_core.trainer")

WEIGHTS_NAME = "model.safetensors"
MODEL_CARD = "README.md"

_PIECE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def build_checkpointer(args: TrainingArguments, strategy: Strategy) -> Checkpointer:
    """Return the checkpointer that the arguments name."""
    try:
        factory = plugins.load("tr.checkpointers", str(args.checkpointer))
    except plugins.PluginError as error:
        raise ValueError(
            f"{error}. Checkpoints are asked for by save_strategy={str(args.save_strategy)!r}; to train without them "
            "set save_strategy='no'"
        ) from error
    return factory(args, strategy)


def in_folder(args: TrainingArguments, folder: str) -> TrainingArguments:
    """Return a copy of the arguments, with another folder for the checkpoints."""
    moved = copy.copy(args)
    moved.output_dir = str(Path(folder).absolute())
    return moved


def checkpointer_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a checkpointer is built from; a change of one needs a new checkpointer."""
    names = ("checkpointer", "output_dir", "save_total_limit", "save_keep_every", "save_async", "save_on_each_node")
    return {name: getattr(args, name) for name in names}


def save_model(model: nn.Module, state: dict[str, Any], folder: Path, save_companions: Callable[[Path], None]) -> None:
    """Write weights in safetensors, and their companion files; if that fails, what was there is unchanged."""
    with _whole_files(folder) as beside, without_library_bars():
        save_pretrained: Any = getattr(model, "save_pretrained", None)
        if save_pretrained is not None and takes_argument(save_pretrained, "state_dict"):
            save_pretrained(str(beside), state_dict=state)
        elif save_pretrained is not None and _holds(model, state):
            save_pretrained(str(beside))
        else:
            save_file(_without_aliases(state), str(beside / WEIGHTS_NAME), metadata={"format": "pt"})
        save_companions(beside)


@contextmanager
def _whole_files(folder: Path) -> Iterator[Path]:
    """Return a folder inside `folder`, and move its files there at the end of the block, each whole."""
    beside = folder / ".unfinished"
    shutil.rmtree(beside, ignore_errors=True)  # of a killed run
    beside.mkdir(parents=True)
    try:
        if (folder / MODEL_CARD).is_file():  # PEFT adds to the one that is there
            shutil.copyfile(folder / MODEL_CARD, beside / MODEL_CARD)
        yield beside
        written = sorted(beside.rglob("*"))  # a folder before what it holds
        for path in written:
            target = folder / path.relative_to(beside)
            target.mkdir(exist_ok=True) if path.is_dir() else path.replace(target)
        kept = {path.name for path in written}
        if any(map(_PIECE.fullmatch, kept)) or WEIGHTS_NAME in kept:  # pieces of a model that was saved there before
            for path in folder.iterdir():
                if _PIECE.fullmatch(path.name) and path.name not in kept:
                    path.unlink()
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save_companions(
    folder: Path, model: nn.Module, args: TrainingArguments, processor: Any, use_cache: UseCache
) -> None:
    """Write a model's files other than its weights: configuration, tokenizer, and the arguments as JSON."""
    # Skips the configuration of a model inside an adapter wrapper: beside an adapter, from_pretrained would look for
    # the weights of the full model.
    owner = model if base_model(model) is model else None
    for companion in (getattr(owner, "config", None), getattr(owner, "generation_config", None), processor):
        save = getattr(companion, "save_pretrained", None)
        if callable(save):
            with use_cache.original(model):
                save(str(folder))
    (folder / "training_args.json").write_text(args.to_json_string() + "\n", encoding="utf-8")


def find_processor(processing_class: Any, collator: Any) -> Any:
    """Return the tokenizer or processor of the model: the Trainer's, or the one that only a collator holds."""
    if processing_class is not None:
        return processing_class
    names = ("processing_class", "processor", "tokenizer", "feature_extractor", "image_processor")
    held = (getattr(collator, name, None) for name in names)
    return next((each for each in held if callable(getattr(each, "save_pretrained", None))), None)


def save_checkpoint(run: Run, save_companions: Callable[[Path], None]) -> None:
    """Save everything that the run needs to resume from here, through the checkpointer."""
    methods, state, model = run.methods, run.methods.state, run.methods.model
    checkpointer = methods.checkpointer()
    run.collect_window(state)
    run.has_saved = True
    run.position.ends_epoch_early = methods.control.should_epoch_stop and not run.position.is_at_epoch_end
    best = state.best_global_step
    if best is not None:
        _record_best_checkpoint(state, checkpointer, best)
    parts = checkpoint_parts(run)
    if methods.args.save_only_model:
        weights = weight_parts(methods.callback_handler.callbacks, model)
        whole = model_parts(run.strategy, model, methods.model_wrapped, own_layout=methods.has_own_layout)
        parts = {name: parts[name] for name in (*whole, *weights, "trainer_state")}

    if run.strategy.rank != 0:
        _write_earlier_entries(run)

    def write_extra(path: Path) -> None:
        _write_earlier_entries(run)  # where the other ranks know that they wait for a disk
        save_companions(path)
        if is_adapter(model) and not methods.has_own_layout:
            write_adapter_config(model, path)

    # An optimizer with two sets of weights saves the evaluation weights, so that they can be loaded as the best.
    with methods.optimizer_in_evaluation():
        checkpointer.save(
            state.global_step,
            parts,
            write_extra=write_extra,
            protected=() if best is None else (best,),
            on_commit=partial(_report_checkpoint, methods.callback_handler.announce, step=state.global_step),
        )


def _write_earlier_entries(run: Run) -> None:
    args, entries = run.methods.args, run.methods.state.log_history
    if args.save_only_model or args.save_on_each_node:
        run.log_files.leave_out()
    elif run.strategy.rank != 0:
        run.log_files.skip(entries)
    else:
        run.log_files.write(entries, Path(args.output_dir).absolute() / FOLDER)


def _record_best_checkpoint(state: TrainerState, checkpointer: Checkpointer, best: int) -> None:
    try:
        path = str(checkpointer.path(best))
        # Not looked up again once it is known: that reads every kept checkpoint.
        if path != state.best_model_checkpoint and (best == state.global_step or best in checkpointer.steps()):
            state.best_model_checkpoint = path
    except ValueError as error:  # a read error must not stop the save
        logger.warning("where the checkpoint of the best step %d is was not looked up: %s", best, error)


def _report_checkpoint(announce: Callable[[Path, int], None], folder: Path, *, step: int) -> None:
    """Log and announce a complete checkpoint. With `save_async`: from the writer thread, after its step."""
    logger.info("saved checkpoint %s", folder)
    announce(folder, step)


# Parts that a resume does not need: other programs save no settings, a run in another precision no loss scale.
OPTIONAL_PARTS = ("settings", "scaler")


def checkpoint_parts(run: Run, model: Mapping[str, Stateful] | None = None) -> dict[str, Stateful]:
    """Return all stateful parts of a run by name: exactly the contents of a checkpoint.

    Args:
        run: the run.
        model: the parts that are the model, for a restore; by default those that a save writes.
    """
    methods = run.methods
    if model is None:
        own = methods.has_own_layout
        model = model_parts(run.strategy, methods.model, methods.model_wrapped, own_layout=own)
    others = run.strategy.state_parts(methods.model_wrapped, run.optimizer)
    del others["model"]
    parts = {
        # Restored first: it checks whether the others fit.
        "settings": run.settings,
        **model,
        **others,
        "scheduler": run.schedule,
        "rng": methods.random_state,
        "run": run,
        "callbacks": methods.callback_handler,
        "trainer_state": SavedState(methods.state, run.log_files),
    }
    weights = weight_parts(methods.callback_handler.callbacks, methods.model)
    if taken := sorted(set(weights) & set(parts)):
        raise ValueError(f"a callback gives its part of the checkpoint the name {taken[0]!r}, which is taken")
    return {**parts, **weights}


def model_parts(
    strategy: Strategy, model: nn.Module, wrapped: nn.Module, *, own_layout: bool = False
) -> dict[str, Stateful]:
    """Return the checkpoint parts of the model, by name: the full model, or only what is trained with an adapter.

    With `own_layout` an override writes the model's files; the part then has a name that it does not use.
    """
    part = model_part(strategy, model, wrapped)
    if own_layout:
        return {BESIDE_OWN_FILES: part}
    return adapter_parts(model, part) if is_adapter(model) else {WHOLE: part}


def readable_model_parts(strategy: Strategy, model: nn.Module, wrapped: nn.Module) -> dict[str, Stateful]:
    """Return the model under each name that a checkpoint may have for it, for `restore_parts`.

    The run that saved it may have had an override that writes the model's files, or none; other programs never have
    the part of such a run.
    """
    part = model_part(strategy, model, wrapped)
    return {BESIDE_OWN_FILES: part, **(adapter_parts(model, part) if is_adapter(model) else {WHOLE: part})}


def find_hub(callbacks: Sequence[Any], args: TrainingArguments) -> Any:
    """Return the callback that pushes to the Hub, or a new one if the run has none."""
    pushing = (callback for callback in callbacks if callable(getattr(callback, "push_to_hub", None)))
    return next(pushing, None) or plugins.load("tr.callbacks", "hub")(args)


def _holds(model: Any, state: dict[str, Any]) -> bool:
    """Whether a model's own weights are those of `state` and not sharded, so that its own method can write them."""
    # Not by its state_dict(): a strategy may make that a collective, and only rank 0 runs this.
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return all(
        name in own and not hasattr(own[name], "full_tensor") and own[name].shape == tensor.shape
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    )


def _without_aliases(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Keep one name of each tensor that several names share: the module ties tied weights again."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.detach().contiguous()
    return kept
