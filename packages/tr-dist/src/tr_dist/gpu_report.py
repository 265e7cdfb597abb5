"""Put into words which GPU of this machine is which CUDA device, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tr_dist.gpu_numbers import Numbering, number_gpus
from tr_dist.physical_gpus import PhysicalGPU, SmiError, read_physical_gpus


def describe_gpus(environ: Mapping[str, str], problems: list[str], *, timeout_s: float = 20.0) -> Iterator[str]:
    """Say what CUDA's variables make of the GPUs that nvidia-smi lists, hidden ones too.

    Where torch sees the devices, what it sees is said, else what the variables mean.

    Args:
        environ: the variables.
        problems: where problems are added.
        timeout_s: seconds that nvidia-smi gets.
    """
    with_mig = environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    try:
        gpus = read_physical_gpus(timeout_s=timeout_s, with_mig=with_mig)
    except SmiError as error:
        problems.append(f"{error}; repair the driver, or hide the GPU with CUDA_VISIBLE_DEVICES")
        gpus = []
    if not gpus:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            if name in environ:
                yield f"{name}={environ[name]!r}"
        yield "nvidia-smi lists no GPU"
        return
    numbering = number_gpus(gpus, environ)
    problems.extend(numbering.problems)
    yield from numbering.why
    seen = _seen_by_torch()
    for gpu in gpus:
        device = _device_of(gpu, numbering, seen)
        yield f"GPU {gpu.index} of nvidia-smi: {gpu.name}, {gpu.bus_id}, {gpu.uuid}: {device}"


def _device_of(gpu: PhysicalGPU, numbering: Numbering, seen: dict[str, int]) -> str:
    if seen:
        number = seen.get(gpu.uuid.removeprefix("GPU-"))
        return "hidden" if number is None else f"cuda:{number}"
    if gpu in numbering.devices:
        return f"cuda:{numbering.devices.index(gpu)}"
    return "cannot be told" if None in numbering.devices else "hidden"


def _seen_by_torch() -> dict[str, int]:
    """Return the number of each CUDA device by its UUID without `GPU-`; empty if torch sees none, or a part of one."""
    if not torch.cuda.is_available():
        return {}
    facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {str(device.uuid).removeprefix("GPU-"): index for index, device in enumerate(facts)}
