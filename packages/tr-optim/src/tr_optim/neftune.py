"""NEFTune: noise on the input embeddings while a model is being fine-tuned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class NEFTune:
    """Add uniform noise to an embedding's output as long as the context is open and the embedding is in training mode.

    The noise of an output of L positions and d channels lies within `alpha / sqrt(L * d)`, so its expected norm over a
    sequence, `alpha / sqrt(3)`, does not depend on the length. L counts padding too. Random numbers come from torch's
    default generator of the output's device.

    On leaving the context, by an exception too, nothing of it remains on the module. Copies of the model made within
    have no noise. One object can be entered again after it was left.

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (2023), Algorithm 1. Deviation: L is
    the padded length of the batch, as in the common implementations, where the paper's runs used each row's own.

    Args:
        model_or_embedding: an `nn.Embedding`, or a model whose input embedding `input_embedding` finds.
        alpha: size of the noise; the paper uses 5, 10 and 15.

    Attributes:
        embedding: the module that gets the noise.

    Raises:
        ValueError: alpha is not positive, or the model's input embedding cannot be told.
    """

    def __init__(self, model_or_embedding: nn.Module, alpha: float) -> None:
        if not alpha > 0 or math.isinf(alpha):
            raise ValueError(
                f"alpha={alpha:g} must be positive and finite: the paper uses 5 to 15; for no noise, leave it out"
            )
        self.embedding = input_embedding(model_or_embedding)
        self._noise = _Noise(alpha)
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> NEFTune:
        if any(isinstance(hook, _Noise) and hook.alpha for hook in self.embedding._forward_hooks.values()):
            raise RuntimeError(
                "this embedding has NEFTune noise already; leave that context first, or the noise would add up"
            )
        self._handle = self.embedding.register_forward_hook(self._noise)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Noise:
    """A forward hook; a copy of it, made with its module, is silent."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not self.alpha or not module.training:
            return output
        # (B, L, d), or (L, d) for a packed batch
        bound = self.alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-bound, bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noise:
        return _Noise(0.0)

    def __reduce__(self) -> tuple[type[_Noise], tuple[float]]:
        return _Noise, (0.0,)


def input_embedding(model: nn.Module) -> nn.Module:
    """Return the module that turns a model's input ids into vectors.

    That is `model` itself if it is an `nn.Embedding`, what its `get_input_embeddings()` returns, or the only
    `nn.Embedding` in it.

    Raises:
        ValueError: there is none, or more than one; the message names the candidates.
    """
    if isinstance(model, nn.Embedding):
        return model
    told = _told(model)
    if told is not None:
        return told
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if len(found) == 1:
        return next(iter(found.values()))
    name = type(model).__name__
    if not found:
        raise ValueError(f"{name} has no nn.Embedding and no get_input_embeddings(); give the embedding module itself")
    raise ValueError(
        f"{name} has {len(found)} embeddings ({', '.join(found)}) and no get_input_embeddings() to tell the input's; "
        f"give one, for instance model.{next(iter(found))}"
    )


def _told(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        embedding = get()
    except (NotImplementedError, AttributeError):  # base classes define the method for models that have no embedding
        return None
    return embedding if isinstance(embedding, nn.Module) else None
