"""Provide the base classes of strategies: mixed precision on one device, and one process among the ranks of a job.

`OnDevice` is the base for one device: precision, backward, step, clipping and state. `OnRanks` also joins the process
group and exchanges values. `MixedPrecision` scales the loss for float16.

`step_unless` skips an update by a flag on the device. `tr_core.optim.nonfinite` has the same code on purpose: neither
package imports the other. The flag must go through `Strategy.step`: under float16 a strategy updates its scaler even
if it skips the update.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MethodType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from tr_dist.environment import LaunchEnvironment
from tr_dist.process_group import ProcessGroup


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can skip an update by a flag on the device: torch's fused ones can, by `found_inf`.

    SGD with momentum cannot: if its first update is skipped, its momentum buffer keeps uninitialised memory.
    On the mps device none can: some versions of torch apply the update all the same.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _takes_scaler(type(optimizer)):
        return False
    groups = optimizer.param_groups
    return not any(group.get("momentum") or any(p.is_mps for p in group["params"][:1]) for group in groups)


def consumes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer consumes gradients in the backward pass."""
    return getattr(optimizer, "fused_in_backward", False)


def before_clearing(owner: torch.optim.Optimizer | nn.Module, *do: Callable[[], None]) -> None:
    """Have `owner.zero_grad` call `do` first, and nothing that this function gave it before; copies do without."""
    clear = getattr(owner.zero_grad, "own", owner.zero_grad)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self is not owner:
            type(self).zero_grad(self, set_to_none)
            return
        for each in do:
            each()
        clear(set_to_none)

    cast("Any", zero_grad).own = clear
    owner.zero_grad = MethodType(zero_grad, owner)  # a function would be that of the owner in a copy too


