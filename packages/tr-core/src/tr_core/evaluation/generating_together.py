"""Have ranks that share one model's weights generate together: none stops making forwards before all are done.

A rank that stopped earlier would leave the others waiting for its shard of the weights. `generate` of transformers goes
on if its option `synced_gpus` says so. Nothing of transformers is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tr_core.protocols import Strategy

SYNCED, CRITERIA = "synced_gpus", "stopping_criteria"


@contextmanager
def generating_together(options: dict[str, Any], model: Any, strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Surround a generation, and give the options for it: as they are, but where ranks have to go on for each other.

    Args:
        options: what `generate` is to be called with.
        model: what generates; one around another, as an adapter's, may pass on what it does not name itself.
        strategy: whether a forward is an exchange between the ranks.
    """
    part = _knowing(model) if strategy.forwards_together else None
    if part is None or strategy.world_size == 1:
        yield options if part is None else {SYNCED: False, **options}
        return
    together = {SYNCED: True, **options}
    ended = _Ended()
    if CRITERIA in _parameters(part):
        together[CRITERIA] = [*(options.get(CRITERIA) or ()), ended]
    handle = part.register_forward_pre_hook(ended.before_forward, with_kwargs=True)
    try:
        yield together
    finally:
        handle.remove()


class _Ended:
    """Has a rank that is done make one forward over and over, while others generate: the first one it made too many.

    By itself transformers has each of them take one token more, beyond the length that the rows may have. A model with
    a table of positions fails there, and the cache grows.

    It is a stopping criterion that never stops. Criteria are asked after each forward but those too many.
    """

    def __init__(self) -> None:
        self._asked, self._forwards = False, 0
        self._last: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        self._asked, self._forwards = True, 0
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._forwards += 1
        if not self._asked or self._forwards == 1:
            self._last = (inputs, options)
            return None
        return self._last if _take_back(self._last[1]) else None


def _knowing(model: Any) -> nn.Module | None:
    """Return the model, or the one inside, whose `generate` knows how to go on; None if there is none."""
    own = _parameters(model)
    if SYNCED not in own and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        return None
    for part in model.modules():
        if SYNCED in _parameters(part):
            return getattr(part.generate, "__self__", part)  # some show as theirs what a module inside has
    return None


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    generate = getattr(model, "generate", None)
    return inspect.signature(generate).parameters if callable(generate) else {}


def _take_back(options: Mapping[str, Any]) -> bool:
    """Take what a forward added to its cache out again, and say whether that could be done."""
    cache = options.get("past_key_values")
    tokens = options.get("decoder_input_ids", options.get("input_ids"))
    if cache is None:
        return True
    # An encoder's states, in a cache of their own, are added once.
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    # Others have forgotten what they would need again, or hold room for a length.
    if tokens is None or not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    cache.crop(-tokens.shape[1])
    return True
