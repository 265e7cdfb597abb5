"""Replace parts of a model with kernels of the liger-kernel package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from tr_core.model_io import base_model
from tr_core.signatures import parameters_of


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
