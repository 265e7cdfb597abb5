"""Run the processes of a job under torch's elastic agent, and return the exit code that describes how they ended.

Signals become an exception of the launcher. It forwards them and waits for the processes to stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from tr_dist.launching import rank as rank_file
from tr_dist.launching.launch import Launch, LaunchError
from tr_dist.launching.report import Ending, describe, exit_code, first_cause, read_ending
from tr_log.masking import mask_secrets
from tr_log.streams import flush_streams, write_text

# Schedulers send SIGUSR1 some minutes before they end a job.
_PASSED_ON = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
# A scheduler may signal the job and each process of it: the same signal within this time is the same request. Ctrl-C
# comes from a person, and always counts.
_REPEATED_WITHIN_S = 1.0
_POLL_S = 0.05


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Let signals end this process at once until `raise_signals` is called; restore the handlers afterwards."""
    former = {number: signal.getsignal(number) for number in _PASSED_ON}
    # Python's own handler waits until torch has met the other machines, which may never happen.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def raise_signals() -> None:
    """Make the signals that ask a process to stop raise torch's `SignalException`, as torch's own handlers do."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in _PASSED_ON:
        signal.signal(number, raise_it)


def stop(processes: Collection[subprocess.Popen[Any]], number: signal.Signals, *, within_s: float) -> str | None:
    """Send a signal once to each running process, and wait for all; kill those that do not end.

    They are killed after a second signal to this process, or after `within_s` seconds.

    Args:
        processes: the processes, each of which leads its own session.
        number: the signal.
        within_s: seconds to wait.

    Returns:
        Why processes were killed, or None if all ended.
    """
    if not processes:
        return None
    begun_s, repeated = time.monotonic(), []

    def note(again: int, frame: FrameType | None) -> None:
        if again != number or again == signal.SIGINT or time.monotonic() - begun_s > _REPEATED_WITHIN_S:
            repeated.append(again)

    former = {each: signal.signal(each, note) for each in _PASSED_ON}
    try:
        for process in processes:
            if process.poll() is None:
                # Only to the rank: it stops its own children after it has saved.
                os.kill(process.pid, number)
        while any(process.poll() is None for process in processes):
            if repeated:
                return _kill(processes, f"a second signal, {signal.Signals(repeated[0]).name}")
            if time.monotonic() - begun_s > within_s:
                return _kill(processes, f"{within_s:g} s (--stop_timeout) after {number.name}")
            time.sleep(_POLL_S)
        return None
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _kill(processes: Collection[subprocess.Popen[Any]], reason: str) -> str:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return reason


# Seconds that the other ranks get to end once one has failed: they wait for it in vain.
_AFTER_FAILURE_S = 15
_RENDEZVOUS_S = 900


def run(launch: Launch) -> int:
    """Start the processes and wait for them. Returns the exit code of the job.

    0 if all ended with 0; else that of the rank that failed first, or 128 + the signal's number if a signal ended it.
    After a forwarded signal it is the exit code of the processes, which is 128 + its number for those that stopped.
    """
    set_environment(launch)
    if not any(os.environ.get(name) for name in ("LOGLEVEL", "TORCH_LOGS")):
        # The agent logs each signal it sends and one of the failures; the report here is more complete.
        for part in ("multiprocessing.api", "agent.server.api"):
            logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    with restored_handlers():
        spec = _specification(launch)
        with _ErrorFiles() as notes:
            code = _run(Agent(launch, spec, notes), spec)
    if launch.max_nodes > 1:
        # A thread may wait for a store that does not answer, and torch's code aborts if it meets the interpreter's end.
        flush_streams()
        os._exit(code)
    return code


def set_environment(launch: Launch) -> None:
    """Set the environment variables that all processes of a job inherit."""
    os.environ.update(launch.variables)
    # A single store for the agent and the workers of all attempts would give gloo the addresses of dead workers.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[rank_file.LAUNCHER] = f"{os.getpid()} {launch.stop_timeout_s}"
    if launch.nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if launch.log_dir is not None:
        os.makedirs(launch.log_dir, exist_ok=True)
        os.environ[rank_file.LOG_FOLDER] = os.path.abspath(launch.log_dir)
        say(f"each rank writes to its own file: {os.path.join(launch.log_dir, 'rank_N.log')}")


def say(text: str) -> None:
    """Write a line for the user who started the job, to the same stream as the ranks."""
    write_text(sys.stderr, f"trainer launch: {mask_secrets(text)}\n")  # if nobody reads it, the job continues


def _run(agent: Agent, spec: WorkerSpec) -> int:
    is_leaving = False
    try:
        result: Any = agent.run()
    except SignalException as error:
        is_leaving = True  # the other machines may continue without this one
        return agent.code_after(error.sigval)
    except (RendezvousError, RuntimeError, OSError) as error:
        say(f"the machines did not meet, or lost the one where they met: {type(error).__name__}: {error}")
        return 1
    finally:
        agent.others.close()
        if not is_leaving:
            spec.rdzv_handler.shutdown()
    if result is None or not result.is_failed():
        return 0
    if agent.ends_with_others:
        return 1
    endings = agent.endings()
    say(agent.report(endings))
    return exit_code(first_cause(endings).code) or 1


class OtherLaunchers:
    """Learns from the launchers of other machines that one has failed, and lets them know that this one has.

    In a thread: the store where they met does not answer while its machine is stopped or cut off.

    Args:
        connect: opens a connection of its own to the store; None if there are no other machines.
        key: the same for all of them.

    Attributes:
        failed: how another has failed; empty if none has.
        failed_s: when that was seen.
    """

    def __init__(self, connect: Callable[[], Any] | None = None, key: str = "") -> None:
        self.failed, self.failed_s = "", 0.0
        self._connect, self._key, self._own = connect, key, ""
        self._wake, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="other launchers", daemon=True)
        if connect is not None:
            self._thread.start()

    @classmethod
    def of(cls, group: WorkerGroup) -> OtherLaunchers:
        """Return those of the machines that have met. Collective over them."""
        store: Any = group.store
        if (group.group_world_size or 1) < 2:
            return cls()
        if group.group_rank == 0 and not store.check([_NAME]):
            store.set(_NAME, uuid.uuid4().hex)
        key = f"{_NAME}-failed-{store.get(_NAME).decode()}"
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return cls()
        host, port = store.host, store.port
        return cls(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False), key)

    def tell(self, text: str) -> None:
        """Let the others know how this one has failed."""
        self._own = text
        self._wake.set()

    def close(self) -> None:
        """Ask no more. Waits some seconds if this one has failed: it may serve the store that the others ask."""
        if self._connect is None:
            return
        if self._own and not self.failed:
            time.sleep(3 * _ASK_S)
        self._is_over = True
        self._wake.set()
        self._thread.join(_ASK_S)

    def _run(self) -> None:
        assert self._connect is not None
        with contextlib.suppress(RuntimeError, OSError):  # who serves the store is gone
            store = self._connect()
            while not self._is_over or self._own:
                if self._own:
                    store.set(self._key, self._own)
                    return
                if store.check([self._key]):
                    self.failed_s = time.monotonic()
                    self.failed = store.get(self._key).decode()
                    return
                self._wake.wait(_ASK_S)


_NAME, _ASK_S = "tr-launchers", 1.0


class Agent(LocalElasticAgent):
    """Torch's agent on one machine, which logs why it restarts and gives processes time to end.

    Args:
        launch: what to start.
        spec: the same in torch's terms.
        notes: the files to which ranks write their exceptions.

    Attributes:
        others: the launchers of the other machines.
        ends_with_others: whether the ranks were stopped because those of another machine have failed.
    """

    def __init__(self, launch: Launch, spec: WorkerSpec, notes: _ErrorFiles) -> None:
        super().__init__(spec, notes, exit_barrier_timeout=300)
        self._launch, self._notes = launch, notes
        self._ended: dict[int, int] = {}
        self._told_to_stop: list[Any] = []
        self.others, self.ends_with_others = OtherLaunchers(), False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # type: ignore[override]
        raise_signals()
        self.others.close()
        self.others = OtherLaunchers.of(worker_group)
        started: Any = super()._start_workers(worker_group)  # type: ignore[call-arg]
        self._ended = {}
        context: Any = self._pcontext
        close = context.close

        def close_others(death_sig: signal.Signals | None = None, timeout: float = _AFTER_FAILURE_S) -> None:
            # Called as soon as one has failed: the failed ones are known now, before the others are gone too.
            codes = {local_rank: process.returncode for local_rank, process in self._processes().items()}
            self._ended = self._ended or {rank: code for rank, code in codes.items() if code is not None}
            if any(self._ended.values()) and self._remaining_restarts == 0:
                self.others.tell(f"machine {worker_group.group_rank}: {self.report(self.endings()).splitlines()[0]}")
            close(death_sig, timeout)

        context.close = close_others
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # type: ignore[override]
        result: Any = super()._monitor_workers(worker_group)  # type: ignore[call-arg]
        others, context = self.others, self._pcontext
        if result.state != WorkerState.HEALTHY or not others.failed or self._remaining_restarts or context is None:
            return result
        if time.monotonic() - others.failed_s < _AFTER_FAILURE_S:
            return result  # mostly the ranks here fail of themselves, and say where
        say(f"{others.failed}; stopping the ranks of this machine, which wait for it in vain")
        self.ends_with_others = True
        context.close(signal.SIGTERM, _AFTER_FAILURE_S)
        return RunResult(state=WorkerState.FAILED)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        if any(self._ended.values()):
            say(self.report(self.endings()))
            attempt = worker_group.spec.max_restarts - self._remaining_restarts
            say(f"starting all ranks again, restart {attempt} of {worker_group.spec.max_restarts}")
        else:
            say("a machine has come: stopping all ranks, to start again with it")
        super()._restart_workers(worker_group)  # type: ignore[call-arg]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        self._told_to_stop = self._running()
        reason = stop(self._told_to_stop, death_sig, within_s=self._launch.stop_timeout_s)
        if reason is not None:
            say(f"killed what still ran: {reason}")
        super()._shutdown(death_sig, *arguments, **options)

    def _processes(self) -> dict[int, Any]:
        context: Any = self._pcontext
        handlers = {} if context is None else context.subprocess_handlers
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _running(self) -> list[Any]:
        return [process for process in self._processes().values() if process.poll() is None]

    def endings(self) -> list[Ending]:
        """Return how the processes ended, except those that were asked to stop, with the exceptions of all."""
        group = self._worker_group
        found = []
        for worker in group.workers:
            code = self._ended.get(worker.local_rank)
            ending = read_ending(worker.global_rank, code, self._notes.path(worker.local_rank))
            if code is None and ending.message:  # it failed at the moment when it was asked to stop
                ending = Ending(ending.rank, 1, ending.message, ending.traceback, ending.time_s)
            if ending.code is not None:
                found.append(ending)
        return found or [Ending(group.workers[0].global_rank, None)]

    def report(self, endings: list[Ending]) -> str:
        """Return the report of a failure."""
        group, folder = self._worker_group, self._launch.log_dir
        ranks = [worker.global_rank for worker in group.workers]
        logs = {} if folder is None else {rank: Path(folder, f"rank_{rank}.log") for rank in ranks}
        size, nodes = group.workers[0].world_size, group.group_world_size or 1
        return describe(endings, world_size=size, nodes=nodes, logs=logs)

    def code_after(self, number: signal.Signals) -> int:
        """Return the exit code of a job after a signal, and report the exit codes of its ranks."""
        codes = [process.poll() for process in self._told_to_stop]
        if not codes:
            return 128 + number
        ends = {exit_code(code) for code in codes}
        said = ", ".join(str(exit_code(code)) for code in codes)
        say(f"{number.name} was passed on to {len(codes)} rank(s), which ended with exit code {said}")
        if ends == {0}:
            return 0
        return 128 + number if 128 + number in ends else max(ends)


class _ErrorFiles(DefaultLogsSpecs):
    """Assigns each rank a file for its exception; its output goes to the launcher's streams."""

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)
        self._folder, self._starts = "", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, local_rank: int) -> Path:
        """Return the file of one rank of this machine, in the present start."""
        return Path(self._folder, f"{self._starts}_{local_rank}.json")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of one start."""
        # Not earlier: while machines meet, a signal ends this process without running another line of Python.
        self._folder = self._folder or tempfile.mkdtemp(prefix="tr_launch_")
        self._starts += 1
        for local_rank, variables in envs.items():
            variables[rank_file.ERROR_FILE] = str(self.path(local_rank))
        none = dict.fromkeys(envs, "")
        errors = {local_rank: os.path.join(self._folder, f"torch_{local_rank}") for local_rank in envs}
        return LogsDest(stdouts=none, stderrs=none, tee_stdouts={}, tee_stderrs={}, error_files=errors)


def _specification(launch: Launch) -> WorkerSpec:
    """Return the launch in torch's terms.

    Raises:
        LaunchError: there is no rendezvous at the endpoint.
    """
    is_static = launch.node_rank is not None and launch.max_nodes > 1
    host, port = _split(launch.endpoint) if launch.endpoint else ("localhost", 0)
    if port and (launch.max_nodes == 1 or launch.node_rank == 0):
        _check_free(host, port)
    settings: dict[str, Any] = {"timeout": _RENDEZVOUS_S, **launch.rdzv_conf}
    if is_static:
        settings["rank"] = launch.node_rank
    parameters = RendezvousParameters(
        backend="static" if is_static else "c10d",
        endpoint=f"{host}:{port}",
        run_id=launch.rdzv_id or (uuid.uuid4().hex if launch.max_nodes == 1 else "none"),
        min_nodes=launch.min_nodes,
        max_nodes=launch.max_nodes,
        **settings,
    )
    try:
        handler = rendezvous.get_rendezvous_handler(parameters)
    except (RendezvousError, RuntimeError, OSError) as error:
        raise LaunchError(f"no rendezvous at {host}:{port}: {_cause(error)}") from error
    words = [*(["-m"] if launch.is_module else []), *launch.command]
    return WorkerSpec(
        role="default",
        local_world_size=launch.nproc,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-u", rank_file.__file__, *(word.replace("$", "$$") for word in words)),  # torch substitutes macros
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
        master_addr=host if is_static else None,
        master_port=port if is_static else None,
    )


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"the place to meet must be HOST:PORT, not {endpoint!r}")
    return host, int(port)


def _check_free(host: str, port: int) -> None:
    """Raise if this machine must serve a port that another program uses: torch would wait for that program's answer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise LaunchError(
            f"the processes cannot meet at {host}:{port}: {error.strerror or error}; choose another port, the same on "
            "all machines, and an address of this one"
        ) from None


def _cause(error: BaseException) -> str:
    inner = error.__cause__ or error
    return f"{type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else error}"
