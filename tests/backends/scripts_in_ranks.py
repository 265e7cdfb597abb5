"""Run a function as the script of several ranks, each a process from a fork server, and keep what each prints."""

import contextlib
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from tr_dist.testing import load_module

_PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "tr_core", "tr_dist", "tr_dist.testing", "tr_dist.fsdp"]
_GRACE_S = 1.0  # that a launcher leaves to the others once one has failed


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, negative where it was told to stop, and all that it printed."""

    code: int
    said: str


def run_script(function, ranks, *arguments, limit_s=60.0, grace_s=_GRACE_S):
    """Call `function(*arguments)` in one process for each dict of environment variables, and return their ends.

    As under a launcher, a failure ends the others, after `grace_s` seconds. A process that is there after `limit_s`
    seconds is an error of the test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    work = (function.__module__, inspect.getsourcefile(function), function.__name__)
    with tempfile.TemporaryDirectory(prefix="scripts-") as folder:
        outputs = [Path(folder, str(number)) for number in range(len(ranks))]
        processes = [
            context.Process(target=_become, args=(work, arguments, variables, str(output)))
            for variables, output in zip(ranks, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, time.monotonic() + limit_s, grace_s)
            hanging = [number for number, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        ends = [End(process.exitcode, output.read_text()) for process, output in zip(processes, outputs, strict=True)]
    assert not hanging, f"ranks {hanging} hang: {ends}"
    return ends


def _wait(processes, deadline, grace_s):
    running = list(processes)
    while running and wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ended):
            wait([process.sentinel for process in running], grace_s) if running else None
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


def _become(work, arguments, variables, output):
    """Be the rank: its variables, its own output, its own end."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "DS_ACCELERATOR")}
    os.environ.clear()
    os.environ.update(kept, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **variables)
    import torch

    torch.set_num_threads(1)
    module_name, file, name = work
    function = getattr(load_module(module_name, file), name)
    code = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tracebacks(said):
    """Count them."""
    return said.count("Traceback (most recent call last)")


def last_line(said):
    """Return the line that names the exception, without a prefix like `[rank0]: `."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
