"""Compile the forward of a model while the Trainer uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]


class Compilation:
    """Compiles a model's calls in place inside a block; module and names do not change.

    Compiled code is kept for the next block with the same model. It compiles the module itself, not the strategy's
    wrapper: torch then cuts the graph where gradients are exchanged.

    Args:
        backend: name of a backend of `torch.compile`.
        mode: mode of inductor; None is its default.

    Raises:
        ValueError: there is no such backend or mode.
    """

    def __init__(self, backend: str, mode: str | None = None) -> None:
        check_compilation(backend, mode)
        self._options: dict[str, Any] = {"backend": backend} if mode is None else {"backend": backend, "mode": mode}
        self._model: nn.Module | None = None
        self._call: Call | None = None

    @contextmanager
    def of(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Compile the calls of `model`, which is on `device`, within the block."""
        if self._model is not model:
            self._model, self._call = model, self._compile(model)
        before = model._compiled_call_impl
        # As nn.Module.compile(), but by hand, because that cannot be undone or restored.
        model._compiled_call_impl = self._call
        try:
            yield
        finally:
            model._compiled_call_impl = before

    @contextmanager
    def paused(self, model: nn.Module) -> Iterator[None]:
        """Call `model` uncompiled within the block, nested in a block that compiles."""
        meanwhile, model._compiled_call_impl = model._compiled_call_impl, None
        try:
            yield
        finally:
            model._compiled_call_impl = meanwhile

    def _compile(self, model: nn.Module) -> Call:
        return torch.compile(model._call_impl, **self._options)


def check_compilation(backend: str, mode: str | None) -> None:
    """Raise `ValueError` unless torch has this backend, and inductor this mode."""
    from torch import _dynamo as dynamo  # takes seconds, so only where needed

    if backend not in dynamo.list_backends(exclude_tags=()):
        raise ValueError(
            f"torch_compile_backend={backend!r} is not known; torch has {', '.join(dynamo.list_backends())}, and for "
            "debugging aot_eager and eager"
        )
    if mode is None:
        return
    if backend != "inductor":
        raise ValueError(
            f"torch_compile_mode={mode!r} is a mode of inductor, and torch_compile_backend={backend!r} would ignore "
            "it; leave one of them out"
        )
    from torch import _inductor as inductor

    known = list(inductor.list_mode_options())
    if mode not in known:
        raise ValueError(f"torch_compile_mode={mode!r} is not known; choose one of {', '.join(known)}")
