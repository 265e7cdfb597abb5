"""Compile the forward of a model during the calls of this Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]


class Compilation:
    """Has a model's calls compiled inside a block, in place: it stays the module it is, with the names it has.

    What was compiled is kept for the next block with the same model. Compiled is the module itself, not what a
    strategy wraps around it: torch then cuts the graph where gradients are exchanged.

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
        # What nn.Module.compile() does; by hand, because that cannot be undone nor put back.
        model._compiled_call_impl = self._call
        try:
            yield
        finally:
            model._compiled_call_impl = before

    @contextmanager
    def paused(self, model: nn.Module) -> Iterator[None]:
        """Have `model` called uncompiled within the block, inside one where its calls are compiled."""
        meanwhile, model._compiled_call_impl = model._compiled_call_impl, None
        try:
            yield
        finally:
            model._compiled_call_impl = meanwhile

    def _compile(self, model: nn.Module) -> Call:
        return torch.compile(model._call_impl, **self._options)


def check_compilation(backend: str, mode: str | None) -> None:
    """Raise `ValueError` unless torch has this backend, and inductor this mode."""
    from torch import _dynamo as dynamo  # seconds, which only those pay who compile

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
