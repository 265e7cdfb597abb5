"""Build and step the optimizers that are compared: ours by their names, and those of galore-torch and lomo-optim."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tr_optim import find_targets

# What a user of galore-torch or lomo-optim would write; the others are entry points of `tr.optimizers`.
UPSTREAM = ("galore-torch", "galore-torch layerwise", "lomo-optim lomo", "lomo-optim adalomo")


def build(
    name: str, model: nn.Module, lr: float, *, rank: int, gap: int = 200, clip: float = 0.0, seed: int = 0
) -> torch.optim.Optimizer:
    """Return the optimizer that a name and its options stand for, built as the Trainer builds it.

    Args:
        name: `adamw`, `adamw:fused`, or an entry point of `tr.optimizers`, with its `optim_args` after a colon.
        model: whose parameters it takes; the linear layers' matrices are projected where it projects.
        lr: learning rate.
        rank: of projections.
        gap: steps from one basis of a matrix to the next.
        clip: greatest norm of the gradients; 0 for no clipping.
        seed: of its random numbers.
    """
    short, _, own = name.partition(":")
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    if short == "adamw":
        return torch.optim.AdamW(groups, lr, fused=own == "fused")
    entries = entry_points(group="tr.optimizers", name=short)
    if not entries:
        known = ", ".join(sorted(entry.name for entry in entry_points(group="tr.optimizers")))
        raise SystemExit(f"error: no optimizer is called {short!r}; there are adamw, {known}")
    factory = next(iter(entries)).load()
    options = dict(part.split("=") for part in own.split(",") if part)
    if getattr(factory, "takes_target_modules", False):
        own_rank = {} if "mini" in short else {"rank": str(rank)}  # APOLLO-Mini has one of its own, 1
        options = {**own_rank, "update_proj_gap": str(gap), **options}
    args = SimpleNamespace(
        learning_rate=lr,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=clip,
        gradient_accumulation_steps=1,
        fp16=False,
        bf16=False,
        on_nonfinite="ignore",
        optim=short,
        optim_args=",".join(f"{key}={value}" for key, value in options.items()),
        optim_target_modules="all-linear",
        seed=seed,
    )
    return factory(groups, args, model) if getattr(factory, "needs_model", False) else factory(groups, args)


def update(optimizer: Any, model: nn.Module, loss: torch.Tensor, clip: float = 0.0) -> None:
    """Make one step, in the backward pass where the optimizer wants that."""
    if getattr(optimizer, "fused_in_backward", False):
        if clip:
            optimizer.clip_to(clip)
        optimizer.backward(loss)
        if clip:
            optimizer.clip_grad_norm(clip)
    else:
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def stepper(name: str, model: nn.Module, lr: float, *, rank: int) -> tuple[Callable[[torch.Tensor], None], Any]:
    """Return what makes a step of a loss, and the optimizer or the optimizers that hold the state.

    Args:
        name: `backward only`, one of `UPSTREAM`, or as of `build`.
        model: what is trained.
        lr: learning rate.
        rank: of projections.
    """
    if name == "backward only":

        def only(loss: torch.Tensor) -> None:
            loss.backward()
            model.zero_grad()

        return only, []
    if name in ("galore-torch", "galore-torch layerwise"):
        return _galore_torch(model, lr, rank, layerwise=name.endswith("layerwise"))
    if name.startswith("lomo-optim"):
        return _lomo_optim(model, lr, is_adaptive=name.endswith("adalomo"))
    optimizer = build(name, model, lr, rank=rank)
    return lambda loss: update(optimizer, model, loss), [optimizer]


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results with the versions and the machine that they are of; None writes nothing."""
    if path is not None:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        path.write_text(json.dumps({**about, "threads": torch.get_num_threads(), **results}, indent=2) + "\n")


def state_bytes(optimizers: Any) -> int:
    """Return the bytes of all tensors in the optimizers' states."""

    def count(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return count(vars(value)) if hasattr(value, "ortho_matrix") else 0

    kept = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")  # where AdaLomo of lomo-optim has its own
    return sum(count(dict(o.state)) + sum(count(vars(o).get(name)) for name in kept) for o in optimizers)


def galore_torch_module(name: str) -> Any:
    """Import a module of galore-torch; its package would import bitsandbytes for the 8-bit optimizers."""
    if "galore_torch" not in sys.modules:
        specification = importlib.machinery.PathFinder.find_spec("galore_torch")
        if specification is None:
            raise SystemExit("error: galore-torch is missing; run: python -m pip install --no-deps galore-torch==1.0")
        package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("galore_torch", None, is_package=True))
        package.__path__ = list(specification.submodule_search_locations or [])
        sys.modules["galore_torch"] = package
    return importlib.import_module(f"galore_torch.{name}")


def _galore_torch(
    model: nn.Module, lr: float, rank: int, *, layerwise: bool
) -> tuple[Callable[[torch.Tensor], None], Any]:
    kind = galore_torch_module("adamw").AdamW
    targets = {id(p) for p in find_targets(model, "all-linear").parameters.values()}
    projection = {"rank": rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}

    def group(parameters: list[torch.Tensor], *, is_projected: bool) -> dict[str, Any]:
        return {"params": parameters, **(projection if is_projected else {})}

    parameters = list(model.parameters())
    if not layerwise:
        divided = [[p for p in parameters if (id(p) in targets) == chosen] for chosen in (False, True)]
        groups = [group(part, is_projected=chosen) for chosen, part in enumerate(divided) if part]
        optimizer = kind(groups, lr=lr, no_deprecation_warning=True)
        return lambda loss: update(optimizer, model, loss), [optimizer]
    own = {p: kind([group([p], is_projected=id(p) in targets)], lr=lr, no_deprecation_warning=True) for p in parameters}

    def hook(parameter: torch.Tensor) -> None:
        own[parameter].step()
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    return lambda loss: loss.backward(), list(own.values())


def _lomo_optim(model: nn.Module, lr: float, *, is_adaptive: bool) -> tuple[Callable[[torch.Tensor], None], Any]:
    if importlib.util.find_spec("lomo_optim") is None:
        raise SystemExit("error: lomo-optim is missing; run: python -m pip install --no-deps lomo-optim==0.1.1")
    lomo_optim = importlib.import_module("lomo_optim")
    if is_adaptive and not torch.cuda.is_available():
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: (
            tensor
        )  # its state is made on a GPU, whatever the model is on
    optimizer = (lomo_optim.AdaLomo if is_adaptive else lomo_optim.Lomo)(model, lr=lr)
    return lambda loss: optimizer.fused_backward(loss, lr), [optimizer]
