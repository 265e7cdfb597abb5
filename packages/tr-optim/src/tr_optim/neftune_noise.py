"""Draw the noise of NEFTune, and record the mask and positions that a model was called with.

The recorded inputs give the length of each row to the module that embeds tokens. The random numbers depend on a key
alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tr_optim.projection.basis import has_generator, seeded_generator

_NAMES = ("attention_mask", "position_ids")

# Of each `TokenInputs`, the paths of calls that may still be going on, and what each was given by name; the outermost
# first. Held here because the compiler takes the shape of a tensor that it reaches through a module to be fixed.
_calls: dict[int, list[tuple[str, dict[str, torch.Tensor | None]]]] = {}


class TokenInputs:
    """Record the inputs of the calls around an embedding; the innermost call that has an input decides.

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
            hook = _RecordInputs(id(self), path, _positions_of(module))
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if self._around:
            self._handles.append(self._around[0][1].register_forward_hook(_ClearInputs(id(self))))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _calls.pop(id(self), None)

    def of(self, embedded: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return mask and positions of embedded tokens, each of shape `(..., L)`; None if the call had none."""
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


class _RecordInputs:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> _RecordInputs:
        return _RecordInputs(0, "", {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _RecordInputs, (0, "", {})


class _ClearInputs:
    """A hook after the outermost call; a copy of it is silent."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *call: Any) -> None:  # not by name: the compiler would look at the output
        calls = _calls.get(self._number)
        if calls is not None:
            calls.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> _ClearInputs:
        return _ClearInputs(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ClearInputs, (0,)


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


def _positions_of(module: nn.Module) -> dict[str, int]:
    """Return the positions of a module's arguments, for inputs that are not given by name."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward that cannot be inspected
        return {}
    return {name: names.index(name) for name in _NAMES if name in names}


SEED, RANK, STEP, CALLS = range(4)
"""Places in the counters of a run."""


def draw(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return noise for embedded tokens, uniform within `alpha / sqrt(L * d)`. Nothing is read from the device.

    Args:
        embedded: vectors of d channels, `(B, L, d)` or `(L, d)`.
        mask: positive where there is a token, of the same positions; None for everywhere.
        positions: of each token in its sequence, of the same positions; where they do not grow, another sequence
            begins, with an L of its own. None for one sequence a row.
        alpha: size of the noise.
        generator: of the numbers; None is torch's default one of the device.
    """
    width = embedded.shape[-1]
    if mask is None and positions is None:
        return _uniform(embedded, alpha / math.sqrt(embedded.shape[-2] * width), generator)
    lengths = real_lengths(mask, positions)
    bounds = torch.where(lengths > 0, (lengths * width).rsqrt() * alpha, 0.0)
    return _uniform(embedded, 1.0, generator).mul_(bounds.to(embedded.dtype).view(*embedded.shape[:-1], 1))


def real_lengths(mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """Return for each token the number of tokens in its sequence, in float32, and 0 for padding.

    Args:
        mask: of shape `(..., L)`; see `draw`.
        positions: of the same shape; see `draw`.
    """
    shape = (positions if mask is None else mask).shape  # type: ignore[union-attr]
    length = shape[-1]
    if mask is None:
        real = torch.ones((1, 1), device=positions.device).expand(positions.numel() // length, length)  # type: ignore[union-attr]
    else:
        real = (mask > 0).float().reshape(-1, length)
    if positions is None:
        return (real * real.sum(dim=-1, keepdim=True)).view(shape)
    positions = positions.reshape(-1, length)
    begins = torch.zeros_like(positions)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    sequence = begins.cumsum(dim=-1)
    counts = torch.zeros_like(real).scatter_add_(1, sequence, real)
    return (real * counts.gather(1, sequence)).view(shape)


def seeded(key: Sequence[int], device: torch.device) -> torch.Generator:
    """Return a generator whose numbers depend on `key` alone, on the CPU where torch has none for the device."""
    like = torch.empty(0, device=device if has_generator(device.type) else "cpu")
    return seeded_generator(like, ("neftune", *key))


def _uniform(like: torch.Tensor, bound: float, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None or generator.device.type == like.device.type:
        return torch.empty_like(like).uniform_(-bound, bound, generator=generator)
    drawn = torch.empty(like.shape, dtype=like.dtype).uniform_(-bound, bound, generator=generator)
    return drawn.to(like.device)


@torch.library.custom_op("tr_optim::neftune_noise", mutates_args=("counters",))
def compiled_noise(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    counters: torch.Tensor,
    counts: bool,
) -> torch.Tensor:
    """Draw in a compiled model: one call that the compiler does not look into, whatever the length.

    Args:
        embedded: as of `draw`.
        mask: as of `draw`.
        positions: as of `draw`.
        alpha: as of `draw`.
        counters: seed, rank, step and calls, on the CPU; empty for torch's default generator. Calls are counted up.
        counts: whether this call counts.
    """
    generator = None
    if counters.numel():
        generator = seeded(counters.tolist(), embedded.device)  # on the CPU: nothing is waited for
        counters[CALLS] += counts
    return draw(embedded, mask, positions, alpha, generator)


@compiled_noise.register_fake
def _(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    counters: torch.Tensor,
    counts: bool,
) -> torch.Tensor:
    return torch.empty_like(embedded)
