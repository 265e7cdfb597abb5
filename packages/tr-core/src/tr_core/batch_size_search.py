"""Retry a step with smaller micro-batches if memory runs out, with the same samples in every step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core.data.batches import AskedBatches
from tr_core.data.short_runs import training_batches
from tr_core.loop import run_epochs
from tr_core.optim.fused_backward import kind
from tr_core.plan import make_plan
from tr_core.random_state import RandomState
from tr_core.rollback import Rollback
from tr_core.run import Run
from tr_core.runtime.memory import free_memory, is_out_of_memory
from tr_log import get_logger

logger = get_logger("tr_core.trainer")


def run_epochs_within_memory(run: Run) -> None:
    """Train as `run_epochs` does, and retry a step with smaller micro-batches if it runs out of memory.

    Accumulation grows as the micro-batch shrinks, so a step keeps its samples. The changes of the failed attempt are
    undone first: no sample is lost or used twice. Several ranks choose a common size before the first step.

    Raises:
        RuntimeError: one sample is too many, or memory ran out where a smaller micro-batch does not help.
        ValueError: the optimizer applies gradients before the step's end, or the loader has its own batch size.
    """
    optimizer = run.optimizer
    if kind(optimizer) == "backward-update":
        raise ValueError(
            f"auto_find_batch_size=True cannot make a step again with {type(optimizer).__name__}, which changes "
            "weights during the backward; set per_device_train_batch_size yourself"
        )
    if run.strategy.world_size > 1:
        _find_common_size(run)
    attempts = _Attempts(run)
    run.methods.callback_handler.add(attempts, first=True)
    try:
        while not attempts.train():
            attempts.rewind()
            reduce_batch_size(run, _next_size(run.methods.args))
    finally:
        run.methods.callback_handler.pop(attempts)


def reduce_batch_size(run: Run, size: int) -> None:
    """Continue from `run.position` with micro-batches of `size` samples a rank, and more of them a step.

    Raises:
        ValueError: the loader's batch size does not follow the arguments.
    """
    methods, args, strategy = run.methods, run.methods.args, run.strategy
    before, order = args.train_batch_size, run.data.order_state()
    args.gradient_accumulation_steps = args.gradient_accumulation_steps * before // size
    args.per_device_train_batch_size = args.per_device_train_batch_size // before * size
    run.watch.note_arguments(args, run.optimizer)
    loader = methods.get_train_dataloader()
    data = training_batches(loader, args, strategy.data)
    if data.samples_per_micro_batch != size * strategy.data.world_size:
        raise ValueError(
            f"auto_find_batch_size=True set per_device_train_batch_size={args.per_device_train_batch_size}, but the "
            f"loader that get_train_dataloader returned still gives {data.samples_per_micro_batch} samples a "
            "micro-batch; build it with that size, or leave auto_find_batch_size out"
        )
    data.restore_order(order, run.position.samples)
    run.data, methods.loaders["train_dataloader"] = data, loader
    run.plan = make_plan(args, data).with_max_steps(run.plan.max_steps)
    methods.state.train_batch_size = run.found_size = size
    logger.warning(
        "memory suffices for fewer than %d samples a device and micro-batch: going on from step %d with %d, and %d "
        "micro-batches a step; a step has the same samples as before",
        before,
        methods.state.global_step,
        size,
        args.gradient_accumulation_steps,
    )


def check_batch_size_search(args: TrainingArguments) -> None:
    """Raise `ValueError` if a smaller micro-batch would change which samples are used."""
    if not args.auto_find_batch_size:
        return
    reasons = []
    if args.dataloader_drop_last:
        reasons.append("dataloader_drop_last=True leaves out what does not fill a micro-batch")
    if args.overfit_batches is not None:
        reasons.append(f"overfit_batches={args.overfit_batches} is a number of micro-batches")
    if reasons:
        raise ValueError(
            f"auto_find_batch_size=True keeps the samples of every step, but {' and '.join(reasons)}: with smaller "
            "ones these would be other samples; leave one of the options out"
        )


class _Attempts:
    """Track the run's position within a step, and rewind the step: a callback that runs before all others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._forward = ForwardState(run.methods.model, run.strategy.device)
        self._noted: list[tuple[Any, dict[str, Any]]] = []
        self.is_in_step = self.is_in_optimizer = False

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what a step changes before its optimizer acts. Nothing is read from the device."""
        self._forward.record()
        window = self._run.window
        known = (self._run.position, window, window.means, window.tokens, window.throughput)
        parts = [part for part in known if part is not None]
        self._noted = [(part, {name: _copy(value) for name, value in vars(part).items()}) for part in parts]
        self.is_in_step = True

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that weights change from here."""
        self.is_in_step, self.is_in_optimizer = False, True

    def on_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that a step is complete."""
        self.is_in_optimizer = False

    def train(self) -> bool:
        """Train; return False if memory ran out in a step that can be retried."""
        try:
            run_epochs(self._run)
            return True
        except Exception as error:
            if not is_out_of_memory(error) or not (self.is_in_step or self.is_in_optimizer):
                raise
            if (reason := self._why_not()) is not None:
                raise RuntimeError(reason) from error
            free_memory(error, self._run.strategy.device)
        return False

    def rewind(self) -> None:
        """Restore everything to the beginning of the step, and drop its gradients."""
        self.is_in_step, self._run.methods.scope.inputs = False, None
        _drop_gradients(self._run)
        for part, values in self._noted:
            vars(part).update(values)
        self._forward.restore()
        self._run.position.is_retry = True

    def _why_not(self) -> str | None:
        """Return why a smaller micro-batch does not help; None if it may."""
        methods, strategy = self._run.methods, self._run.strategy
        size, step = methods.args.train_batch_size, methods.state.global_step
        if self.is_in_optimizer:
            return (
                f"memory ran out in the optimizer at step {step}, where the micro-batch makes no difference and "
                "weights may have changed already; use an optimizer with a smaller state, or shard it"
            )
        if strategy.world_size > 1:
            return (
                f"memory ran out on rank {strategy.rank} at step {step} with {size} samples a device and micro-batch, "
                "which had fitted before the first step; the other ranks are in the middle of theirs, so the size "
                f"cannot be changed now: set per_device_train_batch_size below {size} and resume"
            )
        if size == 1:
            return (
                f"memory ran out at step {step} with 1 sample a device and micro-batch, so there is no smaller one; "
                "set activation_checkpointing=True, use shorter samples, a lower precision or a smaller model"
            )
        return None


def _next_size(args: TrainingArguments) -> int:
    """Return the next smaller micro-batch size that divides a step."""
    size, accumulation = args.train_batch_size, args.gradient_accumulation_steps
    return next(smaller for smaller in range(size - 1, 0, -1) if size * accumulation % smaller == 0)


def _find_common_size(run: Run) -> None:
    """Reduce the micro-batch until every rank can compute its gradients. Collective.

    Raises:
        RuntimeError: one sample is too many for a rank.
    """
    while True:
        fits = run.strategy.gather_objects(_fits(run))
        if all(fits):
            return
        size = run.methods.args.train_batch_size
        if size == 1:
            raise RuntimeError(
                f"memory ran out on ranks {[rank for rank, fit in enumerate(fits) if not fit]} with 1 sample a device "
                "and micro-batch, so there is no smaller one; set activation_checkpointing=True, use shorter samples, "
                "a lower precision or a smaller model"
            )
        reduce_batch_size(run, _next_size(run.methods.args))


def _fits(run: Run) -> bool:
    """Whether this rank can compute the gradients of the next micro-batch; the gradients are dropped.

    The model is called without its wrapper: a rank that runs out of memory would leave the others waiting.
    """
    strategy, model, scope = run.strategy, run.methods.model, run.methods.scope
    position = run.position
    batch = next(iter(run.data.iterate(position.epoch, position.samples)), None)
    if batch is None:
        return True
    num_items = run.count_targets([batch]) if run.count_targets else None
    if run.take_batches is not None:
        (batch,), num_items = run.take_batches(AskedBatches(iter([batch]), strategy.device), 1)
    scope.size, scope.weight, scope.inputs = run.plan.accumulation, batch.weight, batch.inputs
    model.train()
    before = Rollback(strategy.device, model)
    try:
        with scope.separate_window(strategy.data):
            run.methods.step_function(model, batch.inputs, num_items)
        scope.inputs = None
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error, strategy.device)
        scope.inputs = None
        return False
    finally:
        before.restore()
        _drop_gradients(run)


def _drop_gradients(run: Run) -> None:
    for parameter in run.methods.model.parameters():
        parameter.grad = None
    run.optimizer.zero_grad()  # some optimizers keep gradients outside of .grad


def _copy(value: Any) -> Any:
    """Copy what a step may change in place; the rest is shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


