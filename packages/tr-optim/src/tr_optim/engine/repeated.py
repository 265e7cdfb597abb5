"""Look at what a backward pass will reach, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    to follow.

    Args:
        loss: scalar; its graph can be used again.
        parameters: those to look at; none has a `.grad`, before and after.
    """
    parameters = list(parameters)
    parts: Counter[int] = Counter()

    def count(parameter: torch.Tensor) -> None:
        parts[id(parameter)] += 1
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]
    try:
        with other_gradients_kept(loss, parameters):
            loss.backward(retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return [parameter for parameter in parameters if parts[id(parameter)] > 1]


@contextmanager
def other_gradients_kept(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have a backward pass leave the gradients of other leaves of its graph as they were.

    Leaves that only reentrant segments know are not in the graph, and not found.
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
