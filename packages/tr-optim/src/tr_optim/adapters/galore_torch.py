"""galore-torch's optimizers, with a state of tensors only and with the faults around their arithmetic fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.adapters import require_parts
from tr_optim.engine.checks import all_or_nothing, check_gradient, check_group, check_saved_state, checked_state_dict
from tr_optim.engine.shards import as_copies, is_distributed, load_states
from tr_optim.engine.updates import run_closure
from tr_optim.moments.adafactor import check_ranges, check_step_size
from tr_optim.projection.basis import sides
from tr_optim.projection.layout import is_divided

_MODULES = require_parts("galore_torch", ("adamw", "adafactor", "galore_projector"), "galore-torch")
_ADAMW, _ADAFACTOR, _PROJECTOR = (vars(module) for module in _MODULES)


class _Projector(_PROJECTOR["GaLoreProjector"]):
    """The library's projector of one or both sides of a gradient, without the memory it does not use."""

    def get_orthogonal_matrix(self, weights: torch.Tensor, rank: int, type: str) -> Any:
        """Return the library's basis as a copy, with contiguous rows of its transpose."""
        found = super().get_orthogonal_matrix(weights, rank, type)
        # The library's are views that keep all singular vectors in memory, and have another layout after a resume.
        if type == "full":
            return [_own_memory(found[0]), _own_memory(found[1].mT).mT]
        return _own_memory(found) if type == "left" else _own_memory(found.mT).mT


