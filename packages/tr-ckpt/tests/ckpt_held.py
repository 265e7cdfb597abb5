"""Hold a write in the background where it is, to look around meanwhile."""

import threading
from contextlib import contextmanager

from tr_ckpt import files

PATIENCE_S = 60


class Held:
    """Blocks every write of a file that another thread makes until `let_go`."""

    def __init__(self):
        self.begun, self._go, self._main = threading.Event(), threading.Event(), threading.current_thread()
        self._write = files.write

    def write(self, descriptor, data):
        if threading.current_thread() is not self._main:
            self.begun.set()
            assert self._go.wait(PATIENCE_S)
        self._write(descriptor, data)

    def let_go(self):
        self._go.set()

    def wait_until_writing(self):
        assert self.begun.wait(PATIENCE_S)


@contextmanager
def held():
    """Hold what is written inside the block; at its end all goes on."""
    holding = Held()
    files.write = holding.write
    try:
        yield holding
    finally:
        files.write = holding._write
        holding.let_go()
