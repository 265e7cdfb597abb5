"""Cut the network between the two machines of a job, and see what each says when, how both end, and what goes on.

Under `trainer launch` and torchrun, by a link that is taken down and by packets that are dropped. Each machine has to
say within 90 seconds for whom it waits, again at least every 90 seconds, and to end with another code than 0; the job
has to go on from its checkpoint, when the network is there again, to the bits of one left alone.

The machines are namespaces of this one: of the network, of processes, of the host's name and of shared memory. That
takes Linux, the programs `ip` and `unshare`, and the permission to use them, as root has in most containers.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from kills import read_end
from machines import Machine, commands, two_machines
from rank_programs import RANK_RUN, Job
from runner import Case, Options

LIMIT_S = 300
AT_STEP = 6
HANG_TIMEOUT_S = 150
ROWS = 160  # forty steps
SAID_WITHIN_S = 90
# What is a machine's word about its state, and how much of it a table shows.
_WORD = re.compile(r"^(?:hang watch:|trainer launch:|(?:\[rank\d+\]: )?\w[\w.]*Error\b).*", re.MULTILINE)
_SHOWN = 150
_FOLLOWS = re.compile(r"^if this stays so, (the job ends in \d+ s)", re.MULTILINE)
# Another machine, for all that a process there can see: arguments are its name, and a command.
_OTHER = 'hostname "$0" && mount -t tmpfs none /dev/shm && { "$@"; exit $?; }'
_UNSHARE = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Word:
    """What a machine said, and when.

    Attributes:
        after_s: seconds after the cut.
        text: its line.
    """

    after_s: float
    text: str


@dataclass(frozen=True)
class Side:
    """What one machine did.

    Attributes:
        words: what it said after the cut.
        code: the exit code of its launcher; None if it was killed for not ending.
        after_s: seconds from the cut to its end.
    """

    words: list[Word]
    code: int | None
    after_s: float

    def wrong(self) -> list[str]:
        """Return what is wrong with it."""
        if self.code is None:
            return ["did not end"]
        times = [0.0, *(word.after_s for word in self.words if word.after_s <= self.after_s), self.after_s]
        longest_s = max(later - sooner for sooner, later in pairwise(times))
        found = [f"was silent for {longest_s:.0f} s"] if longest_s > SAID_WITHIN_S else []
        return [*found, *(["ended with 0"] if self.code == 0 else [])]


def link_down(machines: list[Machine]) -> str:
    """Take the cable out of the second machine."""
    _in(machines[1], "ip", "link", "set", machines[1].variables["GLOO_SOCKET_IFNAME"], "down")
    return "link down"


def drop_packets(machines: list[Machine]) -> str:
    """Let each machine's packets be lost on their way, by what this kernel has; return how."""
    for machine, other in (machines, machines[::-1]):
        cable = machine.variables["GLOO_SOCKET_IFNAME"]
        lossy = ("tc", "qdisc", "add", "dev", cable, "root", "netem", "loss", "100%")
        filtered = ("iptables", "-A", "INPUT", "-i", cable, "-j", "DROP")
        # To a card that is not there: nobody takes them.
        astray = ("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", cable)
        ways = {"netem loss 100%": lossy, "iptables DROP": filtered, "sent astray": (*astray, "nud", "permanent")}
        way = next((name for name, words in ways.items() if _may(machine, *words)), None)
        if way is None:
            raise RuntimeError("neither tc netem nor iptables nor ip neigh drops packets here")
    return f"packets dropped ({way})"


CUTS = {"link": link_down, "packets": drop_packets}


def _in(machine: Machine, *words: str) -> None:
    subprocess.run([*machine.words[:4], *words], check=True, capture_output=True, timeout=60)


def _may(machine: Machine, *words: str) -> bool:
    try:
        return not subprocess.run([*machine.words[:4], *words], check=False, capture_output=True, timeout=60).returncode
    except OSError:
        return False


