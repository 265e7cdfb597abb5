"""Refuse, in words, what cannot be projected."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.projection.basis import PROJ_TYPES, projected_shape, sides


def check_group(group: dict[str, Any], owner: str) -> None:
    """Raise where a group's options are out of range, or its parameters cannot be projected.

    Raises:
        ValueError: the message says what is needed.
    """
    rank, gap, scale, proj_type = (group[name] for name in ("rank", "update_proj_gap", "scale", "proj_type"))
    if not group["projects"]:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{owner}: rank={rank!r} must be a whole number from 1: directions to project on")
    if isinstance(gap, bool) or not isinstance(gap, int) or gap < 1:
        raise ValueError(f"{owner}: update_proj_gap={gap!r} must be a whole number from 1: steps between two bases")
    if scale <= 0:
        raise ValueError(f"{owner}: scale={scale:g} must be positive: a share of the learning rate")
    if proj_type not in PROJ_TYPES:
        raise ValueError(f"{owner}: proj_type={proj_type!r} is not known; it is one of {', '.join(PROJ_TYPES)}")
    for parameter in group["params"]:
        _check_projectable(parameter, owner)


def _check_projectable(parameter: torch.Tensor, owner: str) -> None:
    shape = tuple(parameter.shape)
    if parameter.is_complex():
        raise ValueError(f"{owner}: a parameter of shape {shape} is complex; only real ones are projected")
    if parameter.dim() == 1:
        raise ValueError(
            f"{owner}: a parameter of shape {shape} has one dimension, and a projection needs rows and columns. If it "
            "is a bias or a norm's scale, put it into a group without a rank; if it is a part of flattened weights, as "
            "FSDP1 and ZeRO make them, there is no matrix to project: train with replicas (strategy='ddp')"
        )
    if parameter.dim() not in (2, 3) or parameter.numel() == 0:
        raise ValueError(
            f"{owner}: a parameter of shape {shape} is no matrix and no stack of matrices; put it into a group without "
            "a rank"
        )


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise where a gradient is of a kind that is not projected.

    Raises:
        RuntimeError: the message says what is needed.
    """
    shape = tuple(parameter.shape)
    if gradient.is_sparse:
        raise RuntimeError(f"a gradient of shape {shape} is sparse; it must be dense (nn.Embedding: sparse=False)")
    if gradient.shape != parameter.shape:
        raise RuntimeError(
            f"the gradient of a parameter of shape {shape} has the shape {tuple(gradient.shape)}: a part of flattened "
            "gradients, as ZeRO and FSDP1 make them, is no matrix to project; train with replicas (strategy='ddp')"
        )
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            f"the gradient of a parameter of shape {shape} is laid out over the ranks in another way than the "
            "parameter; it must be there as fully_shard leaves it, added up and divided by rows"
        )


def check_saved_state(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    """Raise where a saved state does not fit its parameter and the projection that its group asks for.

    Raises:
        ValueError: the message says in what.
    """
    shape = tuple(parameter.shape)
    bases = [name for name in ("basis_left", "basis_right") if name in saved]
    left, right = sides(shape, group["proj_type"]) if group["projects"] else (False, False)
    wanted = ["basis_left"] * left + ["basis_right"] * right
    if bases != wanted:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {shape} has {' and '.join(bases) or 'no basis'}, and "
            f"{' and '.join(wanted) or 'none'} is needed; resume with the model, target modules and proj_type that it "
            "was saved with"
        )
    rank = saved[bases[0]].shape[-1] if bases else 0
    expected = projected_shape(shape, rank, group["proj_type"]) if bases else shape
    moment = saved.get("exp_avg")
    if moment is not None and tuple(moment.shape) != expected:
        raise ValueError(
            f"the saved optimizer state does not fit the model: exp_avg of a parameter of shape {shape} has the shape "
            f"{tuple(moment.shape)}, and {expected} is needed; resume with the model that it was saved with"
        )


def refuse_codes(saved: dict[str, Any], parameter: torch.Tensor) -> None:
    """Raise where a saved state has moments in 8 bits.

    Raises:
        ValueError: the message says what can load it.
    """
    if "exp_avg_scale" in saved:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has moments in 8 bits; load "
            "it into the class that saved it (GaLoreAdamW8bit, AdamW8bit), or begin with new moments"
        )


def refuse_late_clipping(max_norm: float | None, used: float | None, *, can_clip: bool) -> None:
    """Raise where updates that were made in the backward pass are to be clipped.

    Args:
        max_norm: what they are to be clipped to, or None.
        used: what they were clipped to, or None.
        can_clip: whether they could have been.

    Raises:
        ValueError: `max_norm` is another than `used`.
    """
    if max_norm is None or max_norm == used:
        return
    what_to_do = "use mode='deferred', or no clipping (max_grad_norm=0)"
    if can_clip:
        what_to_do = f"call clip_to({max_norm:g}) before the step's backward passes, or use mode='step'"
    raise ValueError(
        f"max_norm={max_norm:g} cannot be held with mode='immediate', which updates before the norm is known; "
        f"{what_to_do}"
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return getattr(tensor, "placements", None) is not None
