"""Run a function in several local processes that form a process group on the CPU, for tests."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from tr_dist.launching.report import CONSEQUENCES

# Seconds that the others get to report once a rank has failed: the cause may arrive after its consequence.
_GRACE_S = 1.0
# Imported once in the fork server. The first optimizer of a process imports torch._dynamo, which takes seconds.
# Missing packages are skipped.
_PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "tr_dist.ddp", "tr_dist.testing", "pytest"]
_PRELOAD += os.environ.get("TR_RANKS_PRELOAD", "").split()
if os.environ.get("DS_ACCELERATOR") == "cpu":  # otherwise it would look for a device that the ranks do not see
    _PRELOAD.append("deepspeed")


class RankError(RuntimeError):
    """A rank ended without a result: killed, out of time, or by an exception that cannot be sent."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `function(*args)` in `world_size` processes and return their results in rank order.

    Each process has one torch thread and the variables of a launcher (RANK, WORLD_SIZE, ...), so that
    `tr_dist.DDP()` in it joins a gloo group. They meet through a temporary file; no port is used. The
    processes come from a fork server that has imported torch, so a call costs about a second. The modules that the
    variable TR_RANKS_PRELOAD names, with spaces between them, are imported there too, once for all calls.

    Args:
        function: a module-level function. Its module need not be importable by name (a test module is not): it is
            then loaded from its file.
        world_size: number of processes.
        *args: arguments of every call; they and the results must be picklable.
        timeout_s: seconds after which all processes are killed.

    Raises:
        Exception: the exception of the rank that failed first, with its traceback and those of the others as
            notes.
        RankError: that exception cannot be pickled, a process died, or the time is over.
        ValueError: the function is not at a module's top level, where another process can find it.
    """
    if "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is defined inside another object; move it to its module's top level")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    work = (function.__module__, inspect.getsourcefile(function), function.__qualname__, pickle.dumps(args))
    with tempfile.TemporaryDirectory(prefix="tr_ranks_") as folder:
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                variables = _variables(rank, world_size, str(Path(folder, "meet")))
                stack = str(Path(folder, f"stack_{rank}"))
                process = context.Process(target=_run_rank, args=(sender, variables, work, stack))
                process.start()
                sender.close()  # now only the rank holds that end, so its death ends the connection
                processes.append(process)
                connections.append(receiver)
            outcomes = _collect(connections, time.monotonic() + timeout_s)
            stacks = _stacks_of_the_silent(processes, outcomes, folder)
        finally:
            _end(processes, connections)
    if any(outcome is None or outcome[0] != "returned" for outcome in outcomes):
        _raise_first_cause(outcomes, processes, [f"time limit {timeout_s:g} s", *stacks])
    _check_ends(processes)
    return [pickle.loads(outcome[1]) for outcome in outcomes if outcome is not None]


def _variables(rank: int, world_size: int, meeting_file: str) -> dict[str, str]:
    """Return the variables of a rank: those of this process, updated with those of a launcher."""
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_"))  # the test itself may run under a launcher
    }
    return {
        **others,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TR_RENDEZVOUS_FILE": meeting_file,
        "CUDA_VISIBLE_DEVICES": "",
    }


# "returned", "raised" or "died"; the pickled value; the traceback. None: no report within the time.
_Outcome = tuple[str, bytes, str] | None


def _collect(connections: list[Connection], deadline: float) -> list[_Outcome]:
    """Receive the ranks' reports until all have come, the time is over, or the time after a failure is."""
    outcomes: list[_Outcome] = [None] * len(connections)
    open_ones = dict(zip(connections, range(len(connections)), strict=True))
    while open_ones and (ready := wait(list(open_ones), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ones.pop(connection)
            try:
                outcome = connection.recv()
            except EOFError:
                outcome = ("died", b"", "")
            outcomes[rank] = outcome
            if outcome[0] != "returned":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _stacks_of_the_silent(processes: list[BaseProcess], outcomes: list[_Outcome], folder: str) -> list[str]:
    """Ask the ranks without a report for their stacks."""
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    for rank in silent:
        pid = processes[rank].pid
        if pid is not None and Path(folder, f"stack_{rank}").exists():  # otherwise it has no handler yet, and would die
            os.kill(pid, signal.SIGUSR1)
    if silent:
        time.sleep(0.2)
    paths = {rank: Path(folder, f"stack_{rank}") for rank in silent}
    return [f"rank {rank} was at:\n{path.read_text()}" for rank, path in paths.items() if path.exists()]


def _end(processes: list[BaseProcess], connections: list[Connection]) -> None:
    """Let ranks that have reported end by themselves; kill the others."""
    patience = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, patience - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    for connection in connections:
        connection.close()


def _check_ends(processes: list[BaseProcess]) -> None:
    """Refuse a rank that crashed after it had returned; a rank that was killed while it ended is not a crash."""
    crashed = [f"rank {rank} with {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode not in (0, -9)]
    if crashed:
        raise RankError(f"returned, and then ended with an exit code: {', '.join(crashed)}")


def _raise_first_cause(outcomes: list[_Outcome], processes: list[BaseProcess], details: list[str]) -> NoReturn:
    reports = {rank: o for rank, o in enumerate(outcomes) if o is not None and o[0] == "raised"}
    notes = [f"rank {rank} of {len(outcomes)}:\n{report[2]}" for rank, report in reports.items()]
    # A rank whose peer is gone fails too; its connection error is not the cause.
    causes = [rank for rank, o in reports.items() if not any(word in o[2] for word in CONSEQUENCES)]
    ends = [
        f"rank {rank} " + ("did not end" if outcome is None else f"died with exit code {processes[rank].exitcode}")
        for rank, outcome in enumerate(outcomes)
        if outcome is None or outcome[0] == "died"
    ]
    if causes or not ends:
        error = _unpickled(reports[causes[0] if causes else min(reports)][1])
        error.add_note("\n".join(notes))
        raise error
    raise RankError("\n".join([", ".join(ends), *details, *notes]))


def _unpickled(data: bytes) -> BaseException:
    error = pickle.loads(data)
    return error if isinstance(error, BaseException) else RankError(str(error))


def _run_rank(
    sender: Connection, variables: dict[str, str], work: tuple[str, str | None, str, bytes], stack: str
) -> None:
    stack_file = open(stack + ".new", "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    os.replace(stack + ".new", stack)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    # A rank starts processes, as those that load data, as one of a launcher does, and not as this one was started.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    module_name, file, qualified_name, arguments = work
    try:
        function = getattr(load_module(module_name, file), qualified_name)
        report = ("returned", pickle.dumps(function(*pickle.loads(arguments))), "")
    except BaseException as error:  # a rank that calls sys.exit has failed too
        report = ("raised", _pickled(error), "".join(traceback.format_exception(error)))
    sender.send(report)
    sender.close()


def _end_with_parent() -> None:
    """End when the calling process is gone, which then cannot kill this one. A daemon process could have no workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def load_module(module_name: str, file: str | None) -> Any:
    """Import a module as the calling process did: by name, otherwise from its file under that name.

    Raises:
        ImportError: neither is possible.
    """
    if module_name in sys.modules:
        return sys.modules[module_name]
    specification = None
    with contextlib.suppress(ImportError, ValueError):
        specification = importlib.util.find_spec(module_name)
    if specification is None or (file and specification.origin != file):
        if file is None:
            raise ImportError(f"run_ranks cannot find module {module_name}; put the function in a file")
        specification = importlib.util.spec_from_file_location(module_name, file)
    if specification is None or specification.loader is None:
        raise ImportError(f"run_ranks cannot load {file}; put the function in a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module  # before running it, so that its definitions can be pickled
    specification.loader.exec_module(module)
    return module


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an exception with its own constructor may pickle but not unpickle
        return data
    except Exception:
        return pickle.dumps(f"{type(error).__name__}: {error}")
