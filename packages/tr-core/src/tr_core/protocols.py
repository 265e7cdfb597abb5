"""Name the seams between the loop and what is plugged into it.

A seam is a structural protocol: only torch and standard types in its signatures, so that an implementation needs no
import of this package. `tr_core.testing` holds a conformance suite for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Stateful(Protocol):
    """Something whose state can be taken and put back: modules, optimizers, schedules, callbacks, positions."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts, lists, tuples, tensors, numbers, strings, booleans, bytes and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state that `state_dict` returned."""
        ...


@runtime_checkable
class Collectives(Protocol):
    """Who this process is among the others, and how values travel between them.

    Attributes:
        device: where this process computes.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
    """

    device: torch.device
    rank: int
    local_rank: int
    world_size: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks, on every rank; the argument stays as it is.

        No value is read back to the host.
        """
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `tensor`, of one shape `(n, ...)` on all, along dimension 0, in rank order."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order. A host-side exchange: not for the step."""
        ...

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of each of `values` over all ranks, on the host alone, and return without waiting.

        Returns:
            What gives them, as often as it is called, once every rank has begun. All ranks begin in the same order,
            with as many values; when each of them reads is its own affair.
        """
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...


@runtime_checkable
class Strategy(Collectives, Protocol):
    """Where a model lives and how its step is made, on one device or on many.

    The loop calls, in this order: `prepare` once; then for each micro-batch `accumulate`, inside it `autocast` around
    the forward and `backward`; then for each step `clip_grad_norm` and `step`; at the very end `close`.
    After the backward of the last micro-batch (`sync=True`) the gradients are the *mean* over the ranks of what each
    rank's losses gave.

    A strategy need not define `binds_optimizer`, `bind_optimizer`, `accumulate_fused` and `gathered`: the Trainer adds
    those of `tr_core.single_device.StrategyDefaults`.

    Attributes:
        forward_is_collective: whether a forward is an exchange between the ranks, so that all make as many: also those
            that have nothing left to generate.
        binds_optimizer: whether `bind_optimizer` checks, or exchanges, what an optimizer holds. Then the loop does not
            look for the model's parameters in it.
    """

    forward_is_collective: bool
    binds_optimizer: bool

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and return it wrapped as training needs it.

        Called before the optimizer is built, and again where modules or parameters of the model were replaced since.
        Raises `ValueError` if the model cannot be trained this way, or what was replaced cannot be taken in.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        ...

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of one micro-batch; without `sync` gradients stay local and add up."""
        ...

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer of what `prepare` returned, before its state is restored; its groups may change tensors."""
        ...

    def accumulate_fused(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Surround one micro-batch whose gradients an `InBackward` consumes; `last` is whether it ends the step."""
        ...

    def gathered(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give one parameter whole to read inside a block, on every rank. Collective where it is divided."""
        ...

    def autocast(self) -> AbstractContextManager[object]:
        """Surround a forward pass and its loss: mixed precision, if it was asked for."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar `loss`, scaling it first where the precision needs that."""
        ...

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, a scalar tensor on the device, a new one each step: the loop keeps it for a
            while. Nothing is read back to the host.
        """
        ...

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients.

        Args:
            optimizer: what applies them.
            skip: scalar on the device, the same on all ranks. Where it is not 0, parameters and optimizer state stay as
                they are, bit for bit. It is given only with `on_nonfinite="skip"` or `"raise"`, and may be read back
                only where the optimizer cannot leave out an update on the device.

        Returns:
            False where a float16 overflow left the update out, else True, also if `skip` did.
        """
        ...

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Stateful]:
        """Return what a checkpoint of this strategy holds, by name: `model`, `optimizer`, `scaler` where there is one.

        `model` is what `prepare` returned. The `model` entry gives the state dict of the unwrapped module.
        """
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of the unwrapped module with whole tensors, as rank 0 writes it for others to load.

        Collective. On the other ranks it may be empty. Tensors may be the model's own, or copies in host memory.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group if this object joined it. `failed` says that the run ends by an exception."""
        ...


@runtime_checkable
class InBackward(Protocol):
    """An optimizer that consumes gradients during the backward pass, so that they are never all there at once.

    It is a `torch.optim.Optimizer`, known by `fused_in_backward` being True. The loop calls `bind` once before the
    first backward pass, then, in each step, `backward` for every micro-batch in place of `loss.backward()`,
    `clip_grad_norm`, `step` and `zero_grad`, and `detach` when training ends, however it ends. In a loop of one's own
    on one process `bind` and `detach` may be left out. A plain `loss.backward()` consumes nothing.

    Any optimizer may have a method `expected_bytes(micro_batches)`, which says before the first step what it will take:
    a pair of the most bytes of gradients, or of what it keeps of them, that are there at once in a step of so many
    micro-batches, and the bytes of its state after a step, or None if it cannot tell. Preflight shows them; of an
    optimizer without it, all gradients are counted, and its state is that of a step over shapes without numbers.

    Attributes:
        fused_in_backward: whether this is such an optimizer; one whose modes differ has it False in the others.
        updates_in_backward: whether weights change in `backward` already. Where they do not, an update is left out by
            not calling `step`, and nothing remembers it after `zero_grad`. Where they do, `clip_to(max_norm)` is called
            once after `bind`, for the norm has to be known before; and a true `leaves_out_nonfinite` says that a step
            whose loss or norm is not finite on any rank has changed nothing.
        reduces_own_gradients: whether it averages over the ranks itself, so that a strategy must not.
        norm_is_estimated: whether the norm that `clip_grad_norm` returned last is an estimate.
    """

    fused_in_backward: bool
    updates_in_backward: bool
    reduces_own_gradients: bool
    norm_is_estimated: bool

    def bind(self, collectives: Collectives) -> None:
        """Take over who this process is among the others, and how values travel between them."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool = True, scale: torch.Tensor | None = None) -> None:
        """Compute the gradients of one micro-batch and consume them.

        Args:
            loss: scalar, already divided by what the step's losses are to be divided by.
            last: whether it is the last micro-batch of its step.
            scale: scalar on the device that the loss is multiplied by before, and gradients are divided by after, so
                that small ones do not vanish in float16.
        """
        ...

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Have the step use gradients whose total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping over all its parameters, those included that keep their `.grad`: a new scalar
            tensor. Nothing is read back to the host.
        """
        ...

    def step(self, closure: None = None) -> object:
        """Apply what the backward passes since the last step have left."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what the backward passes since the last step have left, gradients and all else."""
        ...

    def detach(self) -> None:
        """Take the hooks off the parameters; the next `backward` puts them on again."""
        ...


