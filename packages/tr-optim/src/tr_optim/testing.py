"""See what a backward pass keeps of the gradients, and draw an optimizer's random numbers, in tests that compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tr_optim.engine.gradient_store import GradientStore
from tr_optim.projection.basis import seeded_normal

__all__ = ["seeded_normal", "watch_gradients"]


def watch_gradients(note: Callable[[int], None]) -> Callable[[], None]:
    """Call a function at the end of every backward pass of an optimizer that consumes gradients in it.

    Args:
        note: takes the bytes of gradients, projected or whole, that the optimizer keeps beside those of the parameters.

    Returns:
        A function that ends it.
    """
    finish = GradientStore._finish_backward

    def noted(store: GradientStore) -> None:
        window = store.window
        note(sum(kept.nbytes for kept in [*window.projected.values(), *window.whole.values()]))
        finish(store)

    def put(method: Callable[[GradientStore], None], kind: Any = GradientStore) -> None:
        kind._finish_backward = method

    put(noted)
    return lambda: put(finish)
