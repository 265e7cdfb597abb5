"""Measure how busy the processor and the GPU were between two looks, and how much memory is in use."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

SHORTEST_S = 0.1
"""Between two looks: the kernel counts hundredths of a second."""


class MachineLoad:
    """Measure the machine of this process; nothing runs in the background, and nothing waits for a device."""

    def __init__(self) -> None:
        self._asks_gpu = True
        self._before = self._now()

    def read(self) -> dict[str, float]:
        """Return what is known since the last call that returned something; nothing if that was a moment ago.

        `cpu` is the share of all processors that was busy, 0 to 1; `cpu_of_process` is the part of it that this process
        took, its ended children included. `gpu` is the share of the last moment in which its GPU computed, as
        nvidia-smi says it, where nvidia-ml-py is installed. `ram_bytes` is the memory of the machine that is in use.
        """
        (before_s, own_s, busy, total), now = self._before, self._now()
        wall_s = now[0] - before_s
        if wall_s < SHORTEST_S:
            return {}
        self._before = now
        found = {"cpu_of_process": (now[1] - own_s) / wall_s / (os.cpu_count() or 1)}
        if now[3] > total:
            found["cpu"] = (now[2] - busy) / (now[3] - total)
        if (gpu := self._gpu()) is not None:
            found["gpu"] = gpu
        if len(memory := _numbers("/proc/meminfo")) >= 3:  # total, free and available
            found["ram_bytes"] = 1024.0 * (memory[0] - memory[2])
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def _now(self) -> tuple[float, float, float, float]:
        """Return seconds of the clock and of this process, and busy and all ticks of the processors."""
        own_s, ticks = sum(os.times()[:4]), _numbers("/proc/stat")[:8]
        return time.perf_counter(), own_s, sum(ticks) - sum(ticks[3:5]), sum(ticks)  # less idle, and waiting for a disk

    def _gpu(self) -> float | None:
        torch: Any = sys.modules.get("torch")  # this package does not import it
        if not self._asks_gpu or torch is None or not torch.cuda.is_initialized():
            return None
        try:
            return torch.cuda.utilization() / 100
        except Exception:  # without the library that it asks, or of a part of a GPU, which has no such figure
            self._asks_gpu = False
            return None


def _numbers(path: str) -> list[int]:
    """Return the numbers at the beginning of a file of the kernel; none where there is no such file."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            words = file.read(200).split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdigit()]
