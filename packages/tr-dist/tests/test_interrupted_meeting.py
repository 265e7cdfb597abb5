"""Ctrl-C ends a rank at once that waits for others to come."""

import os
import signal
import subprocess
import sys

import pytest
from meetings import free_port

LIMIT_S = 120  # far below what the rank would wait
SCRIPT = """
import os, signal, threading
from tr_dist import DDP
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
DDP(use_cpu=True, timeout_s=3600)
"""


@pytest.mark.parametrize(
    ("rank", "place"),
    [pytest.param(0, "file", marks=pytest.mark.slow), (0, "port"), (1, "port")],
    ids=["the other does not come to a file", "the other does not come to a port", "rank 0 does not come"],
)
def test_ctrl_c_ends_the_wait(tmp_path, rank, place):
    to_file = {"TR_RENDEZVOUS_FILE": str(tmp_path / "meet")}
    to_port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables = {**os.environ, "GROUP_RANK": "0", **numbers, **(to_file if place == "file" else to_port)}
    end = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    assert end.returncode == -signal.SIGINT, end.stderr
    assert end.stderr.endswith("KeyboardInterrupt\n")