class _Projecting(Optimizer):
    """Base of the library's optimizers: groups that are checked, and a state of tensors.

    A state has the names and shapes of that of `own`, which can load it: `basis_left` `m x r`, `basis_right`
    `n x r`, the moments of the rule, and `step`, a float64 on the CPU. During the library's step they are replaced by
    the library's own state.
    """

    own = ""
    _projection: dict[str, Any]

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that the library cannot project."""
        self.defaults = {**vars(self).pop("_projection", {}), **self.defaults}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("projects", group["rank"] is not None)
        self._check(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Returns the result of `closure`, if one is given.

        Raises:
            ValueError: the rank or side of a group is not that of the state.
            RuntimeError: a gradient is of a kind that is not projected.
        """
        result = run_closure(closure)
        with torch.no_grad(), self._as_the_library_has_it():
            super().step()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as copies: of this class, of `own`, or of the library's with its projector objects.

        Read a file with the library's state by `torch.load(file, weights_only=True)` within
        `torch.serialization.safe_globals([galore_torch.galore_projector.GaLoreProjector])`.

        Raises:
            ValueError: its shapes or its kind of projection are different; nothing is changed then.
        """
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        shapes = {number: parameter.shape for number, (parameter, _) in zip(saved_ids, self._each(), strict=False)}
        found = {n: _as_tensors(s, shapes[n]) if n in shapes else s for n, s in state_dict["state"].items()}
        complete, states = checked_state_dict({**state_dict, "state": found}, self.param_groups, check_saved_state)
        super().load_state_dict(complete)
        load_states(self, states, as_copies, is_divided)

    def _each(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return ((parameter, group) for group in self.param_groups for parameter in group["params"])

    def _check(self, group: dict[str, Any]) -> None:
        for parameter in group["params"] if group["projects"] else ():
            shape = tuple(parameter.shape)
            what = f"{type(self).__name__}: a parameter of shape {shape}"
            if is_distributed(parameter):
                raise ValueError(
                    f"{what} is a DTensor, of which each rank holds a part: galore-torch would gather its whole "
                    f"gradient, and decompose it, on every rank; use {self.own}, or replicas (strategy='ddp')"
                )
            if parameter.dim() == 1:
                raise ValueError(
                    f"{what} has one dimension, and galore-torch projects matrices. If it is a bias or a norm's scale, "
                    "put it into a group without a rank; if it is a part of flattened weights, as FSDP1 and ZeRO make "
                    f"them, use {self.own} with replicas (strategy='ddp')"
                )
            if parameter.dim() != 2 or parameter.numel() == 0:
                raise ValueError(
                    f"{what} is not a matrix, and galore-torch projects nothing else; use {self.own}, which projects "
                    "stacks of matrices too, or put it into a group without a rank"
                )
        check_group(group, type(self).__name__)

    @contextmanager
    def _as_the_library_has_it(self) -> Iterator[None]:
        groups, unpacked = self.param_groups, []
        try:
            for parameter, group in self._each():
                if parameter.grad is not None:
                    self._unpack(parameter, group)
                    unpacked.append(parameter)
            # The library projects every group with a rank, whatever its value.
            self.param_groups = [
                group if group["projects"] else {name: group[name] for name in group if name != "rank"}
                for group in groups
            ]
            yield
        finally:
            self.param_groups = groups
            for parameter in unpacked:
                _pack(self.state[parameter], parameter.shape)

    def _unpack(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if group["projects"]:
            if parameter.dim() != 2 or is_distributed(parameter):
                self._check(group)  # it became so since
            check_gradient(parameter, parameter.grad)
            rank, (left, right) = group["rank"], sides(parameter.shape, group["proj_type"])
            self._check_basis(state, parameter, group)
            # The library's std and reverse_std take the side from the shape of what they find, which may mislead them.
            side = "full" if left and right else "left" if left else "right"
            projector = _Projector(rank, False, group["update_proj_gap"], group["scale"], side)
            bases = [state.pop("basis_left", None), state.pop("basis_right", None)]
            if bases[1] is not None:
                bases[1] = bases[1].mT
            found = [basis for basis in bases if basis is not None]
            if found:
                projector.ortho_matrix = found if side == "full" else found[0]
            state["projector"] = projector
        if "step" in state:
            state["step"] = int(state["step"])  # on the CPU

    def _check_basis(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if not any(name in state for name in ("basis_left", "basis_right")):
            return
        check_saved_state(state, parameter, group)
        basis = state.get("basis_left", state.get("basis_right"))
        assert basis is not None
        rank = min(group["rank"], *parameter.shape)
        if basis.shape[-1] != rank:
            raise ValueError(
                f"{type(self).__name__}: the state of a parameter of shape {tuple(parameter.shape)} is of rank "
                f"{basis.shape[-1]}, and its group now has rank={group['rank']}: galore-torch cannot change it; set "
                f"rank={basis.shape[-1]}, or use {self.own}"
            )


class GaLoreTorchAdamW(_Projecting, _ADAMW["AdamW"]):
    """galore-torch's GaLoreAdamW.

    The arithmetic is that of galore-torch 1.0: a full singular value decomposition every `update_proj_gap` steps,
    all matrices in the same ones, moments kept across a change of basis, eps added before the bias correction, weight
    decay after the update. It is not reproducible beyond rounding: singular vectors have any sign, so that a change of
    1e-7 in the data changes the result by as much as training does, and so does another LAPACK or GPU.
    `tr_optim.GaLoreAdamW` is the same method without that; its `compat="galore-torch"` gives the same numbers.

    Fixed: the state holds tensors, copied when it is loaded, and its bases no more memory than their own;
    `step` takes a closure; `scale` and `update_proj_gap` of a group count from when they are changed, and a `rank` or
    `proj_type` that the state does not have is refused; `reverse_std` works with any rank; what is not a matrix,
    flattened or sharded is refused.

    State of a projected `m x n` matrix, std, m <= n, in the gradient's dtype: `basis_left` `m x r`, `exp_avg` and
    `exp_avg_sq` `r x n`, and `step`.

    Args:
        params: parameters or groups; those with a `rank` that is not None are projected, unless they have
            `"projects": False`.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second, before its bias correction.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        correct_bias: whether moments are corrected for beginning at 0.
        rank: directions; None for no projection.
        update_proj_gap: steps from one basis of a matrix to its next.
        scale: factor of a projected update.
        proj_type: `std`, `reverse_std`, `left`, `right` or `full`, as of `tr_optim.GaLoreAdamW`.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be projected.
    """

    own = "tr_optim.GaLoreAdamW"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        correct_bias: bool = True,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
    ) -> None:
        self._projection = _projection(rank, update_proj_gap, scale, proj_type)
        options: Any = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
        }
        super().__init__(params, **options | {"no_deprecation_warning": True})


class GaLoreTorchAdafactor(_Projecting, _ADAFACTOR["Adafactor"]):
    """galore-torch's GaLoreAdafactor.

    `GaLoreTorchAdamW` describes the method and what is fixed; both hold here too. `tr_optim.GaLoreAdafactor` is the
    same without what is left. With `scale_parameter` the library waits for the device at every parameter.

    State of a projected `m x n` matrix, std, m <= n, in float32: `basis_left` `m x r`, `exp_avg_sq_row` r,
    `exp_avg_sq_col` n, with `beta1` `exp_avg` `r x n`, `RMS` and `step`.

    Args:
        params: parameters or groups, as of `GaLoreTorchAdamW`.
        lr: learning rate; None with `relative_step`.
        eps: added to squared gradients; and the least root mean square that `scale_parameter` takes a parameter to
            have.
        clip_threshold: greatest root mean square of an update before the learning rate.
        decay_rate: negative; after t steps the second moment takes in `t ** decay_rate` of the newest squares.
        beta1: decay of a first moment of the updates; None keeps none.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        scale_parameter: multiply the learning rate by the parameter's root mean square.
        relative_step: take `min(1e-2, 1 / sqrt(step))` for the learning rate.
        warmup_init: with `relative_step`, begin with `1e-6 * step` instead of 1e-2.
        rank: as of `GaLoreTorchAdamW`, and so are all that follow.
        update_proj_gap: see there.
        scale: see there.
        proj_type: see there.

    Raises:
        ValueError: an argument is out of range, contradicts another, or a parameter cannot be projected.
    """

    own = "tr_optim.GaLoreAdafactor"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | None = None,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
    ) -> None:
        check_step_size(lr, relative_step, warmup_init)
        check_ranges(eps, clip_threshold, decay_rate, beta1)
        self._projection = _projection(rank, update_proj_gap, scale, proj_type)
        options: Any = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate}
        options |= {"beta1": beta1, "weight_decay": weight_decay, "scale_parameter": scale_parameter}
        super().__init__(params, **options | {"relative_step": relative_step, "warmup_init": warmup_init})


def _projection(rank: int | None, update_proj_gap: int, scale: float, proj_type: str) -> dict[str, Any]:
    return {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _pack(state: dict[str, Any], shape: torch.Size) -> None:
    """Put tensors in the place of the library's objects."""
    packed = _as_tensors(state, shape)
    state.clear()
    state.update(packed)


def _as_tensors(state: dict[str, Any], shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return a state of a parameter of a shape, the library's too, with tensors in the place of its objects."""
    found = {name: value for name, value in state.items() if name != "projector"}
    projector: Any = state.get("projector")
    basis = getattr(projector, "ortho_matrix", None)
    if basis is not None:
        left, right = sides(shape, projector.proj_type)
        if left:
            found["basis_left"] = basis[0] if right else basis
        if right:
            found["basis_right"] = (basis[1] if left else basis).mT
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for name, value in found.items()
    }
