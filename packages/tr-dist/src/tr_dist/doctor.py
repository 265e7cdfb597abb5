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
    parser = argparse.ArgumentParser(
        prog="trainer doctor",
        description="Show devices, communication backends, installed packages and the launch environment.",
    )
    about = "sizes such as tp=2,dp_shard=4: say whether processes that compute a sample together are on one machine"
    parser.add_argument("--parallelism_config", metavar="SIZES", default="", help=about)
    given = parser.parse_args(argv)
    from tr_dist.machine import describe  # late, so that help and a mistyped word come at once

    problems: list[str] = []
    for title, lines in describe(problems, near_processes(parser, given.parallelism_config)):
        print(title)
        for line in lines:
            print(f"  {line}")
    print("problems" if problems else "no problems found")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def near_processes(parser: argparse.ArgumentParser, sizes: str) -> int:
    """Return how many processes in a row compute a sample together by sizes such as `tp=2,sp=2`; ends if wrong."""
    near = 1
    for name, _, size in (pair.partition("=") for pair in sizes.split(",") if pair):
        if name.strip() == "cp_comm_strategy":
            continue
        if not size.strip().isdigit() or not int(size):
            parser.error(f"--parallelism_config {sizes!r} is not understood; give it as in tp=2,dp_shard=4")
        near *= int(size) if name.strip().removesuffix("_size") in ("cp", "sp", "tp") else 1
    return near
