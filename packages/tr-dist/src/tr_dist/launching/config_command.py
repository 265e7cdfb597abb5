"""Ask how a job is to be started and write the file that `trainer launch` reads, by Accelerate's own questions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tr_dist.launching.accelerate_file import interpret, read_file
from tr_dist.launching.launch import LaunchError

_USAGE_ERROR = 2


def main(argv: list[str]) -> int:
    """Ask Accelerate's questions and write the file.

    Args:
        argv: the command line after the command's name.

    Returns:
        0, or 2 if nothing could be asked, or if `trainer launch` does not start what was answered.
    """
    parser = _parser()
    options, others = parser.parse_known_args(argv)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}; the answers are typed, or written into the file")
    path = str(Path(options.config_file).expanduser())
    try:
        if Path(path).exists() and not options.overwrite:
            raise LaunchError(f"{path} exists; name another file, or say --overwrite")
        _ask(path)
        interpret(read_file(path), path)
    except LaunchError as error:
        print(f"trainer config: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(f"start with: trainer launch --config_file {path} SCRIPT")
    return 0


def _ask(path: str) -> None:
    try:
        from accelerate.commands.config.config import config_command
    except ImportError:
        raise LaunchError(
            "the questions are those of accelerate config: pip install 'tr-dist[accelerate]', or write the file by hand"
        ) from None
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        config_command(argparse.Namespace(config_file=path))
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer config",
        description="Ask how a job is to be started, by the questions of accelerate config, and write the file that "
        "trainer launch and accelerate launch read. For no questions at all: accelerate config default.",
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", default="default_config.yaml", metavar="FILE", help="where (.yaml or .json)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    return parser
