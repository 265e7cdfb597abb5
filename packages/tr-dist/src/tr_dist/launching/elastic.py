"""Run the processes of a job that goes on when some of them are lost (`trainer launch --elastic`).

A process that fails is started again by itself, and the others are left alone. They meet by torch's rendezvous
(`tr_dist.members`), whose store this launcher serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException

from tr_dist.environment import ELASTIC_RUN
from tr_dist.launching import rank as rank_file
from tr_dist.launching.agent import raise_signals, restored_handlers, say, set_environment, stop
from tr_dist.launching.launch import Launch, LaunchError
from tr_dist.launching.report import Ending, describe, exit_code, first_cause, read_ending
from tr_dist.members import ENDED

_POLL_S = 0.05


def run_elastic(launch: Launch) -> int:
    """Start the processes, start those again that fail, and wait for all. Returns the exit code of the job.

    0 if the run ended and no process failed after that; else that of the process that failed first. After a forwarded
    signal it is as for other jobs.

    Raises:
        LaunchError: the processes cannot meet.
    """
    with restored_handlers(), tempfile.TemporaryDirectory(prefix="tr_launch_", ignore_cleanup_errors=True) as notes:
        processes = _Processes(launch, Path(notes))
        raise_signals()
        try:
            return processes.run()
        except SignalException as error:
            return processes.stop_all(error.sigval)


class _Processes:
    """The processes of a job on one machine.

    Args:
        launch: what to start.
        notes: folder for the exceptions of ranks.
    """

    def __init__(self, launch: Launch, notes: Path) -> None:
        self._launch, self._notes = launch, notes
        host, _, port = (launch.endpoint or "localhost:0").rpartition(":")
        try:
            self._store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise LaunchError(f"the processes cannot meet at {host}:{port}: {said}; choose another port") from None
        set_environment(launch)
        self._common = {
            **os.environ,
            "WORLD_SIZE": str(launch.nproc),
            "LOCAL_WORLD_SIZE": str(launch.nproc),
            "GROUP_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": ELASTIC_RUN,
            ELASTIC_RUN: uuid.uuid4().hex,
        }
        self._running: dict[int, subprocess.Popen[Any]] = {}
        self._starts = dict.fromkeys(range(launch.nproc), 0)
        self._restarts = 0
        self._lost: list[Ending] = []  # before the run had ended, and not started again
        self._late: list[Ending] = []

    def run(self) -> int:
        """Start all, and wait until all have ended."""
        for rank in range(self._launch.nproc):
            self._start(rank)
        while self._running:
            time.sleep(_POLL_S)
            for rank, process in list(self._running.items()):
                if (code := process.poll()) is not None:
                    del self._running[rank]
                    self._note_end(rank, code)
        failed = self._late if self._has_ended() else self._lost
        if not failed:
            return 0
        size, folder = self._launch.nproc, self._launch.log_dir
        logs = {} if folder is None else {rank: Path(folder, f"rank_{rank}.log") for rank in range(size)}
        say(describe(failed, world_size=size, nodes=1, logs=logs))
        return exit_code(first_cause(failed).code)

    def stop_all(self, number: signal.Signals) -> int:
        """Pass a signal on to all, wait for them, and return the exit code of the job."""
        processes = list(self._running.values())
        if reason := stop(processes, number, within_s=self._launch.stop_timeout_s):
            say(f"killed what still ran: {reason}")
        codes = [exit_code(process.poll()) for process in processes]
        said = ", ".join(map(str, codes))
        say(f"{number.name} was passed on to {len(codes)} rank(s), which ended with exit code {said}")
        return 0 if {*codes} == {0} else 128 + number if 128 + number in codes or not codes else max(codes)

    def _start(self, rank: int) -> None:
        starts = self._starts[rank]
        own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": starts}
        variables = {name: str(value) for name, value in own.items()}
        self._starts[rank] += 1
        words = [*(["-m"] if self._launch.is_module else []), *self._launch.command]
        self._running[rank] = subprocess.Popen(
            [sys.executable, "-u", rank_file.__file__, *words],
            env={**self._common, **variables, rank_file.ERROR_FILE: str(self._error_file(rank))},
            start_new_session=True,  # a signal from the terminal reaches it through the launcher alone
        )

    def _note_end(self, rank: int, code: int) -> None:
        """Start a process again that failed before the run has ended, or leave it to the others to go on."""
        if code == 0:
            return
        ending = read_ending(rank, code, self._error_file(rank))
        if self._has_ended():
            self._late.append(ending)
            return
        left = f"{len(self._running)} of {self._launch.nproc} processes are left"
        if self._restarts < self._launch.max_restarts:
            self._restarts += 1
            say(f"{ending}; {left}; starting it again, restart {self._restarts} of {self._launch.max_restarts}")
            self._start(rank)
        else:
            say(f"{ending}; {left}" + (", which go on without it" if self._running else ""))
            self._lost.append(ending)

    def _has_ended(self) -> bool:
        return self._store.check([ENDED])

    def _error_file(self, rank: int) -> Path:
        return self._notes / f"{self._starts[rank]}_{rank}.json"
