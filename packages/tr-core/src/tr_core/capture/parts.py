"""Capture the parts of a training step: forward and backward of a micro-batch, and the update of the optimizer.

Capturing calls their code with tensors that have a shape and no content. Nothing is computed, and nothing changes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from tr_core.capture.values import NotCapturableError, Tensors

Clip = Callable[[Tensors], torch.Tensor] | None


def capture(function: Callable[..., Any], inputs: Sequence[torch.Tensor], trained: int = 0) -> Any:
    """Return a function of as many tensors that runs the operations of `function`, as `torch.fx` code.

    Args:
        function: takes the tensors and returns tensors.
        inputs: have the shapes and types; their content is not read.
        trained: how many of them, from the first, get a gradient if they require one.

    Raises:
        NotCapturableError: the operations depend on the content of a tensor, or cannot be found out.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in inputs]
    for fake, tensor in zip(fakes[:trained], inputs, strict=False):
        fake.requires_grad_(tensor.requires_grad)
    try:
        with mode, torch.enable_grad():  # in the mode, so that tensors that the code makes are without content too
            captured = make_fx(function)(*fakes)
    except NotCapturableError:
        raise
    except Exception as error:
        raise NotCapturableError(why_of(error)) from error
    for node in reversed(captured.graph.nodes):  # the profiler's marks mean nothing in a capture
        if "_record_function" in str(node.target):
            captured.graph.erase_node(node)
    captured.recompile()
    return captured


def why_of(error: Exception) -> str:
    """Return what an exception says about code that cannot be captured, in one line."""
    name, text = type(error).__name__, str(error).strip().split("\n")[0]
    if name in ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"):
        return f"its Python code, or the shape of a result, depends on the content of a tensor ({text})"
    if "Please convert all Tensors to FakeTensors" in str(error):
        return "it uses a tensor that is neither an input, a parameter nor a buffer; register it as a buffer"
    return f"{name}: {text[:300]}"


class Gradients:
    """The captured forward and backward of one micro-batch, and the clipping if the micro-batch is the full step.

    Args:
        loss_of: returns the loss of a batch, as a function of its tensors.
        batch: the tensors of a batch.
        clip: clips the gradients of parameters and returns their norm; None leaves that to the update.

    Attributes:
        captured: takes parameters, buffers and batch; returns loss, norm (if it clips) and gradients.
        with_gradient: which parameters get a gradient, by number.
        clips: whether it clips.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        loss_of: Callable[[Tensors], torch.Tensor],
        batch: Tensors,
        clip: Clip,
    ) -> None:
        from torch.nn.utils.stateless import _reparametrize_module

        self.with_gradient: list[int] = []
        self.clips = clip is not None
        names, number = [*named, *buffers], len(named)

        def run(*tensors: torch.Tensor) -> Tensors:
            parameters = list(tensors[:number])
            state = dict(zip(names, tensors[: len(names)], strict=True))
            with _reparametrize_module(model, state, tie_weights=True):
                loss = loss_of(list(tensors[len(names) :]))
                loss.backward()
            self.with_gradient = [n for n, p in enumerate(parameters) if p.grad is not None]
            if not self.with_gradient:
                raise NotCapturableError("no parameter gets a gradient")
            norm = [] if clip is None else [clip([parameters[n] for n in self.with_gradient])]
            with torch.no_grad():
                return [loss.detach(), *norm, *(parameters[n].grad for n in self.with_gradient)]  # type: ignore[list-item]

        with without_trace(model):
            self.captured = capture(run, [*named.values(), *buffers.values(), *batch], trained=number)


class Update:
    """The captured update of an optimizer, and the clipping before it if the gradients were not clipped yet.

    Args:
        parameters: those that have a gradient.
        rates: the learning rate of each group, scalar tensors.
        clip: as for `Gradients`; None if the gradients are clipped.

    Attributes:
        captured: takes parameters, gradients, states and rates, which it changes in place; returns the norm, if it
            clips.
        states: the tensors of the optimizer's state, in the order that `captured` takes them.

    Raises:
        NotCapturableError: the update does more than operations on tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        rates: Tensors,
        clip: Clip,
    ) -> None:
        keys = _state_keys(optimizer, parameters)
        self.optimizer, self.parameters, self._keys = optimizer, parameters, keys
        number, size = len(parameters), len(rates)

        def run(*tensors: torch.Tensor) -> Tensors:
            own, gradients = list(tensors[:number]), tensors[number : 2 * number]
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
            norm = [] if clip is None else [clip(own)]
            _update_copy(optimizer, dict(zip(parameters, own, strict=True)), keys, tensors[2 * number :], size)
            return norm

        gradients = [torch.empty_like(p) for p in parameters]
        self.captured = capture(run, [*parameters, *gradients, *self.states, *rates])

    def is_current(self) -> bool:
        """Whether the state still has the tensors that the capture takes."""
        of = self.optimizer.state
        return all(
            all(isinstance(of[p].get(key), torch.Tensor) for key in keys)
            for p, keys in zip(self.parameters, self._keys, strict=True)
            if keys
        )

    @property
    def states(self) -> Tensors:
        """The tensors of the state as they are now."""
        of = self.optimizer.state
        return [of[p][key] for p, keys in zip(self.parameters, self._keys, strict=True) for key in keys]


