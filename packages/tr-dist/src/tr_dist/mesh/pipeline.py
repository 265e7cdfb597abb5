"""Train stages of layers on a row of processes, by the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.direction import Direction, as_in_evaluation
from tr_dist.mesh.stages import Stages, bounds_of, cut_of

# name -> the schedule, and how many stages each process has.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "1f1b": (Schedule1F1B, 1),
    "gpipe": (ScheduleGPipe, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
_KEPT_SCHEDULES = 4  # of the last shapes of micro-batches; each has buffers for what it receives

# The hidden states that a stage takes and gives, on the meta device; None where it takes or gives none.
Form = torch.Tensor | None


class Pipeline(Direction):
    """A row of processes that hold stages of layers, and pass hidden states on.

    Args:
        size: number of processes in a row.
        split: the first layer of each stage but the first; None divides them evenly.
        schedule: the order in which micro-batches go through them: a name of `SCHEDULES`.

    Attributes:
        stages: those of this process, once the model is divided.
        row: this process in its row.
        ranks: those of the row, in the job.
    """

    name = "pp"
    computes = "its own layers"
    stages: Stages
    row: DataRanks

    def __init__(self, size: int, split: list[str] | None = None, schedule: str = "1f1b") -> None:
        self.size, self._split = size, split
        self._kind, self._each = SCHEDULES[schedule]
        self._schedules: dict[Any, Any] = {}
        self._forms: dict[Any, dict[int, tuple[Form, Form]]] = {}
        self._checked: set[frozenset[str]] = set()  # names of inputs with which hidden states pass unchanged
        self._batches: list[Any] = []
        self._received: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self._step: Step

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Make the groups of the rows; see `Direction.join`."""
        self.row = among(ranks.flatten(1).T.tolist())
        self.ranks = dist.get_process_group_ranks(self.row.group)

    def check(self, model: nn.Module) -> None:
        """Check that the model can be cut; see `Direction.check`."""
        bounds_of(cut_of(model), self._split, self.size, self._each)

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the model; see `Direction.divide`."""
        parameter = next(model.parameters())
        self._device, self._wire_is_double = torch.device(mesh.device_type), parameter.dtype == torch.float64
        self.stages = Stages(model, self._split, self.row.rank, self.size, self._each)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"pp_size={self.size}: stage {self.row.rank} trains no parameter; cut elsewhere by pp_split"
            )

    @property
    def is_last(self) -> bool:
        """Whether this process computes the losses."""
        return self.stages.last in self.stages.own

    def run(self, batches: list[Any], step: Step) -> list[torch.Tensor]:
        """Run forward and backward of micro-batches, and return their losses, on every process of the row.

        Those of one shape that follow each other go through the stages together. Processes that share a stage exchange
        in its forwards, so they compute in the same order, also where some of them have other shapes.
        """
        losses, shapes, number = list[torch.Tensor](), [_shape_of(batch.inputs) for batch in batches], len(batches)
        begins = [int(shape != before) for before, shape in pairwise([None, *shapes])]
        agreed = step.agree([*begins, *(int(shape not in self._forms) for shape in shapes)])()
        self._step = step
        try:
            for start, end in pairwise([*(at for at in range(number) if agreed[at]), number]):
                given, shape = batches[start:end], shapes[start]
                self._batches = [batch._replace(inputs=step.inputs_of(batch.inputs)) for batch in given]
                if agreed[number + start]:
                    self._forms[shape] = self._find_forms(self._batches[0].inputs)
                self._losses: list[torch.Tensor] = []
                numbers = torch.arange(end - start)
                first = (numbers,) if 0 in self.stages.own else ()
                target = {"target": numbers} if self.is_last else {}
                schedule = self._schedule(shape, end - start)
                schedule.step(*first, number=numbers, return_outputs=False, **target)
                losses += self._losses
        finally:
            self._batches, self._received, self._loss = [], None, None
        return self._known_to_all(losses, number)

    def take_loss(self, loss: torch.Tensor) -> None:
        """Keep a loss for the schedule, which runs its backward when it is its turn."""
        if self._received is None:
            raise RuntimeError("pp_size: a backward outside of a step, in which all stages take part")
        self._loss = loss

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model: of the last stage what is left of it, in a step; else all stages in turn, without gradients.

        Raises:
            RuntimeError: with gradients, outside of a step.
        """
        if self._received is not None:
            return self.stages.run(self.stages.last, inputs, self._received)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "pp_size: a forward with gradients outside of a step, in which all stages take part; use "
                "torch.no_grad()"
            )
        outputs, _ = self._in_turn(inputs)
        return self._from_last(outputs)

    def compute(self, stage: int, number: int, taken: torch.Tensor | None) -> torch.Tensor:
        """Compute a stage before the last for a micro-batch of the step."""
        with self._step.autocast():
            hidden = self.stages.run(stage, self._batches[number].inputs, taken)
        if hidden.requires_grad:
            hidden.register_hook(self._on_backward)
        return hidden

    def _on_backward(self, gradient: torch.Tensor) -> None:
        self._step.begins_backward()

    def _loss_of(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a micro-batch from what the last stage got, as the Trainer does for a whole model."""
        self._received, self._loss = hidden, None
        self._losses.append(self._step.compute(self._batches[int(target)])[1])
        loss = self._loss
        if loss is None:
            raise RuntimeError("pp_size: the step of a micro-batch called no backward")
        self._received = None
        loss.register_hook(self._on_backward)
        return loss

    def _schedule(self, shape: Any, number: int) -> Any:
        """Return the schedule for `number` micro-batches of one shape."""
        key = shape, number
        if key not in self._schedules:
            stages = []
            for index in self.stages.own:
                taken, given = self._forms[shape][index]
                stages.append(
                    PipelineStage(
                        Chunk(self, index, self.stages.model),
                        *(index, self.stages.last + 1, self._step.device),
                        input_args=(torch.zeros(1, dtype=torch.int64) if taken is None else taken,),
                        output_args=(cast("torch.Tensor", taken if given is None else given),),
                        group=self.row.group,
                    )
                )
            kind, given = self._kind_for(number), stages if self._each > 1 else stages[0]
            self._schedules[key] = kind(given, number, loss_fn=self._loss_of, scale_grads=False)
            while len(self._schedules) > _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
        return self._schedules[key]

    def _kind_for(self, number: int) -> Any:
        """Return the schedule that was chosen; all forwards first for a number that it does not take."""
        if self._each > 1:
            return self._kind if number % max(1, number // self.size) == 0 else ScheduleLoopedBFS
        return self._kind if number >= self.size else ScheduleGPipe

    def _find_forms(self, inputs: Mapping[str, Any]) -> dict[int, tuple[Form, Form]]:
        """Return what each stage of this process takes and gives for inputs of their shape, found by a forward."""
        devices = [self._step.device] if self._step.device.type != "cpu" else []
        model = self.stages.model
        with torch.no_grad(), self._step.autocast(), torch.random.fork_rng(devices), as_in_evaluation(model):
            return self._in_turn(inputs, to_end=False)[1]

    # Without gradients

    def _in_turn(self, inputs: Mapping[str, Any], *, to_end: bool = True) -> tuple[Any, Any]:
        """Run the stages of this process when it is their turn; returns the outputs of the last, and all forms."""
        outputs, given, forms, names = None, None, dict[int, tuple[Form, Form]](), frozenset(inputs)
        for index in self.stages.own:
            hidden = None if index == 0 else self._receive((self.row.rank - 1) % self.size)
            if index == self.stages.last:
                outputs = self.stages.run(index, inputs, hidden) if to_end else None
                forms[index] = (_form(hidden), None)
            else:
                given = self.stages.run(index, inputs, hidden)
                self._send(given, (self.row.rank + 1) % self.size)
                forms[index] = (_form(hidden), _form(given))
            if not to_end or names not in self._checked:  # a forward, so all that share the stage make it
                self.stages.check(inputs, cast("torch.Tensor", given if hidden is None else hidden))
        self._checked.add(names)
        return outputs, forms

    def _send(self, hidden: torch.Tensor, place: int) -> None:
        dist.send_object_list([_form(hidden)], self.ranks[place], group=self.row.host_group, device=torch.device("cpu"))
        dist.send(hidden.contiguous(), self.ranks[place], group=self.row.group)

    def _receive(self, place: int) -> torch.Tensor:
        form: list[Any] = [None]
        dist.recv_object_list(form, self.ranks[place], group=self.row.host_group, device=torch.device("cpu"))
        hidden = torch.empty_like(form[0], device=self._device)
        dist.recv(hidden, self.ranks[place], group=self.row.group)
        return hidden

    def _from_last(self, outputs: Any) -> Any:
        """Return the outputs of the process that has the last stage, on every process of the row."""
        own = iter([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])

        def described(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return _form(leaf)
            return leaf if isinstance(leaf, int | float | str | bool) else None  # no caches of keys and values

        def from_last(form: torch.Tensor) -> torch.Tensor:
            value = next(own).contiguous() if self.is_last else torch.empty_like(form, device=self._device)
            dist.broadcast(value, self.ranks[-1], group=self.row.group)
            return value

        forms = self.row.gather_objects(tree_map(described, outputs) if self.is_last else None)[-1]
        return tree_map_only(torch.Tensor, from_last, forms)

    def _known_to_all(self, losses: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Return the losses of the step, on every process of the row. One exchange; nothing is read."""
        dtype = torch.float64 if self._wire_is_double else torch.float32
        together = (
            torch.stack(losses).to(dtype) if self.is_last else torch.empty(number, dtype=dtype, device=self._device)
        )
        dist.broadcast(together, self.ranks[-1], group=self.row.group)
        return list(together.unbind())


@dataclass(frozen=True)
class Step:
    """What a pipeline needs of a step.

    Attributes:
        device: of this process.
        compute: runs forward, loss and backward of a micro-batch, and returns it with its loss.
        inputs_of: moves the inputs of a micro-batch to the device; `compute` gets it with these.
        autocast: the block around a forward.
        begins_backward: called when a stage begins the backward of a micro-batch.
        agree: starts to find the largest of each of some numbers over the processes that share this stage; what it
            returns waits.
    """

    device: torch.device
    compute: Callable[[Any], tuple[Any, torch.Tensor]]
    inputs_of: Callable[[Any], Any]
    autocast: Callable[[], AbstractContextManager[object]]
    begins_backward: Callable[[], None]
    agree: Callable[[list[int]], Callable[[], list[int]]]


class Chunk(nn.Module):
    """A stage, as a schedule calls it: with what the stage before gave, and the number of the micro-batch."""

    def __init__(self, pipeline: Pipeline, stage: int, model: nn.Module) -> None:
        super().__init__()
        self._pipeline, self._stage = pipeline, stage
        self.model = model

    def forward(self, taken: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of a micro-batch; of the last stage those it got, for `_loss_of`."""
        if self._stage == self._pipeline.stages.last:
            return taken.view_as(taken)
        return self._pipeline.compute(self._stage, int(number), None if self._stage == 0 else taken)


def _form(tensor: torch.Tensor | None) -> Form:
    """Return a contiguous tensor of the same shape and type, without values; a schedule passes gradients back of it."""
    if tensor is None:
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())


def _shape_of(inputs: Any) -> tuple[Any, ...]:
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"pp_size: a micro-batch is a mapping of the model's inputs, by name, not a {type(inputs).__name__}"
        )
    return tuple((name, value.shape, value.dtype) for name, value in inputs.items() if isinstance(value, torch.Tensor))
