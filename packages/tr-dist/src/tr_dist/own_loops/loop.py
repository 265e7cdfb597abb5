"""Distribute a loop written by hand, with four lines changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from tr_dist.ddp import DDP
from tr_dist.elastic import Elastic
from tr_dist.own_loops.loader import PreparedLoader, RowShare, rows_of
from tr_dist.own_loops.prepared import PreparedOptimizer, PreparedSchedule, follow_parameters

# The strategies of this package have them; a strategy of one's own that the Trainer completes may not.
_METHODS = ("accumulate", "autocast", "backward", "bind_optimizer", "check_accumulation", "clip_grad_norm", "close",
            "gather", "prepare", "state_parts", "step", "unwrap")  # fmt: skip


class Loop:
    """A loop over one model and one optimizer on the ranks of a strategy, with the numbers of one process.

    `prepare` takes loaders, model, optimizer and schedule as for one process. Then call the model as before,
    `backward(loss)` instead of `loss.backward()`, and step the optimizer as before. The loss is the mean over
    the rows of the rank's batch. Ranks with fewer rows have less weight, so that the step equals that of one process
    on all rows. The strategy's precision applies from the forward to `backward`.

    Args:
        strategy: such as `DDP()`, `FSDP()` or `DeepSpeed({...})`; None takes `DDP()`, which without a launcher is one
            process on one device.
        gradient_accumulation_steps: micro-batches in a step; losses are divided by the number in the step. Calls of
            optimizer and schedule before the last micro-batch do nothing.

    Attributes:
        strategy: the strategy in use.
        device: the device of this process.
        rank: number of this process among all, from 0.
        world_size: number of processes.

    Raises:
        TypeError: the strategy lacks a method.
        ValueError: the strategy has another number of micro-batches, or needs steps of another kind.
    """

    def __init__(self, strategy: Any = None, *, gradient_accumulation_steps: int = 1) -> None:
        if gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps} must be at least 1")
        self.strategy = DDP() if strategy is None else strategy
        if lacking := [name for name in _METHODS if not hasattr(self.strategy, name)]:
            raise TypeError(f"the strategy {type(self.strategy).__name__} lacks {', '.join(lacking)}, which Loop calls")
        if isinstance(self.strategy, Elastic) or getattr(self.strategy, "data", self.strategy) is not self.strategy:
            raise ValueError(
                "Loop gives each process samples of its own, and exchanges after a backward pass; a "
                f"{type(self.strategy).__name__} needs steps of another kind: use the Trainer, or DDP, FSDP, DeepSpeed"
            )
        self.device, self.rank = self.strategy.device, self.strategy.rank
        self.world_size = self.strategy.world_size
        self._steps = gradient_accumulation_steps
        self.strategy.check_accumulation(gradient_accumulation_steps)
        self._model: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._optimizer: PreparedOptimizer | None = None
        self._share: RowShare | None = None
        self._outer: list[tuple[RowShare | None, int, bool]] = []
        self._in_step, self._is_last = 1, True
        self._open: ExitStack | None = None
        self._precision = ExitStack()

    @property
    def is_step_due(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        return self._is_last

    def prepare(self, *parts: Any) -> Any:
        """Prepare the parts for several ranks; return one, or a tuple in the order given. Collective.

        Prepare an optimizer with its model, or after it; a schedule with its optimizer, or after it. Sharding
        replaces the model's parameters, and the optimizer gets the new ones.

        Args:
            parts: a module, an optimizer, a schedule of `torch.optim.lr_scheduler`, and any number of `DataLoader`s.

        Raises:
            TypeError: a part is of another type.
            ValueError: there is a second model or optimizer, or a part cannot be prepared.
        """
        done: dict[int, Any] = {}
        for kind, prepare in self._kinds():
            done.update((id(part), prepare(part)) for part in parts if isinstance(part, kind))
        if unknown := [type(part).__name__ for part in parts if id(part) not in done]:
            raise TypeError(f"prepare takes modules, optimizers, schedules and DataLoaders, not {', '.join(unknown)}")
        prepared = tuple(done[id(part)] for part in parts)
        return prepared[0] if len(prepared) == 1 else prepared

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of this rank's mean loss; the last micro-batch of a step averages them over ranks.

        Raises:
            RuntimeError: no forward of the prepared model in training came before.
        """
        if self._open is None:
            raise RuntimeError(
                "backward(loss) without a forward before it: call the module that prepare() returned, in training mode "
                "(model.train()) and with gradients, and backward once for each batch"
            )
        weight = 1.0 if self._share is None else self._share.weight(self.rank)
        self._precision.close()
        with self._close_after():
            self.strategy.backward(loss * (weight / self._in_step))

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Return a context for one micro-batch. Optional: the model's forward begins a micro-batch by itself.

        Raises:
            TypeError: `model` is not the result of `prepare`.
        """
        if model is not self._model:
            raise TypeError(f"accumulate needs the module that prepare() returned, not {type(model).__name__}")
        yield

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor | None:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, on the device; None if no step is due and nothing was done.
        """
        if self._model is None or self._optimizer is None:
            raise RuntimeError("clip_grad_norm needs a prepared model and optimizer: call prepare(model, optimizer)")
        if not self._is_last:
            return None
        return self.strategy.clip_grad_norm(self._model, self._optimizer.inner, max_norm)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's rows of the current batch, once each in the loader's order; of a scalar one a rank.

        Args:
            tensor: with a row for each sample of this rank's batch, or a scalar.

        Raises:
            ValueError: it has another number of rows.
        """
        if tensor.dim() == 0:
            return self.strategy.gather(tensor.reshape(1))
        share = self._share
        if share is None:
            return self.strategy.gather(tensor)
        here = rows_of(share, self.rank)
        if len(tensor) != here.stop - here.start:
            raise ValueError(
                f"gather got {len(tensor)} rows, and this rank's batch has {here.stop - here.start}; give one for each "
                "sample, before the next batch is taken"
            )
        most = max(share.counts)
        padding = tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))
        whole = self.strategy.gather(torch.cat([tensor, padding]))
        return torch.cat([whole[rank * most : rank * most + count] for rank, count in enumerate(share.counts)])

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return self.strategy.unwrap(model)

    def stateful(self) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name, for example for tr-ckpt's `Checkpointer`."""
        if self._model is None:
            raise RuntimeError("nothing is prepared: call prepare(model, optimizer) first")
        inner = None if self._optimizer is None else self._optimizer.inner
        return self.strategy.state_parts(self._model, inner)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group; with `failed` other ranks may be gone."""
        self._give_up()
        self.strategy.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=kind is not None)

    def begin_batch(self, share: RowShare, *, in_step: int, is_last: bool) -> None:
        """Record the batch that a prepared loader gives."""
        self._give_up()
        self._share, self._in_step, self._is_last = share, in_step, is_last

    def begin_loader(self) -> None:
        """Record that a prepared loader begins, perhaps within another."""
        self._outer.append((self._share, self._in_step, self._is_last))

    def end_loader(self) -> None:
        """Record that it has ended: the current batch is again that of the enclosing loader."""
        self._give_up()
        share, in_step, is_last = self._outer.pop()
        if self._outer:
            self._share, self._in_step, self._is_last = share, in_step, is_last

    def make_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the gradients; False if an overflow skipped the step."""
        return self.strategy.step(optimizer)

    def _kinds(self) -> list[tuple[type, Callable[[Any], Any]]]:
        """Return the function that prepares each kind of part, in the order of preparation."""
        return [
            (nn.Module, self._prepare_model),
            (torch.optim.Optimizer, self._prepare_optimizer),
            (LRScheduler, self._prepare_schedule),
            (DataLoader, self._prepare_loader),
        ]

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if self._model is not None:
            raise ValueError("prepare got a second model; one Loop trains one: put both into one module, or make two")
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        prepared = self.strategy.prepare(model)
        prepared.register_forward_pre_hook(self._before_forward)
        prepared.register_forward_hook(self._after_forward, always_call=True)
        self._model = prepared
        return prepared

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        if self._optimizer is not None:
            raise ValueError("prepare got a second optimizer; one Loop has one: give it several parameter groups")
        if self._model is None:
            raise ValueError("prepare got an optimizer without its model; give both in one call")
        follow_parameters(optimizer, self._names, self.strategy.unwrap(self._model))
        self.strategy.bind_optimizer(self._model, optimizer)
        self._optimizer = PreparedOptimizer(optimizer, self)
        return self._optimizer

    def _prepare_schedule(self, schedule: LRScheduler) -> PreparedSchedule:
        if self._optimizer is None:
            raise ValueError("prepare got a schedule without its optimizer; give both in one call")
        return PreparedSchedule(schedule, self._optimizer)

    def _prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        return PreparedLoader(loader, self.strategy, self, self._steps)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._open is not None:
            return
        if self._steps > 1 and self._share is None:
            raise RuntimeError(
                f"gradient_accumulation_steps={self._steps} needs the loader prepared too, which knows where a step "
                "ends; give it to prepare()"
            )
        self._precision = ExitStack()
        if torch.is_grad_enabled() and module.training:
            self._open = ExitStack()
            self._open.enter_context(self.strategy.accumulate(module, sync=self._is_last))
        self._precision.enter_context(self.strategy.autocast())

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open is None:
            self._precision.close()

    @contextmanager
    def _close_after(self) -> Iterator[None]:
        """Leave the micro-batch's context; its checks run unless its backward failed."""
        stack, self._open = self._open, None
        assert stack is not None
        with stack:
            yield

    def _give_up(self) -> None:
        """Leave the context of a micro-batch without a backward, without its checks."""
        stack, self._open = self._open, None
        if stack is None:
            return
        self._precision.close()
        error = GeneratorExit()
        try:
            stack.__exit__(GeneratorExit, error, None)
        except GeneratorExit as raised:
            if raised is not error:
                raise
