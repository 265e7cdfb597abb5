"""Note which mask and positions a model was called with, for the module in it that embeds tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_NAMES = ("attention_mask", "position_ids")

# Of each `TokenInputs`, the paths of calls that may still be going on, and what each was given by name; the outermost
# first. Held here because the compiler takes the shape of a tensor that it reaches through a module to be fixed.
_calls: dict[int, list[tuple[str, dict[str, torch.Tensor | None]]]] = {}


class TokenInputs:
    """Knows, while a module embeds, what the calls around it were given: the innermost that was given a thing decides.

    Args:
        model: what is called.
        embedding: a module in it, or itself.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module) -> None:
        self._around = _modules_around(model, embedding)
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Hook into the modules around the embedding."""
        _calls[id(self)] = []
        for path, module in self._around:
            hook = _Note(id(self), path, _places(module))
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if self._around:
            self._handles.append(self._around[0][1].register_forward_hook(_Forget(id(self))))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _calls.pop(id(self), None)

    def of(self, embedded: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return mask and positions of embedded tokens, each of shape `(..., L)`; None where not told."""
        shape = embedded.shape[:-1]
        return self._fitting(_NAMES[0], shape), self._fitting(_NAMES[1], shape)

    def _fitting(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        for _, given in reversed(_calls.get(id(self), [])):
            if name not in given:
                continue
            value = given[name]
            if value is None:
                return None
            if value.shape == shape:
                return value
            # One row for all, or one row of tokens without the dimension of the batch.
            if value.dim() == 2 and value.shape[0] == 1 and value.shape[-1] == shape[-1] and len(shape) <= 2:
                return value.expand(shape) if len(shape) == 2 else value[0]
        return None


class _Note:
    """A hook before a call. A copy of it, made with its module, is silent: there are no calls of number 0."""

    def __init__(self, number: int, path: str, places: dict[str, int]) -> None:
        self._number, self._path, self._places = number, path, places

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = _calls.get(self._number)
        if calls is None:
            return
        while calls and not (self._path != calls[-1][0] and self._path.startswith(calls[-1][0])):
            calls.pop()  # that one is over
        given: dict[str, torch.Tensor | None] = {}
        for name in _NAMES:
            place = self._places.get(name, len(args))
            if name in kwargs or place < len(args):
                value = kwargs[name] if name in kwargs else args[place]
                if value is None or isinstance(value, torch.Tensor):
                    given[name] = value
        calls.append((self._path, given))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        return _Note(0, "", {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _Note, (0, "", {})


class _Forget:
    """A hook after the outermost call; a copy of it is silent."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *call: Any) -> None:  # not by name: the compiler would look at the output
        calls = _calls.get(self._number)
        if calls is not None:
            calls.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forget:
        return _Forget(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forget, (0,)


def _modules_around(model: nn.Module, embedding: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules that the embedding is in, by their path with a dot at its end; the outermost first."""
    paths = ["." + name for name, module in model.named_modules(remove_duplicate=False) if module is embedding and name]
    around: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path = f".{name}." if name else "."
        if any(inner.startswith(path) for inner in paths):
            around[path] = module
    seen: set[int] = set()
    return [(path, module) for path, module in around.items() if not (id(module) in seen or seen.add(id(module)))]


def _places(module: nn.Module) -> dict[str, int]:
    """Return at which place a module's call takes a thing that is not given by name."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward that cannot be inspected
        return {}
    return {name: names.index(name) for name in _NAMES if name in names}
