"""Give cached memory of the device back every so many steps."""

import pytest
import torch

from tr_core import TrainerControl, TrainerState
from tr_core.callbacks.defaults import EmptyCacheCallback


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_cache_of_the_device_is_emptied_every_so_many_steps(monkeypatch, kind):
    emptied, state = [], TrainerState()
    monkeypatch.setattr(torch.get_device_module(kind), "empty_cache", lambda: emptied.append(state.global_step))
    callback = EmptyCacheCallback(torch.device(kind), 3)
    for state.global_step in range(1, 8):
        callback.on_step_end(None, state, TrainerControl())
    assert emptied == [3, 6]


def test_on_a_cpu_there_is_nothing_to_empty(make_trainer):
    trainer = make_trainer(8, torch_empty_cache_steps=1)
    assert not any(isinstance(callback, EmptyCacheCallback) for callback in trainer.callback_handler.callbacks)
    assert trainer.train().global_step == 2


@pytest.mark.cuda
def test_memory_that_no_tensor_uses_goes_back_to_a_cuda_device(make_trainer):
    class Leaves(torch.nn.Module):
        """Frees a large tensor in every forward."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def forward(self, x, labels):
            torch.empty(64 * 2**20, dtype=torch.uint8, device=x.device)
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    reserved = []
    for changes in ({}, {"torch_empty_cache_steps": 1}):
        torch.cuda.empty_cache()
        make_trainer(8, model=Leaves(), use_cpu=False, **changes).train()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] >= 64 * 2**20 > reserved[1]
