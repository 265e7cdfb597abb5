"""Take and put back what FSDP1 divides, by parameter: in rows, as other strategies in shards lay it out, or whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tr_dist.fsdp1.places import Piece, Places
from tr_dist.rows import Rows


class FlatModel:
    """The state of a model that FSDP1 divides, with the names and shapes of the module as it was built.

    Args:
        places: where its tensors are.
        whole: put the tensors together on rank 0, instead of leaving every rank its rows.
    """

    def __init__(self, places: Places, *, whole: bool) -> None:
        self._places, self._whole = places, whole

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; with `whole` it is empty but on rank 0. Collective."""
        if self._whole:
            return whole_state(self._places, keep=dist.get_rank() == 0)
        rows = Rows()
        kept = {name: rows.keep(tensor) for name, tensor in self._places.whole(changed=False)}
        return {name: kept[first] for name, first in self._places.aliases.items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a state that `state_dict` of this or of the plain module returned. Collective.

        Raises:
            RuntimeError: it lacks tensors, or holds others.
        """
        if differing := sorted(self._places.aliases.keys() ^ state_dict.keys()):
            raise RuntimeError(f"the saved model has other tensors than this one, such as {differing[0]}")
        rows = Rows()
        for name, mine in self._places.whole(changed=True):
            value = rows.whole(state_dict[name], mine.device)
            if value.shape != mine.shape:
                raise RuntimeError(f"{name} is saved as {tuple(value.shape)} and is {tuple(mine.shape)} here")
            mine.copy_(value)

    def tensor_layout(self) -> Rows:
        """Return what gives memory for the tensors of a checkpoint that is being read."""
        return Rows()


class FlatOptimizer:
    """The state of an optimizer over parameters that FSDP1 divides, in the form of a plain optimizer's.

    Args:
        optimizer: over the parts that this rank has.
        pieces: how each parameter is divided, by its name.
        parts: this rank's part of each, by the same names.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: dict[str, Piece], parts: dict[str, torch.nn.Parameter]
    ) -> None:
        self._optimizer = optimizer
        names = {id(part): name for name, part in parts.items()}
        given = [part for group in optimizer.param_groups for part in group["params"]]
        self._pieces = [pieces[names[id(part)]] for part in given]
        self._parts = given

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the numbers of parameters, tensors in rows; what counts steps as it is. Collective."""
        packed, rows, state = self._optimizer.state_dict(), Rows(), {}
        for number, entries in sorted(_of_all_ranks(packed["state"], self._parts).items()):
            piece, own = self._pieces[number], packed["state"].get(number, {})
            state[number] = {
                name: rows.keep(piece.gather(own[name] if name in own else self._empty(number, entry)))
                if isinstance(entry, torch.dtype)
                else entry
                for name, entry in entries.items()
            }
        return {"state": state, "param_groups": packed["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over such a state, or that of a plain optimizer over the same groups. Collective.

        Raises:
            ValueError: it is of other parameters.
        """
        rows, state = Rows(), {}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(numbers) != len(self._parts):
            raise ValueError(f"the saved optimizer has {len(numbers)} parameters, this one {len(self._parts)}")
        for number, piece, part in zip(numbers, self._pieces, self._parts, strict=True):
            own = {}
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    whole = rows.whole(value, part.device)
                    own[name] = piece.of(whole).reshape(part.shape).clone() if whole.shape == piece.shape else whole
                else:
                    own[name] = value.clone() if isinstance(value, torch.Tensor) else value
            if own and part.numel():  # an optimizer has none for a parameter of which it gets no gradient
                state[number] = own
        self._optimizer.load_state_dict({**state_dict, "state": state})

    def tensor_layout(self) -> Rows:
        """Return what gives memory for the tensors of a checkpoint that is being read."""
        return Rows()

    def _empty(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self._parts[number].device)


def whole_state(places: Places, *, keep: bool) -> dict[str, Any]:
    """Return the state dict with whole tensors in host memory; empty unless `keep`. Collective."""
    state = {name: tensor.detach().cpu().clone() if keep else None for name, tensor in places.whole(changed=False)}
    return {name: state[first] for name, first in places.aliases.items()} if keep else {}


def _of_all_ranks(state: dict[int, dict[str, Any]], parts: list[torch.nn.Parameter]) -> dict[int, dict[str, Any]]:
    """Return what any rank has in its state: of tensors like a parameter the dtype, else the value. Collective."""
    mine = {
        number: {name: _described(value, parts[number]) for name, value in entries.items()}
        for number, entries in state.items()
    }
    found: list[dict[int, dict[str, Any]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return {number: entries for of_rank in reversed(found) for number, entries in of_rank.items()}


def _described(value: Any, part: torch.nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype if value.shape == part.shape else value.detach().cpu()
