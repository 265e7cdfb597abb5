"""Build the optimizer, and reckon the size of its state without computing a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from tr_core.plugins import PluginError
from tr_core.preflight.disk_space import tensor_bytes
from tr_core.preflight.raised import last_line, place
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_optimizer(subject: Subject) -> Iterator[Problem]:
    """Build the run's optimizer; what it changes on the model, such as hooks, stays."""
    trainer, figures = subject.trainer, subject.figures
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if not subject.trains or not trainable:
        return
    figures["parameter_bytes"] = tensor_bytes(list(trainer.model.parameters()))
    figures["gradient_bytes"] = tensor_bytes(trainable)
    try:
        subject.optimizer = trainer.create_optimizer()
    except PluginError as error:
        yield Problem("T301", str(error), subject.origin("optim"))
    except ImportError as error:
        yield Problem("T302", f"optim={subject.args.optim!r}: {error}", subject.origin("optim"))
    except Exception as error:
        yield Problem("T304", f"optim={subject.args.optim!r}: {last_line(error)}", place(error))
    if subject.optimizer is None:
        return
    tells: Any = getattr(subject.optimizer, "expected_bytes", None)
    if tells is None:
        size = state_bytes(subject.optimizer)
    else:  # one that frees gradients during the backward pass, or whose step needs such a pass
        figures["gradient_bytes"], size = tells(micro_batches=subject.args.gradient_accumulation_steps)
    figures["optimizer_is_assumed"] = size is None
    figures["optimizer_bytes"] = 8 * sum(p.numel() for p in trainable) if size is None else size


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the size of the state that an optimizer has, or will have after its first step; None if unknown.

    A twin of it makes a step over parameters that have a shape and no numbers. One that wants to see numbers fails in
    that; it has made its state by then, so that each parameter's is looked at by itself.
    """
    if optimizer.state:
        return tensor_bytes(dict(optimizer.state))
    state, failed = _state_of_twin(optimizer, optimizer.param_groups)
    if not failed:
        return tensor_bytes(state)
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, failed = _state_of_twin(optimizer, [{**group, "params": [parameter]}])
            if failed and not state:
                return None
            total += tensor_bytes(state)
    return total


def _state_of_twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> tuple[dict[Any, Any], bool]:
    """Return the state after a step of an optimizer that is like `optimizer` over `groups`, and whether it failed."""
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    # Fused kernels want numbers; the state is the same without.
    plain = {"fused": None, "foreach": False}
    twin.param_groups = [
        {**group, **{k: v for k, v in plain.items() if k in group}, "params": [_shape_of(p) for p in group["params"]]}
        for group in groups
    ]
    twin.state = defaultdict(dict)
    try:
        type(optimizer).step(twin)
    except Exception:  # whatever it meets when it reads a number, or if it knows its parameters by another way
        return dict(twin.state), True
    return dict(twin.state), False


def _shape_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    shape.grad = torch.empty_like(shape)
    return shape
