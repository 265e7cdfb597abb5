"""Estimate the floating-point operations of training a model, and look up how many its devices can do, for MFU.

MFU (model FLOPs utilization) is the operations that the model needs per second, divided by the peak of the devices.
Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tr_core.model_io import main_input_name
from tr_log.events_file import whole_size


class ModelFacts(NamedTuple):
    """What a walk over a model's parameters finds.

    Attributes:
        per_position: floating-point operations of forward and backward for one position of the input (a token); None
            if an estimate from the parameters would be wrong.
        per_target: the same for one position of a decoder's own input; 0 without an encoder beside it.
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
                totals[is_targets] += factor * whole_size(parameter) * (1 + parameter.requires_grad + needs_gradient)
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


class FlopCounter:
    """Count 6 operations per parameter and input element: two for the forward, four for the backward.

    Embeddings do not count. A model without a number of parameters and a main input (`num_parameters`,
    `main_input_name`) counts as 0.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """

    def __init__(self, model: nn.Module) -> None:
        self._input_name: str | None = getattr(model, "main_input_name", None)
        count = getattr(model, "num_parameters", None)
        # Counted once: a walk over the parameters in every micro-batch costs milliseconds.
        is_known = self._input_name is not None and callable(count)
        self._per_element: int = 6 * cast("Callable[..., int]", count)(exclude_embeddings=True) if is_known else 0

    @property
    def knows(self) -> bool:
        """Whether the model has what is needed to count."""
        return self._per_element > 0

    def count(self, inputs: Any) -> int:
        """Return the operations for forward and backward of one batch, from shapes only."""
        if not self._per_element or self._input_name not in inputs:
            return 0
        main = inputs[self._input_name]
        return self._per_element * main.numel() if isinstance(main, torch.Tensor) else 0


# Peaks of devices

PEAK_VARIABLE = "TR_PEAK_FLOPS"
"""Environment variable with the peak of one device, in operations per second; it wins over the table."""

_BF16, _FP16, _TF32, _FP32 = "bfloat16", "float16", "tf32", "float32"


def _peaks(half: float, tf32: float, fp32: float) -> dict[str, float]:
    return {_BF16: half, _FP16: half, _TF32: tf32, _FP32: fp32}


# Dense (not sparse) peaks in 10^12 operations per second, by torch's name of the device without its maker; with
# accumulation in float32. A part of a device (MIG), a laptop's and any other variant is not in it.
# Sources: NVIDIA's data sheets of A10, A10G, A30, A40, A100, B200 (HGX), GB200 (NVL72), GH200, H100, H200, L4, L40,
# L40S, T4 and V100; NVIDIA's white papers on the GA102, Ada and RTX Blackwell architectures for GeForce and RTX A6000.
# Where a sheet gives figures with sparsity only, half of them.
_NVIDIA: tuple[tuple[str, dict[str, float]], ...] = (
    (r"B200", _peaks(2250, 1125, 75)),
    (r"GB200", _peaks(2500, 1250, 80)),
    (r"H200|GH200 .*|H100 \d+GB HBM3", _peaks(989.5, 494.5, 67)),
    (r"H100 NVL|H200 NVL", _peaks(835.5, 417.5, 60)),
    (r"H100 PCIe", _peaks(756.5, 378, 51)),
    (r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", _peaks(312, 156, 19.5)),
    (r"A30", _peaks(165, 82, 10.3)),
    (r"A40", _peaks(149.7, 74.8, 37.4)),
    (r"A10", _peaks(125, 62.5, 31.2)),
    (r"A10G", {_BF16: 70, _FP16: 70, _TF32: 35}),
    (r"L40S", _peaks(362.05, 183, 91.6)),
    (r"L40", _peaks(181.05, 90.5, 90.5)),
    (r"L4", _peaks(121, 60, 30.3)),
    (r"T4", {_FP16: 65, _FP32: 8.1}),
    (r"V100-SXM2-\d+GB", {_FP16: 125, _FP32: 15.7}),
    (r"V100-PCIE-\d+GB", {_FP16: 112, _FP32: 14}),
    (r"V100S-PCIE-32GB", {_FP16: 130, _FP32: 16.4}),
    (r"RTX A6000", _peaks(154.8, 77.4, 38.7)),
    (r"RTX 3090", _peaks(71, 35.6, 35.6)),
    (r"RTX 3080", _peaks(59.5, 29.8, 29.8)),
    (r"RTX 3070", _peaks(40.6, 20.3, 20.3)),
    (r"RTX 4090", _peaks(165.2, 82.6, 82.6)),
    (r"RTX 4080", _peaks(97.5, 48.7, 48.7)),
    (r"RTX 4070 Ti", _peaks(80.2, 40.1, 40.1)),
    (r"RTX 5090", _peaks(209.5, 104.8, 104.8)),
    (r"RTX 5080", _peaks(112.6, 56.3, 56.3)),
    (r"RTX 5070 Ti", _peaks(87.9, 43.9, 43.9)),
    (r"RTX 5070", _peaks(61.7, 30.9, 30.9)),
)
# By the part of TPU_ACCELERATOR_TYPE before the number of cores or chips. Source: Google Cloud's pages of TPU versions.
_TPU = {"v4": 275.0, "v5litepod": 197.0, "v5e": 197.0, "v5p": 459.0, "v6e": 918.0}


def peak_flops(device: torch.device, dtype: torch.dtype | None, given: float | None = None) -> float | None:
    """Return the peak operations per second of a device at a type, dense; None if it is not known.

    `given` is the peak that a user gave; without it TR_PEAK_FLOPS of the environment counts, then the table. float32
    counts as TF32 where torch may use that.

    Raises:
        ValueError: the environment variable is not a positive number.
    """
    given = peak_of_environment() if given is None else given
    if given is not None:
        return given
    known: Mapping[str, float] = {}
    if device.type == "cuda" and torch.version.hip is None:
        known = peaks_of(torch.cuda.get_device_name(device))
    elif device.type == "xla":
        kind = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
        known = {_BF16: _TPU[kind]} if kind in _TPU else {}
    name = str(dtype).removeprefix("torch.")
    if name == _FP32 and device.type == "cuda" and _allows_tf32():
        name = _TF32 if _TF32 in known else _FP32
    peak = known.get(name)
    return None if peak is None else peak * 1e12


def peaks_of(device_name: str) -> Mapping[str, float]:
    """Return the dense peaks of an NVIDIA device in 10^12 per second, by type; empty for an unknown one."""
    short = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", device_name.strip())
    return next((peaks for pattern, peaks in _NVIDIA if re.fullmatch(pattern, short)), {})


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch's newer setting was used, which this function then refuses to read
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"


def peak_of_environment() -> float | None:
    """Return the peak that the environment variable TR_PEAK_FLOPS gives, None without it.

    Raises:
        ValueError: it is not a positive number.
    """
    text = os.environ.get(PEAK_VARIABLE, "")
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise ValueError(
        f"{PEAK_VARIABLE}={text!r} is not a positive number; it is the peak of one device in operations per second, "
        f"such as {PEAK_VARIABLE}=989.5e12"
    )
