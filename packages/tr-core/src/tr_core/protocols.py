"""Define the interfaces between the loop and its replaceable parts.

An interface is a structural protocol of torch's and standard types: an implementation imports nothing from here.
`tr_core.testing` holds a conformance suite for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Stateful(Protocol):
    """Save and load a state: modules, optimizers, schedules, callbacks, positions."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts, lists, tuples, tensors, numbers, strings, booleans, bytes and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class HeldInShards(Stateful, Protocol):
    """A model's state that is whole on one rank alone, and empty on the others.

    A strategy of a user whose `state_parts` gives such a part needs the method for models with an adapter.
    """

    def state_held_here(self) -> dict[str, Any]:
        """Return this rank's shards under all names, on every rank; `load_state_dict` takes them, to stay unchanged."""
        ...


@runtime_checkable
class Collectives(Protocol):
    """Identify this process among the others, and exchange values between them.

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

    @property
    def data(self) -> Collectives:
        """Return this process among those that compute other samples: itself, unless several compute one together.

        Whatever is ordered, counted or averaged by samples goes through it.
        """
        ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor`, which stays as it is, over all ranks, on every rank. No sync. Collective."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate `tensor` of all ranks along dimension 0, in rank order; all have one shape `(n, ...)`."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order. A host-side exchange: do not call it in a step."""
        ...

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start a maximum of each of `values` over all ranks, on the host only, without waiting. Collective.

        All ranks start in the same order, with as many values. The returned function waits until every rank has
        started, and returns the maxima; each rank may call it at any time, and repeatedly.
        """
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...


@runtime_checkable
class Strategy(Collectives, Protocol):
    """Place a model and run its steps, on one device or on many.

    The loop first calls `prepare` once. For each micro-batch it calls `accumulate`, and inside it `autocast` around the
    forward, then `backward`. For each step it calls `clip_grad_norm` and `step`. At the very end it calls `close`.
    After the backward of the last micro-batch (`sync=True`) the gradients are the *mean* over the ranks of each rank's
    gradients.

    It may leave out what is in `tr_core.single_device.StrategyDefaults`, which the Trainer adds.

    Attributes:
        acts_on: which of the arguments `fsdp` and `deepspeed` it applies. A Trainer refuses the others.
        accelerator: the `accelerate.Accelerator` that it trains with, None for none.
        forward_is_collective: whether every rank must call the forward equally often.
        binds_optimizer: whether `bind_optimizer` checks or replaces an optimizer's parameters; the loop then does not.
        members: who trains together, where processes come and go during a run; None elsewhere.
        schedules_micro_batches: whether `run_micro_batches` has an order of its own, in which not every process
            computes each loss. Overrides of a step are refused then.
        sizes: numbers of processes, above 1, over which each sample, or the experts, are divided, named as in
            `parallelism_config`: `tp_size`.
        coordinates: place of this process in each direction of a mesh, by name, from 0; empty without a mesh.
    """

    acts_on: frozenset[str]
    accelerator: Any
    forward_is_collective: bool
    binds_optimizer: bool
    members: Any
    schedules_micro_batches: bool
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]

    def check_model(self, model: nn.Module) -> None:
        """Raise `ValueError` if `prepare` would refuse the model for its form. Changes nothing; not collective."""
        ...

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and return it wrapped as training needs it.

        Called before the optimizer is built, and again after parts of it were replaced. Raises `ValueError` if it
        cannot be trained this way.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was passed to `prepare`."""
        ...

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return a block for one micro-batch's forward and backward. Without `sync`, gradients add up locally."""
        ...

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bind an optimizer to the prepared model, before its state is restored; may replace tensors in its groups."""
        ...

    def accumulate_fused(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return a block for a micro-batch whose gradients an `InBackward` consumes. `last`: it ends the step."""
        ...

    def run_micro_batches(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        compute: Callable[[Any], tuple[Any, torch.Tensor]],
        inputs_of: Callable[[Any], Any],
        size: int,
    ) -> Iterable[tuple[Any, torch.Tensor]]:
        """Run forward and backward of a step's micro-batches, and yield each of them with its share of the loss.

        Args:
            model: what `prepare` returned.
            batches: one-shot; each has `inputs`, as its loader gave them.
            compute: runs the forward of a micro-batch, its loss and `backward`, and returns it with the loss, detached.
            inputs_of: moves the inputs of a micro-batch to the device.
            size: number of micro-batches.
        """
        ...

    def exchange_s(self, model: nn.Module) -> float | None:
        """Return the seconds since the last call that steps waited for an exchange of gradients; None if unknown."""
        ...

    def window_metrics(self) -> Mapping[str, torch.Tensor]:
        """Return what it measured since the last call, by name, for the log; scalars on the device. Collective."""
        ...

    def gathered(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a block in which every rank can read one full parameter. Collective if it is sharded."""
        ...

    def watching(self, progress: Callable[[], tuple[int, str, int]], folder: str) -> AbstractContextManager[object]:
        """Return a block that may end hung ranks, with a report in `folder`. See `Running._progress` for `progress`."""
        ...

    def autocast(self) -> AbstractContextManager[object]:
        """Return a block for a forward pass and its loss: mixed precision, if requested."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar `loss`, after scaling it if the precision needs that."""
        ...

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns the norm before clipping: each step a new scalar tensor on the device. Nothing is read back to the host.
        """
        ...

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients.

        Args:
            optimizer: applies the gradients.
            skip: scalar on the device, the same on all ranks; unless 0, parameters and optimizer state stay the same,
                bit for bit. Passed only with `on_nonfinite="skip"` or `"raise"`. It may be read back only if the
                optimizer cannot skip an update on the device.

        Returns:
            False if a float16 overflow skipped the update. True otherwise, also if `skip` skipped it.
        """
        ...

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Stateful]:
        """Return the parts of this strategy's checkpoints, by name: `model`, `optimizer`, and `scaler` if there is one.

        `model` is what `prepare` returned. The `model` entry returns the state dict of the unwrapped module.
        """
        ...

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of the unwrapped module, which rank 0 writes for other programs. Collective.

        Empty on the other ranks, perhaps. Its tensors may be the model's own, or copies on the host.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group if this object joined it. `failed`: whether an exception ended the run."""
        ...


