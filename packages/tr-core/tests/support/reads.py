"""Count what gives a tensor's value to Python."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
}


class ReadCounter(TorchDispatchMode):
    """Counts operations that give a tensor's value to Python."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def read_counter(monkeypatch):
    counter = ReadCounter()
    for name in ("tolist", "numpy"):  # these do not pass through the dispatcher
        original = getattr(torch.Tensor, name)

        def counted(tensor, *args, _name=name, _original=original, **kwargs):
            counter.reads.append(_name)
            return _original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return counter