class ForwardState:
    """Random number generators and a model's buffers, as of the last call of `note`.

    No sync. A buffer that never changes is copied once; another is copied again if it was written to since. Running
    statistics are copied every time, because torch's writes to them are not detectable.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._generators: dict[str, Any] = {}
        self._noted: dict[int, _SavedBuffer] = {}
        self.record()

    def record(self) -> None:
        """Save the current state."""
        self._generators = RandomState(self._device).state_dict()
        noted: dict[int, _SavedBuffer] = {}
        for module in self._model.modules():
            for buffer in module._buffers.values():
                if buffer is None:
                    continue
                known = self._noted.get(id(buffer))
                if known is None or known.buffer is not buffer or known.may_differ():
                    silent = getattr(module, "running_mean", None) is not None
                    known = _SavedBuffer(buffer, buffer._version, buffer.detach().clone(), silent)
                noted[id(buffer)] = known
        self._noted = noted

    def restore(self) -> None:
        """Restore generators and buffers to the saved state."""
        RandomState(self._device).load_state_dict(self._generators)
        with torch.no_grad():
            for noted in self._noted.values():
                if noted.may_differ():
                    noted.buffer.copy_(noted.copy)


class _SavedBuffer(NamedTuple):
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor
    is_silent: bool

    def may_differ(self) -> bool:
        return self.is_silent or self.buffer._version != self.version
