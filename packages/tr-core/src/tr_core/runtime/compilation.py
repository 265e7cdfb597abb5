"""Compile a model's forward while the Trainer uses it, and replace parts of a model with kernels of liger-kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tr_core.model_io import base_model
from tr_core.signatures import parameters_of
from tr_log.phases import doing

Call = Callable[..., Any]


class Compilation:
    """Compiles a model's calls in place inside a block; module and names do not change.

    Compiled code is kept for the next block with the same model. It compiles the module itself, not the strategy's
    wrapper: torch then cuts the graph where gradients are exchanged.

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
        call = self._call
        if self._model is not model or call is None:
            self._model, self._call = model, self._compile(model)
            call = self._saying_so(model, self._call)
        before = model._compiled_call_impl
        # As nn.Module.compile(), but by hand, because that cannot be undone or restored.
        model._compiled_call_impl = call
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

    def _saying_so(self, model: nn.Module, call: Call) -> Call:
        def first(*args: Any, **kwargs: Any) -> Any:
            model._compiled_call_impl = call
            with doing("compiling"):  # torch compiles in the first call
                return call(*args, **kwargs)

        return first

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


def check_liger() -> None:
    """Raise `ImportError` unless the package is installed."""
    if find_spec("liger_kernel") is None:
        raise ImportError(
            "use_liger_kernel=True needs the package liger-kernel, which is not installed; pip install liger-kernel, "
            "or leave use_liger_kernel out"
        )


def apply_liger_kernel(model: nn.Module, options: Mapping[str, Any] | None) -> None:
    """Replace parts of a transformers model, in place and permanently.

    Args:
        model: the model, or an adapter wrapper (PEFT's) around it.
        options: the kernels, such as `{"rope": True}`; None for the package's choice.

    Raises:
        ImportError: the package is not installed.
        ValueError: the package has no kernels for this model, or does not take an option.
    """
    check_liger()
    from liger_kernel.transformers import monkey_patch  # type: ignore[import-not-found]

    inner, options = base_model(model), dict(options or {})
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    # The package itself ignores unknown options.
    if kind not in known:
        raise ValueError(
            f"use_liger_kernel=True, but liger-kernel has no kernels for {type(inner).__name__} (model_type {kind!r}); "
            f"it has them for {', '.join(sorted(known))}; leave use_liger_kernel out"
        )
    takes = [name for name in parameters_of(known[kind]) if name != "model"]
    if unknown := sorted(set(options) - set(takes)):
        raise ValueError(f"liger_kernel_config has {unknown}, which {kind!r} does not take; it takes {takes}")
    monkey_patch._apply_liger_kernel_to_instance(model=inner, **options)
