"""Write what a run did and when to `events.jsonl` in its output folder: starts, phases, checkpoints, warnings, ends."""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tr_log.drawings import Drawing
from tr_log.formatting import printable, to_json, to_scalar
from tr_log.line_file import LineFile
from tr_log.loggers import get_logger
from tr_log.machine_load import MachineLoad
from tr_log.masking import MASK, is_secret, mask_secrets, mask_words
from tr_log.phases import COMPUTE, active_clock
from tr_log.tracker import EveryEvent, settings

logger = get_logger(__name__)

EVENTS_FILE = "events.jsonl"
LONGEST_TEXT = 2000
MOST_WARNINGS = 200
MOST_DRAWINGS = 50  # of a name; of those after it, fewer and fewer
SHORTEST_SECRET = 6  # a shorter one would be replaced inside ordinary words
_PACKAGES = ("torch", "transformers", "datasets", "accelerate", "deepspeed", "peft", "trl", "numpy", "safetensors")
_OWN = ("tr_args", "tr_log", "tr_core", "tr_ckpt", "tr_optim", "tr_dist")


class EventsFile(EveryEvent):
    """A trainer callback that writes one strict-JSON object a line, on the main process.

    Each object has `event` and `time_s`, seconds since 1970. Events are `start` (of a call of `train`: what runs where,
    by which command and commit, the model, with which arguments, set where), `time` (the step, and since the last one
    the seconds of each phase, and how busy the machine was), `rates` (at each log, the figures of
    `tr_log.phases.PhaseClock.rates`), `updates` (how many were skipped, or not finite, since the last log),
    `evaluation`, `checkpoint`, `warning`, `profile` (what a recording of some steps found), `processes` (of a run with
    several: the seconds of each phase in each), `end`, and, also after the end, `drawing` (a matrix or a table that was
    logged) and `prediction` (its metrics). A resumed run appends; nothing is removed, so that time spent twice shows. A
    new run keeps the file of an earlier one as `events-1.jsonl`.

    A `time` event is written a quarter of a second after the last one at the soonest, in a long run later: after a kill
    the last one tells when the run was alive.
    """

    def __init__(self) -> None:
        self._file: LineFile | None = None
        self._path: Path | None = None
        self._due_s = float("inf")
        self._began_s = 0.0
        self._rates: dict[str, float] = {}  # as they were written last
        self._warnings: _Warnings | None = None
        self._secrets: list[str] = []
        self._load = MachineLoad()
        self._drawn: dict[str, int] = {}
        self._left_out: dict[str, dict[str, Any]] = {}  # the newest drawings, if they are not in the file

    @classmethod
    def from_arguments(cls, args: Any) -> EventsFile:
        """Return one for a trainer with these arguments; `output_dir` is read when a run begins."""
        return cls()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Write `start`, and then what the phases before it took."""
        if not state.is_world_process_zero:
            return
        # Absolute, because a relative folder means another one after os.chdir.
        self._path = (Path(args.output_dir) / EVENTS_FILE).absolute()
        self._file = LineFile(self._path)
        if state.global_step == 0:
            try:
                self._file.set_aside()
            except OSError as error:
                self._file.report(error)
        self._began_s, self._load, self._drawn, self._left_out = time.perf_counter(), MachineLoad(), {}, {}
        clock, spent = active_clock(), {}
        if clock is not None:
            clock.switch(COMPUTE)
            spent = clock.take()
            clock.on_due, clock.on_event, clock.on_close = self._write_time, self._write_late, self._close
        self._secrets = _secrets(args)
        command = self._shown(printable(shlex.join(mask_words(sys.argv))))
        known = {"command": command, "model": _model(model), "train_samples": _samples(train_dataloader)}
        self._write("start", time.time() - sum(spent.values()), **_description(args, state), **known)
        self._write_time(state.global_step, spent)
        self._warnings = _Warnings(self)
        self._warnings.attach()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write new rates, updates that were skipped, and the time if it is due.

        A training loop with a clock also writes the time between two logs.
        """
        self._write_rates(state.global_step)
        clock = active_clock()
        if clock is not None and clock.updates:
            counts, clock.updates = clock.updates, {}
            self._write("updates", time.time(), step=state.global_step, **counts)
        if time.perf_counter() >= self._due_s:
            self._write_time(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
        """Write `evaluation`."""
        if self._file is not None:
            self._write("evaluation", time.time(), step=state.global_step, samples=_samples(eval_dataloader))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write `prediction`, also after the training of this object has ended."""
        numbers = {name: to_scalar(item) for name, item in (metrics or {}).items()}
        numbers = {name: item for name, item in numbers.items() if isinstance(item, int | float)}
        self._write_late("prediction", step=state.global_step, metrics=numbers)

    def on_draw(
        self, args: Any, state: Any, control: Any, drawings: Mapping[str, Drawing] | None = None, **kwargs: Any
    ) -> None:
        """Write `drawing` for each, also after the training of this object has ended.

        Of very many of one name, the file has fewer and fewer, and the last one.
        """
        for name, drawing in (drawings or {}).items():
            number = self._drawn[name] = self._drawn.get(name, 0) + 1
            event: dict[str, Any] = {"step": state.global_step, "name": name, **drawing.content()}
            if self._file is not None and number % (1 + number // MOST_DRAWINGS):
                self._left_out[name] = {"time_s": time.time(), **event}
            else:
                self._left_out.pop(name, None)
                self._write_late("drawing", **event)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write `checkpoint`, with the time before it: what follows is lost if the run resumes from here."""
        if self._file is not None:
            self._write_time(state.global_step)
            self._write("checkpoint", time.time(), step=state.global_step)

    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Write `end`: whether the run finished, was stopped or failed."""
        if self._file is None:
            return
        self._write_rates(state.global_step)
        self._write_time(state.global_step)
        for drawing in self._left_out.values():
            self._write("drawing", **drawing)
        status = "failed" if error is not None else "finished" if state.global_step >= state.max_steps else "stopped"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            status = "stopped"
        text = {} if error is None else {"error": self._shown(f"{type(error).__name__}: {error}")}
        self._write("end", time.time(), step=state.global_step, status=status, **text)
        self._close()

    def warn(self, record: logging.LogRecord) -> None:
        """Write `warning`."""
        self._write("warning", record.created, level=record.levelname, text=self._shown(record.getMessage()))

    def _close(self) -> None:
        """Stop writing; also called when a run ends after this callback was removed from it."""
        if self._warnings is not None:
            self._warnings.detach()
            self._warnings = None
        self._due_s = float("inf")
        if (clock := active_clock()) is not None:
            clock.due_s = self._due_s
        if self._file is not None:
            self._file.close()
            self._file = None

    def _shown(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = mask_secrets(text)
        return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."

    def _write_rates(self, step: int) -> None:
        clock = active_clock()
        if clock is not None and clock.rates and clock.rates is not self._rates:
            self._rates = clock.rates
            figures = {n: v if isinstance(v, int) else float(f"{v:.6g}") for n, v in clock.rates.items()}
            self._write("rates", time.time(), step=step, **figures)

    def _write_time(self, step: int, spent: dict[str, float] | None = None) -> None:
        clock = active_clock()
        if spent is None:
            spent = {} if clock is None else clock.take()
        phases = {name: round(seconds, 6) for name, seconds in spent.items()}
        more: dict[str, Any] = {"measures_exchange": True} if clock is not None and clock.knows_exchange else {}
        if load := self._load.read():
            more["load"] = load
        self._write("time", time.time(), step=step, phases=phases, **more)
        now = time.perf_counter()
        # A thousandth of the time so far: a day writes 7,000 lines, and no kill hides more than that share.
        self._due_s = now + min(max((now - self._began_s) / 1000, 0.25), 60.0)
        if clock is not None:
            clock.due_s = self._due_s

    def _write(self, event: str, time_s: float, **more: Any) -> None:
        if self._file is not None:
            self._write_late(event, time_s, **more)

    def _write_late(self, event: str, time_s: float | None = None, **more: Any) -> None:
        """Add a line, also to the file of a training that has ended."""
        if self._path is not None:
            line = {"event": event, "time_s": round(time_s or time.time(), 6), **more}
            (self._file or LineFile(self._path)).append(to_json(line))


class _Warnings(logging.Handler):
    """Write warnings of these packages as events."""

    def __init__(self, file: EventsFile) -> None:
        super().__init__(logging.WARNING)
        self._events, self._left, self._writing = file, MOST_WARNINGS, False

    def attach(self) -> None:
        """Listen."""
        for name in _OWN:
            logging.getLogger(name).addHandler(self)

    def detach(self) -> None:
        """Listen no longer."""
        for name in _OWN:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless writing it is what warns."""
        if self._left and not self._writing:
            self._writing, self._left = True, self._left - 1
            try:
                self._events.warn(record)
            finally:
                self._writing = False


def _description(args: Any, state: Any) -> dict[str, Any]:
    origins = _origins(args)
    return {
        "step": state.global_step,
        "max_steps": state.max_steps,
        "num_train_epochs": getattr(state, "num_train_epochs", None),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
        "host": socket.gethostname(),
        "world_size": getattr(args, "world_size", 1),
        "script": printable(sys.argv[0]),
        "commit": (commit := _commit(folder := Path(sys.argv[0]).absolute().parent)),
        "modified": _modified(folder) if commit else None,
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "arguments": settings(args),
        "changed": sorted(_changed(args, origins)),
        "origins": origins,
    }


def process_start(pid: int) -> int | None:
    """Return when a process of this machine began, in clock ticks since its boot; None where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _hardware() -> dict[str, Any]:
    known: dict[str, Any] = {"system": platform.platform(), "cpu": _processor(), "cores": os.cpu_count()}
    torch: Any = sys.modules.get("torch")  # this package does not import it
    # Asked for a name, CUDA would begin to run in a process that trains elsewhere, and could not be forked any more.
    if torch is not None and torch.cuda.is_initialized():
        known["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return known


def _processor() -> str:
    """Return the name of the processor; its kind where the system does not name it."""
    try:
        with Path("/proc/cpuinfo").open("r", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit(folder: Path) -> str | None:
    """Return the commit of the git repository that a folder is in, from its files; None without one."""
    try:
        git = next((above / ".git" for above in (folder, *folder.parents) if (above / ".git").exists()), None)
        if git is None:
            return None
        if git.is_file():  # of a further work tree, or of a submodule
            git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text("utf-8").strip()
        ref = head.removeprefix("ref: ")
        if ref == head:
            return head
        common = git / (git / "commondir").read_text("utf-8").strip() if (git / "commondir").exists() else git
        if (common / ref).exists():
            return (common / ref).read_text("utf-8").strip()
        packed = (common / "packed-refs").read_text("utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)
    except (OSError, ValueError):
        return None


@cache  # asked once: the code of this process is that of its beginning
def _modified(folder: Path) -> int | None:
    """Return how many files of a git repository differ from its commit, untracked ones aside; None if git says none."""
    import subprocess  # a process that trains nothing needs none of it

    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, one that refuses, or a repository that takes long
        return len(subprocess.run(command, capture_output=True, check=True, timeout=0.5).stdout.splitlines())
    return None


def whole_size(parameter: Any) -> int:
    """Return the number of a parameter's elements: of all ranks if it is sharded, unpacked if it is quantized."""
    packed = getattr(getattr(parameter, "quant_state", None), "shape", None)  # bitsandbytes' 4 bits
    if packed is not None:
        return math.prod(packed)
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())  # DeepSpeed's third stage


