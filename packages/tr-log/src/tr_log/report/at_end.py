"""Write the page of a run when it ends."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr_log.formatting import duration, evaluation, value
from tr_log.line_file import write_whole
from tr_log.loggers import get_logger
from tr_log.tracker import EveryEvent

if TYPE_CHECKING:
    from tr_log.report.run_folder import RunFolder

logger = get_logger(__name__)

REPORT_FILE = "report.html"
SHARE, FREE_S = 0.1, 1.0
"""Writing the page again may take this share of the time since the training, and so many seconds more."""


class ReportFile(EveryEvent):
    """A trainer callback that writes `report.html` to the output folder when a training ends, on the main process.

    It then logs what the training came to: the best evaluation, checkpoints, the page, and where the time went. An
    evaluation or a prediction after it writes the page again, with what it found; where that takes long, as after a
    hundred thousand logs, not each does, and the last one is on the page when the process ends. This callback comes
    after `EventsFile` and `MetricsFile` in the list, whose last lines the page shows. A failure is a warning.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None  # of a training that ended
        self._ended_s = self._spent_s = 0.0
        self._is_due = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write no page before the end."""
        self._folder = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the page, and log the result."""
        if not state.is_world_process_zero:
            return
        self._folder = Path(args.output_dir)
        self._write(logging.DEBUG if getattr(state, "is_hyper_param_search", False) else logging.INFO)
        self._ended_s, self._spent_s = time.perf_counter(), 0.0
        self._folder = self._folder.absolute()  # a relative folder means another one after os.chdir

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the page again if the training has ended, now or when the process ends."""
        began_s = time.perf_counter()
        if self._spent_s <= FREE_S + SHARE * (began_s - self._ended_s):
            self._write()
            self._spent_s += time.perf_counter() - began_s
        elif not self._is_due:
            self._is_due = True
            atexit.register(self._write_at_exit)

    on_predict = on_evaluate

    def _write_at_exit(self) -> None:
        if self._is_due:
            self._write()

    def _write(self, level: int | None = None) -> None:
        if self._folder is None:
            return
        self._is_due = False
        try:
            (run,) = write_report([self._folder], self._folder / REPORT_FILE)
            # Without `EventsFile` nothing says how the training ended, and where its time went.
            if level is not None and run.sessions:
                logger.log(level, "training %s at step %d%s", run.status, run.step, result_of(run))
        except Exception as error:  # a page must not cost a finished training
            logger.warning(
                "the report of this run was not written: %s: %s; `trainer report %s` writes it",
                type(error).__name__,
                error,
                self._folder,
            )


def result_of(run: RunFolder) -> str:
    """Return lines that say what a run came to: evaluations, checkpoints, how to go on, and where the time went."""
    from tr_log.report.time_split import OTHER, time_split, words

    session, best, split, said = run.sessions[-1], run.best(), time_split(run.sessions), words(run.sessions)
    evaluated = [({n: v for n, v in e.items() if n.startswith("eval_")}, e["step"]) for e in run.entries]
    seconds = sum(split.values())
    parts = sorted(((taken, name) for name, taken in split.items() if taken >= 0.01 * seconds > 0), reverse=True)
    # A loop without a clock measures no part.
    shares = [f"{said[n]} {100 * taken / seconds:.0f}%" for taken, n in parts if split[OTHER] < seconds]
    saved = [("last", mark["step"]) for mark in session.marks if mark.get("event") == "checkpoint"][-1:]
    saved += [("best", best[2])] if best else []
    kept = [(name, folder) for name, step in saved if (folder := run.path / f"checkpoint-{step}").is_dir()]
    lines = {
        "evaluation": next((f"{'  '.join(evaluation(e))}  at step {at}" for e, at in reversed(evaluated) if e), ""),
        "best": f"{best[0]} {value(best[1])} at step {best[2]}" if best else "",
        "checkpoints": ", ".join(f"{name} {folder}" for name, folder in kept),
        "report": str(run.path / REPORT_FILE),
        "time": duration(seconds) + ": " * bool(shares) + ", ".join(shares),
        "to go on": "" if session.ended == "finished" or not kept else "trainer.train(resume_from_checkpoint=True)",
    }
    return "".join(f"\n  {name:<11} {text}" for name, text in lines.items() if text)


def write_report(folders: Sequence[Path], target: Path) -> list[RunFolder]:
    """Write the page of the runs in these folders, and return the runs. A crash leaves the old page or the new one.

    Raises:
        FileNotFoundError: there is no run.
        OSError: the page cannot be written.
    """
    from tr_log.report.page import page  # here: a process that writes no page needs none of it
    from tr_log.report.run_folder import find_runs

    runs = find_runs(folders)
    text = page(runs, place=target.parent)
    replace_file(target, text.encode("utf-8", "replace"))  # a folder may have a name that is not text
    return runs


def replace_file(target: Path, content: bytes) -> None:
    """Write a file beside its place, and move it there; through a link, and into a device or pipe that is there.

    Raises:
        OSError: it cannot be written.
    """
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # moved there, a file would take the place of /dev/stdout itself
        return
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, content)
