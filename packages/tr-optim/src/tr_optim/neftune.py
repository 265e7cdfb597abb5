"""NEFTune: add noise to the input embeddings during fine-tuning, by a context or by a Trainer's callback."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tr_log.tracker import EveryEvent
from tr_optim.neftune_noise import CALLS, RANK, SEED, STEP, TokenInputs, compiled_noise, draw, seeded

LENGTHS = ("real", "padded")
_REMEMBERED = 64


class NEFTune:
    """Add uniform noise to an embedding's output while the context is open and the embedding is in training mode.

    The noise of a sequence of L tokens with d channels is within `alpha / sqrt(L * d)`. So its expected norm,
    `alpha / sqrt(3)`, does not depend on the length. L is the number of real tokens, and padding gets no noise. If the
    model gets an `attention_mask` of the tokens' shape, its positive entries count. If it gets `position_ids`, each
    sequence of a packed row counts separately. Without either, L is the length of the batch.

    Its own generator draws the numbers; the seed is (seed, rank, step, call within the step). So torch's default
    generators are not used, micro-batches get different noise, and a resumed run gets the noise of an uninterrupted
    one. `set_step` sets the step; without it the step is always 0. Activations that are recomputed in the backward pass
    get their first noise again.

    On leaving the context, also by an exception, the model is as it was before. Copies of the model made inside have no
    noise. An object can be entered again after it was left. Under torch.compile there is neither a graph break nor a
    compilation for each length. Models that were compiled before are recompiled, or they would have no noise.

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (2023, arXiv 2310.05914), Algorithm
    1, with the lengths of the authors' runs. Common implementations count padding as tokens, which gives short rows of
    a batch too little noise: `length="padded"`.

    Args:
        model_or_embedding: an `nn.Embedding`, or a model whose input embedding `input_embedding` finds. An embedding
            alone has no mask.
        alpha: size of the noise; the paper uses 5, 10 and 15.
        length: meaning of L: `real` tokens, or all positions of the `padded` batch, which then all get noise.
        seed: of the numbers; None takes them from torch's default generator of the output's device.
        rank: number of this process among those that have different data.

    Attributes:
        embedding: the module that gets the noise.

    Raises:
        ValueError: alpha is not positive, `length` is unknown, or the model's input embedding is not found.
    """

    def __init__(
        self,
        model_or_embedding: nn.Module,
        alpha: float,
        *,
        length: str = "real",
        seed: int | None = 0,
        rank: int = 0,
    ) -> None:
        if not alpha > 0 or math.isinf(alpha):
            raise ValueError(
                f"alpha={alpha:g} must be positive and finite: the paper uses 5 to 15; for no noise, leave it out"
            )
        if length not in LENGTHS:
            raise ValueError(f"length={length!r} is not known; it is one of {', '.join(LENGTHS)}")
        self.embedding = input_embedding(model_or_embedding)
        self._inputs = TokenInputs(model_or_embedding, self.embedding) if length == "real" else None
        self._noise = _Noise(alpha, self._inputs, seed, rank)
        self._handle: RemovableHandle | None = None

    def set_step(self, step: int) -> None:
        """Start an optimizer step; the noise depends on its number and on the calls since."""
        self._noise.set_step(step)

    def __enter__(self) -> NEFTune:
        if any(isinstance(hook, _Noise) and hook.alpha for hook in self.embedding._forward_hooks.values()):
            raise RuntimeError(
                "this embedding has NEFTune noise already; leave that context first, or the noise would add up"
            )
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what is compiled already does not look for new hooks
        self._handle = self.embedding.register_forward_hook(self._noise)
        if self._inputs is not None:
            self._inputs.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._inputs is not None:
            self._inputs.detach()


class _Noise:
    """A forward hook; a copy of it, made with its module, is silent."""

    def __init__(self, alpha: float, inputs: TokenInputs | None = None, seed: int | None = None, rank: int = 0) -> None:
        self.alpha, self._inputs = alpha, inputs
        self._counters = torch.zeros(0 if seed is None else 4, dtype=torch.int64)
        if seed is not None:
            self._counters[SEED], self._counters[RANK] = seed, rank
        self._remembered: dict[int, int] = {}

    def set_step(self, step: int) -> None:
        if self._counters.numel():
            self._counters[STEP], self._counters[CALLS] = step, 0
        self._remembered.clear()

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not self.alpha or not module.training:
            return output
        mask, positions = (None, None) if self._inputs is None else self._inputs.of(output)
        # A call without gradients does not count: it may be a trial, of which nothing is left.
        counts, embedded = torch.is_grad_enabled(), output.detach()
        if torch.compiler.is_compiling():
            return output + compiled_noise(embedded, mask, positions, self.alpha, self._counters, counts)
        generator = seeded(self._key(inputs, counts), output.device) if self._counters.numel() else None
        return output + draw(embedded, mask, positions, self.alpha, generator)

    def _key(self, inputs: Any, counts: bool) -> list[int]:
        """Return what the numbers of a call depend on, and count it."""
        seed, rank, step, call = self._counters.tolist()  # on the CPU: nothing is waited for
        tokens = inputs[0].data_ptr() if inputs and isinstance(inputs[0], torch.Tensor) else 0
        if torch._C._current_graph_task_id() != -1:  # computed again, within a backward pass
            call = self._remembered.get(tokens, max(call - 1, 0))
        else:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[tokens] = call
        if counts:
            self._counters[CALLS] = max(int(self._counters[CALLS]), call + 1)
        return [seed, rank, step, call]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noise:
        return _Noise(0.0)

    def __reduce__(self) -> tuple[type[_Noise], tuple[float]]:
        return _Noise, (0.0,)


class NEFTuneCallback(EveryEvent):
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
        """Set the step, so that a resumed run has the same noise."""
        if self._noise is not None:
            self._noise.set_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach it, after an exception too."""
        noise, self._noise = self._noise, None
        if noise is not None:
            noise.__exit__(None, None, None)


def input_embedding(model: nn.Module) -> nn.Module:
    """Return the module that turns a model's input ids into vectors.

    That is `model` itself if it is an `nn.Embedding`, what its `get_input_embeddings()` returns, or the only
    `nn.Embedding` in it.

    Raises:
        ValueError: there is none, or more than one; the message names the candidates.
    """
    if isinstance(model, nn.Embedding):
        return model
    named = _named_by_model(model)
    if named is not None:
        return named
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


def _named_by_model(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        embedding = get()
    except (NotImplementedError, AttributeError):  # base classes define the method for models that have no embedding
        return None
    return embedding if isinstance(embedding, nn.Module) else None
