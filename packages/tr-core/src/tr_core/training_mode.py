"""Have every micro-batch computed in training mode, whatever mode a callback or a loss left the model in."""

from __future__ import annotations

from torch import nn


class TrainingMode:
    """The mode of a model's modules while a run trains.

    - A run puts the whole model into training mode when it begins. Norm layers with running statistics stay in
      evaluation mode where they are in it although the module around them is not: they were frozen by hand.
    - Modules that are put into evaluation mode during the run stay in it, as long as the model itself is in training
      mode.
    - A model that was left in evaluation mode as a whole, as by `model.eval()` in a callback that generates text, is
      put back into training mode before its next micro-batch, but for the modules that were in evaluation mode when
      the run, or its last epoch, began.

    Args:
        model: the unwrapped model.
        wrapped: the model as the strategy wrapped it.
    """

    def __init__(self, model: nn.Module, wrapped: nn.Module) -> None:
        self._model, self._wrapped = model, wrapped
        self._frozen: list[nn.Module] = []

    def begin(self) -> None:
        """Put the model into training mode, frozen norm layers excepted."""
        self._frozen = _frozen_norms(self._model)
        self.restore()

    def note(self) -> None:
        """Remember which modules are in evaluation mode, unless the model as a whole is."""
        if self._model.training:
            self._frozen = [module for module in self._model.modules() if not module.training]

    def restore(self) -> None:
        """Put the model back into training mode, but for the modules that are to stay in evaluation mode."""
        self._wrapped.train()
        self._model.train()
        for module in self._frozen:
            module.training = False


def _frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers with running statistics that are in evaluation mode inside a module that is not."""
    return [
        child
        for module in model.modules()
        if module.training
        for child in module.children()
        if not child.training and hasattr(child, "running_mean")
    ]
