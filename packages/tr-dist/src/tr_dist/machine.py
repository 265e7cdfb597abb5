"""Describe what this machine offers for training, and whether the launch environment is sound."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from tr_dist.environment import LaunchEnvironment, lone_device, rank_device, read_environment
from tr_dist.mesh.direction import far_neighbours
from tr_dist.rendezvous import meeting_place

_GIB = 2**30
_OPTIONAL = ("accelerate", "deepspeed", "torch_xla", "transformers")


def describe(problems: list[str], near: int = 1) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the titles of what there is, each with its facts, one a line.

    Args:
        problems: a list that problems are appended to which would stop a training run.
        near: number of processes in a row that are to be on one machine.
    """
    yield "machine", _machine()
    yield "devices", _devices(problems)
    yield "communication", _communication()
    yield "packages", _packages()
    yield "launch environment", _launch(problems, near)


def _machine() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield f"Python {platform.python_version()} ({sys.executable})"
    yield f"{usable} usable CPU cores, {torch.get_num_threads()} torch threads a process"


def _devices(problems: list[str]) -> Iterator[str]:
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        yield f"{name}={os.environ[name]!r}" if name in os.environ else f"{name} is not set"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    listed = re.split(",? *(?:-1|NoDevFiles)", os.environ.get("CUDA_VISIBLE_DEVICES", ""))[0]
    if 0 < count < len(listed.split(",")):
        problems.append(
            f"CUDA_VISIBLE_DEVICES={listed!r}: {count} visible; CUDA ends the list at the first wrong entry"
        )
    if not count:
        built = (
            f"torch is built with CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        )
        yield f"cuda: none usable ({built})"
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}: {facts.name} (UUID {facts.uuid}, as nvidia-smi -L lists it), "
            f"{facts.total_memory / _GIB:.1f} GiB, compute capability {facts.major}.{facts.minor}, "
            f"{_computes(torch.device('cuda', index), problems)}"
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
    yield f"torch {torch.__version__} (python -m torch.utils.collect_env lists its libraries, drivers and hidden GPUs)"
    for name in _OPTIONAL:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"


def _launch(problems: list[str], near: int) -> Iterator[str]:
    try:
        environment = read_environment()
    except ValueError as error:
        problems.extend(line.strip() for line in str(error).splitlines()[1:])
        yield "cannot be used: see the problems below"
        return
    yield _who(environment)
    if near > 1:
        is_launched = environment.launcher != "none"
        here = (environment.local_world_size or 0) if is_launched else torch.cuda.device_count()
        far = far_neighbours(near, here, environment.world_size if is_launched else here + 1)
        yield (
            f"warning: {far}"
            if far
            else (
                f"{near} processes in a row compute a sample together: "
                + (
                    f"they are on one machine, of {here} processes"
                    if here
                    else "how many a machine has is not known here"
                )
            )
        )
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
