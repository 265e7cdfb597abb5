"""Take and put back what ZeRO divides over the ranks: by parameter, so that stage and number of ranks may change."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

from tr_dist.deepspeed.engine_model import EngineModel
from tr_dist.deepspeed.pieces import Piece, pieces_of
from tr_dist.deepspeed.swapping import forget_swapped_state, in_memory, refresh_masters
from tr_dist.rows import Rows

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DividedOptimizer:
    """The state of an optimizer whose parameters ZeRO has flattened, in the form of a plain optimizer's.

    Beside it, under `masters`, are the float32 parameters where the model's are of another type.

    Args:
        model: with its engine.
        optimizer: as it was given to the engine.
        stage: of ZeRO, 1 to 3.
        rank: of this process.
    """

    def __init__(self, model: EngineModel, optimizer: torch.optim.Optimizer, stage: int, rank: int) -> None:
        self._model, self._optimizer, self._stage, self._rank = model, optimizer, stage, rank

    def state_dict(self) -> dict[str, Any]:
        """Return `state` by the numbers of parameters, `param_groups`, and `masters`; tensors in rows. Collective."""
        rows, state, masters = Rows(), {}, {}
        for number, (parameter, piece) in enumerate(self._pieces(changed=False)):
            shape = _shape(parameter)
            own = self._optimizer.state.get(piece.flat, {})
            if own:
                # Copies of what counts steps: a plain optimizer has one for each parameter, and adds to each.
                state[number] = {
                    name: rows.keep(piece.gather(value, shape)) if _is_like(value, piece.flat) else copy.deepcopy(value)
                    for name, value in own.items()
                }
            if parameter.dtype != piece.flat.dtype:
                masters[number] = rows.keep(piece.gather(piece.flat.detach(), shape))
        numbers = count()
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [next(numbers) for _ in given]}
            for group, given in zip(self._optimizer.param_groups, self._model.given_groups, strict=True)
        ]
        return {"state": state, "param_groups": groups, "masters": masters}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over such a state, or that of a plain optimizer over the same groups. Collective.

        Raises:
            ValueError: it is of other parameters.
        """
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved_groups]
        own_sizes = [len(group) for group in self._model.given_groups]
        if sizes != own_sizes:
            raise ValueError(f"the saved optimizer has groups of {sizes} parameters, this one of {own_sizes}")
        rows = Rows()
        numbers = [number for group in saved_groups for number in group["params"]]
        self._optimizer.state.clear()
        forget_swapped_state(self._model.engine.optimizer)
        for number, (parameter, piece) in zip(numbers, self._pieces(changed=True), strict=True):
            own = self._optimizer.state[piece.flat] if number in state_dict["state"] else {}
            for name, value in state_dict["state"].get(number, {}).items():
                _take(own, name, value, rows, parameter, piece)
            if isinstance(own.get("step"), torch.Tensor):
                options = self._optimizer.param_groups[piece.group]
                on_device = options.get("fused") or options.get("capturable")  # as torch's own loading has it
                own["step"] = own["step"].to(piece.flat.device if on_device else "cpu")
            if (master := state_dict.get("masters", {}).get(number)) is not None:
                piece.fill(piece.flat.data, rows.whole(master, piece.flat.device))
        for group, saved in zip(self._optimizer.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def tensor_layout(self) -> Rows:
        """Return what gives memory for the tensors of a checkpoint that is being read."""
        return Rows()

    def _pieces(self, *, changed: bool) -> Iterator[tuple[Any, Piece]]:
        """Yield each parameter and its piece, while that is in memory; `changed` has it written back."""
        groups, zero = self._model.given_groups, self._model.engine.optimizer
        found = pieces_of(zero, groups, self._stage, self._rank)
        parameters = (parameter for group in groups for parameter in group)
        return in_memory(zero, zip(parameters, found, strict=True), changed=changed)


class DividedModel:
    """A model that ZeRO-3 divides, whose state a checkpoint holds in rows, or whole.

    Args:
        model: with its engine.
        rank: of this process.
        whole: gather the tensors on rank 0, instead of leaving every rank its rows.
    """

    def __init__(self, model: EngineModel, rank: int, *, whole: bool) -> None:
        self._model, self._rank, self._whole = model, rank, whole

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; with `whole` it is empty but on rank 0. Collective."""
        if self._whole:
            return whole_state(self._model.module, keep=self._rank == 0)
        rows = Rows()
        return _gathered(self._model.module, rows.keep)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a state that `state_dict` of this or of the plain module returned. Collective.

        Raises:
            RuntimeError: it lacks tensors, or holds others.
        """
        module, rows = self._model.module, Rows()
        own = module.state_dict(keep_vars=True)
        if differing := sorted(own.keys() ^ state_dict.keys()):
            raise RuntimeError(f"the saved model has other tensors than this one, such as {differing[0]}")
        done: set[int] = set()
        for name, mine in own.items():
            value = state_dict[name]
            if not isinstance(mine, torch.Tensor):
                module.load_state_dict({name: value}, strict=False)
            elif id(mine) not in done:
                done.add(id(mine))
                whole = rows.whole(value, torch.device("cpu"))
                if whole.shape != _shape(mine):
                    raise RuntimeError(f"{name} is saved as {tuple(whole.shape)} and is {tuple(_shape(mine))} here")
                with gathered(mine, changed_by=0), torch.no_grad():
                    if self._rank == 0 or not _is_divided(mine):
                        mine.copy_(whole)
        refresh_masters(self._model.engine.optimizer)

    def tensor_layout(self) -> Rows:
        """Return what gives memory for the tensors of a checkpoint that is being read."""
        return Rows()


class WholeModel:
    """A model that every rank has whole, while its optimizer has float32 parameters of its own.

    Args:
        model: with its engine.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict."""
        return self._model.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a module's state, and have the optimizer begin from it."""
        self._model.module.load_state_dict(state_dict)
        refresh_masters(self._model.engine.optimizer)


class LossScale:
    """The state of an engine's loss scaler.

    Args:
        engine: in float16.
    """

    def __init__(self, engine: Any) -> None:
        self._scaler = engine.optimizer.loss_scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and when it last changed."""
        return {name: getattr(self._scaler, name) for name in _SCALE if hasattr(self._scaler, name)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over such a state."""
        vars(self._scaler).update(state_dict)


def whole_state(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state dict of a module that is divided, with whole tensors in host memory; empty unless `keep`."""
    state = _gathered(module, lambda tensor: tensor.detach().cpu().clone() if keep else None)
    return state if keep else {}


def gathered(parameter: Any, changed_by: int | None = None) -> Any:
    """Return a block in which a parameter is whole on every rank. Collective.

    Args:
        parameter: of a divided module, or any tensor.
        changed_by: the rank whose changes to it all ranks are to have afterwards.
    """
    zero = importlib.import_module("deepspeed.runtime.zero")
    return zero.GatheredParameters([parameter], modifier_rank=changed_by, enabled=_is_divided(parameter))


def _gathered(module: nn.Module, convert: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    converted: dict[int, Any] = {}  # tied parameters stay one tensor
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in converted:
            with gathered(value):
                converted[id(value)] = convert(value.data)
        state[name] = converted[id(value)] if isinstance(value, torch.Tensor) else value
    return state


def _take(own: dict[str, Any], name: str, value: Any, rows: Rows, parameter: nn.Parameter, piece: Piece) -> None:
    """Put one entry of a parameter's saved state into that of the flat tensor it is in."""
    if isinstance(value, torch.Tensor) and value.shape == _shape(parameter) and name != "step":
        if name not in own:
            own[name] = torch.zeros_like(piece.flat, dtype=value.dtype)
        piece.fill(own[name], rows.whole(value, piece.flat.device))
        return
    if isinstance(value, torch.Tensor):
        value = rows.whole(value, torch.device("cpu"))
    if name in own and bool(own[name] != value):
        raise ValueError(
            f"the saved optimizer has {name}={own[name]} for some parameters and {value} for others, which ZeRO keeps "
            "in one tensor; go on with the strategy that saved it"
        )
    own[name] = value.clone() if isinstance(value, torch.Tensor) else value


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def _is_divided(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def _shape(tensor: Any) -> torch.Size:
    return getattr(tensor, "ds_shape", tensor.shape)
