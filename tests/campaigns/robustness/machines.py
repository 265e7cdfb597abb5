"""Two machines: network namespaces with a cable between them where that is permitted, else this machine twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rank_programs import TORCHRUN, TRAINER, free_port


@dataclass(frozen=True)
class Machine:
    """Where to start programs.

    Attributes:
        words: what a command line begins with there.
        address: its own.
        variables: of programs there.
    """

    words: tuple[str, ...]
    address: str
    variables: dict[str, str]


@contextmanager
def two_machines(*, on_loopback: bool = False) -> Iterator[tuple[list[Machine], int]]:
    """Yield two machines and a port that is free on the first."""
    if on_loopback or not _may_have_namespaces():
        here = Machine((), "127.0.0.1", {})
        yield [here, here], free_port()
        return
    # Names of at most 15 characters, and addresses that only the two see.
    names = [f"trnode{number}-{os.getpid()}" for number in range(2)]
    cables = [f"trc{number}-{os.getpid()}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True)):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", cable)
            for device in (cable, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield (
            [
                # The host's name is not known there, by which gloo would look for its address.
                Machine(("ip", "netns", "exec", name), f"10.77.0.{number + 1}", {"GLOO_SOCKET_IFNAME": cable})
                for number, (name, cable) in enumerate(zip(names, cables, strict=True))
            ],
            29500,
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def commands(launcher: str, machines: list[Machine], port: int, nproc: int) -> list[list[object]]:
    """Return the launcher's part of each machine's command line."""
    place: list[object] = ["--nnodes", 2, "--master_addr", machines[0].address, "--master_port", port]
    if launcher == "torchrun":
        place = [str(word).replace("_", "-") for word in place]
    start = [*TRAINER, "--nproc", nproc] if launcher == "trainer launch" else [*TORCHRUN, "--nproc-per-node", nproc]
    rank = "--node_rank" if launcher == "trainer launch" else "--node-rank"
    return [[*machine.words, *start, *place, rank, number] for number, machine in enumerate(machines)]


def _may_have_namespaces() -> bool:
    if shutil.which("ip") is None:
        return False
    name = f"trtrial-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if made.returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
