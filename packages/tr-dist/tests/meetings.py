"""What processes of tests meet by: a free port, and a file that one of them waits for."""

import socket
import time

LIMIT_S = 60.0


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(path):
    """Wait until a file is there."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
