"""Save and restore state that ZeRO divides over the ranks, and measure, clip or skip its gradients before a step.

States are saved by parameter, so the stage and the number of ranks may change. Full tensors are saved as rows
divided over the ranks, and every rank writes a part of the checkpoint.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tr_dist.deepspeed.engine import EngineModel
from tr_dist.state_part import StatePart


class RowSharding:
    """Divide tensors over the ranks by their first dimension, in host memory.

    In a checkpoint they have the layout of `fully_shard` parameters, independent of the number of ranks and the
    stage.
    """

    def __init__(self) -> None:
        self._mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))

    def keep(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor reduced to this rank's rows; a single number is kept by all ranks."""
        if whole.dim() == 0:
            return whole.detach().cpu()
        mine = self._rows(len(whole))
        local = whole.detach()[mine].cpu().clone()
        return self._divided(local, whole.shape)

    def whole(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return all rows of a result of `keep`, or a plain tensor, on `device`. Collective."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.to(device)

    def __bool__(self) -> bool:
        """True, so that a checkpoint of full tensors is also read in rows."""
        return True

    def empty(self, name: str, saved: Any) -> torch.Tensor | None:
        """Return an uninitialised DTensor of `saved.shape` and `saved.dtype`, for reading a checkpoint.

        None for a number: it has no rows, and every rank has the whole of it.
        """
        shape = torch.Size(saved.shape)
        if not shape:
            return None
        mine = self._rows(shape[0])
        return self._divided(torch.empty((mine.stop - mine.start, *shape[1:]), dtype=saved.dtype), shape)

    def _rows(self, number: int) -> slice:
        size = -(-number // self._mesh.size())
        start = min(number, self._mesh.get_local_rank() * size)
        return slice(start, min(number, start + size))

    def _divided(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def clip_gradients(engine: Any, stage: int, max_norm: float | None) -> torch.Tensor:
    """Return the norm of the engine's gradients, and make its step clip them to `max_norm`. Collective.

    DeepSpeed clips in its step, where it measures the norm again.
    """
    if stage == 0:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(engine.module.parameters(), max_norm, norm)
        return norm
    zero = engine.optimizer
    pass_early_gradients(zero)
    zero.clip_grad = 0.0 if max_norm is None else float(max_norm)
    if stage == 3:
        combine = importlib.import_module("deepspeed.runtime.utils").combine_grad_norm_groups
        norm = combine(zero._get_norm_groups())
    else:
        norm = zero.scaled_global_norm()
    return norm / zero.loss_scale


def skip_step(engine: Any, stage: int) -> None:
    """Drop the engine's gradients, as DeepSpeed does if their norm is not finite."""
    if stage == 0:
        engine.zero_grad()
        return
    with _invalid_norm(engine.optimizer, stage):
        engine.step()


def pass_early_gradients(zero: Any) -> None:
    """Give an offloaded optimizer the gradients that only earlier micro-batches of a step produced.

    DeepSpeed copies only the sums to which the last micro-batch added.
    """
    if getattr(zero, "offload_optimizer", False):  # at stage 3
        numbers = {each.ds_id: zero.get_param_id(each) for group in zero.fp16_groups for each in group}
        _copy_left_out(zero, "_offload_boundary_param_ids", zero._finalize_offload_gradient_accumulation, numbers)
    elif getattr(zero, "cpu_offload", False):
        numbers = {number: number for number in zero._offload_accumulated_param_ids}
        _copy_left_out(
            zero, "_offload_accumulated_param_ids", zero._finalize_cpu_offload_gradient_accumulation, numbers
        )


def clear_gradients(zero: Any) -> None:
    """Zero the gradients after a step, where DeepSpeed keeps them for the next.

    Only the first micro-batch of a step overwrites them. A parameter that takes no part in it would keep its gradient
    of the step before, or add to it.
    """
    kept = [getattr(zero, "grad_partitions_flat_buffer", None)]  # at stage 3
    if getattr(zero, "cpu_offload", False):
        kept += [*zero.accumulated_grads_in_cpu.values(), *(flat.grad for flat in zero.single_partition_of_fp32_groups)]
    for gradients in kept:
        if gradients is not None:
            gradients.zero_()


def zero_absent_gradients(zero: Any) -> None:
    """At stage 3 with an offloaded optimizer, set the gradients to zero of parameters that have none in this step.

    DeepSpeed would otherwise use what its buffer holds, such as the gradient of an earlier step.
    """
    if not getattr(zero, "offload_optimizer", False):
        return
    for number, parameters in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[number]
        for each in (zero.get_param_id(parameter) for parameter in parameters):
            if each not in zero.norm_for_param_grads:
                _, start, size = zero.grad_position[each]
                flat.grad.narrow(0, start, size).zero_()


def _copy_left_out(zero: Any, with_gradient: str, copy: Callable[[], None], numbers: dict[int, int]) -> None:
    """Copy the sums of this step's gradients that were not copied yet."""
    before = getattr(zero, with_gradient)
    setattr(zero, with_gradient, {each for each in before if numbers[each] not in zero.norm_for_param_grads})
    try:
        copy()
    finally:
        setattr(zero, with_gradient, before)


@contextmanager
def _invalid_norm(zero: Any, stage: int) -> Iterator[None]:
    infinity = torch.full((), torch.inf, device=zero.device)
    replaced = (
        {"_get_norm_groups": lambda: [infinity]}
        if stage == 3
        else {"scaled_global_norm": lambda: infinity, "check_grad_overflow": True}
    )
    before = {name: vars(zero)[name] for name in replaced if name in vars(zero)}
    vars(zero).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(zero)[name]
        vars(zero).update(before)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank holds.

    Attributes:
        flat: the tensor that this rank's optimizer updates, which contains the piece.
        group: number of the optimizer's group.
        start: start of the piece in `flat`.
        offset: start of the piece in the flattened parameter.
        size: how many numbers; 0 if this rank holds none of the parameter.
    """

    flat: torch.Tensor
    group: int
    start: int = 0
    offset: int = 0
    size: int = 0

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the piece of a tensor with the layout of `flat`."""
        return values.narrow(0, self.start, self.size)

    def gather(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Assemble the parameter's numbers from all ranks' tensors with the layout of `flat`. Collective."""
        whole = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
        if self.size:
            whole.narrow(0, self.offset, self.size).copy_(self.of(values))
        dist.all_reduce(whole)
        return whole.view(shape)

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's piece of a full tensor into one with the layout of `flat`."""
        if self.size:
            self.of(values).copy_(whole.reshape(-1).narrow(0, self.offset, self.size))


def pieces_of(zero: Any, groups: list[list[nn.Parameter]], stage: int, rank: int) -> list[Piece]:
    """Return this rank's piece of every parameter of an optimizer's groups, in their order.

    Args:
        zero: DeepSpeed's optimizer of stage 1, 2 or 3.
        groups: the parameters of each group.
        stage: of ZeRO.
        rank: of this process.
    """
    if stage == 3:
        return [_of_stage_3(zero, p, rank) for parameters in groups for p in parameters]
    flats = zero.single_partition_of_fp32_groups
    return [_of_stage_2(flats[group], group, p) for group, parameters in enumerate(groups) for p in parameters]


def _of_stage_2(flat: torch.Tensor, group: int, parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:
        return Piece(flat, group)
    inside, here = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(flat, group, here.start, inside.start, inside.numel)


def _of_stage_3(zero: Any, parameter: Any, rank: int) -> Piece:
    subgroup, start, size = zero.grad_position[zero.get_param_id(parameter)]
    flat, group = zero.fp32_partitioned_groups_flat[subgroup], zero.sub_group_to_group_id[subgroup]
    offset = rank * size  # the last ranks' pieces are padded to this size
    return Piece(flat, group, start, offset, max(0, min(size, parameter.ds_numel - offset)))


class ShardedOptimizer:
    """The state of an optimizer whose parameters ZeRO has flattened, in the form of a plain optimizer's state.

    An extra entry `masters` holds the float32 parameters if the model's are of another type.

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
        rows, state, masters = RowSharding(), {}, {}
        for number, (parameter, piece) in enumerate(self._pieces()):
            shape = _shape(parameter)
            own = self._optimizer.state.get(piece.flat, {})
            if own:
                # Step counters are copied: a plain optimizer has one for each parameter, and increments each.
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
        """Load such a state, or that of a plain optimizer over the same groups. Collective.

        Raises:
            ValueError: it belongs to other parameters.
        """
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved_groups]
        own_sizes = [len(group) for group in self._model.given_groups]
        if sizes != own_sizes:
            raise ValueError(f"the saved optimizer has groups of {sizes} parameters, this one of {own_sizes}")
        rows = RowSharding()
        numbers = [number for group in saved_groups for number in group["params"]]
        self._optimizer.state.clear()
        for number, (parameter, piece) in zip(numbers, self._pieces(), strict=True):
            own = self._optimizer.state[piece.flat] if number in state_dict["state"] else {}
            for name, value in state_dict["state"].get(number, {}).items():
                _take(own, name, value, rows, parameter, piece)
            if isinstance(own.get("step"), torch.Tensor):
                options = self._optimizer.param_groups[piece.group]
                on_device = options.get("fused") or options.get("capturable")  # the same rule as in torch's loading
                own["step"] = own["step"].to(piece.flat.device if on_device else "cpu")
            if (master := state_dict.get("masters", {}).get(number)) is not None:
                piece.fill(piece.flat.data, rows.whole(master, piece.flat.device))
        for group, saved in zip(self._optimizer.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def tensor_layout(self) -> RowSharding:
        """Return the layout that allocates tensors for reading a checkpoint."""
        return RowSharding()

    def _pieces(self) -> Iterator[tuple[Any, Piece]]:
        groups = self._model.given_groups
        pieces = pieces_of(self._model.engine.optimizer, groups, self._stage, self._rank)
        return zip((parameter for group in groups for parameter in group), pieces, strict=True)


class ShardedModel:
    """A model that ZeRO-3 divides, saved in rows or as full tensors.

    Args:
        model: with its engine.
        rank: of this process.
        whole: gather the full tensors on rank 0, instead of rows on every rank.
    """

    def __init__(self, model: EngineModel, rank: int, *, whole: bool) -> None:
        self._model, self._rank, self._whole = model, rank, whole

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; with `whole` it is empty on all ranks but 0. Collective."""
        if self._whole:
            return full_state_dict(self._model.module, keep=self._rank == 0)
        rows = RowSharding()
        return _gathered(self._model.module, rows.keep)

    def state_held_here(self) -> dict[str, Any]:
        """Return the module's own tensors, divided; `load_state_dict` leaves those as they are."""
        return self._model.module.state_dict(keep_vars=True)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state from `state_dict` of this class or of the plain module. Collective.

        Raises:
            RuntimeError: it lacks tensors, or holds others.
        """
        module, rows = self._model.module, RowSharding()
        own = module.state_dict(keep_vars=True)
        if differing := sorted(own.keys() ^ state_dict.keys()):
            raise RuntimeError(f"the saved model has other tensors than this one, such as {differing[0]}")
        done: set[int] = set()
        for name, mine in own.items():
            value = state_dict[name]
            if not isinstance(mine, torch.Tensor):
                module.load_state_dict({name: value}, strict=False)
            elif value is not mine and id(mine) not in done:
                done.add(id(mine))
                whole = rows.whole(value, torch.device("cpu"))
                if whole.shape != _shape(mine):
                    raise RuntimeError(f"{name} is saved as {tuple(whole.shape)} and is {tuple(_shape(mine))} here")
                with gathered(mine, changed_by=0), torch.no_grad():
                    if self._rank == 0 or not _is_sharded(mine):
                        mine.copy_(whole)
        self._model.engine.optimizer.refresh_fp32_params()

    def tensor_layout(self) -> RowSharding:
        """Return the layout that allocates tensors for reading a checkpoint."""
        return RowSharding()


def replicated_model(model: EngineModel) -> StatePart:
    """Return the part of a model that every rank holds in full, while its optimizer has separate float32 parameters."""

    def load(state_dict: dict[str, Any]) -> None:
        model.module.load_state_dict(state_dict)
        model.engine.optimizer.refresh_fp32_params()

    return StatePart(model.module.state_dict, load)


_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale(engine: Any) -> StatePart:
    """Return the part of the loss scaler of an engine in float16: the scale, and the step of its last change."""
    scaler = vars(engine.optimizer.loss_scaler)
    return StatePart(lambda: {name: scaler[name] for name in _SCALE if name in scaler}, scaler.update)


def full_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state dict of a divided module, with full tensors in host memory; empty unless `keep`."""
    state = _gathered(module, lambda tensor: tensor.detach().cpu().clone() if keep else None)
    return state if keep else {}


def gathered(parameter: Any, changed_by: int | None = None) -> Any:
    """Return a context in which a parameter is gathered on every rank. Collective.

    Args:
        parameter: of a divided module, or any tensor.
        changed_by: the rank whose changes to it are sent to all ranks afterwards.
    """
    zero = importlib.import_module("deepspeed.runtime.zero")
    return zero.GatheredParameters([parameter], modifier_rank=changed_by, enabled=_is_sharded(parameter))


def _gathered(module: nn.Module, convert: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    converted: dict[int, Any] = {}  # tied parameters stay one tensor
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in converted:
            with gathered(value):
                converted[id(value)] = convert(value.data)
        state[name] = converted[id(value)] if isinstance(value, torch.Tensor) else value
    return state


def _take(own: dict[str, Any], name: str, value: Any, rows: RowSharding, parameter: nn.Parameter, piece: Piece) -> None:
    """Copy one entry of a parameter's saved state into that of its flat tensor."""
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
            "in one tensor; resume with the strategy that saved it"
        )
    own[name] = value.clone() if isinstance(value, torch.Tensor) else value


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def _shape(tensor: Any) -> torch.Size:
    return getattr(tensor, "ds_shape", tensor.shape)