def sizes_of(model: Any) -> list[tuple[int, bool]]:
    """Return the numbers of elements of a model's parameters, and whether each is trained.

    A model of which a process has some layers alone says those of the whole in its attribute `sizes_of_whole`.
    """
    own = getattr(model, "sizes_of_whole", None)
    return own or [(whole_size(parameter), parameter.requires_grad) for parameter in model.parameters()]


def _model(model: Any) -> dict[str, Any]:
    """Return the class of a model, where it came from, and its numbers of parameters; nothing is read from a device."""
    try:
        counts = sizes_of(model)
    except Exception:  # no model of torch, or one whose parameters have no shape yet
        return {}
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    named = {"source": mask_secrets(source)} if isinstance(source, str) and source else {}
    trained = sum(count for count, is_trained in counts if is_trained)
    return {"class": type(model).__name__, **named, "parameters": sum(n for n, _ in counts), "trained": trained}


def _samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except Exception:  # a stream has no length, and a loader of a user's own perhaps no dataset
        return None


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in (*_PACKAGES, *_OWN) if name in sys.modules}
    return {name: text for name, text in found.items() if text is not None}


@cache
def _version(name: str) -> str | None:
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return None


def _changed(args: Any, origins: dict[str, str]) -> list[str]:
    """Return the names of arguments that are not at their default."""
    fields: dict[str, Any] = getattr(type(args), "__dataclass_fields__", {})
    return [
        name
        for name, field in fields.items()
        if not name.startswith("_")
        and hasattr(args, name)
        and not _is_default(field, getattr(args, name))
        and not (callable(field.default_factory) and origins and name not in origins)
    ]


def _origins(args: Any) -> dict[str, str]:
    """Return where arguments were set, `call`, `command line`, `file NAME` ..., without those at their default."""
    fields = [name for name in getattr(type(args), "__dataclass_fields__", {}) if not name.startswith("_")]
    try:
        known = {name: str(args.origin(name)) for name in fields}
    except Exception:  # arguments of another library, which may have an attribute of this name
        return {}
    return {name: place for name, place in known.items() if place != "default"}


def _is_default(field: Any, value: Any) -> bool:
    if callable(field.default_factory):
        # A factory of a user's own may do more than make a value; these make an empty one.
        return field.default_factory in (list, dict, tuple, set) and not value
    try:
        return bool(type(field.default) is type(value) and field.default == value)
    except Exception:  # arrays have no truth value
        return False


def _secrets(args: Any) -> list[str]:
    """Return the values of arguments and variables whose names mean a secret: an error may quote them."""
    named = {**os.environ, **{str(name): value for name, value in getattr(args, "__dict__", {}).items()}}
    values = {value for name, value in named.items() if isinstance(value, str) and is_secret(name, value)}
    return sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True)
