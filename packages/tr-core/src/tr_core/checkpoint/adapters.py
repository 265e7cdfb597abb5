"""Save and load what training changes in a model with an adapter (PEFT's), in the adapter's own format.

In a checkpoint two parts represent the model. `adapter_model` is the adapter, with the names that PEFT gives its
weights. So `PeftModel.from_pretrained` loads `adapter_model.safetensors` and `adapter_config.json` from the folder of
the checkpoint. `unfrozen` is everything else that training may change: layers that are trained beside the adapter,
other adapters, running statistics. Frozen weights are in neither part.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tr_core.model import state_held_here
from tr_core.protocols import Checkpointer, Restored, Stateful

ADAPTER, UNFROZEN = "adapter_model", "unfrozen"

# The parts that are the whole model. The second one is that of a run in which an override writes the model's files.
WHOLE, BESIDE_OWN_FILES = "model", "trained_model"


def is_adapter(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`, with an adapter in the form that PEFT saves."""
    peft = sys.modules.get("peft")  # a PEFT model exists only if PEFT was imported
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_parts(model: nn.Module, whole: Stateful) -> dict[str, Stateful]:
    """Return the checkpoint parts of a model with an adapter."""
    return {ADAPTER: _Adapter(model, whole), UNFROZEN: _Unfrozen(model, whole)}


def restore_parts(
    checkpointer: Checkpointer,
    parts: Mapping[str, Stateful],
    source: str | Path | None,
    *,
    optional: Collection[str] = (),
    only_read: Collection[str] = (),
) -> Restored:
    """Restore `parts` as the checkpointer does, and check that the model got its weights, if it is among them.

    `parts` may hold the model under several names, of which a checkpoint has one. Another program's checkpoint of an
    adapter has no part `unfrozen`. It needs none if only the adapter is trained.
    """
    names = {WHOLE, BESIDE_OWN_FILES, ADAPTER, UNFROZEN} & set(parts)
    step = checkpointer.restore(parts, source=source, optional={*optional, *names}, only_read=only_read)
    restored = cast("Restored", checkpointer.restored)
    if not names or step is None or {WHOLE, BESIDE_OWN_FILES} & set(restored.loaded):
        return restored
    missing = ""
    if ADAPTER not in names:
        missing = "weights of the whole model, under a known name"
    elif ADAPTER not in restored.loaded:
        missing = "adapter"
    elif UNFROZEN not in restored.loaded and cast("_Unfrozen", parts[UNFROZEN]).names():
        missing = "weights that are trained beside the adapter"
    if missing:
        raise ValueError(
            f"the checkpoint of step {step} holds no {missing}; resume with the model that it was saved with, override "
            "_load_from_checkpoint if an override of _save or save_model wrote files of its own, or begin a new run"
        )
    return restored


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write `adapter_config.json` of the active adapter, in inference mode."""
    config = copy.copy(model.peft_config[_active(model)])
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    # Without a task PEFT finds the model by its class.
    config.save_pretrained(str(folder), auto_mapping_dict=mapping if config.task_type is None else None)


class _Part:
    """Save and load some tensors of a model's state, under other names."""

    def __init__(self, model: nn.Module, whole: Stateful) -> None:
        self._model, self._whole = model, whole

    def _load(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        # Includes the current rest of the state: a strategy loads full state dicts only.
        self._whole.load_state_dict({**state, **{name: _sharded_as(state[name], t) for name, t in tensors.items()}})


class _Adapter(_Part):
    def state_dict(self) -> dict[str, Any]:
        state = self._whole.state_dict()
        # Where one rank has the full state, it is empty on the others.
        return _as_peft_saves(self._model, state) if state else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        state = state_held_here(self._whole)
        own = _as_peft_saves(self._model, state)
        if odd := sorted(set(own) ^ set(state_dict)):
            raise ValueError(
                f"the adapter differs from the one that was saved: {', '.join(odd[:3])}{', ...' if odd[3:] else ''} "
                "are only in one of them; give the model an adapter with the saved configuration"
            )
        name_of = _names(own, state)
        self._load({name_of[key]: value for key, value in state_dict.items() if key in name_of}, state)


class _Unfrozen(_Part):
    def names(self) -> set[str]:
        """Return the names of the state, the same on every rank."""
        return self._names_in(state_held_here(self._whole))

    def state_dict(self) -> dict[str, Any]:
        state = self._whole.state_dict()
        names = self._names_in(state) if state else ()
        return {name: state[name] for name in state if name in names}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        state = state_held_here(self._whole)
        if odd := sorted(self._names_in(state) ^ set(state_dict)):
            raise ValueError(
                f"the weights trained beside the adapter differ from those when it was saved: {', '.join(odd[:3])}"
                f"{', ...' if odd[3:] else ''}; freeze the same ones"
            )
        self._load(dict(state_dict), state)

    def _names_in(self, state: dict[str, Any]) -> set[str]:
        inside = _names(_as_peft_saves(self._model, state), state).values()
        frozen = {name for name, p in self._model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return set(state) - set(inside) - frozen


def _sharded_as(mine: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor, sharded as the model's own if that is sharded and this one is not."""
    if not hasattr(mine, "placements") or hasattr(saved, "placements"):
        return saved
    from torch.distributed.tensor import DTensor, distribute_tensor

    own = cast("DTensor", mine)
    whole = saved.to(own.device, own.dtype)
    # Each rank takes its shard from the whole tensor, which all have. Torch before 2.7 sends those of rank 0.
    here: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in signature(distribute_tensor).parameters else {}
    return distribute_tensor(whole, own.device_mesh, own.placements, **here)


def _as_peft_saves(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the active adapter's part of a model's state under PEFT's names."""
    save: Callable[..., dict[str, Any]] = sys.modules["peft"].get_peft_model_state_dict
    # By default PEFT asks the Hub whether the vocabulary grew. Trained embeddings are in `unfrozen`.
    return save(model, state_dict=dict(state), adapter_name=_active(model), save_embedding_layers=False)


def _names(adapter: dict[str, Any], state: dict[str, Any]) -> dict[str, str]:
    """Return the model's own names of the tensors that PEFT saves unchanged, by PEFT's names."""
    places = {id(value): name for name, value in state.items()}
    return {key: places[id(value)] for key, value in adapter.items() if id(value) in places}


def _active(model: Any) -> str:
    active = model.active_adapter
    return active if isinstance(active, str) else active[0]
