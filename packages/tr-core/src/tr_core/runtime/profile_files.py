"""Write what was recorded of some steps: a trace, a snapshot of CUDA's memory, and the operators that took most."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

STEP = "step "
"""Begins the label of each step in a trace."""
MOST_ALLOCATIONS = 100_000
NUM_DEAREST = 10


class MemoryHistory:
    """Records the allocations of a CUDA device, unless that is recorded anyway: then it is only written."""

    def __init__(self) -> None:
        self._is_ours = not torch._C._cuda_isHistoryEnabled()  # pyright: ignore[reportAttributeAccessIssue] - CUDA builds
        if self._is_ours:
            # Frames of C++ would take minutes to be named.
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def end(self, target: Path | None) -> bool:
        """Write the snapshot, if there is a target, and stop."""
        try:
            if target is not None:
                with _beside(target) as unfinished:
                    torch.cuda.memory._dump_snapshot(str(unfinished))
            return target is not None
        finally:
            if self._is_ours:
                torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a path that becomes `target` if the block succeeds; all else in its folder is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
        try:
            yield Path(folder) / target.name
            (Path(folder) / target.name).replace(target)
        finally:
            # torch keeps a file open that it failed to write: removed, it would still fill the disk.
            for left in Path(folder).iterdir():
                os.truncate(left, 0)


def write_trace(recording: profile, target: Path) -> int:
    """Write the trace of a recording as gzipped JSON, and return the bytes of the JSON.

    Raises:
        OSError: it could not be written as a whole.
    """
    with _beside(target) as packed:
        plain = packed.with_name("trace.json")
        recording.export_chrome_trace(str(plain))
        # torch prints that a file could not be written, and raises nothing.
        if not plain.is_file() or not _ends_as_json(plain):
            raise OSError(f"torch did not write the whole of it to {target.parent}; its disk may be full")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as sink:
            shutil.copyfileobj(source, sink, 2**20)
        return plain.stat().st_size


def _ends_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 16, 0))
        return file.read().rstrip().endswith(b"}")


def dearest_operators(averages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the operators with the most time of their own: on the device if it worked at all, else on the host.

    Returns:
        For each `name`, `calls`, `cpu_ms`, `device_ms` and its `share` (0 to 1) of the time of all. Time is an
        operator's own, without that of operators which it calls.
    """
    kernels = [row for row in averages if row.device_type != DeviceType.CPU and not row.is_user_annotation]
    operators = [row for row in averages if row.device_type == DeviceType.CPU and not row.key.startswith(STEP)]
    device_us = sum(row.self_device_time_total for row in kernels)
    time_of = "self_device_time_total" if device_us else "self_cpu_time_total"
    whole_us = device_us or sum(row.self_cpu_time_total for row in operators)
    operators.sort(key=lambda row: getattr(row, time_of), reverse=True)
    return [
        {
            "name": row.key,
            "calls": row.count,
            "cpu_ms": round(row.self_cpu_time_total / 1000, 3),
            "device_ms": round(row.self_device_time_total / 1000, 3),
            "share": round(getattr(row, time_of) / max(whole_us, 1e-9), 4),
        }
        for row in operators[:NUM_DEAREST]
    ]