@runtime_checkable
class InBackward(Protocol):
    """Consume gradients during the backward pass, so that they never exist all at once: an optimizer.

    It is a `torch.optim.Optimizer` whose `fused_in_backward` is True. The loop calls `bind` once before the first
    backward pass. In each step it calls `backward` for every micro-batch in place of `loss.backward()`. Then it calls
    `clip_grad_norm`, `step` and `zero_grad`. It calls `detach` when training ends, also after an exception. A
    hand-written loop on one process may omit `bind` and `detach`. A plain `loss.backward()` consumes nothing.

    Any optimizer may have a method `expected_bytes(micro_batches)`, which estimates its memory before the first step.
    It returns a pair, for a step of so many micro-batches. The first item is the most bytes of gradients, or of what it
    keeps of them, that exist at once. The second item is the bytes of its state after a step. It returns None if it has
    no estimate. Preflight shows the pair. For an optimizer without the method, preflight counts all gradients, and
    measures the state by a step over shapes without numbers.

    Attributes:
        fused_in_backward: whether this is such an optimizer; False in an optimizer's other modes.
        updates_in_backward: whether `backward` already changes weights. If not, an update is skipped by not calling
            `step`, and `zero_grad` clears all traces of it. If so, `clip_to(max_norm)` is called once after `bind`,
            because the norm must be known earlier. A true `leaves_out_nonfinite` then means that a step with a
            non-finite loss or norm on any rank changes nothing.
        reduces_own_gradients: whether it averages over the ranks itself, so that a strategy must not.
        norm_is_estimated: whether the last norm of `clip_grad_norm` is an estimate.
    """

    fused_in_backward: bool
    updates_in_backward: bool
    reduces_own_gradients: bool
    norm_is_estimated: bool

    def bind(self, collectives: Collectives) -> None:
        """Store the collectives: this process among the others, and the exchange of values."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool = True, scale: torch.Tensor | None = None) -> None:
        """Compute the gradients of one micro-batch and consume them.

        Args:
            loss: scalar, already divided by the divisor of the step's losses.
            last: whether it is the last micro-batch of its step.
            scale: scalar on the device. The loss is multiplied by it before, and gradients are divided by it after, so
                that small gradients do not vanish in float16.
        """
        ...

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Clip the gradients of the step to a total 2-norm of at most `max_norm`; None measures without scaling.

        Return the norm before clipping: a new scalar tensor. It covers all its parameters, also those that keep their
        `.grad`. Nothing is read back to the host.
        """
        ...

    def step(self, closure: None = None) -> object:
        """Apply the results of the backward passes since the last step."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the results of the backward passes since the last step: gradients and everything else."""
        ...

    def detach(self) -> None:
        """Remove the hooks from the parameters; the next `backward` adds them again."""
        ...


