"""Train a model that is cut into stages: the strategy, and the parts of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from tr_dist.fsdp.settings import Sharding
from tr_dist.mesh.data_ranks import own_group
from tr_dist.mesh.direction import Direction, sizes_of
from tr_dist.mesh.pipeline import Pipeline, Step
from tr_dist.mesh.strategy import Mesh
from tr_dist.sharded_model import full_state_dict
from tr_log import get_logger, warning_once

logger = get_logger(__name__)


class PipelinedMesh(Mesh):
    """A mesh in whose outermost direction processes hold stages of layers.

    A step's micro-batches go through the stages by a schedule; the loss is computed where the last stage is, and known
    everywhere. What the first and the last stage share gets the sum of both gradients.

    Args:
        sharding: how each stage is divided over those that compute other samples.
        directions: a `Pipeline`, and those inside it.
        **options: those of `Mesh`.
    """

    schedules_micro_batches = True
    _keeps = "which pp_size computes together: it would drop the gradients of all"

    def __init__(self, sharding: Sharding | None = None, *, directions: Sequence[Direction], **options: Any) -> None:
        self._pipeline = next(direction for direction in directions if isinstance(direction, Pipeline))
        super().__init__(sharding, directions=directions, **options)

    @classmethod
    def directions_of(cls, args: Any) -> list[Direction]:
        """Return the directions that the training arguments give.

        Raises:
            ValueError: an argument does not work with stages.
        """
        if args.fsdp_config.get("state_dict_type") == "FULL_STATE_DICT":
            raise ValueError("fsdp_config: state_dict_type='FULL_STATE_DICT' is not done with pp_size; leave it out")
        pipeline = Pipeline(sizes_of(args)["pp_size"], args.pp_split, args.pp_schedule)
        return [*super().directions_of(args), pipeline]  # last: plans of the others name modules of the whole model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Cut the model, divide its stages, and return what passes hidden states on; see `FSDP.prepare`."""
        prepared = super().prepare(model)
        tied, parameters = self._pipeline.stages.tied, dict(prepared.named_parameters())
        ends = self._whole.mesh.flatten(1)[[0, -1]].T.tolist()
        self._pairs = own_group(ends, self) if tied else None
        self._shared = [parameters[name] for name in tied if name in parameters]
        self._stages = AllStages(self._pipeline, self._whole, self._pairs)
        return _Piped(self._pipeline, prepared)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`, of which this process holds its stages."""
        return model.module if isinstance(model, _Piped) else model

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        """Surround a micro-batch; the schedule decides when gradients are exchanged."""
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Hand the loss to the schedule, which runs its backward."""
        self._pipeline.take_loss(loss)

    def run_micro_batches(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        compute: Callable[[Any], tuple[Any, torch.Tensor]],
        inputs_of: Any,
        size: int,
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Run all micro-batches of a step through the stages, and yield each with its loss."""
        inner, given = cast("FSDPModule", self.unwrap(model)), list(batches)
        if len(given) < self._pipeline.size:
            warning_once(
                logger,
                "pp_size=%d and %d micro-batches a step: most processes wait most of the time; raise "
                "gradient_accumulation_steps, to some %d, and lower per_device_train_batch_size",
                *(self._pipeline.size, len(given), 4 * self._pipeline.size),
            )
        inner.set_requires_gradient_sync(False)
        left = len(given) * len(self._pipeline.stages.own)

        def begins_backward() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                inner.set_requires_gradient_sync(True)

        step = Step(self.device, compute, inputs_of, self.autocast, begins_backward, self._data.all_reduce_max)
        losses = self._pipeline.run(given, step)
        self._check_gradients(self.unwrap(model))
        for parameter in self._shared:
            if parameter.grad is not None:  # of both ends; it may be frozen
                dist.all_reduce(_local(parameter.grad), group=self._pairs)
        self._is_within = True
        yield from zip(given, losses, strict=True)
        self._is_within = False

    def _share_of(self, gradient: torch.Tensor) -> float:
        stages = 2 if any(gradient is parameter.grad for parameter in self._shared) else 1  # those that hold it
        return super()._share_of(gradient) * self._pipeline.size / stages

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizers of all stages have the same groups. Collective.

        Raises:
            ValueError: they have not.
        """
        OptimizerOfStages(self._stages, optimizer).groups()
        super().bind_optimizer(model, optimizer)

    def window_metrics(self) -> dict[str, torch.Tensor]:
        """Return the largest of what the stages measured, on every rank. Collective. Sync: once a log."""
        found = dict[str, torch.Tensor]()
        for own in self._pipeline.row.gather_objects({name: float(v) for name, v in super().window_metrics().items()}):
            for name, value in own.items():
                found[name] = torch.tensor(value).maximum(found.get(name, torch.tensor(value)))
        return found

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name: `model`, and `optimizer` if given, of all stages."""
        of_optimizer = optimizer and OptimizerOfStages(self._stages, optimizer)
        return self._parts(ModelOfStages(self._stages, self.unwrap(model)), of_optimizer)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of all stages in host memory; empty on all ranks but 0. Collective."""
        of_stage = self._whole["replicate", "shard", "tp"].get_coordinate()
        own = full_state_dict(self.unwrap(model), keep=of_stage is not None and not any(of_stage))
        gathered = self._pipeline.row.gather_objects(own)
        if self.rank != 0:
            return {}
        found = {name: value for state in reversed(gathered) for name, value in state.items()}
        return self._stages.with_tied(found)


class _Piped(nn.Module):
    """What the loop calls as the model."""

    def __init__(self, pipeline: Pipeline, module: nn.Module) -> None:
        super().__init__()
        self._pipeline = pipeline
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the whole model, whose last stage is elsewhere perhaps."""
        return self._pipeline.forward(inputs)


class AllStages:
    """What the processes of a row hold, as if each held all of it: of the others' tensors the form, and no numbers.

    Collective over the job: every process makes the groups of all stages.

    Args:
        pipeline: the row.
        mesh: of all processes.
        pairs: of the first and the last stage's process in a row, if they share parameters.

    Attributes:
        tied: names of the parameters that the first and the last stage share.
        borrowed: those that this process has of the first stage.
    """

    def __init__(self, pipeline: Pipeline, mesh: DeviceMesh, pairs: dist.ProcessGroup | None) -> None:
        self.pipeline, self._pairs = pipeline, pairs
        self.tied = pipeline.stages.tied
        self.borrowed = self.tied if pipeline.is_last else []
        self._meshes = [DeviceMesh(mesh.device_type, of_stage) for of_stage in mesh.mesh.flatten(1).tolist()]

    def share_again(self, tensors: list[torch.Tensor]) -> None:
        """Give the other end of the row the tensors of the first stage."""
        for tensor in tensors:
            dist.broadcast(_local(tensor), self.pipeline.ranks[0], group=self._pairs)

    def with_tied(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return tensors by name as the whole model's state dict has them."""
        found = found | {name: found[self.tied[0]] for name in self.tied}
        return {name: found[name] for name in self.pipeline.stages.entries}

    def of_all(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all stages, by name. Collective over the row.

        Args:
            own: entries of this process: tensors, numbers, or mappings of them.
        """
        described, found = self.pipeline.row.gather_objects(_described(own)), dict[str, Any]()
        for place, entries in enumerate(described):
            for name, value in entries.items():
                if name not in found:
                    found[name] = own[name] if place == self.pipeline.row.rank else self._elsewhere(value, place)
        return found

    def _elsewhere(self, value: Any, place: int) -> Any:
        if isinstance(value, dict):
            return {name: self._elsewhere(inner, place) for name, inner in value.items()}
        if not _is_form(value):
            return value
        mesh, like = self._meshes[place], {"shape": value.shape, "stride": value.stride()}
        nothing = torch.empty(0, dtype=value.dtype, device=mesh.device_type)
        return DTensor.from_local(nothing, mesh, [Replicate()], run_check=False, **like)


def _is_form(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _described(value: Any) -> Any:
    """Return a state with the forms of tensors in parts, and whatever else it has in host memory."""
    if isinstance(value, Mapping):
        return {name: _described(inner) for name, inner in value.items()}
    if isinstance(value, DTensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


class _Layout:
    """Allocates tensors for reading a checkpoint, like given ones."""

    def __init__(self, like: Mapping[str, Any]) -> None:
        self._like = like

    def empty(self, name: str, saved: Any) -> torch.Tensor | None:
        """Return an uninitialised DTensor of the saved type, in host memory; None for what is read whole."""
        like = self._like.get(name)
        if like is None and name.startswith("state."):
            like = self._like.get(name.split(".")[1])
        if not isinstance(like, DTensor) or tuple(like.shape) != tuple(saved.shape):
            return None
        return torch.empty_like(like, dtype=saved.dtype, device="cpu", requires_grad=False)


class ModelOfStages:
    """The state of a model whose stages several processes hold."""

    def __init__(self, stages: AllStages, model: nn.Module) -> None:
        self._stages, self._model = stages, model

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all stages: those of others without numbers. Collective."""
        return self._stages.with_tied(self._stages.of_all(self._model.state_dict()))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the tensors of this process's stages out of such a state. Collective.

        Raises:
            RuntimeError: it lacks tensors.
        """
        own = self._model.state_dict()
        kept = self._stages.borrowed
        if lacking := [name for name in own if name not in state_dict]:
            raise RuntimeError(f"the saved model lacks {lacking[0]}")
        self._model.load_state_dict({name: own[name] if name in kept else state_dict[name] for name in own})
        parameters = dict(self._model.named_parameters())
        self._stages.share_again([parameters[name].detach() for name in self._stages.tied if name in parameters])

    def tensor_layout(self) -> _Layout:
        """Return the layout that allocates tensors for reading a checkpoint. Collective."""
        return _Layout(self.state_dict())


class OptimizerOfStages:
    """The state of an optimizer over parameters of several stages, by their numbers in the whole model."""

    def __init__(self, stages: AllStages, optimizer: torch.optim.Optimizer) -> None:
        self._stages, self._optimizer = stages, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state and groups of all stages. Collective."""
        own, groups = self._optimizer.state_dict(), self.groups()
        names = [*chain.from_iterable(self._names())]
        found = self._stages.of_all({names[number]: state for number, state in own["state"].items()})
        state = {number: found[name] for number, name in enumerate(chain.from_iterable(groups)) if name in found}
        return {**own, "state": state, "param_groups": _numbered(own["param_groups"], groups)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load what belongs to this process's stages out of such a state. Collective.

        Raises:
            ValueError: it belongs to other parameters.
        """
        names, groups = self._names(), self.groups()
        sizes, saved = [len(group) for group in groups], [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != saved:
            raise ValueError(f"the saved optimizer has groups of {saved} parameters, this one of {sizes}")
        place = {name: number for number, name in enumerate(chain.from_iterable(groups))}
        state = {
            number: state_dict["state"][place[name]]
            for number, name in enumerate(chain.from_iterable(names))
            if place[name] in state_dict["state"] and name not in self._stages.borrowed
        }
        own_groups = _numbered(state_dict["param_groups"], names)
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": own_groups})
        self._share_state()

    def tensor_layout(self) -> _Layout:
        """Return the layout that allocates tensors for reading a checkpoint. Collective."""
        found = self._stages.of_all(dict(self._stages.pipeline.stages.model.named_parameters()))
        return _Layout({str(number): found[name] for number, name in enumerate(chain.from_iterable(self.groups()))})

    def _share_state(self) -> None:
        """Give the last stage the state of the parameters that it shares with the first."""
        pipeline, tied = self._stages.pipeline, self._stages.tied
        if not tied:
            return
        ends = {name: p for name, p in pipeline.stages.model.named_parameters() if name in tied}
        own_state = {name: _described(self._optimizer.state.get(p, {})) for name, p in ends.items()}
        of_first = pipeline.row.gather_objects(own_state)[0]
        for name, parameter in ends.items():
            own = self._optimizer.state[parameter]
            for key, value in of_first.get(name, {}).items():
                if _is_form(value) and value.shape != parameter.shape:
                    raise ValueError(
                        f"pp_size: {name} is on the first and the last stage, and its state {key} of shape "
                        f"{tuple(value.shape)} is not like it, {tuple(parameter.shape)}, so both cannot have it; untie "
                        "it, or use adamw_torch"
                    )
                if self._stages.borrowed:
                    own[key] = torch.zeros_like(parameter, dtype=value.dtype).detach() if _is_form(value) else value
                if _is_form(value):
                    self._stages.share_again([own[key]])

    def _names(self) -> list[list[str]]:
        named = {id(p): name for name, p in self._stages.pipeline.stages.model.named_parameters()}
        given = [group["params"] for group in self._optimizer.param_groups]
        if any(id(p) not in named for parameters in given for p in parameters):
            raise ValueError(
                "pp_size: the optimizer has parameters that are none of this process's stages; let the Trainer build "
                "it (optim, optimizer_cls_and_kwargs), or override create_optimizer"
            )
        return [[named[id(p)] for p in parameters] for parameters in given]

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of all stages, by group, in the whole model's order. Collective.

        Raises:
            ValueError: the stages have other groups.
        """
        row = self._stages.pipeline.row.gather_objects(self._names())
        if len({len(groups) for groups in row}) > 1:
            raise ValueError(
                f"the stages of pp_size have {[len(groups) for groups in row]} groups of parameters; build the "
                "optimizer with the same groups on each, also where some are empty"
            )
        order = {name: number for number, name in enumerate(self._stages.pipeline.stages.names)}
        return [sorted({*chain.from_iterable(names)}, key=order.__getitem__) for names in zip(*row, strict=True)]


def _numbered(groups: list[dict[str, Any]], names: list[list[str]]) -> list[dict[str, Any]]:
    """Return groups of an optimizer's state with the numbers of so many parameters."""
    number = count()
    return [{**group, "params": [next(number) for _ in own]} for group, own in zip(groups, names, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
