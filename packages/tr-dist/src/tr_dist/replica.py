"""Keep a module's replicas in step with torch's DistributedDataParallel, and refuse what would make them diverge.

One case is a gradient that comes in several parts: only the first part would be averaged.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tr_dist.base import some_of
from tr_dist.process_group import ProcessGroup


class GradientParts:
    """Detects in one backward pass whether a parameter's gradient comes in several parts.

    Under reentrant activation checkpointing every segment has a separate backward pass, and a weight that several
    segments use gets a part of its gradient from each. torch's DistributedDataParallel averages only the first part.
    It raises if it notices. It does not notice if the last part comes after all other gradients, for example for an
    embedding that is tied to the output layer of a segment. Then each rank keeps its own rest, and replicas diverge.

    Args:
        parameters: those whose gradients are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen: set[int] = set()
        self._names: dict[int, str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, module: nn.Module) -> None:
        """Count from here on, and raise RuntimeError if a gradient has a second part."""
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._seen.clear()
        if not self._handles:
            self._handles = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def end(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._seen:
            self.end()
            raise RuntimeError(
                f"the gradient of {self._names.get(id(parameter))} comes in several parts in one backward pass, as of "
                "a weight that several segments use under reentrant activation checkpointing; its average over the "
                "ranks would be that of the first part. Set use_reentrant=False "
                "(activation_checkpointing_kwargs={'use_reentrant': False}), or static_graph=True "
                "(--ddp_static_graph true), with which averages wait for all parts"
            )
        self._seen.add(id(parameter))


_NO_BACKWARD = (
    "a micro-batch ended without a backward, so no gradient was averaged over the ranks; call backward(loss) inside "
    "accumulate(model, sync=True)"
)
# Constants of splitmix64, as signed numbers.
# Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", figure 16.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
# Elements at a time, of 8 bytes each. Few on the CPU, because the process's allocator returns blocks of up to 32 MiB
# late or never.
_DIGEST_BLOCKS = {"cpu": 2**17}
_DIGEST_BLOCK = 2**22

_NOT_SENT_BY_GLOO = {torch.int16, torch.uint16, torch.uint32, torch.uint64}  # nor float8, nor complex before torch 2.9
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# torch renamed the option, and warns about the old name.
_KNOWN_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN_OPTIONS else "broadcast_buffers"


@dataclass(slots=True)
class _Pass:
    """What is known of the current micro-batch, apart from the module: assigning to a module costs ten times as much.

    Attributes:
        forwarded: whether a forward went through the replica.
        witnessed: the gradients before it.
        num_averaged: micro-batches that averaged gradients.
    """

    forwarded: bool = False
    witnessed: Sequence[object] = ()
    num_averaged: int = 0


class _OnFirstUse:
    """An attribute of a replica that is made together with its buckets; after that it is an ordinary one."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, replica: Any, owner: type[Any]) -> Any:
        replica.allocate_buckets()
        return vars(replica)[self._name]


class Replica(DistributedDataParallel):
    """One rank's copy of a module, whose gradients backward averages over the ranks.

    Differs from its base in six points.

    - A forward without gradients calls the module alone: the base would exchange buffers, and ranks with unequal
      numbers of evaluation batches would wait for each other forever.
    - It checks that a backward has averaged all gradients; with the base, the optimizer would silently apply a rank's
      own.
    - Buffers are made equal at the end of a step, not in the first forward of the next. An evaluation between two
      steps then sees, on every rank, the values that a checkpoint holds.
    - Gradients are in the same buckets from the first step on, the last parameters first. With three ranks or more,
      the order in which ranks are summed depends on a gradient's position in its bucket. The base reorders buckets
      after its first step, so that step has other bits than later ones, and a resumed run would not end
      with the bits of an uninterrupted one.
    - In the first step it refuses gradients that come in several parts, of which the base may average only the first
      (see `GradientParts`).
    - The buckets, as large as the gradients, are allocated before the first backward that averages, not in the
      constructor. An optimizer that averages gradients itself, and keeps none, never needs them.

    Attributes:
        compared: whether the ranks' parameters have been found equal.
        all_parameters: the module's parameters, listed once: walking the modules costs more than their norm.

    Args:
        module: the module, on this rank's device.
        broadcast_buffers: copy the buffers of rank 0 to all ranks before the first step and after each.
        options: further arguments of `DistributedDataParallel`.

    Raises:
        ValueError: gloo cannot copy parameters or buffers of their type to the other ranks.
    """

    reducer: Any = _OnFirstUse()
    logger: Any = _OnFirstUse()

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, **options: Any) -> None:
        if not broadcast_buffers:  # True is the default in all versions of torch
            options[_BUFFERS_OPTION] = False
        if options.get("static_graph"):
            options["find_unused_parameters"] = False  # GradientParts finds these in the first step
        try:
            super().__init__(module, **options)
        except RuntimeError as error:
            if "Invalid scalar type" not in str(error):  # gloo's words
                raise
            raise ValueError(_what_cannot_be_sent(module)) from None
        del self.logger  # it is None so far
        self.compared = False
        self._pass = _Pass()
        self.all_parameters = tuple(module.parameters())
        # A backward shows in the gradients: in any one of them, unless parameters may be unused.
        trainable = [p for p in self.all_parameters if p.requires_grad]
        self._frozen = [p for p in self.all_parameters if not p.requires_grad]
        may_be_unused = options.get("find_unused_parameters") or options.get("static_graph")
        self._witnesses = trainable if may_be_unused else trainable[:1]
        # Until the end of the first step; for a static graph torch itself counts the parts.
        counts = not options.get("static_graph") and dist.get_world_size(self.process_group) > 1
        self._parts = GradientParts(trainable) if counts else None

    def _ddp_init_helper(self, *arguments: Any, **options: Any) -> None:
        """Store the arguments of the base's reducer, until it is needed."""
        self._of_reducer = arguments, options

    def _set_static_graph(self) -> None:
        """Defer to `allocate_buckets`: the reducer does not exist yet."""
        self.static_graph = True

    @property
    def num_averaged(self) -> int:
        """How many micro-batches averaged gradients."""
        return self._pass.num_averaged

    @property
    def has_buckets(self) -> bool:
        """Whether the buckets for averaging are allocated."""
        return "reducer" in vars(self)

    def allocate_buckets(self) -> None:
        """Allocate the buckets, unless they exist. Collective the first time."""
        if self.has_buckets:
            return
        arguments, options = self._of_reducer
        super()._ddp_init_helper(*arguments, **options)
        if self.static_graph:
            self.static_graph = False
            super()._set_static_graph()
        # The base does this after its first step, in the order of its backward. With a search for unused parameters
        # it never does, and neither do these calls.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """List the trainable parameters, and which have sparse gradients, the last first: roughly backward's order."""
        parameters, are_sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters:  # buckets are never reordered, and are built from the last to the first
            return parameters, are_sparse
        return parameters[::-1], are_sparse[::-1]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module with its usual arguments."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        self._pass.forwarded = True
        if not self.has_buckets and not self.require_backward_grad_sync:  # like the base without its reducer
            if self.will_sync_module_buffers():
                self._sync_buffers()
            self.require_forward_param_sync = False
            return self.module(*inputs, **kwargs)
        self.allocate_buckets()
        return super().forward(*inputs, **kwargs)

    def expect_averaging(self) -> None:
        """Begin a micro-batch that `check_averaged` will end."""
        self.allocate_buckets()
        self._pass.forwarded, self._pass.witnessed = False, self._witness()
        if self._parts is not None:
            self._parts.begin(self.module)

    def _witness(self) -> list[object]:
        gradients = [p.grad for p in self._witnesses]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def check_averaged(self) -> None:
        """Check that a backward since `expect_averaging` averaged every gradient over the ranks. No sync.

        Raises:
            RuntimeError: it did not; the message gives the reason.
        """
        if not self._pass.forwarded:
            raise RuntimeError(
                "no forward went through the module that prepare() returned, so this rank's gradients were "
                "not averaged with the others'; call that module instead of the one given to prepare()"
            )
        try:
            self._check_reducer_finalized()
        except RuntimeError as error:
            raise RuntimeError(self._why_not_averaged()) from error
        if self._witness() == self._pass.witnessed:
            raise RuntimeError(_NO_BACKWARD)
        if any(p.grad is not None for p in self._frozen):
            raise RuntimeError(self._what_was_unfrozen())
        self._pass.num_averaged += 1
        if self._parts is not None:
            self._parts.end()
            self._parts = None

    def _what_was_unfrozen(self) -> str:
        frozen = {id(p) for p in self._frozen}
        named = self.module.named_parameters()
        names = [name for name, p in named if id(p) in frozen and p.grad is not None]
        return (
            f"{len(names)} parameters ({some_of(names)}) were frozen when the model was prepared and have a gradient "
            "now, which was not averaged over the ranks; prepare the model with all trainable that ever will be, and "
            "freeze afterwards"
        )

    def share_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks, if enabled, instead of in the next forward. Collective."""
        if not self.modules_buffers:
            return
        self.require_forward_param_sync = True  # a micro-batch without averaging has left it False
        if self.will_sync_module_buffers():
            self._sync_buffers()
        self.require_forward_param_sync = False

    def _why_not_averaged(self) -> str:
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        trainable = sum(p.requires_grad for p in self.module.parameters())
        if len(unused) == trainable:
            return _NO_BACKWARD
        what = f"{len(unused)} of {trainable} trainable parameters ({some_of(unused)})" if unused else "some parameters"
        return (
            f"{what} got no gradient from the last micro-batch, so the gradients were not averaged over the "
            "ranks; use them in the loss, freeze them with requires_grad_(False), or set "
            "find_unused_parameters=True (--ddp_find_unused_parameters true), which costs a walk over the "
            "graph in every step"
        )


def _what_cannot_be_sent(module: nn.Module) -> str:
    tensors = {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}
    odd = {name: t for name, t in tensors.items() if t in _NOT_SENT_BY_GLOO or str(t).startswith("torch.float8")}
    odd = odd or {name: t for name, t in tensors.items() if t.is_complex}
    return (
        f"gloo cannot copy {len(odd)} parameters and buffers of {type(module).__name__} to the other ranks "
        f"({some_of([f'{name}: {t}' for name, t in odd.items()])}); keep them as another type (int32 for int16, uint8 "
        "for float8), or name those that are equal on all ranks in the model's _ddp_params_and_buffers_to_ignore"
    )


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to `device`, unless all of it is there: modules with quantized weights or hooks refuse to move.

    Raises:
        ValueError: the model was loaded onto several devices.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return model
    if len(getattr(model, "hf_device_map", None) or ()) > 1:
        raise ValueError(
            f"{type(model).__name__} is divided over devices (hf_device_map), and every rank needs one that is whole "
            f"on {device}; load it with device_map={{'': {str(device)!r}}} or without, or train in one process"
        )
    return model.to(device)


def check_replicas_equal(module: nn.Module, group: ProcessGroup) -> None:
    """Check that every rank holds bit for bit the same parameters. One sync, and 8 bytes a rank where they do.

    It compares digests of the parameters' bit patterns and positions, in integers that wrap: exact on every device,
    whatever the order of the sum. The numbers are mixed before the sum, so that differences do not cancel. Plain bit
    patterns would cancel, if one weight grows by as many units in the last place as another shrinks.

    Raises:
        RuntimeError: ranks differ; the message names the first parameter that does.
    """
    named = list(module.named_parameters())
    mine = torch.stack([_digest(p) for _, p in named])
    wholes = group.gather(_digest(mine).reshape(1))
    if bool((wholes == wholes[0]).all()):  # sync: once, before the first step
        return
    sums = group.gather(mine.unsqueeze(0)).cpu()
    differs = (sums != sums[0]).any(dim=0)
    name = named[int(differs.int().argmax())][0]
    column = sums[:, int(differs.int().argmax())]
    ranks = [rank for rank in range(group.world_size) if column[rank] != column[0]]
    raise RuntimeError(
        f"{int(differs.sum())} of {len(named)} parameters differ between the ranks before the first step, "
        f"the first is {name}: rank {ranks} not as rank 0; load the same weights on every rank, after "
        "prepare() and before training"
    )


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit number, a scalar tensor, that depends on every bit of a tensor."""
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.contiguous().view(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _DIGEST_BLOCKS.get(bits.device.type, _DIGEST_BLOCK)
    for start in range(0, bits.numel(), size):
        mixed = bits[start : start + size].to(torch.int64)
        mixed += torch.arange(start, start + mixed.numel(), device=bits.device).mul_(_GOLDEN)
        for shift, factor in _MIXING:
            mixed ^= mixed >> shift
            mixed *= factor
        total += mixed.sum()
    return total