@runtime_checkable
class EvaluationWeights(Protocol):
    """Swap in other weights than the trained ones for evaluation and export: a callback.

    The loop calls `weight_parts` at every save, and before a restore. It uses `evaluation_weights` around every
    evaluation, prediction and `save_model`. It calls `keep_evaluation_weights` once, at the end of a run without an
    exception. `model` is always the unwrapped module, on its device.
    """

    def weight_parts(self, model: nn.Module) -> dict[str, Stateful]:
        """Return the parts of these weights for a checkpoint, by file name; also saved with `save_only_model`."""
        ...

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a block in which the model holds these weights. A nested block, or one not needed, does nothing."""
        ...

    def keep_evaluation_weights(self, model: nn.Module, state: Any) -> None:
        """Copy these weights into the model permanently; `state` is the run's `TrainerState`."""
        ...


class Restored(Protocol):
    """Report what a restore of a `Checkpointer` did."""

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
        """The checkpoints that were skipped though they may be newer, each with its damage as the reason."""
        ...

    @property
    def loaded(self) -> Collection[str]:
        """Names of the parts that received a state."""
        ...

    @property
    def states(self) -> Mapping[str, Any]:
        """The states of the parts that were only read, by name."""
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """Save and restore a run's state.

    Every rank calls every method; the implementation chooses which rank writes what. A save may continue in the
    background after `save` has returned. It saves the state at the call, whatever changes meanwhile. `restore`, `steps`
    and `path` wait for it first. Its failure is raised once, by `check`, `wait`, `close` or the next `save`.

    A checkpointer that can lock its folder may have two more methods. The run calls `claim()` when it begins, which
    raises `OSError` if another run saves to the folder, and each rank `release()` when it ends, even by an exception.

    Where processes come and go, each leg has a new one. If it has `take_over(former)`, it gets the one before.
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
            write_extra: called on rank 0 with the folder being written, before it is sealed, to add files that are
                verified like the others (`config.json`, a tokenizer).
            protected: steps that must not be removed, whatever the limit (the best one).
            on_commit: called on rank 0 with the folder of the complete checkpoint, before older ones are removed. It
                may run in another thread, and it must return soon. Its exceptions are logged, not raised.

        Returns:
            The checkpoint's folder; it exists once `wait` has returned.

        Raises:
            OSError: this checkpoint, or the one before, could not be written; older checkpoints are intact.
        """
        ...

    @property
    def restored(self) -> Restored | None:
        """What the last `restore` did, also if it found no checkpoint; None before the first."""
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
            source: a checkpoint's folder; None loads the newest valid one and skips damaged ones, with a warning that
                names the damage.
            optional: names of parts that do not change if the checkpoint does not hold them.
            only_read: names of parts whose state goes to `restored.states` and is not loaded; they need not be in
                `parts`.

        Returns:
            The checkpoint's step, or None if `source` is None and there is no valid checkpoint.

        Raises:
            ValueError: `source` is damaged or no checkpoint, or it lacks a part of `parts` that is not optional. Or a
                checkpoint that may be the newest cannot be read, which is not damage.
        """
        ...

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending.

        Raises:
            ValueError: a checkpoint cannot be listed.
        """
        ...

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether it exists or not."""
        ...

    def check(self) -> None:
        """Raise the error of a failed background save. Local to this rank, without waiting.

        Raises:
            OSError: a checkpoint could not be written; older checkpoints are intact.
        """
        ...

    def wait(self) -> None:
        """Wait until nothing is being written. Collective: all ranks raise if one of them failed.

        Raises:
            OSError: a checkpoint could not be written; older checkpoints are intact.
        """
        ...

    def close(self) -> None:
        """Finish background saves; raises as `wait` does."""
        ...
