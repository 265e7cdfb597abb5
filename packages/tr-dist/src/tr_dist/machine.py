"""Describe what this machine offers for training, and whether the launch environment is sound.

The description includes which GPU is which CUDA device, and why.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from tr_dist.environment import LaunchEnvironment, lone_device, rank_device, read_environment
from tr_dist.gpus import Numbering, PhysicalGPU, SmiError, number_gpus, read_physical_gpus
from tr_dist.rendezvous import meeting_place


def describe_gpus(environ: Mapping[str, str], problems: list[str], *, timeout_s: float = 20.0) -> Iterator[str]:
    """Describe which CUDA device each GPU of nvidia-smi is, hidden ones too.

    If torch sees the devices, its numbers are used, otherwise the meaning of the variables.

    Args:
        environ: the variables.
        problems: a list that problems are appended to.
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
    return "unknown" if None in numbering.devices else "hidden"


def _seen_by_torch() -> dict[str, int]:
    """Return the number of each CUDA device by its UUID without `GPU-`; empty if torch sees none, or a MIG device."""
    if not torch.cuda.is_available():
        return {}
    facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {str(device.uuid).removeprefix("GPU-"): index for index, device in enumerate(facts)}


_GIB = 2**30
_OPTIONAL = ("accelerate", "deepspeed", "torch_xla", "transformers")


def describe(problems: list[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the titles of what there is, each with its facts, one a line.

    Args:
        problems: a list that problems are appended to which would stop a training run.
    """
    yield "machine", _machine()
    yield "devices", _devices(problems)
    yield "communication", _communication()
    yield "packages", _packages()
    yield "launch environment", _launch(problems)


def _machine() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield f"Python {platform.python_version()} ({sys.executable})"
    yield f"{usable} usable CPU cores, {torch.get_num_threads()} torch threads a process"


def _devices(problems: list[str]) -> Iterator[str]:
    yield from describe_gpus(os.environ, problems)
    built = f"torch is built with CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    if not torch.cuda.is_available():
        yield f"cuda: none usable ({built})"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}: {facts.name}, {facts.total_memory / _GIB:.1f} GiB, compute capability "
            f"{facts.major}.{facts.minor}, {_computes(torch.device('cuda', index), problems)}"
        )
    if torch.backends.mps.is_available():
        yield f"mps: {_computes(torch.device('mps'), problems)}"
        given = os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "not set")
        yield f"PYTORCH_ENABLE_MPS_FALLBACK: {given} (1 computes on the CPU what MPS has not, else that is an error)"
    yield f"cpu: {_computes(torch.device('cpu'), problems)}"


def _computes(device: torch.device, problems: list[str]) -> str:
    """Multiply two small matrices: a driver may list a device that does not work."""
    try:
        product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
        if float(product.sum()) == 512.0:
            return "computes"
        problem = "multiplies wrongly"
    except RuntimeError as error:
        problem = f"cannot compute: {str(error).splitlines()[0]}"
    problems.append(f"{device} {problem}; hide it with CUDA_VISIBLE_DEVICES, or repair its driver")
    return problem


def _communication() -> Iterator[str]:
    if not dist.is_available():
        yield "torch is built without torch.distributed: one process only"
        return
    for name in ("gloo", "nccl", "mpi", "xccl"):
        yield f"{name}: {'in this torch' if dist.is_backend_available(name) else 'not in this torch'}"


def _packages() -> Iterator[str]:
    yield f"torch {torch.__version__}"
    for name in _OPTIONAL:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"


def _launch(problems: list[str]) -> Iterator[str]:
    try:
        environment = read_environment()
    except ValueError as error:
        problems.extend(line.strip() for line in str(error).splitlines()[1:])
        yield "cannot be used: see the problems below"
        return
    yield _who(environment)
    try:
        device = lone_device() if environment.launcher == "none" else rank_device(environment)
        yield f"this process would compute on {device}"
    except ValueError as error:
        problems.append(str(error))
        yield "no device for this process: see the problems below"


def _who(environment: LaunchEnvironment) -> str:
    if environment.launcher == "none":
        return "no launcher: a training run started here is one process"
    return (
        f"{environment.launcher}: rank {environment.rank} of {environment.world_size}, local rank "
        f"{environment.local_rank}, meeting at {meeting_place(environment)}, restart "
        f"{environment.restart_count}"
    )
