"""Report what this machine offers for training: `trainer doctor`."""

from __future__ import annotations

import argparse


def main(argv: list[str]) -> int:
    """Print the facts, one a line. Joins no process group and starts no process.

    Args:
        argv: the command line after the command's name.

    Returns:
        0, or 1 if a problem was found that would stop a training run.
    """
    argparse.ArgumentParser(
        prog="trainer doctor",
        description="Show devices, communication backends, installed packages and the launch environment.",
    ).parse_args(argv)
    from tr_dist.machine import describe  # late, so that help and a mistyped word come at once

    problems: list[str] = []
    for title, lines in describe(problems):
        print(title)
        for line in lines:
            print(f"  {line}")
    print("problems" if problems else "no problems found")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0
