"""What subclasses written for transformers call on `trainer.accelerator`, answered by the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from tr_args import TrainingArguments
from tr_core.data.loaders import SeededLoader, seed_order
from tr_core.evaluation.gather import gather_tree, map_tensors
from tr_core.model_io import to_device
from tr_core.protocols import Strategy
from tr_core.step_scope import StepScope

_KINDS = {"ddp": ("MULTI_GPU", "MULTI_CPU"), "fsdp": ("FSDP", "FSDP"), "deepspeed": ("DEEPSPEED", "DEEPSPEED")}

# What to override in place of a function of the accelerator.
_IN_PLACE = {
    "clip_grad_norm_": "_clip_grad_norm",
    "autocast": "compute_loss_context_manager",
    "gather_for_metrics": "evaluation_loop",
    "get_state_dict": "_save",
}


class StrategyAccelerator:
    """The members of `accelerate.Accelerator` that subclasses use, over a strategy. Nothing is prepared twice.

    Any other member raises an error that says how to get a real `Accelerator`.
    """

    even_batches = True
    dispatch_batches = None
    use_seedable_sampler = True

    def __init__(
        self,
        strategy: Callable[[], Strategy],
        args: Callable[[], TrainingArguments],
        scope: StepScope,
        order_seed: Callable[[], int] = torch.initial_seed,
    ) -> None:
        self._strategy, self._args, self._scope, self._order_seed = strategy, args, scope, order_seed
        self.dataloader_config = SimpleNamespace(split_batches=False, dispatch_batches=None, even_batches=True)

    # Processes

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._strategy().device

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self._strategy().world_size

    @property
    def process_index(self) -> int:
        """Number of this process among all, from 0."""
        return self._strategy().rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine, from 0."""
        return self._strategy().local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def distributed_type(self) -> str:
        """The name that accelerate gives this way to train: `NO`, `MULTI_CPU`, `MULTI_GPU`, `FSDP` or `DEEPSPEED`."""
        args = self._args()
        kind = "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else "ddp" if self.num_processes > 1 else ""
        return _KINDS[kind][self.device.type == "cpu"] if kind else "NO"

    @property
    def mixed_precision(self) -> str:
        """The precision of the arguments: `no`, `bf16` or `fp16`."""
        args = self._args()
        return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"

    @property
    def parallelism_config(self) -> Any:
        """The sizes in the arguments, with Accelerate's attributes; None without any."""
        return self._args().parallelism_config

    @property
    def state(self) -> Any:
        """What accelerate holds of the processes; without plugins, as the strategy has none."""
        names = ("device", "num_processes", "process_index", "local_process_index", "is_main_process",
                 "is_local_main_process", "distributed_type", "mixed_precision", "parallelism_config")  # fmt: skip
        args = self._args()
        plugins = {"deepspeed_plugin": args.deepspeed_plugin, **({} if args.fsdp else {"fsdp_plugin": None})}
        return _Held("state", **{name: getattr(self, name) for name in names}, **plugins)

    def wait_for_everyone(self) -> None:
        """Wait for all processes. Collective."""
        self._strategy().barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process before it runs on the others. Collective."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a block that gets this process' part of a list, a tuple, a tensor, or a mapping of them.

        Args:
            inputs: the same on all processes; the first ones get the samples that are left over.
            apply_padding: repeat the last sample until all parts are equally long.
        """
        yield inputs if self.num_processes == 1 else self._own_part(inputs, apply_padding)

    def _own_part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            return {name: self._own_part(values, apply_padding) for name, values in inputs.items()}
        rank, (size, left) = self.process_index, divmod(len(inputs), self.num_processes)
        begin = rank * size + min(rank, left)
        indices = list(range(begin, begin + size + (rank < left)))
        if apply_padding:
            indices += [len(inputs) - 1] * (size + (left > 0) - len(indices))
        if isinstance(inputs, torch.Tensor):
            return inputs[indices]
        part = [inputs[index] for index in indices]
        return tuple(part) if isinstance(inputs, tuple) else part

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    # Models and steps

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return 1, as under transformers: the Trainer accumulates, and `backward` divides nothing."""
        return 1

    @property
    def split_batches(self) -> bool:
        """Whether the batch sizes of the arguments are sums over all processes."""
        return self._args().accelerator_config.split_batches

    @property
    def gradient_state(self) -> Any:
        """What accelerate holds of accumulation; one step of its own, as the Trainer accumulates."""
        given = dict(self._args().accelerator_config.gradient_accumulation_kwargs or {})
        return _Held(
            "gradient_state",
            num_steps=self.gradient_accumulation_steps,
            sync_each_batch=given.get("sync_each_batch", False),
            sync_gradients=self.sync_gradients,
            plugin_kwargs={**given, "num_steps": self.gradient_accumulation_steps},
        )

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its step; True outside a run."""
        return self._scope.is_last

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Return the same objects, a model on the device: the Trainer prepares what it trains.

        A loader that shuffles by torch's `RandomSampler` does so by seed and epoch then, as accelerate has it; in a run
        by what torch was last seeded with, as in an evaluation there.

        Raises:
            RuntimeError: a loader would have to be divided between processes.
        """
        if self.num_processes > 1 and any(_is_undivided(item) for item in objects):
            raise RuntimeError(
                f"trainer.accelerator.prepare(loader) would give each of {self.num_processes} processes all batches: "
                "return the loader of self._get_dataloader(dataset=..., description=..., batch_size=...), which is "
                "divided; or give your loader a DistributedSampler and do not prepare it; or pass Trainer(..., "
                "strategy=tr_dist.AcceleratorStrategy(accelerator)), whose accelerator divides it"
            )
        for item in objects:
            if isinstance(item, DataLoader):
                seed_order(item, self._order_seed())
        placed = tuple(self.prepare_model(item) if isinstance(item, nn.Module) else item for item in objects)
        return placed if len(placed) != 1 else placed[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move another model, such as a frozen reference, to the device. Each process has all of it."""
        if device_placement is not False and not hasattr(model, "hf_device_map"):
            model = model.to(self.device)
        return model.eval() if evaluation_mode else model

    def prepare_data_loader(self, data_loader: Any, **options: Any) -> Any:
        """Return the same loader, as `prepare` does: the Trainer places its batches, and divides its own loaders'.

        Raises:
            RuntimeError: it would have to be divided between processes.
        """
        return self.prepare(data_loader)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the module inside what the strategy, or a user, wrapped."""
        inner = self._strategy().unwrap(model)
        while isinstance(inner, nn.DataParallel | DistributedDataParallel):
            inner = inner.module
        return inner if keep_torch_compile else getattr(inner, "_orig_mod", inner)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients of a loss as it is, which a step divides by its micro-batches; a filler sample has none."""
        self._strategy().backward(loss if self._scope.weight == 1.0 else loss * self._scope.weight, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """Clip the gradients of these parameters to a norm.

        Raises:
            RuntimeError: with fp16 they are scaled here.
        """
        if self._args().fp16:
            raise RuntimeError(
                "accelerator.clip_grad_norm_ would clip gradients that are scaled for float16; set max_grad_norm, or "
                "override _clip_grad_norm(model) and call super() in it"
            )
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[object]:
        """Do nothing: the loop decides when gradients are exchanged."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a block without an exchange of gradients."""
        return self._strategy().accumulate(model, sync=False)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[object]:
        """Return the context of mixed precision."""
        return self._strategy().autocast()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a wrapped model. Collective."""
        return self._strategy().full_state_dict(model)

    # Values of all processes

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all processes along their first dimension; scalars become vectors. Collective.

        In one process tensors stay as they are.
        """
        return tensor if self.num_processes == 1 else self._gathered(tensor, None)

    def _gathered(self, tensor: Any, count: int | None) -> Any:
        rows = map_tensors(lambda value: value.reshape(1) if value.dim() == 0 else value, tensor)
        return gather_tree(to_device(rows, self.device), self._strategy(), count)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors, or lists of objects, without those of a rank that has only a filler sample. Collective."""
        if self.num_processes == 1:
            return input_data
        if use_gather_object or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(input_data)):
            own = input_data if self._scope.weight else []
            return [item for rank in self._strategy().gather_objects(own) for item in rank]
        return self._gathered(input_data, self._scope.total)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Add tensors of all processes elementwise; `mean` divides by their number. Collective."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction={reduction!r} is not known; choose sum, mean or none")
        if reduction == "none":
            return tensor
        factor = scale / self.num_processes if reduction == "mean" else scale
        return map_tensors(lambda value: self._strategy().sum(value.clone()) * factor, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the greatest size that a process has along a dimension. Collective."""

        def padded(value: torch.Tensor) -> torch.Tensor:
            if dim >= value.dim():
                return value
            largest = max(self._strategy().gather_objects(value.shape[dim]))
            shape = list(value.shape)
            shape[dim] = largest - shape[dim]
            filler = value.new_full(shape, pad_index)
            return torch.cat((filler, value) if pad_first else (value, filler), dim=dim)

        return map_tensors(padded, tensor)

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise AttributeError(
                f"trainer.accelerator.{name} was replaced, and no run calls it: this Trainer trains by its strategy; "
                f"override {_IN_PLACE.get(name, 'training_step')} of the Trainer, or pass Trainer(..., "
                "strategy=tr_dist.AcceleratorStrategy(accelerator))"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise _not_there(name)


class _Held:
    """What the accelerator holds, read-only: other members are refused in words too."""

    def __init__(self, _name: str, **members: Any) -> None:
        vars(self).update(members, _name=_name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"trainer.accelerator.{self._name}.{name} = {value!r} would do nothing: it follows from the strategy and "
            "the arguments; set it there, or pass Trainer(..., strategy=tr_dist.AcceleratorStrategy(accelerator))"
        )

    def __getattr__(self, name: str) -> Any:
        raise _not_there(f"{vars(self).get('_name')}.{name}")


def _not_there(path: str) -> AttributeError:
    return AttributeError(
        f"trainer.accelerator.{path} is not there: this Trainer trains by its strategy, and offers only the most used "
        "members of an accelerate.Accelerator; for a real one pass Trainer(..., "
        "strategy=tr_dist.AcceleratorStrategy(accelerator))"
    )


def _is_undivided(item: Any) -> bool:
    return isinstance(item, DataLoader) and not isinstance(item, SeededLoader)
