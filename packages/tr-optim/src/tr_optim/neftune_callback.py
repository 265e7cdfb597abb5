"""Attach NEFTune's noise for as long as a Trainer trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from tr_optim.neftune import NEFTune


class NEFTuneCallback:
    """A trainer callback: noise on the input embedding from the beginning of training to its end, however it ends.

    Args:
        alpha: size of the noise, as of `NEFTune`.
        length: `real` or `padded`, as of `NEFTune`.
        seed: as of `NEFTune`.
    """

    def __init__(self, alpha: float, length: str = "real", seed: int | None = 0) -> None:
        self.alpha, self.length, self.seed = alpha, length, seed
        self._noise: NEFTune | None = None

    @classmethod
    def from_arguments(cls, args: Any) -> NEFTuneCallback:
        """Build from training arguments: `neftune_noise_alpha`, `neftune_length` and `seed`."""
        return cls(args.neftune_noise_alpha, args.neftune_length, args.seed)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Attach the noise."""
        self._noise = NEFTune(model, self.alpha, length=self.length, seed=self.seed, rank=args.process_index)
        self._noise.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which step it is: a resumed run then has the same noise."""
        if self._noise is not None:
            self._noise.set_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach it, after an exception too."""
        noise, self._noise = self._noise, None
        if noise is not None:
            noise.__exit__(None, None, None)
