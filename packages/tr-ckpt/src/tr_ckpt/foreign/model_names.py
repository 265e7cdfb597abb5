"""Find for each name of a model's state the tensor that a file of weights holds for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping

import torch
from torch import nn

from tr_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

# Buffers that older versions of transformers saved and newer ones compute.
_COMPUTED = (r"(^|\.)position_ids$", r"(^|\.)rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")


def complete(saved: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a whole state of `model` made of the weights in a file.

    A weight that the file leaves out as it is tied to another one is that other one.

    Raises:
        CheckpointError: the file lacks weights of the model, or holds others.
    """
    own = model.state_dict()
    found = {name: saved[name] for name in own if name in saved}
    by_place = {_place(own[name]): found[name] for name in found}
    for name in own:
        if name not in found and (tied := by_place.get(_place(own[name]))) is not None:
            found[name] = tied
    _check_extra([name for name in saved if name not in own], model)
    _take_what_is_never_saved(own, found, model)
    if lacking := [name for name in own if name not in found]:
        raise CheckpointError(
            f"the weights lack {_some(lacking)} of {type(model).__name__}: give the model of the run that saved them, "
            "of the same version"
        )
    return {name: found[name] for name in own}


def _check_extra(extra: list[str], model: nn.Module) -> None:
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if unknown := [name for name in extra if not any(re.search(each, name) for each in (*_COMPUTED, *own))]:
        raise CheckpointError(
            f"the weights hold {_some(unknown)}, which {type(model).__name__} does not have: give the model of the run "
            "that saved them, of the same version"
        )


def _take_what_is_never_saved(
    own: Mapping[str, torch.Tensor], found: dict[str, torch.Tensor], model: nn.Module
) -> None:
    patterns = [
        each
        for attribute in ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
        for each in getattr(model, attribute, None) or ()
    ]
    kept = [name for name in own if name not in found and any(re.search(each, name) for each in patterns)]
    if kept:
        logger.info("%s of the model are not saved by design, and stay as they are", _some(kept))
    found |= {name: own[name] for name in kept}


def _place(tensor: torch.Tensor) -> Hashable:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _some(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
