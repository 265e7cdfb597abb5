"""Estimate the floating-point operations of training a model, from its parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tr_core.model_io import main_input_name


class ModelFacts(NamedTuple):
    """What a walk over a model's parameters finds.

    Attributes:
        per_position: floating-point operations of forward and backward for one position of the input (a token); None
            if an estimate from the parameters would be wrong.
        per_target: the same for one position of a decoder's own input; 0 without an encoder beside it.
        devices: where the parameters are.
        dtype: type of most of the floating-point ones that are multiplied; None without any.
    """

    per_position: float | None
    per_target: float
    devices: frozenset[torch.device]
    dtype: torch.dtype | None


def look_at(model: nn.Module) -> ModelFacts:
    """Walk over a model's parameters, in the order of its modules, which is taken for that of its forward.

    A parameter takes part in two operations (a product and a sum) of the forward for each position; in two more of
    the backward if it is trainable; and in two more if the gradient of its input is needed: a module before it is
    trainable. So all trainable weights count 6 (the 6ND of the field), frozen ones after trainable ones 4, and others
    2. What a table of embeddings looks up costs nothing; an output layer that is tied to it counts. Of a mixture of
    experts, those that a position goes to count. The products of attention scores do not, and neither does what
    activation checkpointing computes again.

    With an encoder and a decoder, the encoder's count for positions of the input, and the others for targets, but for
    the keys and values that the decoder makes of the encoder's output. There is no estimate for models with images or
    sounds among their inputs, whose parts see other numbers of positions, and for weights packed into buffers.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    config = getattr(model, "config", None)
    share, needs_gradient = _share_of_experts(config), False
    is_known, seen = _is_text_only(model, config), set[int]()
    encoder, totals = _encoder(model), [0.0, 0.0]
    devices, sizes = set(), Counter[torch.dtype]()
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        is_known = is_known and "qweight" not in module._buffers
        if not own:
            continue
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        is_targets = encoder is not None and not name.startswith(f"{encoder}.") and not _READS_ENCODER.search(name)
        factor = 2 * share if share < 1 and ".experts" in f".{name}" else 2
        for parameter in own:
            devices.add(parameter.device)
            if parameter.is_floating_point() and not is_table:
                sizes[parameter.dtype] += parameter.numel()
            if not is_table and id(parameter) not in seen:
                seen.add(id(parameter))
                totals[is_targets] += factor * _size(parameter) * (1 + parameter.requires_grad + needs_gradient)
        needs_gradient = needs_gradient or any(parameter.requires_grad for parameter in own)
    most = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
    per_position, per_target = totals if is_known and any(totals) else (None, 0.0)
    return ModelFacts(per_position, per_target, frozenset(devices), most)


# Keys and values of a decoder's attention to the encoder, as BART's and its kin, and T5's are called.
_READS_ENCODER = re.compile(r"\.(encoder_attn\.[kv]_proj|EncDecAttention\.[kv])(\.|$)")


def has_targets(model: nn.Module) -> bool:
    """Whether a model has an encoder and a decoder, which see positions of different inputs."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _encoder(model: nn.Module) -> str | None:
    """Return the name of the encoder beside a decoder, None without one."""
    get = getattr(model, "get_encoder", None) if has_targets(model) else None
    encoder = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if module is encoder), None)


def _size(parameter: torch.Tensor) -> int:
    """Return the number of a parameter's elements: of all ranks if it is sharded, unpacked if it is quantized."""
    packed = getattr(getattr(parameter, "quant_state", None), "shape", None)  # bitsandbytes' 4 bits
    if packed is not None:
        return int(torch.Size(packed).numel())
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())  # DeepSpeed's third stage


def _share_of_experts(config: Any) -> float:
    """Return which share of a mixture's experts a position goes to; 1 without a mixture."""
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(config, name, None))), None)
    return chosen / experts if isinstance(chosen, int) and isinstance(experts, int) else 1.0


def _is_text_only(model: nn.Module, config: Any) -> bool:
    others = ("vision_config", "audio_config", "encoder")
    is_text = not has_targets(model) or (main_input_name(model) == "input_ids" and _encoder(model) is not None)
    return is_text and all(getattr(config, name, None) is None for name in others)


def num_targets(inputs: Any, name: str) -> int:
    """Count the positions of a decoder's own input, padding included: those of the labels, or as many as of the input.

    A decoder that classifies sees the input itself.
    """
    for key in ("decoder_input_ids", "labels") if isinstance(inputs, Mapping) else ():
        given = inputs.get(key)
        if isinstance(given, torch.Tensor) and given.dim() == 2 and not given.is_floating_point():
            return given.numel()
    return num_positions(inputs, name)


def num_positions(inputs: Any, name: str) -> int:
    """Count the positions of a batch's main input, padding included: integers, or vectors of `inputs_embeds`."""
    if not isinstance(inputs, Mapping):
        return 0
    main, vectors = inputs.get(name), inputs.get("inputs_embeds")
    if isinstance(main, torch.Tensor) and not main.is_floating_point():
        return main.numel()
    return vectors.numel() // max(vectors.shape[-1], 1) if isinstance(vectors, torch.Tensor) and vectors.dim() else 0
