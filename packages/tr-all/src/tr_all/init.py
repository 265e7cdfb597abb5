"""Begin a project: write a training script and its settings, which run at once: `trainer init TASK`."""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tr_args.errors import did_you_mean
from tr_log.line_file import write_whole

TEMPLATES = {path.stem.replace("_", "-"): path for path in sorted(Path(__file__).with_name("templates").glob("*.py"))}

EPILOG = """\
train.py makes its own data and model, and learns within seconds on a CPU; no network, and no library but this one.
What to replace is marked YOURS. train.yaml holds the arguments; the command line goes before it:
  python train.py --config train.yaml --learning_rate 1e-3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write `train.py` and `train.yaml` for a task, and print what to type next.

    Args:
        argv: the words after `trainer init`; None takes this program's.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    task, folder = given.task.replace("_", "-"), given.folder
    if task not in TEMPLATES:
        parser.error(f"unknown task {given.task!r}; there are {', '.join(TEMPLATES)}{did_you_mean(task, TEMPLATES)}")
    script, settings = folder / "train.py", folder / "train.yaml"
    there = [str(path) for path in (script, settings) if path.exists()]
    if there:
        parser.error(f"{' and '.join(there)} would be written over; give another folder, or move what is there")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (script, settings):
            write_whole(path, TEMPLATES[task].with_suffix(path.suffix).read_bytes())
    except OSError as error:
        with suppress(OSError):
            script.unlink()  # it was not there before
        parser.error(f"{folder} cannot be written: {error.strerror}; give another folder")
    words = shlex.join([str(script), "--config", str(settings)])
    print(f"wrote {script} and {settings}\n")
    print(f"train:             python {words}")
    print(f"check without it:  trainer check {words}")
    print(f"go on later:       python {words} --resume_from_checkpoint true")
    return 0


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, TEMPLATES))
    tasks = (f"  {name:<{width}}  {_first_line(path)}" for name, path in TEMPLATES.items())
    parser = argparse.ArgumentParser(
        prog="trainer init",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write train.py and train.yaml for a task, to begin a project from.\n\ntasks:\n" + "\n".join(tasks),
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", help="one of the tasks above")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=Path(), help="where to write; made if it is missing"
    )
    return parser


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0].rstrip(".")
