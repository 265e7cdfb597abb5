"""Wait in one process for what another does."""

import time

LIMIT_S = 60.0


def wait_for(path):
    """Wait until a file is there."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
