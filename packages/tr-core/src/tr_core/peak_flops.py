"""Look up the peak of a device in operations per second, for MFU.

MFU (model FLOPs utilization) is the operations that the model needs per second, divided by the peak of the devices.
Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

import torch

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

    Args:
        device: the device.
        dtype: type of the products; float32 counts as TF32 where torch may use that.
        given: the peak, if a user gave it; else the environment variable TR_PEAK_FLOPS, then the table.

    Raises:
        ValueError: the environment variable is no positive number.
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
        ValueError: it is no positive number.
    """
    text = os.environ.get(PEAK_VARIABLE, "")
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise ValueError(
        f"{PEAK_VARIABLE}={text!r} is no positive number; it is the peak of one device in operations per second, "
        f"such as {PEAK_VARIABLE}=989.5e12"
    )
