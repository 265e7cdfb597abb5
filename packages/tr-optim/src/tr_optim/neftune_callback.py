"""Attach NEFTune's noise for as long as a Trainer trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from tr_optim.neftune import NEFTune


class NEFTuneCallback:
    """A trainer callback: noise on the input embedding from the beginning of training to its end, however it ends.

    Args:
        alpha: size of the noise, as of `NEFTune`.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._noise: NEFTune | None = None

    @classmethod
    def from_arguments(cls, args: Any) -> NEFTuneCallback:
        """Build from training arguments: `neftune_noise_alpha`."""
        return cls(args.neftune_noise_alpha)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Attach the noise."""
        self._noise = NEFTune(model, self.alpha)
        self._noise.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach it, after an exception too."""
        noise, self._noise = self._noise, None
        if noise is not None:
            noise.__exit__(None, None, None)