def _state_keys(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[list[str]]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in held for p in parameters):
        raise NotCapturableError("some parameters with a gradient are not held by the optimizer")
    keys = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if other := [name for name, value in state.items() if value is not None and type(value) is not torch.Tensor]:
            raise NotCapturableError(f"its state holds {', '.join(map(repr, other))}, which are not tensors")
        keys.append([name for name, value in state.items() if value is not None])
    return keys


def _update_copy(
    optimizer: torch.optim.Optimizer,
    own: dict[torch.Tensor, torch.Tensor],
    keys: list[list[str]],
    rest: Sequence[torch.Tensor],
    num_rates: int,
) -> None:
    """Call the step of a copy of an optimizer that holds other parameters, states and rates."""
    kind = type(optimizer)
    copy: Any = object.__new__(kind)
    before = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state", "param_groups")}
    copy.__dict__.update(before)
    rates, values = rest[len(rest) - num_rates :], iter(rest)
    groups = []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        held = [own[p] for p in group["params"] if p in own]
        groups.append({**group, "params": held, "lr": rate})
        # Tensors of a capture are of another type, for which torch would take its slow way.
        if held and held[0].is_cuda and not group.get("fused") and group.get("foreach", False) is None:
            groups[-1]["foreach"] = True
    copy.param_groups = [dict(group) for group in groups]
    copy.state = defaultdict(dict)
    for (parameter, mine), names in zip(own.items(), keys, strict=True):
        given = {name: next(values) for name in names}
        copy.state[mine] = {**optimizer.state.get(parameter, {}), **given}
    states = {id(mine): dict(state) for mine, state in copy.state.items()}
    with torch.no_grad():
        kind.step(copy)
    changed = [name for name, value in vars(copy).items() if name in before and value is not before[name]]
    changed += [name for name in vars(copy) if name not in before and name not in ("state", "param_groups")]
    for group, mine in zip(groups, copy.param_groups, strict=True):
        changed += [name for name in mine if name not in group or not _same(mine[name], group[name])]
    for mine, state in copy.state.items():
        then = states.get(id(mine), {})
        changed += [name for name in {**state, **then} if state.get(name, copy) is not then.get(name, copy)]
    if changed:
        raise NotCapturableError(f"its step changes {', '.join(sorted(set(changed))[:5])} in Python")


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Undo what Python code in the block leaves behind, and refuse code that leaves something.

    Raises:
        NotCapturableError: an attribute of a module was changed, a random number of Python or numpy was drawn, or the
            state of torch's random numbers was set. A capture would not do that again.
    """
    modules = list(model.modules())
    noted = [(f"{type(module).__name__}.", vars(module), _contents(vars(module))) for module in modules]
    noted += [(f"{type(module).__name__}.", module._buffers, _contents(module._buffers)) for module in modules]
    drawn: Any = (random.getstate(), np.random.get_state())
    set_states: list[torch.Tensor] = []
    set_state = torch.set_rng_state
    torch.set_rng_state = lambda state: set_states.append(state)
    try:
        yield
    finally:
        torch.set_rng_state = set_state
        changed = [name for where, own, before in noted for name in _restore(where, own, before)]
        after: Any = (random.getstate(), np.random.get_state())
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    if changed:
        raise NotCapturableError(f"its forward sets {', '.join(changed[:5])}, which a capture would not do again")
    if after[0] != drawn[0] or after[1][2] != drawn[1][2] or not np.array_equal(after[1][1], drawn[1][1]):
        raise NotCapturableError("it draws random numbers by Python or numpy, which a capture would not draw again")
    if set_states:
        raise NotCapturableError("it sets the state of random numbers, as checkpointing of activations does")


Contents = dict[str, tuple[Any, Any]]


def _contents(own: dict[str, Any]) -> Contents:
    """Return the values of a dict, and a copy of those that may grow in place."""
    return {key: (value, copy(value) if type(value) in (list, dict, set) else None) for key, value in own.items()}


def _restore(where: str, own: dict[str, Any], before: Contents) -> list[str]:
    """Give a dict its values back; return the names of those that were others."""
    changed = [where + key for key in own if key not in before]
    for key, (value, content) in before.items():
        if key not in own or own[key] is not value:
            changed.append(where + key)
        elif content is not None and not _holds_the_same(value, content):
            changed.append(where + key)
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
    for key in [key for key in own if key not in before]:
        del own[key]
    own.update({key: value for key, (value, _) in before.items()})
    return changed


def _holds_the_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and now[key] is value for key, value in before.items())
    return all(map(is_, now, before)) if isinstance(now, list) else now == before