@runtime_checkable
class EvaluationWeights(Protocol):
    """A callback that has the model evaluated and exported with other weights than those that train.

    The loop asks: `weight_parts` at every save, and before a restore; `evaluation_weights` around every evaluation,
    prediction and `save_model`; `keep_evaluation_weights` once, at the end of a run that no exception ended.
    `model` is always the unwrapped module, on its device.
    """

    def weight_parts(self, model: nn.Module) -> dict[str, Stateful]:
        """Return what a checkpoint must hold of these weights, by names of files: saved with `save_only_model` too."""
        ...

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a block in which the model holds these weights; one inside another, and none needed, do nothing."""
        ...

    def keep_evaluation_weights(self, model: nn.Module, state: Any) -> None:
        """Give the model these weights for good; `state` is the run's `TrainerState`."""
        ...


class Restored(Protocol):
    """What a restore of a `Checkpointer` did."""

    @property
    def step(self) -> int | None:
        """The checkpoint's step; None if there was no valid checkpoint."""
        ...

    @property
    def source(self) -> Path | None:
        """The checkpoint's folder; None if there was none."""
        ...

    @property
    def skipped(self) -> Sequence[str]:
        """The checkpoints that were not taken though they may be newer, each with the reason: what is damaged."""
        ...

    @property
    def loaded(self) -> Collection[str]:
        """Names of the parts that were given a state."""
        ...

    @property
    def states(self) -> Mapping[str, Any]:
        """The states of the parts that were only read, by name."""
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """Where a run's state is kept.

    Every rank calls every method; which rank writes what is the implementation's affair. A save may go on in the
    background after `save` has returned: what it saves is the state at the call, whatever changes meanwhile.
    `restore`, `steps` and `path` wait for it first. A failure of it is raised once, by `check`, `wait`, `close` or
    the next `save`.

    One that can keep other runs from its folder may have two more methods. `claim()` is called when a run begins,
    before anything is looked for there; it raises `OSError` where another run saves to it. `release()` is called when
    the run ends, whichever way, by each rank for itself.
    """

    def save(
        self,
        step: int,
        parts: Mapping[str, Stateful],
        *,
        write_extra: Callable[[Path], None] | None = None,
        protected: Sequence[int] = (),
        on_commit: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the state of all `parts` as the checkpoint of `step` and remove older ones beyond the limit.

        Args:
            step: completed optimizer steps.
            parts: what to save, by name; the part named `rng` is saved by every rank, the others by rank 0.
            write_extra: called on rank 0 with the folder being written, before it is sealed, to add files of its own
                (`config.json`, a tokenizer); those files are verified as the others are.
            protected: steps that must not be removed, whatever the limit (the best one).
            on_commit: called on rank 0 with the checkpoint's folder once it is complete, before older ones are removed;
                maybe in another thread, and it must return soon. What it raises is logged, not raised.

        Returns:
            The checkpoint's folder; it is there once `wait` has returned.

        Raises:
            OSError: it, or the one before, could not be written; what was there before is intact.
        """
        ...

    @property
    def restored(self) -> Restored | None:
        """What the last `restore` did, also where it found no checkpoint; None before one."""
        ...

    def restore(
        self,
        parts: Mapping[str, Stateful],
        source: str | Path | None = None,
        *,
        optional: Collection[str] = (),
        only_read: Collection[str] = (),
    ) -> int | None:
        """Load a checkpoint into `parts`, which may be fewer than were saved.

        Args:
            parts: what to load into, by name; loaded in this order, but random states last.
            source: a checkpoint's folder; None takes the newest valid one and skips damaged ones, with a warning that
                names the damage.
            optional: names of parts that stay as they are where the checkpoint does not hold them.
            only_read: names of parts whose state is put into `restored.states` instead of loading it; they need not
                be in `parts`.

        Returns:
            The checkpoint's step, or None if `source` is None and there is no valid checkpoint.

        Raises:
            ValueError: `source` is damaged or no checkpoint, or it lacks one of `parts` that is not optional; or one
                that may be the newest cannot be read, which is no damage.
        """
        ...

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending.

        Raises:
            ValueError: one cannot be looked at.
        """
        ...

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether it exists or not."""
        ...

    def check(self) -> None:
        """Raise what a save that went on in the background failed with; local to this rank, and waits for nothing.

        Raises:
            OSError: it could not be written; what was there before is intact.
        """
        ...

    def wait(self) -> None:
        """Return when nothing is being written. All ranks call it, and all raise if one of them failed.

        Raises:
            OSError: it could not be written; what was there before is intact.
        """
        ...

    def close(self) -> None:
        """Finish what is being written; raises as `wait` does."""
        ...
