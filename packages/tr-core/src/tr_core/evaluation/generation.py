"""Settle how a model generates in an evaluation: its settings, the options of a call, and how long a row can become.

Nothing of a library is imported: a model has `generate`, and `generation_config` if it has settings, as models of
transformers do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core.evaluation.outputs import PADDING

# What `generate` of transformers makes beyond the prompt if nothing says how much.
DEFAULT_NEW_TOKENS = 20


def load_generation_config(given: Any, model: nn.Module) -> Any:
    """Return generation settings: a copy of an object, or what a dict, a file, a folder or a model's name holds.

    Args:
        given: the argument `generation_config`.
        model: whose own settings tell the class of all others.

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
        settings = _made(given, type(own))
        if hasattr(settings, "validate"):
            strict = "strict" in inspect.signature(settings.validate).parameters
            settings.validate(**({"strict": True} if strict else {}))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"generation_config={given!r} cannot be used: {error}. It must be a settings object, a dict of settings, "
            "or the name or path of a model or file that has some, and be valid: it is saved with the model"
        ) from error
    return settings


def _made(given: Any, kind: Any) -> Any:
    if isinstance(given, Mapping):
        return kind(**given)
    if not isinstance(given, str | Path):
        return copy.deepcopy(given)
    path = Path(given)
    if path.is_file():
        return kind.from_pretrained(path.parent, config_file_name=path.name)
    return kind.from_pretrained(given)


def call_options(args: Any, given: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Return what `generate` is called with: what a call gave, and where it did not, what the arguments say.

    Args:
        args: the training arguments.
        given: options of the call; None is as if not given.
        settings: the model's, which options override.
    """
    options = {name: value for name, value in given.items() if value is not None}
    says_length = "max_length" in options or "max_new_tokens" in options
    if args.generation_max_length is not None and not says_length:
        options["max_length"] = args.generation_max_length
    if args.generation_num_beams is not None:
        options.setdefault("num_beams", args.generation_num_beams)
    own_settings = options.get("generation_config", settings)
    if "max_length" in options and "max_new_tokens" not in options and _setting("max_new_tokens", {}, own_settings):
        options["max_new_tokens"] = None  # which would go before the length that was asked for
    return options


def check_options(given: Mapping[str, Any], model: nn.Module) -> None:
    """Raise for options that neither a model's `generate` nor its settings know, where nothing will be generated.

    Where something is, `generate` knows better.

    Raises:
        TypeError: the message names them.
    """
    generate = getattr(model, "generate", None)
    known = set(inspect.signature(generate).parameters) if generate is not None else set()
    known |= {"max_length", "max_new_tokens", "num_beams"}
    settings = getattr(model, "generation_config", None)
    unknown = [name for name in given if name not in known and not hasattr(settings, name)]
    if unknown:
        raise TypeError(
            f"unknown arguments {', '.join(unknown)}: they belong neither to evaluate and predict nor to generation"
        )


def longest_row(options: Mapping[str, Any], settings: Any, inputs: Mapping[str, Any], *, has_encoder: bool) -> int:
    """Return how many tokens a generated row can have, its prompt included; 0 where that is not known.

    Args:
        options: what `generate` is called with.
        settings: the model's, or None.
        inputs: what `generate` is given.
        has_encoder: whether `input_ids` go to an encoder, and are no prompt.
    """
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
    """Return token rows with at least `length` columns, filled up at the end.

    Raises:
        ValueError: there is nothing to fill up with.
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
    """Return the number of the padding token, or the end token where there is none, of the first source that has one.

    Args:
        *sources: tokenizers, processors that hold one, settings and configurations; None is passed over.
    """
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
