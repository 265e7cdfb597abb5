"""Record what some optimizer steps spend their time on: a trace, a snapshot of memory, and the dearest operators."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from tr_args import TrainingArguments
from tr_args.types.choices import StepRange
from tr_core.callback import CallbackList
from tr_core.protocols import Collectives
from tr_core.state import TrainerControl, TrainerState
from tr_log import get_logger
from tr_log.phases import PROFILE, active_clock, phase

logger = get_logger("tr_core.trainer")

FOLDER = "profile"
MOST_BATCHES = 100
"""Batches, of training and of evaluations, after which a recording ends: each may take megabytes of memory."""
MOST_BYTES_FOR_A_TABLE = 256 * 2**20
"""Size of an unpacked trace from which its operators are not added up: that takes a minute for each million."""


@contextmanager
def profiled_steps(
    args: TrainingArguments, state: TrainerState, collectives: Collectives, callbacks: CallbackList
) -> Iterator[None]:
    """Record the steps that `profile_steps` names, on rank 0, while a block of training runs.

    The files are written when the last of these steps ends, or when the block ends in their midst, by an exception too.
    What cannot be recorded or written is a warning; it never ends the training.
    """
    if args.profile_steps is None or collectives.rank != 0:
        yield
        return
    folder = Path(args.output_dir).absolute() / FOLDER
    recorder = StepRecorder(args.profile_steps, folder, state, collectives.device, callbacks)
    try:
        yield
    finally:
        recorder.close()


class StepRecorder:
    """Records consecutive steps, once."""

    def __init__(
        self, wanted: StepRange, folder: Path, state: TrainerState, device: torch.device, callbacks: CallbackList
    ) -> None:
        self._wanted, self._folder, self._device, self._callbacks = wanted, folder, device, callbacks
        self._profile: profile | None = None
        self._memory: MemoryHistory | None = None
        self._label: Any = None
        self._first = self._last = self._num_batches = 0
        self._is_step_complete = True
        self._listening: list[tuple[str, Callable[..., None]]] = []
        if self._has_steps(state.global_step, state.max_steps):
            self._listen("on_step_begin", self.on_step_begin)
            self._listen("on_step_end", self.on_step_end)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to record if this is the first step, and label the step in the trace."""
        step = state.global_step + 1
        if self._profile is None and self._wanted.first <= step <= self._wanted.last:
            self._begin(step)
        if self._profile is not None:
            self._end_label()  # of a step that is made again, because memory ran out
            self._last, self._is_step_complete = step, False
            self._label = record_function(f"{STEP}{step}")
            self._label.__enter__()

    def on_batch(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the recording when it has become large."""
        self._num_batches += 1
        if self._num_batches >= MOST_BATCHES:
            self._end(
                f"profile_steps={self._wanted} ends in or after step {self._last}, at {MOST_BATCHES} batches: a longer "
                "trace takes gigabytes and cannot be viewed; name fewer steps, without an evaluation between them"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End the label of a step, and the recording with the last one."""
        if self._profile is None:
            return
        self._end_label()
        self._is_step_complete = True
        if state.global_step >= self._wanted.last:
            self._end()

    def close(self) -> None:
        """End a recording that has begun; say so if none has."""
        if self._profile is not None:
            self._end(f"profile_steps={self._wanted}: training ended in or after step {self._last}")
        elif self._listening:
            logger.warning("profile_steps=%s: training ended before, and no step was recorded", self._wanted)
        self._unlisten()
        self._end_memory(None)  # an interrupt may have prevented it

    def _has_steps(self, at: int, max_steps: int) -> bool:
        """Whether a step is left to record; where not all of them are, log it."""
        wanted = self._wanted
        if wanted.last <= at:
            logger.warning(
                "profile_steps=%s lies before step %d, at which this run resumes: nothing is recorded", wanted, at
            )
            return False
        if wanted.first > max_steps:
            logger.warning("profile_steps=%s lies after the last step, %d: nothing is recorded", wanted, max_steps)
            return False
        if wanted.first <= at or wanted.last > max_steps:
            first, last = max(wanted.first, at + 1), min(wanted.last, max_steps)
            logger.warning("profile_steps=%s: this run makes steps %d to %d of them", wanted, first, last)
        return True

    def _begin(self, step: int) -> None:
        self._first = step
        if torch.autograd._profiler_enabled():
            self._unlisten()
            logger.warning(
                "profile_steps=%s: another profiler is active, and torch has one at a time; nothing is recorded. End "
                "it before step %d, or leave profile_steps out",
                self._wanted,
                step,
            )
            return
        activity = getattr(ProfilerActivity, self._device.type.upper(), ProfilerActivity.CPU)
        recording = profile(activities={ProfilerActivity.CPU, activity} & supported_activities())
        with phase(PROFILE):
            _wait_for(self._device)  # sync: what earlier steps have begun does not belong to the trace
            self._memory = self._try("the memory snapshot", MemoryHistory) if self._device.type == "cuda" else None
            self._profile = self._try("the trace", lambda: _started(recording))
        if self._profile is None:
            self._end_memory(None)
            self._unlisten()
            return
        self._listen("on_micro_batch_end", self.on_batch)
        self._listen("on_prediction_step", self.on_batch)

    def _end(self, why: str = "") -> None:
        """Stop, and write what was recorded."""
        recording, self._profile = self._profile, None
        self._unlisten()
        if why:
            logger.warning("%s", why)
        with phase(PROFILE):
            self._end_label()
            if recording is not None and self._try("the trace", lambda: _stopped(recording)):
                self._write(recording)
            else:
                self._end_memory(None)

    def _write(self, recording: profile) -> None:
        steps = f"step-{self._first}" if self._first == self._last else f"steps-{self._first}-{self._last}"
        trace, snapshot = self._folder / f"{steps}.trace.json.gz", self._folder / f"{steps}.memory.pickle"
        size = self._try("the trace", lambda: write_trace(recording, trace))
        has_snapshot = self._end_memory(snapshot)
        rows = []
        if (size or 0) <= MOST_BYTES_FOR_A_TABLE:
            rows = self._try("the table of operators", lambda: dearest_operators(recording.key_averages())) or []
        files = {"trace": trace} if size else {}
        files |= {"memory": snapshot} if has_snapshot else {}
        if (clock := active_clock()) is not None:
            clock.on_event(
                "profile",
                step=self._last if self._is_step_complete else self._last - 1,
                first=self._first,
                last=self._last,
                complete=self._is_step_complete,
                device=self._device.type,
                operators=rows,
                **{kind: f"{FOLDER}/{path.name}" for kind, path in files.items()},
            )
        logger.info(
            "recorded %s:\n%s", steps.replace("-", " ", 1).replace("-", " to "), "\n".join(self._summary(files, rows))
        )

    def _summary(self, files: dict[str, Path], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
        if "trace" in files:
            yield f"  trace    {files['trace']} (opens at https://ui.perfetto.dev)"
        if "memory" in files:
            yield f"  memory   {files['memory']} (opens at https://docs.pytorch.org/memory_viz)"
        elif self._device.type != "cuda":
            yield f"  memory   no snapshot: torch records one on CUDA only, and this is {self._device.type}"
        if rows:
            yield "  dearest  " + ", ".join(f"{row['name']} {row['share']:.0%}" for row in rows[:3])

    def _end_memory(self, target: Path | None) -> bool:
        history, self._memory = self._memory, None
        return history is not None and bool(self._try("the memory snapshot", lambda: history.end(target)))

    def _end_label(self) -> None:
        label, self._label = self._label, None
        if label is not None:
            self._try("the label of a step", lambda: label.__exit__(None, None, None))

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        """Return what `action` returns; None, and a warning, if it fails."""
        try:
            return action()
        except Exception as error:
            logger.warning(
                "profile_steps=%s: %s was not made: %s: %s; training continues",
                self._wanted,
                what,
                type(error).__name__,
                error,
            )
            return None

    def _listen(self, event: str, method: Callable[..., None]) -> None:
        self._callbacks.listen(event, method)
        self._listening.append((event, method))

    def _unlisten(self) -> None:
        while self._listening:
            self._callbacks.unlisten(*self._listening.pop())


def _started(recording: profile) -> profile:
    recording.start()
    return recording


def _stopped(recording: profile) -> bool:
    recording.stop()
    return True


def _wait_for(device: torch.device) -> None:
    if device.type in ("cuda", "xpu", "mps"):
        torch.get_device_module(device).synchronize()


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
