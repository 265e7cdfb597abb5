"""Train with the same bits on any number of processes: a step is computed in shards, and summed in a fixed tree.

A step has `virtual_shards` shards, a power of two. Process r of W computes those numbered r, r + W, r + 2 W, ..., each
by itself. Their gradients are added in one tree over all shards, neighbours first, whatever W is. Each process adds a
part of the numbers: after W neighbouring shards it gets its part of their gradients, and at the end of the step all get
the sums. With shards of a model a process keeps its part, and W must be a power of two. Divisions are by powers of two,
which round nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tr_dist.base import OnRanks, check_trainable, clip_to_norm, common_options, some_of
from tr_dist.environment import ELASTIC_RUN, LaunchEnvironment, rank_device, read_environment
from tr_dist.fsdp.strategy import FSDP, ReduceScatter
from tr_dist.members import Members
from tr_dist.replica import moved
from tr_log import get_logger, info_once

_BUCKET = 2**23  # numbers that are exchanged at once, which takes the memory of twice as many
_logger = get_logger(__name__)
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def of_arguments(args: Any) -> Elastic:
    """Build the strategy that computes `virtual_shards`: with shards of the model where the arguments have `fsdp`."""
    strategy: Elastic = (ElasticFSDP if args.fsdp else ElasticDDP).from_arguments(args)  # type: ignore[attr-defined]
    strategy.begin(args.virtual_shards)
    return strategy


class Elastic:
    """What both strategies have in common: the shards of a step, their sum, and the norm of that.

    Kernels of the CPU divide sums by their number of threads, so there it is one for each process.

    Attributes:
        shards: number of shards of a step that this process computes.
    """

    device: torch.device
    rank: int
    world_size: int
    shards: int
    _number: int
    _threads: int | None = None
    _keeps = "whose shards elastic adds up: what it drops would depend on the number of processes"
    _model: nn.Module | None = None
    _same: tuple[list[int], set[int]] = ([], set())  # trainable parameters, and which of them have gradients

    def begin(self, number: int) -> None:
        """Divide steps into `number` shards.

        Raises:
            ValueError: there are more processes.
        """
        self._number = number
        self._share_out()
        if self.device.type == "cpu":
            self._threads = torch.get_num_threads()
            torch.set_num_threads(1)

    def _share_out(self) -> None:
        if self._number < self.world_size:
            raise ValueError(_TOO_MANY.format(self._number, self.world_size))
        self.shards = len(range(self.rank, self._number, self.world_size))

    def close(self, *, failed: bool = False) -> None:
        """Set the threads of this process as they were, and leave the process group if this object joined it."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        super().close(failed=failed)  # type: ignore[misc]

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse optimizers that consume gradients before they are summed.

        Raises:
            ValueError: it is such an optimizer.
        """
        if getattr(optimizer, "fused_in_backward", False):
            raise ValueError(
                f"elastic sums gradients in a fixed order, and {type(optimizer).__name__} consumes them in the "
                "backward pass; choose another optim, such as adamw_torch"
            )
        super().bind_optimizer(model, optimizer)  # type: ignore[misc]

    def run_micro_batches(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        compute: Callable[[Any], tuple[Any, torch.Tensor]],
        inputs_of: Any,
        size: int,
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield each micro-batch of a step with its loss; at the end parameters have the mean gradient of all shards.

        Raises:
            ValueError: the forward changed buffers, or a parameter has a gradient in some shards alone.
        """
        parameters = [p for p in cast("Any", self).unwrap(model).parameters() if p.requires_grad]
        each, total, buffers = size // self.shards, TreeSum(), _versions(model)
        held: list[torch.Tensor] = []
        self._is_within = True
        try:
            for number, batch in enumerate(batches, start=1):
                yield compute(batch)
                if number % each == 0:
                    gradients = self._taken(parameters)
                    held = held or gradients
                    self._add(total, gradients, number // each)
        finally:
            self._is_within = False
        if changed := _versions(model).items() ^ buffers.items():
            raise ValueError(
                f"the forward changed {some_of(sorted({name for name, _ in changed}))}, such as running statistics of "
                "a batch norm, whose values depend on the order of shards; use a norm without them, such as LayerNorm, "
                "or freeze them with module.eval()"
            )
        summed = self._summed(total, held)
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in summed], 1 / self._number)
        with_gradient = (p for index, p in enumerate(parameters) if index in self._same[1])
        for parameter, gradient in zip(with_gradient, summed, strict=True):
            parameter.grad = gradient

    def _add(self, total: TreeSum, gradients: list[torch.Tensor], turn: int) -> None:
        """Add the gradients of the `turn`-th shards of all processes, from 1; of this process they are `gradients`."""
        total.add([g.to_local() if isinstance(g, DTensor) else g for g in gradients])

    def _summed(self, total: TreeSum, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums over all shards; `held` are the gradients of this process's first."""
        return held

    def _taken(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Take the gradients of a shard from the parameters."""
        has = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
        trained = list(map(id, parameters))
        if trained != self._same[0]:  # the first shard, or others are frozen now
            if len({tuple(sorted(of_rank)) for of_rank in cast("Any", self).gather_objects(has)}) > 1:
                raise ValueError(_UNEQUAL)
            self._same = (trained, has)
        if has != self._same[1]:
            raise ValueError(_UNEQUAL)
        gradients = [cast("torch.Tensor", parameters[index].grad) for index in sorted(has)]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, with the same bits however the model is divided.
        """
        gradients = [p.grad for p in cast("Any", self).unwrap(model).parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        number = sum(g.shape[0] if g.dim() else 1 for g in gradients)
        rows = torch.zeros(number, dtype=torch.float64, device=self.device)
        place, local = 0, list[torch.Tensor]()
        for gradient in gradients:
            part, first = gradient, 0
            if isinstance(gradient, DTensor):
                part = gradient.to_local()
                first = min(self.rank * -(-gradient.shape[0] // self.world_size), gradient.shape[0])
            local.append(part)
            squares = squares_of_rows(part)
            rows[place + first : place + first + len(squares)] = squares
            place += gradient.shape[0] if gradient.dim() else 1
        if any(isinstance(gradient, DTensor) for gradient in gradients) and self.world_size > 1:
            dist.all_reduce(rows)  # each row is of one process, and 0 of the others: exact in any order
        norm = halved(rows[None])[0].sqrt().float()
        if max_norm is not None:
            clip_to_norm(local, max_norm, norm)
        return norm


_TOO_MANY = "virtual_shards={0} cannot be shared out over {1} processes; start at most {0}"
_UNEQUAL = (
    "a parameter has a gradient in some shards of a step, and none in others; elastic needs every parameter in every "
    "loss, or in none: freeze it with requires_grad_(False), or add 0 * parameter.sum() to the loss"
)


class ElasticDDP(Elastic, OnRanks):
    """Replicas with the same bits on any number of processes; see the module.

    Attributes:
        members: who trains together, where processes come and go; None elsewhere.
    """

    members: Members | None = None

    @classmethod
    def from_arguments(cls, args: Any) -> ElasticDDP:
        """Build from the training arguments that concern it."""
        environment, options = read_environment(), common_options(args)
        device = rank_device(environment, use_cpu=options.pop("use_cpu"))
        if not os.environ.get(ELASTIC_RUN):
            return cls(environment, device, **options)
        if environment.world_size > args.virtual_shards:
            raise ValueError(_TOO_MANY.format(args.virtual_shards, environment.world_size))
        if options["hang_timeout_s"] == 0:
            raise ValueError(
                "trainer launch --elastic needs the watch for hangs, which sees who is gone; leave hang_timeout out"
            )
        if device.type == "cuda" and "nccl" in str(options["backend"] or "nccl"):
            raise ValueError(
                "trainer launch --elastic cannot exchange by NCCL, which ends a process whose peer is gone; set "
                "ddp_backend='gloo'"
            )
        alone = LaunchEnvironment(local_rank=environment.local_rank)
        strategy = cls(alone, device, **options)
        strategy.members = Members(strategy, strategy._join_round, environment, options["timeout_s"])
        return strategy

    def _join_round(self, environment: LaunchEnvironment, store: dist.Store) -> None:
        """Exchange with the processes of an environment, which have met at a store. Collective over them."""
        self._join(environment, store)
        self._same = ([], set())
        self._share_out()
        self._share_model()

    def close(self, *, failed: bool = False) -> None:
        """Leave the processes; one of them may be lost once the run has ended, which is said."""
        try:
            super().close(failed=failed)
        except RuntimeError as error:
            if self.members is None or not self.members.is_over:
                raise
            _logger.warning("a process was lost after the run had ended: %s", error)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, and copy the weights and buffers of rank 0 to all ranks. Collective.

        Raises:
            ValueError: it has no trainable parameter, is wrapped, has no values yet, or is on another accelerator.
        """
        check_trainable(model, self.device)
        self._model = moved(model, self.device)
        self._share_model()
        return self._model

    @torch.no_grad()
    def _share_model(self) -> None:
        if self.world_size > 1 and self._model is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                sent = tensor.detach().contiguous().view(-1).view(torch.uint8)  # gloo does not know all types
                dist.broadcast(sent, 0)
                tensor.copy_(sent.view(tensor.dtype).view_as(tensor))

    def _add(self, total: TreeSum, gradients: list[torch.Tensor], turn: int) -> None:
        if self.world_size == 1:
            total.add(gradients)
            return
        first = (turn - 1) * self.world_size
        parts = [scattered(bucket, self._number - first) for bucket in _buckets(gradients)]
        for of_shard in zip(*parts, strict=True):
            total.add([part.clone() for part in of_shard])  # not all of what was received

    def _summed(self, total: TreeSum, held: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.world_size == 1:
            return held
        for turn in range(self.shards, -(-self._number // self.world_size)):  # others have one more
            self._add(total, held, turn + 1)
        for bucket, part in zip(_buckets(held), total.total, strict=True):
            put_together(bucket, part)
        return held


class TreeReduceScatter(ReduceScatter):
    """Sums gradients over processes, each of which keeps its part, in a tree of additions."""

    def exchange(
        self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Any, **options: Any
    ) -> None:
        """Sum what all ranks give, and keep this rank's part."""
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=group)
        output.copy_(added_in_pairs(received.view(group.size(), -1)))


class ElasticFSDP(Elastic, FSDP):
    """Shards of a model with the same bits on any number of processes; see the module."""

    reduces_by = TreeReduceScatter

    def begin(self, number: int) -> None:
        """Divide steps into `number` shards; see `Elastic.begin`."""
        if self.mesh.ndim > 1:
            raise ValueError("elastic divides a model over all processes; set fsdp='full_shard auto_wrap'")
        if self.world_size & (self.world_size - 1):
            raise ValueError(
                f"elastic with fsdp needs a power of two of processes, not {self.world_size}; start "
                f"{2 ** (self.world_size.bit_length() - 1)}, or leave fsdp out"
            )
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ValueError(f"elastic with fsdp needs a newer torch than {torch.__version__}; use strategy='ddp'")
        super().begin(number)

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse optimizers that see more than single numbers; see `Elastic.bind_optimizer`.

        Raises:
            ValueError: it is such an optimizer, or not known to be none.
        """
        super().bind_optimizer(model, optimizer)
        if type(optimizer) not in _ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise ValueError(
                f"elastic with fsdp needs an optimizer that updates each number by itself: torch's {names}, not "
                f"{type(optimizer).__name__}; choose such an optim, or leave fsdp out"
            )

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients; on the CPU without torch's fused kernels, whose last bits differ by a part's length."""
        if self.device.type == "cpu":
            for group in optimizer.param_groups:
                if group.get("fused"):
                    group["fused"] = False
                    info_once(_logger, "elastic with fsdp on the CPU: the optimizer computes without its fused kernel")
        return super().step(optimizer, skip=skip)


class TreeSum:
    """The sum of a power of two of equal lists of tensors, in a tree of additions: neighbours first, then their sums.

    It holds as many lists at a time as the tree is high.

    Its tensors are those of the first list.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[torch.Tensor]]] = []

    @property
    def total(self) -> list[torch.Tensor]:
        """The sum of all lists."""
        (_, total), *_ = self._partial
        return total

    @torch.no_grad()
    def add(self, leaf: list[torch.Tensor]) -> None:
        """Add a list, which the sum then owns."""
        height = 0
        while self._partial and self._partial[-1][0] == height:
            _, earlier = self._partial.pop()
            if leaf:
                torch._foreach_add_(earlier, leaf)
            leaf, height = earlier, height + 1
        self._partial.append((height, leaf))


def added_in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 0, a power of two, of which neighbours are added first."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def scattered(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Return this rank's part of the numbers in tensors of one type, of each of the first `ranks` ranks. Collective."""
    size, here = dist.get_world_size(), dist.get_rank()
    sent = _flat(tensors, size)
    each = len(sent) // size
    senders = min(ranks, size)
    received = sent.new_empty(senders * each)
    receives = [each if rank < senders else 0 for rank in range(size)]
    sends = [each if here < senders else 0] * size
    dist.all_to_all_single(received, sent[: sum(sends)], receives, sends)
    return list(received.split(each))


def put_together(tensors: Sequence[torch.Tensor], part: torch.Tensor) -> None:
    """Fill tensors of one type from the parts of all ranks, in the order of `scattered`. Collective."""
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather(list(whole.split(len(part))), part)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, values in zip(tensors, whole[: sum(sizes)].split(sizes), strict=True):
        tensor.copy_(values.view_as(tensor))


def _flat(tensors: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Return the numbers in tensors, and zeros, so that all ranks have as many."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % ranks))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in groups of one type and a bounded size, in the order of the parameters."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, numbers = list[torch.Tensor](), 0
        for tensor in tensors:
            if tensor.dtype is dtype:
                if bucket and numbers + tensor.numel() > _BUCKET:
                    yield bucket
                    bucket, numbers = [], 0
                bucket, numbers = [*bucket, tensor], numbers + tensor.numel()
        yield bucket


def squares_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row, in float64, with bits that do not depend on the number of rows."""
    rows = torch.atleast_1d(tensor.detach().double())
    if rows.numel() == 0:
        return rows.new_zeros(len(rows))
    rows = rows.reshape(len(rows), -1)
    return halved(rows * rows)


def halved(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 1, by adding its halves to each other: kernels of sums depend on shapes."""
    while rows.shape[1] > 1:
        half = -(-rows.shape[1] // 2)
        first = rows[:, :half].clone()
        first[:, : rows.shape[1] - half] += rows[:, half:]
        rows = first
    return rows[:, 0]


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
