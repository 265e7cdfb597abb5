"""Take each gradient from its parameter as soon as a backward pass has computed it.

Before that, find the parameters whose gradient comes in several parts, and keep the gradients of other tensors.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tr_optim.engine.shards import is_distributed

# The node of torch.utils.checkpoint with use_reentrant=True, and of what is made after its pattern.
_REENTRANT = "CheckpointFunctionBackward"


def is_reentrant(loss: torch.Tensor) -> bool:
    """Whether there are reentrantly checkpointed segments in the graph of a loss, which is walked."""
    return any(type(node).__name__ == _REENTRANT for node in _nodes(loss))


def repeated_parameters(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose gradient comes in several parts, each of which calls a post-accumulate hook.

    That happens under reentrant activation checkpointing alone, where every checkpointed segment has a backward pass
    of its own: a weight that several segments use, as tied embeddings or a layer that is called in a loop, gets a part
    from each. A backward pass counts the parts, frees every gradient at once, and keeps the graph for the one that is
    to follow. Without such checkpointing there is none.

    Args:
        loss: scalar; its graph can be used again.
        parameters: those to look at; their gradients stay as they are.
    """
    if not is_reentrant(loss):
        return []
    parameters = list(parameters)
    kept, parts = [parameter.grad for parameter in parameters], Counter[int]()
    for parameter in parameters:
        parameter.grad = None

    def count(parameter: torch.Tensor) -> None:
        parts[id(parameter)] += 1
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]
    try:
        with other_gradients_kept(loss, parameters):
            loss.backward(retain_graph=True)
    finally:
        for handle, parameter, gradient in zip(handles, parameters, kept, strict=True):
            handle.remove()
            parameter.grad = gradient
    return [parameter for parameter in parameters if parts[id(parameter)] > 1]


@contextmanager
def other_gradients_kept(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep the gradients of other leaves of the graph as they were before a backward pass.

    Leaves that occur only in reentrant segments are not in the graph, and not found.
    """
    own = {id(parameter) for parameter in parameters}
    leaves = [node.variable for node in _nodes(loss) if hasattr(node, "variable")]
    kept = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in own]
    for leaf, _ in kept:
        leaf.grad = None  # what is there would be added to in place
    try:
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            new = {following for following, _ in node.next_functions} - seen
            seen |= new
            waiting += new


Consume = Callable[[torch.Tensor, torch.Tensor], None]


class BackwardPass:
    """Make backward passes that pass every parameter's gradient to a function, and free it.

    The hooks act only inside `run`: a plain `loss.backward()` fills `.grad` as if they were not there. Their cost is
    one Python call for each parameter, whatever the number of parameters.

    Some parameters get their gradient in several parts, and the hook is called for each part. That happens with weights
    that several modules share under reentrant activation checkpointing. Such parameters are in `shared`: their
    gradients add up in `.grad` and are passed on at the end of the backward pass.

    Args:
        parameters: the parameters whose gradients are consumed. Others keep theirs.
        consume: called with a parameter and its gradient; `.grad` is already None. Its result is not used. It runs
            without recording a graph. It must not change the parameter through `.data`, or autograd could not notice
            that a graph still needs the old value.
        shared: those of `parameters` that are passed on at the end of the backward pass, in this order.

    Attributes:
        parameters: those of the next pass.
        are_apart: whether they are not in the graph themselves, so that a backward pass cannot be limited to them.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], consume: Consume, *, shared: Iterable[torch.Tensor] = ()
    ) -> None:
        self._consume = consume
        self._seen: set[int] = set()
        self._is_armed = self._is_put_on = self.are_apart = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._put_on(parameters, shared)

    def are_on(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether `put_on` was called for these parameters last."""
        return self._is_put_on and [id(parameter) for parameter in parameters] == [
            id(parameter) for parameter in self.parameters
        ]

    def put_on(self, loss: torch.Tensor, parameters: list[torch.Tensor], among: list[torch.Tensor]) -> None:
        """Consume the gradients of these parameters, and no others, from the next pass on.

        Args:
            loss: its graph shows which gradients come in several parts.
            parameters: all that are consumed.
            among: these, and those whose gradients are to stay in `.grad`.
        """
        self.detach()
        self._put_on(parameters, repeated_parameters(loss, among))
        self.are_apart = is_reentrant(loss) or any(map(is_distributed, parameters))
        self._is_put_on = True

    def forget(self) -> None:
        """Remove the hooks, and consume nothing before `put_on`."""
        self.detach()
        self._put_on((), ())
        self._is_put_on = False

    def run(self, loss: torch.Tensor, *, then_another: bool = False) -> None:
        """Compute the gradients of a scalar loss, and consume those of the parameters as they come.

        Args:
            loss: the loss.
            then_another: keep the graph for another pass, and leave it the gradients of all other parameters.

        Raises:
            RuntimeError: a parameter holds a gradient already; one that is not in `shared` got its gradient in several
                parts; or this is called from within itself.
        """
        if then_another and self.are_apart:
            with other_gradients_kept(loss, self.parameters):
                self._run(loss, retain_graph=True)
        else:
            self._run(loss, retain_graph=then_another, inputs=self.parameters if then_another else None)

    def _put_on(self, parameters: Iterable[torch.Tensor], shared: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        own = {id(parameter) for parameter in self.parameters}
        self._shared = [parameter for parameter in shared if id(parameter) in own]
        self._shared_ids = {id(parameter) for parameter in self._shared}

    def _run(self, loss: torch.Tensor, **options: Any) -> None:
        if self._is_armed:
            raise RuntimeError("a backward pass that consumes gradients was begun within another; make one at a time")
        self._refuse_leftovers()
        self._attach()
        self._seen.clear()
        self._is_armed = True
        try:
            loss.backward(**options)
            for parameter in self._shared:
                self._hand_over(parameter)
        finally:
            self._is_armed = False

    def detach(self) -> None:
        """Remove the hooks; the next `run` adds them again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _attach(self) -> None:
        if not self._handles:
            this = weakref.ref(self)  # a parameter must not keep an optimizer alive
            self._handles = [p.register_post_accumulate_grad_hook(_hook(this)) for p in self.parameters]

    def _refuse_leftovers(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} holds a gradient that this backward pass did not "
                    "make, and would add it to its own; call zero_grad() after a plain loss.backward(), or "
                    "optimizer.backward(loss) in its place"
                )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        number = id(parameter)
        if number in self._shared_ids:
            return
        if number in self._seen:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in several parts in one backward "
                "pass, of which the first is consumed: a weight that is used more than once, under reentrant "
                "activation checkpointing that the first backward pass did not have. Set use_reentrant=False "
                "(gradient_checkpointing_kwargs={'use_reentrant': False}), or turn it on from the beginning"
            )
        self._seen.add(number)
        # Within a backward pass no graph is recorded, and calls for each tensor add up.
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._consume(parameter, gradient)

    def _hand_over(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            with torch.no_grad():
                self._consume(parameter, gradient)


def _hook(this: Callable[[], BackwardPass | None]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hooks = this()
        if hooks is not None and hooks._is_armed:
            hooks._on_gradient(parameter)

    return hook
