"""Keep an exponential moving average of the weights, and evaluate and export that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from tr_args import TrainingArguments
from tr_args.fields.training import RegularizationFields
from tr_core.callback import TrainerCallback
from tr_core.model_io import local_shard, to_device
from tr_core.protocols import Stateful
from tr_core.state import TrainerControl, TrainerState


class WeightAverage:
    """An exponential moving average of a module's weights, held in float32 on the weights' device.

    It averages the parameters that are trainable at construction, each once however many names it has. It also averages
    the floating-point buffers that are saved with the module (running statistics of norms). It leaves other buffers and
    frozen parameters to the module. Float64 stays float64. Each rank averages its own part of a sharded weight (a
    DTensor) and exchanges nothing.

    No sync. An update makes the same number of torch calls for a thousand weights as for one.

    Args:
        model: the module, on its device.
        decay: share of the average that an update keeps, between 0 and 1.

    Attributes:
        model: the module.
        restored: whether a state was loaded and training has not begun from it yet.

    Raises:
        ValueError: a weight is packed, or this process cannot access its values.

    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging"; as exponential average
    in Tarvainen and Valpola 2017, "Mean teachers are better role models", equation 2.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.restored = False
        self._parameters = {name: p for name, p in model.named_parameters() if _is_averaged(p)}
        # Kept by module and name: a module may replace a buffer's tensor.
        self._buffers = _buffer_places(model)
        for name, tensor in zip(self._names(), self._live(), strict=True):
            if type(local_shard(tensor.data)) is not torch.Tensor:
                raise ValueError(
                    f"ema_decay averages plain tensors, or shards, but {name} is a "
                    f"{type(tensor.data).__name__}; leave ema_decay out with a strategy that packs the weights"
                )
            if tensor.numel() == 0:
                raise ValueError(
                    f"ema_decay averages weights, of which {name} has none in this process; leave ema_decay out, or "
                    "divide the model by strategy='fsdp', which knows whose part is where"
                )
        self._named = {name: _widened(live) for name, live in zip(self._names(), self._live(), strict=True)}
        self._average = [local_shard(average) for average in self._named.values()]
        pairs = zip(self._average, self._numbers(), strict=True)
        narrow = [place for place, (average, live) in enumerate(pairs) if average.dtype != live.dtype]
        self._narrow: dict[torch.device, list[int]] = {}
        for place in narrow:
            if self._average[place].numel():
                self._narrow.setdefault(self._average[place].device, []).append(place)
        self._absent = [place for place in narrow if not self._average[place].numel()]  # other ranks hold all of it
        self._narrow_numel = {
            device: sum(self._average[place].numel() for place in places) for device, places in self._narrow.items()
        }
        self._is_swapped = False

    def reset(self) -> None:
        """Reset the average to the current weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._average, self._numbers())

    def update(self, left_out: torch.Tensor | None = None) -> None:
        """Update the average: average ← decay · average + (1 - decay) · weights.

        Args:
            left_out: scalar on a device; unless 0, the average stays the same, bit for bit.
        """
        live = self._numbers()
        with torch.no_grad():
            for device, places in self._narrow.items():
                for place, wide in zip(places, self._widen(live, device), strict=True):
                    live[place] = wide
            for place in self._absent:
                live[place] = self._average[place]
            if left_out is None:
                torch._foreach_lerp_(self._average, live, 1 - self.decay)
            else:
                torch._foreach_lerp_(self._average, live, self._shares(left_out))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the average into the module inside the block, and restore its own weights afterwards.

        The block costs one more copy of the weights. A nested block does nothing.

        Raises:
            ValueError: a parameter was frozen when training began and is not any more.
        """
        if self._is_swapped:
            yield
            return
        self._check_complete()
        own = [tensor.detach().clone() for tensor in self._numbers()]
        self._is_swapped = True
        try:
            self._put_in(self._average)
            yield
        finally:
            self._put_in(own)
            self._is_swapped = False

    def keep(self) -> None:
        """Copy the average into the module permanently."""
        self._check_complete()
        self._put_in(self._average)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average by the names that the tensors have in the module's own state."""
        return dict(self._named)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], /) -> None:
        """Load an average.

        Raises:
            ValueError: the average belongs to other weights; the message names them.
        """
        own = self.state_dict()
        if odd := sorted(set(own) ^ set(state_dict)):
            raise ValueError(
                f"the saved average is of other weights: {', '.join(odd[:5])}{', ...' if odd[5:] else ''} are only in "
                "one of them; the same parameters must be frozen as when it was saved"
            )
        for name, average in own.items():
            if average.shape != state_dict[name].shape:
                raise ValueError(
                    f"the average of {name} has the shape {tuple(state_dict[name].shape)}, the weight "
                    f"{tuple(average.shape)}"
                )
            local_shard(average).copy_(_part_like(average, state_dict[name]))
        self.restored = True

    def _names(self) -> list[str]:
        return [*self._parameters, *self._buffers]

    def _live(self) -> list[torch.Tensor]:
        # No generator: it would cost one call per weight.
        return [*self._parameters.values(), *[module._buffers[name] for module, name in self._buffers.values()]]  # pyright: ignore[reportReturnType]

    def _numbers(self) -> list[torch.Tensor]:
        """Return this rank's part of the trainable weights, without gradients.

        Not cached, because `fully_shard` may replace the memory of a shard. Read by the attribute, because `to_local()`
        costs one call per weight.
        """
        return [getattr(tensor, "_local_tensor", tensor) for tensor in self._live()]

    def _widen(self, live: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return copies in float32 of those weights on a device that have fewer bits than their average."""
        narrow = [live[place] for place in self._narrow[device]]
        memory = torch.empty(self._narrow_numel[device], dtype=torch.float32, device=device)
        wide = _unflatten_dense_tensors(memory, narrow)  # one call for all
        torch._foreach_copy_(wide, narrow)
        return wide

    def _shares(self, left_out: torch.Tensor) -> list[torch.Tensor]:
        """Return the share of the weights in each average: 0 if the update was left out."""
        kinds = [(average.device, average.dtype) for average in self._average]
        keeps = left_out.logical_not()
        shares = {(to, kind): to_device(keeps, to).to(kind) * (1 - self.decay) for to, kind in {*kinds}}
        return [shares[kind] for kind in kinds]

    def _put_in(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._numbers(), tensors)

    def _check_complete(self) -> None:
        late = [n for n, p in self.model.named_parameters() if _is_averaged(p) and n not in self._parameters]
        if late:
            raise ValueError(
                f"there is no average of {', '.join(late[:5])}{', ...' if late[5:] else ''}: frozen when training "
                "began, trainable now; with ema_decay, freeze by a learning rate of 0 instead"
            )


class EMACallback(TrainerCallback):
    """Average the weights during training; evaluation, `save_model` and the end of the run use the average.

    A checkpoint holds the raw weights as its part `model` and the average as its part `ema`. `ema.safetensors` has the
    names of the model's own file. After an exception the model has the raw weights.

    Args:
        decay: as of `WeightAverage`, for one update.
        start_step: optimizer steps before the average begins; until then the raw weights are used.
        update_steps: optimizer steps from one update to the next.
    """

    def __init__(self, decay: float, start_step: int = 0, update_steps: int = 1) -> None:
        self.decay, self.start_step, self.update_steps = decay, start_step, update_steps
        self._average: WeightAverage | None = None
        self._is_training = self._has_begun = False

    @classmethod
    def from_arguments(cls, args: RegularizationFields) -> EMACallback:
        """Build from training arguments: `ema_decay`, `ema_start_step` and `ema_update_steps`."""
        return cls(cast("float", args.ema_decay), args.ema_start_step, args.ema_update_steps)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start from the current weights, or from the average of the restored checkpoint."""
        average = self._of(kwargs["model"])
        if not average.restored:
            average.reset()
        average.restored = False
        self._is_training, self._has_begun = True, state.global_step >= self.start_step

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the average, unless the step was left out or no update is due."""
        since_start = state.global_step + 1 - self.start_step  # the state does not count this step yet
        if since_start == 0:
            self._of(kwargs["model"]).reset()
            self._has_begun = True
        elif since_start > 0 and since_start % self.update_steps == 0 and kwargs.get("applied", True):
            self._of(kwargs["model"]).update(kwargs.get("left_out"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop swapping the average into the model."""
        self._is_training = False

    def weight_parts(self, model: nn.Module) -> dict[str, Stateful]:
        """Return the average, to be saved and restored with the weights."""
        average = self._of(model)
        if self._is_training and not self._has_begun:
            average.reset()  # save what would be evaluated
        return {"ema": average}

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        """Swap the average into the model inside the block, during training."""
        return self._of(model).swapped_in() if self._is_training and self._has_begun else nullcontext()

    def keep_evaluation_weights(self, model: nn.Module, state: TrainerState) -> None:
        """Copy the average into the model permanently, at the end of the run."""
        average = self._of(model)
        if state.global_step >= self.start_step:
            average.keep()
        average.restored = self._is_training = False

    def _of(self, model: nn.Module) -> WeightAverage:
        if self._average is None or self._average.model is not model:
            self._average = WeightAverage(model, self.decay)
        return self._average


def _is_averaged(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.is_floating_point()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _part_like(average: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return the part of a saved tensor, whole or in shards, that this rank holds of the average."""
    if local_shard(average) is average:
        return saved
    if local_shard(saved) is saved:  # whole, on every rank
        from torch.distributed.tensor import DTensor, Replicate

        mesh = average.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        whole = DTensor.from_local(saved.to(average.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
        saved = whole.redistribute(placements=average.placements)  # pyright: ignore[reportAttributeAccessIssue]
    return local_shard(saved)


def _buffer_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return module and name of each floating-point buffer that is saved with the model, by its whole name."""
    places: dict[str, tuple[nn.Module, str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if buffer.is_floating_point():
                seen.add(id(buffer))
                places[f"{prefix}.{name}" if prefix else name] = (module, name)
    return places
