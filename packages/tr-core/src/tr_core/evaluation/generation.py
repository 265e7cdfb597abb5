"""Generate in an evaluation: settings, options of a call, and the longest possible row.

Ranks that share one model's weights keep calling forward until all of them have finished. A rank that stopped earlier
would block the others, which need its shard of the weights. The option `synced_gpus` makes the `generate` of
transformers continue.

This file does not import transformers. A model needs `generate`, and `generation_config` if it has settings.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_args import Seq2SeqTrainingArguments
from tr_core.evaluation.gather import PADDING
from tr_core.protocols import Strategy
from tr_core.signatures import names_argument, parameters_of

# New tokens of transformers' `generate` when no setting limits them.
DEFAULT_NEW_TOKENS = 20


def load_generation_config(given: Any, model: nn.Module) -> Any:
    """Return generation settings: a copy of an object, or those in a dict, a file, a folder or a model's repository.

    Raises:
        ValueError: there are no such settings, or they are invalid.
    """
    own = getattr(model, "generation_config", None)
    if own is None and isinstance(given, str | Path | Mapping):
        raise ValueError(
            f"generation_config={given!r} says where or what the settings are, but {type(model).__name__} has no "
            "generation_config of its own that tells their class; pass an object"
        )
    try:
        settings = _build_settings(given, type(own))
        if hasattr(settings, "validate"):
            strict = names_argument(settings.validate, "strict")
            settings.validate(**({"strict": True} if strict else {}))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"generation_config={given!r} cannot be used: {error}. It must be a settings object, a dict of settings, "
            "or the name or path of a model or file that has some, and be valid: it is saved with the model"
        ) from error
    return settings


def _build_settings(given: Any, kind: Any) -> Any:
    if isinstance(given, Mapping):
        return kind(**given)
    if not isinstance(given, str | Path):
        return copy.deepcopy(given)
    path = Path(given)
    if path.is_file():
        return kind.from_pretrained(path.parent, config_file_name=path.name)
    return kind.from_pretrained(given)


def call_options(args: Seq2SeqTrainingArguments, given: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Return the options of `generate`: those of a call, and the rest from the arguments."""
    options = {name: value for name, value in given.items() if value is not None}
    says_length = "max_length" in options or "max_new_tokens" in options
    if args.generation_max_length is not None and not says_length:
        options["max_length"] = args.generation_max_length
    if args.generation_num_beams is not None:
        options.setdefault("num_beams", args.generation_num_beams)
    own_settings = options.get("generation_config", settings)
    if "max_length" in options and "max_new_tokens" not in options and _setting("max_new_tokens", {}, own_settings):
        options["max_new_tokens"] = None  # it would override the requested length
    return options


def check_generation_options(given: Mapping[str, Any], model: nn.Module) -> None:
    """Raise for options unknown to a model's `generate` and its settings, if nothing will be generated.

    In a generation `generate` itself checks them.
    """
    generate = getattr(model, "generate", None)
    known = set(parameters_of(generate)) if generate is not None else set()
    known |= {"max_length", "max_new_tokens", "num_beams"}
    settings = getattr(model, "generation_config", None)
    unknown = [name for name in given if name not in known and not hasattr(settings, name)]
    if unknown:
        raise TypeError(
            f"unknown arguments {', '.join(unknown)}: they belong neither to evaluate and predict nor to generation"
        )


def longest_row(options: Mapping[str, Any], settings: Any, inputs: Mapping[str, Any], *, has_encoder: bool) -> int:
    """Return the most tokens of a generated row, its prompt included; 0 if unknown."""
    prompt = inputs.get("decoder_input_ids" if has_encoder else "input_ids")
    prompt_length = prompt.shape[1] if isinstance(prompt, torch.Tensor) else int(has_encoder)
    settings = options.get("generation_config", settings)
    new_tokens, length = _setting("max_new_tokens", options, settings), _setting("max_length", options, settings)
    if new_tokens is not None:
        return prompt_length + new_tokens
    if length is not None:
        return length
    return prompt_length + DEFAULT_NEW_TOKENS if hasattr(settings, "max_length") else 0


def pad_rows(tokens: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    """Return token rows with at least `length` columns, padded at the end.

    Raises:
        ValueError: there is no padding token.
    """
    missing = length - tokens.shape[-1]
    if missing <= 0:
        return tokens
    if fill is None:
        raise ValueError(
            f"rows of {tokens.shape[-1]} tokens are to be padded to {length}, but neither the tokenizer nor "
            "the model's configuration has a pad_token_id or an eos_token_id; set one"
        )
    return nn.functional.pad(tokens, (0, missing), value=fill)


def padding_token(*sources: Any) -> int | None:
    """Return the padding token, or the end token without one, of the first source that has either."""
    for source in sources:
        for holder in (source, getattr(source, "tokenizer", None)):
            for token in _tokens(holder):
                return token
    return None


def _tokens(source: Any) -> Iterator[int]:
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(source, name, None)
        token = token[0] if isinstance(token, list | tuple) and token else token
        if isinstance(token, int) and token != PADDING:
            yield token


def _setting(name: str, options: Mapping[str, Any], settings: Any) -> Any:
    return options[name] if name in options else getattr(settings, name, None)


SYNCED, CRITERIA = "synced_gpus", "stopping_criteria"


@contextmanager
def synced_generation(options: dict[str, Any], model: Any, strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Surround a generation, and yield its options, changed if ranks must continue for each other."""
    part = _part_with_sync(model) if strategy.forward_is_collective else None
    if part is None or strategy.world_size == 1:
        yield options if part is None else {SYNCED: False, **options}
        return
    together = {SYNCED: True, **options}
    ended = _FinishedRank()
    if CRITERIA in _parameters(part):
        together[CRITERIA] = [*(options.get(CRITERIA) or ()), ended]
    handle = part.register_forward_pre_hook(ended.before_forward, with_kwargs=True)
    try:
        yield together
    finally:
        handle.remove()


class _FinishedRank:
    """Makes a finished rank repeat one forward while others generate: its first surplus one.

    By default transformers adds one token at each surplus forward, beyond the longest row. A model with a table of
    positions fails there, and the cache grows.

    It is a stopping criterion that never stops. Criteria are called after each forward except the surplus ones.
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
        return self._last if _crop_cache(self._last[1]) else None


def _part_with_sync(model: Any) -> nn.Module | None:
    """Return the model, or the one inside, whose `generate` takes `synced_gpus`; None if there is none."""
    own = _parameters(model)
    if SYNCED not in own and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        return None
    for part in model.modules():
        if SYNCED in _parameters(part):
            return getattr(part.generate, "__self__", part)  # some wrappers expose the method of an inner module
    return None


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    generate = getattr(model, "generate", None)
    return parameters_of(generate) if callable(generate) else {}


def _crop_cache(options: Mapping[str, Any]) -> bool:
    """Remove what a forward added to its cache; return whether that was possible."""
    cache = options.get("past_key_values")
    tokens = options.get("decoder_input_ids", options.get("input_ids"))
    if cache is None:
        return True
    # An encoder's states, in a separate cache, are added once.
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    # Other caches have dropped states that cropping needs, or have a fixed length.
    if tokens is None or not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    cache.crop(-tokens.shape[1])
    return True
