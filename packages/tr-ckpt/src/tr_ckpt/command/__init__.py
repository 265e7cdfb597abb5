"""List, verify, compare, export, prune, accept and import checkpoints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module

from tr_ckpt.command.parser import build_parser
from tr_ckpt.errors import CheckpointError, printable

ERROR = 2

# Imported on use: some take a second to load.
_MODULES = {
    "ls": "listing",
    "verify": "listing",
    "diff": "comparing",
    "export": "exporting",
    "prune": "pruning",
    "seal": "pruning",
    "import": "exporting",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0 on success; 1 if a checkpoint is damaged, or two differ; 2 if the request
        cannot be carried out; 130 after Ctrl-C.

    Raises:
        SystemExit: help was requested (0) or the arguments are wrong (2).
    """
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without "…" must not make the command fail
    try:
        module = import_module(f"tr_ckpt.command.{_MODULES[arguments.action]}")
        run: Callable[..., int] = getattr(module, f"run_{arguments.action}")
        code = run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, OSError, RecursionError) as error:
        print(f"trainer ckpt {arguments.action}: {printable(_text(error), lines=True)}", file=sys.stderr)
        return ERROR


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
