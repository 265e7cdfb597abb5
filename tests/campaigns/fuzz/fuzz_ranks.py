"""Train a run on several ranks of this machine: real processes of a fork server, which meet through gloo."""

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path

from fuzz_habits import Acts, Stopped
from fuzz_trainers import OURS, settle, train

from tr_dist.testing import RankError, run_ranks


def train_in_ranks(run, folder, stop=None, resume=None):
    """Train with ours on a run's ranks; return what the first saw."""
    _fork_server()
    try:
        return run_ranks(_train, run.ranks, run, str(folder), stop, resume, timeout_s=120)[0]
    except RankError as error:
        raise RuntimeError(f"{run!r} on {run.ranks} ranks: {error}") from error


def _train(run, folder, stop, resume):
    settle()
    trace = train(OURS, run, folder, Acts(run, stop), resume, closes=True)
    trace.batches = []
    if trace.error is not None:
        trace.error = Stopped(str(trace.error)) if isinstance(trace.error, Stopped) else RuntimeError(repr(trace.error))
    return trace


@cache
def _fork_server():
    """Have the server import what ranks need, once: what is asked for after its start has no effect."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), path])  # it does not see sys.path
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "tr_dist.testing", "fuzz_ranks"])
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = path
