"""Measure the memory of a stage of a run, and recognise and clean up after out-of-memory errors."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")

Metrics = dict[str, int]
ReadMemory = Callable[[], Metrics]


class MemoryMeter:
    """Measures stages of a run; only the outermost counts, so training includes its evaluations.

    Host memory is that of the whole process (resident set), as the kernel counts it. On Linux its peak is that of the
    stage; elsewhere the kernel reports only how much the stage raised the peak of the whole run. There the allocated
    difference is missing. For an accelerator, memory is what torch's allocator handed out.
    """

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device, self._is_on, self._is_busy = device, is_on, False
        if is_on and device.type == "cpu" and not _STATUS.exists() and find_spec("resource") is None:
            raise ValueError(
                "skip_memory_metrics=False needs a system that tells a process its memory, by /proc or getrusage; set "
                "skip_memory_metrics=True"
            )

    @contextmanager
    def stage(self, name: str) -> Iterator[ReadMemory]:
        """Measure a stage.

        Args:
            name: prefix of the metrics' names.

        Returns:
            A function for the metrics, in bytes, to call within the block. `<name>_mem_cpu_alloc_delta` is what the
            stage still holds; `<name>_mem_cpu_peaked_delta` is how much more it held at its peak. With `gpu` they are
            the same of an accelerator. The metrics are empty inside another stage.
        """
        if not self._is_on or self._is_busy:
            yield dict
            return
        self._is_busy = True
        gc.collect()
        gauges = [gauge for gauge in (_host_gauge(), _device_gauge(self._device)) if gauge is not None]

        def metrics() -> Metrics:
            gc.collect()
            return {f"{name}_mem_{key}": value for gauge in gauges for key, value in gauge().items()}

        try:
            yield metrics
        finally:
            self._is_busy = False


def _host_gauge() -> ReadMemory | None:
    if not _STATUS.exists():
        return _peak_gauge()
    with suppress(OSError):  # without permission, the peak is that of the whole run so far
        _RESET.write_text("5")
    begin = _resident()["VmRSS"]

    def read() -> Metrics:
        now = _resident()
        return {"cpu_alloc_delta": now["VmRSS"] - begin, "cpu_peaked_delta": max(now["VmHWM"] - now["VmRSS"], 0)}

    return read


def _resident() -> dict[str, int]:
    with open(_STATUS, "rb", buffering=0) as file:  # at each log: the two lines are found without a look at the others
        content = file.read()
    found = {}
    for name in ("VmHWM", "VmRSS"):
        _, is_there, rest = content.partition(b"\n%s:" % name.encode())
        if is_there:
            found[name] = int(rest.split(None, 1)[0]) * 1024
    return found


def _peak_gauge() -> ReadMemory | None:
    if find_spec("resource") is None:
        return None
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes

    begin = peak()
    return lambda: {"cpu_peaked_delta": peak() - begin}


def _device_gauge(device: torch.device) -> ReadMemory | None:
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if hasattr(module, "current_allocated_memory"):  # a Mac's, which reports no peak
        begin = module.current_allocated_memory()
        return lambda: {"gpu_alloc_delta": module.current_allocated_memory() - begin}
    if not hasattr(module, "reset_peak_memory_stats"):  # XLA's: the compiler has planned the usage
        return None
    module.reset_peak_memory_stats(device)
    begin = module.memory_allocated(device)

    def read() -> Metrics:
        now = module.memory_allocated(device)
        return {"gpu_alloc_delta": now - begin, "gpu_peaked_delta": max(module.max_memory_allocated(device) - now, 0)}

    return read


def memory_in_use(devices: Iterable[torch.device]) -> tuple[int | None, int | None]:
    """Return the bytes that are allocated now on the fullest of some devices, and the greatest peak; None if unknown.

    Of an accelerator it is what torch's allocator handed out, and the peak since the process began or since the peak
    was last reset. Of the CPU it is the memory of this process. No sync.
    """
    pairs = [_in_use(device) for device in devices]
    now, peaks = [now for now, _ in pairs if now is not None], [peak for _, peak in pairs if peak is not None]
    return max(now, default=None), max(peaks, default=None)


def _in_use(device: torch.device) -> tuple[int | None, int | None]:
    if device.type == "cpu":
        resident = _resident() if _STATUS.exists() else {}
        return resident.get("VmRSS"), resident.get("VmHWM")
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:  # a device type without a module, such as meta
        return None, None
    if hasattr(module, "current_allocated_memory"):  # a Mac's
        return module.current_allocated_memory(), None
    if not hasattr(module, "max_memory_allocated"):  # XLA's
        return None, None
    return module.memory_allocated(device), module.max_memory_allocated(device)


# Allocators and libraries that raise a plain RuntimeError say one of these.
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on the host
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # from cuDNN, when its work space does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device, or the host, ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY_MESSAGES)


def free_memory(error: BaseException, device: torch.device) -> None:
    """Free the locals in the frames of a caught exception, and release the device's cached memory."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