def step_unless(skip: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Apply an update unless a flag is set; then parameters and state stay unchanged, bit for bit.

    Args:
        skip: scalar on the device. It is read only if the optimizer cannot skip by itself (see `skips_on_device`).
        optimizer: the optimizer to step.
    """
    if skips_on_device(optimizer):
        vars(optimizer).update(grad_scale=None, found_inf=skip.to(torch.float32))
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
    elif not skip.item():  # sync: every step, with an optimizer that cannot skip by itself
        optimizer.step()


@cache
def _takes_scaler(kind: type[Any]) -> bool:
    # An older protocol, in which an optimizer takes the scaler as an argument.
    return "grad_scaler" in inspect.signature(kind.step).parameters


class MixedPrecision:
    """Autocast, scaled backward and scaled step of one precision on one device.

    Args:
        precision: `no`, `bf16`, or `fp16`, which scales the loss so that small gradients do not vanish.
        device: the device of the model.

    Attributes:
        dtype: the autocast dtype; None computes in the parameters' own.
        scaler: the loss scaler of `fp16`, whose state belongs in a checkpoint; otherwise None.

    Raises:
        ValueError: the precision is unknown, or the device does not support it.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        if precision not in _DTYPES:
            raise ValueError(f"precision={precision!r} is not known; choose no, bf16 or fp16")
        if precision == "fp16" and device.type == "cpu":
            raise ValueError(
                "fp16=True cannot train on a CPU: its kernels have no float16 accumulation; use bf16=True or float32"
            )
        if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(
                f"bf16=True needs a device with bfloat16, which {torch.cuda.get_device_name(device)} has not; use "
                "fp16=True"
            )
        self._device_type = device.type
        self.dtype = _DTYPES[precision]
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for a forward pass and its loss."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a scalar loss, multiplied by the scale under float16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, at most once a step; `step` then does not repeat it."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients, unless the scalar `skip` is set on the device.

        Returns False if float16 overflowed and the step was skipped, otherwise True.
        """
        if self.scaler is None:
            if skip is None:
                optimizer.step()
            else:
                step_unless(skip, optimizer)
            return True
        before = self.scaler.get_scale()  # sync
        if skip is None or not skip.item():  # sync
            self.scaler.step(optimizer)  # sync: float16 must know on the host whether a gradient overflowed
        self.scaler.update()
        return self.scaler.get_scale() >= before  # sync; the scale falls exactly when a step was skipped


_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class OnDevice:
    """A device and its precision: the base of strategies. By itself it trains one process, which exchanges nothing.

    Args:
        device: the device of this process.
        precision: `no`, `bf16`, or `fp16` with loss scaling.

    Attributes:
        acts_on: which of the arguments `fsdp` and `deepspeed` the strategy applies.
        adopts: ranks over which a model may be divided already.
        device: the device of this process.
        binds_optimizer: whether `bind_optimizer` checks or replaces an optimizer's parameters.
        forward_is_collective: whether a forward is an exchange between all ranks, so that each must make as many.
        members: who trains together, where processes come and go; None elsewhere.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.

    Raises:
        ValueError: the precision is unknown, or the device does not support it.
    """

    acts_on: frozenset[str] = frozenset()
    adopts: Sequence[int] = ()
    binds_optimizer = False
    forward_is_collective = False
    members: Any = None
    rank = 0
    local_rank = 0
    world_size = 1

    def __init__(self, device: torch.device, *, precision: str) -> None:
        self.device = device
        self._precision = MixedPrecision(precision, device)

    @property
    def data(self) -> Any:
        """Return the strategy: each process has samples of its own."""
        return self

    def check_model(self, model: nn.Module) -> None:
        """Raise `ValueError` if the model is divided over processes already, but for `adopts`."""
        check_whole(model, self.adopts)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device.

        Raises:
            ValueError: it has no trainable parameter, is wrapped, has no values yet, or is on another accelerator.
        """
        check_trainable(model, self.device)
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return model

    def check_accumulation(self, number: int) -> None:
        """Do nothing: a step may have any number of micro-batches."""

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: `prepare` keeps the parameters that an optimizer holds."""

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch; without `sync` gradients add up locally."""
        return nullcontext()

    def exchange_s(self, model: nn.Module) -> float | None:
        """Return None: how long steps wait for an exchange of gradients is not known."""
        return None

    def accumulate_fused(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return the context for a micro-batch whose gradients the optimizer consumes and averages in backward."""
        return self.accumulate(model, sync=False)

    def gathered(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a context that yields a full parameter, to be read; here every rank holds it."""
        return nullcontext(parameter)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass and its loss: autocast, if mixed precision is on."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss; float16 scales it first."""
        self._precision.backward(loss)

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, a scalar tensor on the device; no sync.
        """
        return self._clip(list(model.parameters()), optimizer, max_norm)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False if a float16 overflow skipped the step, otherwise True.

        All ranks decide the same, because their averaged gradients are equal. Only float16 reads from the device.

        Args:
            optimizer: the optimizer to step.
            skip: scalar on the device, the same on all ranks; if it is not 0, parameters and optimizer state stay
                unchanged. It is read from the device unless the optimizer is one of torch's fused ones.
        """
        return self._precision.step(optimizer, skip=skip)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks: of one process the tensor."""
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `tensor` of shape `(n, ...)` along dimension 0."""
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        return [value]

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over all ranks; the returned function waits."""
        return lambda: list(values)

    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def watching(self, progress: Callable[[], tuple[int, str, int]], folder: str) -> AbstractContextManager[None]:
        """Return a block that does nothing: one process waits for no other."""
        return nullcontext()

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name: `model` (unwrapped), `optimizer` if given, `scaler` under float16.

        Every rank holds the same state, so one rank may save for all.
        """
        return self._parts(self.unwrap(model), optimizer)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of the unwrapped model; every rank holds it."""
        return self.unwrap(model).state_dict()

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: this strategy joined no process group."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=kind is not None)

    def _parts(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return the parts of a checkpoint; the optimizer may be None."""
        given = {"model": model, "optimizer": optimizer, "scaler": self._precision.scaler}
        return {name: part for name, part in given.items() if part is not None}

    def _clip(
        self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale full gradients down to a total norm, unless it is None, and return the norm before."""
        self._precision.unscale(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not are_of_one_kind(gradients):
            norm = total_norm(gradients, self.device)
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            return norm
        norm = _norm_together(gradients).to(self.device)
        if max_norm is not None:
            clip_to_norm(gradients, max_norm, norm)
        return norm


def check_whole(model: nn.Module, adopts: Sequence[int] = ()) -> None:
    """Raise `ValueError` if parameters are divided over processes already, which would share out samples wrongly.

    Args:
        model: to be divided, or not.
        adopts: ranks over which parameters may be divided.
    """
    ranks = {
        name: mesh.mesh.tolist()
        for name, parameter in model.named_parameters()
        if (mesh := getattr(parameter, "device_mesh", None)) is not None
    }
    if others := [name for name, found in ranks.items() if found != list(adopts)]:
        raise ValueError(
            f"parameters of {type(model).__name__} are divided over the processes {ranks[others[0]]} already "
            f"({some_of(others)}), as by from_pretrained(tp_plan='auto') or fully_shard; tp_size takes over what "
            "transformers divided over its processes alone, beside replicas and shards ("
            f"parallelism_config='tp={len(ranks[others[0]])}'), or give the model whole, and tp_size or fsdp divides "
            "it. Parts of a model are replaced before the Trainer's first train, evaluate or predict, which divides it"
        )


def check_trainable(model: nn.Module, device: torch.device, adopts: Sequence[int] = ()) -> None:
    """Check that a module can be trained on `device`; `adopts` as in `check_whole`.

    Raises:
        ValueError: it has no trainable parameter, is wrapped or divided already, or is where it cannot be moved from.
    """
    check_whole(model, adopts)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__} already; give prepare() its .module")
    parameters = dict(model.named_parameters())
    name = type(model).__name__
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError(
            f"{name} has no trainable parameter (total {len(parameters)}, frozen {len(parameters)}); "
            "set requires_grad_(True) on those to train"
        )
    places = Counter(p.device for p in parameters.values())
    if torch.device("meta") in places:
        meta = [key for key, p in parameters.items() if p.device.type == "meta"]
        raise ValueError(
            f"{len(meta)} parameters of {name} are on the meta device ({some_of(meta)}) and have no values; "
            "load the weights before prepare()"
        )
    elsewhere = [place for place in places if place.type != "cpu" and place != device]
    if elsewhere:
        shown = ", ".join(f"{places[place]} parameters on {place}" for place in places)
        raise ValueError(
            f"{name} has {shown}, but this rank computes on {device}; give prepare() a model on the CPU or "
            f"on {device} (device_map is for models that one process spreads over its devices)"
        )


_NAMES_SHOWN = 5


def some_of(names: list[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def are_of_one_kind(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether torch can work on all gradients at once: they are ordinary tensors of one type on one CPU or GPU.

    Its functions for clipping sort gradients by device and type, which takes longer than to scale a small model's.
    """
    first = gradients[0] if gradients else None
    return (
        first is not None
        and first.device.type in ("cpu", "cuda")
        and {torch.Tensor}.issuperset(map(type, gradients))
        and len({gradient.dtype for gradient in gradients}) == len({gradient.device for gradient in gradients}) == 1
    )


def total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm of all numbers of gradients, a scalar tensor on `device`; zero if there are none."""
    if not gradients:
        return torch.zeros((), device=device)
    together = are_of_one_kind(gradients)
    return (_norm_together(gradients) if together else nn.utils.get_total_norm(gradients)).to(device)


@torch.no_grad()
def _norm_together(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))


@torch.no_grad()
def clip_to_norm(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients whose total norm, with those of other ranks, is `norm`, so that it is at most `max_norm`."""
    if gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))


def precision_of(args: Any) -> str:
    """Return the precision that `bf16` and `fp16` of the training arguments select."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


Kind = TypeVar("Kind")


class OnRanks(ProcessGroup, OnDevice):
    """This process among the ranks of a job, with its device and precision: the base of strategies.

    Args:
        environment: identifies this process.
        device: the device of this process.
        precision: `no`, `bf16`, or `fp16` with loss scaling.
        backend: the backend for collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, when joining and in each collective.
        hang_timeout_s: seconds without progress of any rank after which all are ended; see `ProcessGroup`.

    Attributes:
        device, rank, local_rank, world_size, backend: those of `ProcessGroup`.
    """

    _is_within = False  # a step
    _keeps = ""  # the gradients of a step until it is complete: says why none can be dropped before

    def __init__(
        self,
        environment: LaunchEnvironment,
        device: torch.device,
        *,
        precision: str,
        backend: str | None,
        timeout_s: float,
        hang_timeout_s: float | None = None,
    ) -> None:
        OnDevice.__init__(self, device, precision=precision)
        ProcessGroup.__init__(
            self, environment, device, backend=backend, timeout_s=timeout_s, hang_timeout_s=hang_timeout_s
        )

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group if this object joined it; a second call does nothing.

        Args:
            failed: the run ends by an exception, so other ranks may be gone: do not wait for them.
        """
        self.leave(failed=failed)

    @contextmanager
    def watching(self, progress: Callable[[], tuple[int, str, int]], folder: str) -> Iterator[None]:
        """Return the block of a run, whose end is the end of a step that failed; see `ProcessGroup.watching`."""
        try:
            with ProcessGroup.watching(self, progress, folder):
                yield
        finally:
            self._is_within = False

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse `zero_grad` within a step where it could not drop the gradients so far."""
        if self._keeps:
            for owner in (optimizer, self.unwrap(model)):
                before_clearing(owner, self._check_clearing)

    def _check_clearing(self) -> None:
        if self._is_within and self._keeps:
            raise RuntimeError(f"zero_grad() between micro-batches of a step, {self._keeps}; call it after the step")

    def _prepared(self, model: nn.Module, kind: type[Kind]) -> Kind:
        """Return the result of `prepare` for a model, also from under `torch.compile`.

        Raises:
            TypeError: `model` was not prepared.
        """
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, kind):
            raise TypeError(
                f"this needs the module that prepare() returned, not {type(model).__name__}: nothing would average its "
                "gradients over the ranks"
            )
        return inner


def common_options(args: Any) -> dict[str, Any]:
    """Return the options that all strategies with a process group share, by the names of their constructors.

    They come from `bf16`, `fp16`, `ddp_backend`, `ddp_timeout`, `hang_timeout` and `use_cpu` of the training arguments.
    """
    return {
        "precision": precision_of(args),
        "backend": args.ddp_backend,
        "timeout_s": float(args.ddp_timeout),
        "hang_timeout_s": getattr(args, "hang_timeout", None),  # arguments of an earlier tr-args have none
        "use_cpu": args.use_cpu,
    }
