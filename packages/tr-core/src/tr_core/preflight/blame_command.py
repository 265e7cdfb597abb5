"""Replay a step of a run, and name the samples that spoil it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tr_core.preflight.cli import run_script
from tr_core.preflight.report import last_line
from tr_core.preflight.requested import BLAME, PreflightDone

_DESCRIPTION = """\
Replay a step of a run, and name the samples whose loss or gradient is not finite, or whose loss is a spike.

The script of the run is started, with the arguments of the run. Where its Trainer would train, the step is replayed
from the nearest checkpoint before it in output_dir, or from the first step, and the script ends. Nothing is written
there: no checkpoint, log or push, and no tracker is called. Callbacks of your own are called, as they are of the run.
"""
_EPILOG = """\
examples:
  trainer blame --step 655 train.py --config run.yaml
  trainer blame --step 655 --leave-out guilty.json train.py     then: train.py --leave_out_samples guilty.json
  torchrun --nproc-per-node 2 --no-python trainer blame --step 655 train.py
  trainer launch --nproc 2 -m tr_core.preflight.blame_command --step 655 train.py

exit codes: 0 the step was replayed; 1 it cannot be, and the message says why; 2 this command line is wrong.
More: docs/blame.md of tr-core.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; end the program with code 2 if a word is unknown or missing.

    Returns:
        0; 1 if the step cannot be replayed.
    """
    given = _parser().parse_args(argv)
    leave_out = None if given.leave_out is None else str(given.leave_out.absolute())

    def request(answer: Path) -> str:
        return json.dumps({"step": given.step, "leave_out": leave_out, "answer": str(answer)})

    with contextlib.redirect_stdout(sys.stderr):  # the output of the script is not that of this command
        answer, error = run_script(given.script, given.words, BLAME, request)
    if answer is not None:
        print(answer, flush=True)
        return 0
    if isinstance(error, PreflightDone):  # another rank has the answer
        return 0
    why = "it ended, and no Trainer began to train" if error is None else last_line(error)
    print(f"trainer blame: {given.script.name}: {why}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer blame",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--step", type=int, metavar="S", help="the step, as in the log; without: the log is searched")
    text = "JSON file to which the guilty samples are added, for leave_out_samples"
    parser.add_argument("--leave-out", "--leave_out", type=Path, metavar="FILE", help=text)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the script of the run")
    words = parser.add_argument("words", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="its arguments in the run")
    words.required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
