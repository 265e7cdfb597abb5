"""torch's Muon for hidden matrices and torch's AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tr_optim.adapters import WholeParameters
from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.updates import run_closure
from tr_optim.targets import ALL_LINEAR, Targets, find_targets

_FIXED = ("eps", "ns_coefficients")  # of Muon; AdamW's eps is another


class MuonAdamW(WholeParameters):
    """Updates matrices by torch's Muon, and all other parameters by torch's AdamW.

    A group with a true `projects` holds matrices for Muon. The state is that of torch's classes: `momentum_buffer`, or
    `step`, `exp_avg` and `exp_avg_sq`.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the learning rate of
    Liu et al., "Muon is scalable for LLM training" (2025), by torch.

    Args:
        params: parameters or groups.
        lr: learning rate of both.
        betas: AdamW's decay of its two moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        momentum: decay of Muon's average of gradients.
        nesterov: whether Muon looks one step ahead.
        ns_steps: steps in which Muon makes a matrix orthogonal.
        adjust_lr_fn: how Muon's learning rate depends on a matrix's shape. "match_rms_adamw" makes its updates as large
            as AdamW's, so that both can share one; "original" is that of Jordan et al.

    Raises:
        ImportError: this torch has no Muon.
        ValueError: an argument is out of range, or a parameter cannot be updated.
    """

    why_whole = "and Muon needs whole matrices"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        shape: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        shape["adjust_lr_fn"] = adjust_lr_fn
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        # They check the arguments, and make the steps; the parameters are given to them there.
        self._muon = _class_of_torch()([nn.Parameter(torch.zeros(1, 1))], **common, **shape)
        self._adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **common, betas=betas, eps=eps)
        super().__init__(params, {**common, "betas": betas, "eps": eps, **shape, "projects": False})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a parameter is a DTensor, or one for Muon is not a matrix.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["projects"] and (odd := [tuple(p.shape) for p in group["params"] if p.dim() != 2]):
            raise ValueError(
                f"MuonAdamW: a parameter of shape {odd[0]} is not a matrix; Muon updates matrices only: name those in "
                "optim_target_modules"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Returns the result of `closure`, if one is given."""
        result = run_closure(closure)
        with torch.no_grad():
            for inner, is_muon in ((self._muon, True), (self._adamw, False)):
                inner.state = self.state
                inner.param_groups = [
                    {**inner.defaults, **_without_others(group, is_muon)}
                    for group in self.param_groups
                    if group["projects"] == is_muon
                ]
                # Without torch's wrapper, which would call hooks a second time.
                inspect.unwrap(type(inner).step)(inner)
                inner.param_groups, inner.state = [], defaultdict(dict)
        return result

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of all gradients, and of the state after a step.

        Args:
            micro_batches: micro-batches in a step; gradients of several take no more memory.
        """
        sizes = [
            (parameter.numel() * parameter.element_size(), group["projects"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        return sum(size for size, _ in sizes), sum(size if is_muon else 2 * size + 4 for size, is_muon in sizes)


def hidden_matrices(model: nn.Module, names: str | Sequence[str] | None) -> Targets:
    """Return the matrices for Muon.

    Args:
        model: where to look.
        names: those of modules, as of `find_targets`; None stands for all linear layers but the output layer, and
            those whose weight is an embedding's.

    Raises:
        ValueError: a name stands for nothing, or nothing is left.
    """
    if names is not None:
        return find_targets(model, names)
    found = find_targets(model, ALL_LINEAR)
    ends: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if (get_output := getattr(model, "get_output_embeddings", None)) is not None:
        ends += filter(None, [get_output()])
    excluded = {id(getattr(module, "weight", None)) for module in ends}  # stages have some elsewhere
    kept = {path: p for path, p in found.parameters.items() if p.dim() == 2 and id(p) not in excluded}
    if not kept:
        raise ValueError(
            "optim='muon' updates the matrices of linear layers, and the model has none beside its output layer; use "
            "optim='adamw_torch'"
        )
    return Targets(kept, found.all_elements)


def _class_of_torch() -> type[Optimizer]:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ImportError(
            f"optim='muon' is torch.optim.Muon, which torch {torch.__version__} lacks; pip install 'torch>=2.9'"
        )
    return kind


def _without_others(group: dict[str, Any], is_muon: bool) -> dict[str, Any]:
    return {name: value for name, value in group.items() if not (is_muon and name in _FIXED)}
