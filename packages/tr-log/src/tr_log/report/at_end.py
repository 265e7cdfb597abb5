"""Write the page of a run when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr_log.line_file import write_whole
from tr_log.loggers import get_logger
from tr_log.tracker import EveryEvent

logger = get_logger(__name__)

REPORT_FILE = "report.html"


class ReportFile(EveryEvent):
    """A trainer callback that writes `report.html` to the output folder when a training ends, on the main process.

    It comes after `EventsFile` in the list of callbacks, whose last event the page shows. A failure is a warning.
    """

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the page."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        try:
            write_report([folder], folder / REPORT_FILE)
        except Exception as error:  # a page must not cost a finished training
            logger.warning(
                "the report of this run was not written: %s: %s; `trainer report %s` writes it",
                type(error).__name__,
                error,
                folder,
            )


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the page of the runs in these folders. A crash leaves the old page or the new one.

    Raises:
        FileNotFoundError: there is no run.
        OSError: the page cannot be written.
    """
    from tr_log.report.page import page  # here: a process that writes no page needs none of it
    from tr_log.report.run_folder import find_runs

    text = page(find_runs(folders), place=target.parent)
    replace_file(target, text.encode("utf-8", "replace"))  # a folder may have a name that is no text


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
