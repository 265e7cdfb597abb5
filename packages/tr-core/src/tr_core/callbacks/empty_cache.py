"""Release the device's cached memory every few steps."""

from __future__ import annotations

from typing import Any

import torch

from tr_args import TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.state import TrainerControl, TrainerState


class EmptyCacheCallback(TrainerCallback):
    """Release the memory that torch's allocator caches: slower, but the peak may be lower.

    Args:
        device: whose memory: a device whose torch module has `empty_cache`, as CUDA, MPS and XPU have.
        every_steps: optimizer steps between two releases.
    """

    def __init__(self, device: torch.device, every_steps: int) -> None:
        self.every_steps = every_steps
        self._empty_cache = torch.get_device_module(device).empty_cache

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Release the cache, if due."""
        if state.global_step % self.every_steps == 0:
            self._empty_cache()  # sync: the driver waits for the device before it takes memory back