@contextmanager
def network() -> Iterator[tuple[list[Machine], int]]:
    """Yield two machines that share nothing but folders, and a port on the first."""
    with two_machines() as (machines, port):
        if not machines[0].words:
            raise PermissionError("no namespace of the network can be made here; it takes iproute2 and root")
        yield (
            [
                replace(machine, words=(*machine.words, *_UNSHARE, "sh", "-c", _OTHER, f"machine-{number}"))
                for number, machine in enumerate(machines)
            ],
            port,
        )


def run(folder: Path, out: Path, launcher: str, cut: str | None) -> tuple[str, list[Side]]:
    """Run a job of two machines to its end, or cut their network at a step; return how, and both sides."""
    how, cut_s = "", 0.0
    with network() as (machines, port), Job(folder) as job:
        script = [
            RANK_RUN,
            out,
            "--rows",
            ROWS,
            "--step_s",
            "0.2",
            "--arguments",
            json.dumps({"hang_timeout": HANG_TIMEOUT_S}),
        ]
        for machine, command in zip(machines, commands(launcher, machines, port, 1), strict=True):
            job.start([*command, *script], **machine.variables)
        if cut is not None:
            _wait_for_step(out, job)
            how, cut_s = CUTS[cut](machines), time.time()
        words, seen, times = ([], []), [0, 0], [0.0, 0.0]
        deadline = time.monotonic() + (LIMIT_S if cut is None else LIMIT_S + HANG_TIMEOUT_S)
        while not all(times) and time.monotonic() < deadline:
            time.sleep(0.2)
            for number, program in enumerate(job.programs):
                ended = program.poll() is not None
                said = job.said(number)
                words[number].extend(_words(said[seen[number] :], time.time() - cut_s))
                seen[number] = len(said)
                times[number] = times[number] or (time.time() if ended else 0.0)
        ends = [program.poll() for program in job.programs]
        if cut is None and ends != [0, 0]:
            raise RuntimeError(f"a job that nobody cut ended with {ends}: {job.said(0)[-3000:]}{job.said(1)[-3000:]}")
    return how, [
        Side(words[number], code, (times[number] or time.time()) - cut_s) for number, code in enumerate(ends)
    ]  # fmt: skip


def _words(said: str, after_s: float) -> list[Word]:
    words = [Word(after_s, match[0]) for match in _WORD.finditer(said)]
    follows = _FOLLOWS.search(said)
    return [*words[:-1], Word(after_s, f"{words[-1].text}; {follows[1]}")] if words and follows else words


def _wait_for_step(out: Path, job: Job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any((out / "run").glob(f"checkpoint-{AT_STEP}")):
        if time.monotonic() > deadline or any(program.poll() is not None for program in job.programs):
            raise RuntimeError(f"the job did not come to step {AT_STEP}: {job.said(0)[-3000:]}{job.said(1)[-3000:]}")
        time.sleep(0.1)


def cuts(options: Options) -> Iterator[Case]:
    """Yield the cuts, by launcher."""
    for launcher in ("trainer launch", "torchrun"):
        for cut in CUTS:
            alone = options.folder / launcher.replace(" ", "-")
            yield Case(f"{launcher}, {cut}", partial(_cut, launcher, cut, alone))


def _cut(launcher: str, cut: str, alone: Path, folder: Path) -> str:
    """Return what is wrong with a job whose network is cut; print what its machines said."""
    if not alone.exists():
        run(alone / "job", alone / "out", launcher, None)
    how, sides = run(folder / "job", folder / "out", launcher, cut)
    run(folder / "again", folder / "out", launcher, None)
    for number, side in enumerate(sides):
        code = "killed" if side.code is None else str(side.code)
        print(f"  {launcher} | {how} | machine {number} | ended after {side.after_s:.0f} s | {code}")
        for word in side.words:
            print(f"    {word.after_s:6.0f} s  {word.text[:_SHOWN]}", flush=True)
    wrong = [f"machine {number} {each}" for number, side in enumerate(sides) for each in side.wrong()]
    is_same = read_end(folder / "out") == read_end(alone / "out")
    return "; ".join([*wrong, *([] if is_same else ["the job that went on ended otherwise"])])
