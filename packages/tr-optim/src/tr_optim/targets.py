"""Find the matrices that a low-rank optimizer projects, by the names of modules in a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

ALL_LINEAR = "all-linear"
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Targets:
    """The parameters that target names stand for.

    Attributes:
        parameters: by the path they were found under, in the model's order; a tied one once.
        all_elements: numbers in the model's trainable parameters.
    """

    parameters: Mapping[str, torch.Tensor]
    all_elements: int

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.parameters.values()))

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def describe(self) -> str:
        """Return how many parameters are projected, of how many, and which."""
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        names = list(self.parameters)
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return (
            f"{len(names)} matrices with {elements:,} of {self.all_elements:,} trainable numbers: "
            f"{', '.join(names[:_NAMES_SHOWN])}{more}"
        )


def find_targets(model: nn.Module, names: str | Sequence[str]) -> Targets:
    """Return the trainable matrices that names stand for.

    Matrices are the weights of `nn.Linear` and of transformers' `Conv1D`, and every parameter of three dimensions that
    a module holds itself, such as the stacked weights of experts; but for a stack of one, which is a vector or position
    that is broadcast over a batch, as the class token of vision transformers. Each goes by the path of its module, as
    in `model.layers.0.self_attn.q_proj`, and by its own, with `.weight`; a stack by its own. A name stands for

    1. the module or parameter that has it for a path, with all that is inside it; else
    2. all whose whole path it matches as a regular expression; else
    3. all whose path contains it, unless it would begin or end within a number: `layers.1` is not in `layers.11`.

    `"all-linear"` alone means all. An embedding's matrix is found by its exact path only. If a layer is tied to it, the
    layer's name finds it too, because parameters are compared by identity.

    Args:
        model: where to look.
        names: one name, or several.

    Raises:
        ValueError: a name stands for nothing, or for frozen parameters only.
        TypeError: `names` is neither a string nor a list of strings.
    """
    patterns = [names] if isinstance(names, str) else names
    if not isinstance(patterns, Sequence) or not all(isinstance(name, str) for name in patterns):
        raise TypeError(f"target modules are {names!r}; give a string or a list of strings")
    if not patterns or not all(patterns):
        raise ValueError(f"target modules are {names!r}; name at least one module, or {ALL_LINEAR!r} for all")
    matrices = _matrices(model)
    inside = _inside(matrices)
    found: dict[int, str] = {}
    for pattern in patterns:
        is_all = pattern.replace("_", "-") == ALL_LINEAR
        matched = list(matrices) if is_all else inside.get(pattern) or _matching(pattern, model, matrices)
        if not matched:
            raise ValueError(_nothing_matches(pattern, model, matrices))
        trainable = [path for path in matched if matrices[path].requires_grad]
        if not trainable:
            raise ValueError(
                f"target module {pattern!r} stands for frozen parameters only ({_shown(matched)}); name what is trained"
            )
        for path in trainable:
            found.setdefault(id(matrices[path]), path)
    chosen = {path: matrices[path] for path in matrices if found.get(id(matrices[path])) == path}
    return Targets(chosen, sum(p.numel() for p in model.parameters() if p.requires_grad))


def _matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what can be a target, by path; the same tensor under each of its paths."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name == "weight" and parameter.dim() == 2 and _is_linear(module):
                found[path or name] = parameter
            elif parameter.dim() == 3 and len(parameter) > 1 and not isinstance(module, nn.modules.conv._ConvNd):
                found[f"{path}.{name}" if path else name] = parameter
    return found


def _inside(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths that each path, and each beginning of one, stands for: names may be as many as layers."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), []).append(path)
    return found


def _is_linear(module: nn.Module) -> bool:
    # Conv1D of transformers is a linear layer whose weight is transposed; known by name, so as not to import it.
    # fully_shard gives a module a class of its own, derived from the one it had.
    return isinstance(module, nn.Linear) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def _matching(pattern: str, model: nn.Module, matrices: dict[str, torch.Tensor]) -> list[str]:
    if pattern.endswith(".weight") and pattern.removesuffix(".weight") in matrices:
        return [pattern.removesuffix(".weight")]
    embeddings = {path: module for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    module = embeddings.get(pattern.removesuffix(".weight"))
    if module is not None:
        path = pattern.removesuffix(".weight")
        matrices[path] = module.weight
        return [path]
    try:
        whole = re.compile(pattern)
    except re.error:
        whole = None
    if whole is not None and (matched := [path for path in matrices if whole.fullmatch(path)]):
        return matched
    start = r"(?<!\d)" if pattern[0].isdigit() else ""
    end = r"(?!\d)" if pattern[-1].isdigit() else ""
    part = re.compile(start + re.escape(pattern) + end)
    return [path for path in matrices if part.search(path)]


def _nothing_matches(pattern: str, model: nn.Module, matrices: dict[str, torch.Tensor]) -> str:
    message = f"target module {pattern!r} stands for no matrix"
    others = [path for path, _ in model.named_modules() if path and pattern in path]
    embeddings = [path for path in others if isinstance(model.get_submodule(path), nn.Embedding)]
    if embeddings:
        return f"{message}; an embedding is named by its whole path: {_shown(embeddings)}"
    if others:
        kinds = sorted({type(model.get_submodule(path)).__name__ for path in others})
        return (
            f"{message}: {_shown(others)} ({', '.join(kinds)}) has none of nn.Linear, Conv1D or stacked weights of "
            "three dimensions"
        )
    if not matrices:
        return f"{message}: the model has no nn.Linear, no Conv1D and no stacked weights of three dimensions"
    near = difflib.get_close_matches(pattern, matrices, n=3, cutoff=0.4)
    return f"{message}; {'near it are' if near else 'there are'} {_shown(near or list(matrices))}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
