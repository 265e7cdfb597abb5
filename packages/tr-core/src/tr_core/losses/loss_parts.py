"""Take apart what an override of `compute_loss` may return in place of a loss: a dict of it and of other scalars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tr_core.metric_window import check_name


def split_loss(returned: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and by their names the scalars that are to be logged beside it.

    Args:
        returned: a mapping with `loss`, a tensor, and any number of further scalars.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no loss in it, an entry is no scalar, or its name is taken.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"compute_loss returned a {type(returned).__name__}; it returns a scalar tensor, or a dict of scalars with "
            "'loss' among them, and only with return_outputs=True a pair of that and the model's outputs"
        )
    loss = returned.get("loss")
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"compute_loss returned a dict without a tensor 'loss', only {sorted(returned)}")
    parts = {name: _scalar(name, value) for name, value in returned.items() if name != "loss"}
    return loss, parts


def _scalar(name: str, value: Any) -> torch.Tensor:
    check_name(name)
    if isinstance(value, int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"compute_loss returned a dict whose entry {name!r} is {what}; entries beside 'loss' are logged, so each is a "
        "number or a tensor with one element. Return outputs['loss'] if this is what the model gave"
    )
