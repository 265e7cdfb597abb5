"""Look whether data sets and collator can be sent to the processes that load data."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

from tr_core.preflight.raised import last_line
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


class _Sink(io.RawIOBase):
    """Counts bytes and keeps none: a data set may be large."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        length = memoryview(data).nbytes
        self.size += length
        return length


def check_pickling(subject: Subject) -> Iterator[Problem]:
    """Pickle what each loading process is sent where processes are started anew (spawn, forkserver)."""
    args, trainer = subject.args, subject.trainer
    workers = args.dataloader_num_workers
    method = args.dataloader_multiprocessing_context or _default_method()
    if workers == 0 or method == "fork":
        return
    subject.progress(f"pickling the data for {workers} loading processes ({method})")
    sent = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    sent |= {f"eval_dataset ({prefix})": dataset for prefix, dataset in subject.evaluation_sets().items()}
    sizes = {}
    for name, value in sent.items():
        try:
            sizes[name] = pickled_bytes(value)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            if "through inheritance" in str(error):  # locks and shared values: they may be sent at a process's start
                continue
            yield Problem(
                "T404",
                f"{name} ({_describe(value)}) cannot be sent to dataloader_num_workers={workers} processes that are "
                f"started by {method}: {last_line(error)}. Use functions and classes defined at the top of a module, "
                "open files on first use, or set dataloader_num_workers=0",
                subject.origin("dataloader_num_workers"),
            )
    subject.figures |= {"workers": workers, "worker_bytes": sizes.get("train_dataset", 0)}


def _default_method() -> str:
    # Asking for the method in force would fix it, and a later `set_start_method` would fail.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def pickled_bytes(value: Any) -> int:
    """Return the size of `value` pickled, without holding it.

    Raises:
        Exception: it cannot be pickled.
    """
    sink = _Sink()
    buffered = io.BufferedWriter(sink)
    pickle.Pickler(buffered, pickle.HIGHEST_PROTOCOL).dump(value)
    buffered.flush()
    return sink.size


def _describe(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    code = getattr(value, "__code__", None)
    if name is None or code is None:
        return type(value).__name__
    return f"{name} of {code.co_filename}:{code.co_firstlineno}"
