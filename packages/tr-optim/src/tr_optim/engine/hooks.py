"""Take each gradient away from its parameter as soon as a backward pass has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from tr_optim.engine.repeated import is_reentrant, repeated_parameters

Consume = Callable[[torch.Tensor, torch.Tensor], None]


class BackwardHooks:
    """Hand every parameter's gradient to a function during a backward pass, and free it.

    The hooks act only inside `run`: a plain `loss.backward()` fills `.grad` as if they were not there. Their cost is
    one Python call for each parameter, whatever the number of parameters.

    A parameter that a backward pass reaches in several parts gets them one after another: its hook is called for each,
    with a part of the gradient. That is so where non-reentrant graphs do not end in one sum, which is the case for
    weights that several modules share under reentrant activation checkpointing. Such parameters belong into `shared`:
    their gradients add up in `.grad` and are handed over when the backward pass is through.

    Args:
        parameters: those whose gradients are consumed. The others keep theirs.
        consume: called with a parameter and its gradient, whose `.grad` is None by then; what it returns is not used.
            It runs without recording a graph. It must not change the parameter by `.data`, for autograd could then not
            tell that a graph still needs the old value.
        shared: those of `parameters` that are handed over at the end of the backward pass, in this order.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], consume: Consume, *, shared: Iterable[torch.Tensor] = ()
    ) -> None:
        self._parameters = list(parameters)
        self._consume = consume
        own = {id(parameter) for parameter in self._parameters}
        self._shared = [parameter for parameter in shared if id(parameter) in own]
        self._shared_ids = {id(parameter) for parameter in self._shared}
        self._seen: set[int] = set()
        self._is_armed = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def are_on(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters whose gradients are consumed."""
        return [id(parameter) for parameter in parameters] == [id(parameter) for parameter in self._parameters]

    def run(self, loss: torch.Tensor, *, retain_graph: bool = False, only_own: bool = False) -> None:
        """Compute the gradients of a scalar loss, and consume those of the parameters as they come.

        Args:
            loss: what to begin from.
            retain_graph: keep the graph for another pass.
            only_own: leave the `.grad` of all others as it is; not under reentrant activation checkpointing.

        Raises:
            RuntimeError: a parameter holds a gradient already; one that is not in `shared` got its gradient in several
                parts; or this is called from within itself.
        """
        if self._is_armed:
            raise RuntimeError("a backward pass that consumes gradients was begun within another; make one at a time")
        self._refuse_leftovers()
        self._attach()
        self._seen.clear()
        self._is_armed = True
        try:
            loss.backward(retain_graph=retain_graph, inputs=self._parameters if only_own else None)
            for parameter in self._shared:
                self._hand_over(parameter)
        finally:
            self._is_armed = False

    def detach(self) -> None:
        """Remove the hooks; the next `run` puts them on again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _attach(self) -> None:
        if not self._handles:
            this = weakref.ref(self)  # a parameter must not keep an optimizer alive that nobody else has
            self._handles = [p.register_post_accumulate_grad_hook(_hook(this)) for p in self._parameters]

    def _refuse_leftovers(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} holds a gradient that this backward pass did not "
                    "make, and would add it to its own; call zero_grad() after a plain loss.backward(), or "
                    "optimizer.backward(loss) in its place"
                )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        number = id(parameter)
        if not self._is_armed or number in self._shared_ids:
            return
        if number in self._seen:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in several parts in one backward "
                "pass, of which the first is consumed: a weight that is used more than once, under reentrant "
                "activation checkpointing that the first backward pass did not have. Set use_reentrant=False "
                "(gradient_checkpointing_kwargs={'use_reentrant': False}), or turn it on from the beginning"
            )
        self._seen.add(number)
        self._hand_over(parameter)

    def _hand_over(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if torch.is_grad_enabled():  # not within a backward pass, where it would only cost time
            with torch.no_grad():
                self._consume(parameter, gradient)
        else:
            self._consume(parameter, gradient)


def look_first(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of all parameters of an optimizer whose gradient comes in parts; gradients stay as they are.

    Without reentrant checkpointing none does, and no backward pass is made to see.
    """
    if not is_reentrant(loss):
        return []
    parameters = list(parameters)
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        return repeated_parameters(loss, parameters)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _hook(this: Callable[[], BackwardHooks | None]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hooks = this()
        if hooks is not None:
            hooks._on_gradient(parameter)

    return hook
