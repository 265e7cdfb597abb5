"""Hold in memory what a checkpoint has, and go on from it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tr_core.checkpoint.saving import checkpoint_parts
from tr_core.model import state_held_here
from tr_core.protocols import Stateful
from tr_core.run import Run


class Snapshot:
    """Everything that a checkpoint has, copied on the devices; one at a time.

    What is held are dicts, lists, tuples, tensors and plain values, and no object of the run. So a snapshot can be
    pickled, sent to another process, and restored there into a run that was just built with the same arguments. Any
    number of ranks takes over what is replicated, and shares the open log window. A shard is taken over by the rank
    that has the same place in the same mesh.

    Attributes:
        step: completed steps of the run when it was taken; None if none was taken.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._states: dict[str, Any] = {}
        self._call: dict[str, Any] = {}

    def take(self, run: Run) -> None:
        """Copy a run between two steps, in place of the former snapshot. Collective. Sync: once, for the open window.

        If another rank is gone, this raises what the exchange raises, and the former snapshot is still held. Ranks may
        then differ in `step`, where one has got the others' part just before.
        """
        window, state = run.window, run.methods.state
        # All that waits for other ranks comes before the former snapshot is dropped: it is what ranks go on from if one
        # of them is gone. It is dropped before the copy, as two would be held at a time.
        run.collect_window(state)
        states = {name: state_held_here(part) for name, part in _parts(run).items()}
        self.step, self._states = None, {}
        self._states = {name: _converted(value, _copied) for name, value in states.items()}
        self._call = {
            "logged_loss": window.logged_loss,
            "logged_skips": window.logged_skips,
            "first_step": window.first_step,
            "first_tokens": window.first_tokens,
            "elapsed_s": time.perf_counter() - window.start_s,
            "stops": run.methods.control.should_training_stop,
        }
        self.step = state.global_step

    def restore(self, run: Run) -> None:
        """Set a run back to the snapshot, between two steps; it may be restored again. Collective as a restore is.

        The run is the one that it was taken from, or was just built. The log window, its tokens and the mean loss of
        the call go on from there; gradients are cleared, and nothing is due. The random states wait in
        `random_state.reapply`, which the caller calls last, as nothing may draw after it.

        Raises:
            ValueError: none was taken, the run has other parts, or it has another place in the mesh of a shard.
        """
        if self.step is None:
            raise ValueError("no snapshot was taken; take one before it is restored")
        parts, meshes = _parts(run), _meshes(run)
        if odd := sorted(set(parts) ^ set(self._states)):
            raise ValueError(
                f"the snapshot of step {self.step} and the run do not have the same parts: {', '.join(odd)} is in one "
                "of them alone; build the run with the arguments, callbacks and overrides that it was taken with"
            )
        position, window, control = run.position, run.window, run.methods.control
        has_begun = (position.epoch, position.samples) != (0, 0)
        discard_step(run)
        for name, part in parts.items():
            part.load_state_dict(_converted(self._states[name], lambda value: _given_back(value, meshes)))
        # A run that was just built announces the epoch that it enters; another has done so.
        position.is_retry = has_begun and position.samples > 0 and not run.is_epoch_complete()
        call = self._call
        window.logged_loss, window.logged_skips = call["logged_loss"], call["logged_skips"]
        window.first_step, window.first_tokens = call["first_step"], call["first_tokens"]
        window.start_s = min(window.start_s, time.perf_counter() - call["elapsed_s"])  # rates are those of the call
        window.unchecked, window.flops = [], 0.0
        if window.tokens is not None:
            window.tokens.take()  # of steps that are made again
        control.should_log = control.should_evaluate = control.should_save = control.should_epoch_stop = False
        control.should_training_stop = call["stops"]


def discard_step(run: Run) -> None:
    """Drop the inputs and the gradients of a step that does not end."""
    run.methods.scope.inputs = None
    run.methods.model.zero_grad()
    run.optimizer.zero_grad()  # some optimizers keep gradients outside of .grad


class _Shard(NamedTuple):
    """This rank's part of a divided tensor: a `DTensor` without the process groups of its mesh."""

    local: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Any, ...]
    place: _Place


class _Place(NamedTuple):
    """Place of a rank in a mesh."""

    names: tuple[str, ...] | None
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


def _parts(run: Run) -> dict[str, Stateful]:
    """Return the parts of a checkpoint, with the whole log in place of the entries that are not in files."""
    parts = checkpoint_parts(run)
    parts["run"] = _ExactPosition(run)
    return {**parts, "trainer_state": run.methods.state}


class _ExactPosition:
    """A run's position, which `ignore_data_skip` does not change: the samples before it were used."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return self._run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._run.load_state_dict(state_dict, skips_data=True)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert what containers hold; containers are new."""
    if isinstance(value, dict):
        return {key: _converted(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, _Shard | torch.Size):
        items = [_converted(item, convert) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return convert(value)


def _copied(value: Any) -> Any:
    if hasattr(value, "placements"):
        mesh, local = value.device_mesh, value.to_local().detach().clone()
        return _Shard(local, value.shape, value.stride(), tuple(value.placements), _place(mesh))
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _given_back(value: Any, meshes: dict[_Place, Any]) -> Any:
    if not isinstance(value, _Shard):
        return _copied(value)  # it stays held: a load may keep what it is given
    if not value.place.coordinate:  # of ranks that this one is not among, as of another stage: it holds nothing
        return value.local
    if value.place not in meshes:
        raise ValueError(
            f"the snapshot holds the shard of {value.place}, and the run has {list(meshes) or 'no mesh'}: a shard goes "
            "on where it was; resume from a checkpoint, which any number of ranks can read"
        )
    from torch.distributed.tensor import DTensor

    local = value.local.clone()
    return DTensor.from_local(
        local, meshes[value.place], value.placements, run_check=False, shape=value.shape, stride=value.stride
    )


def _meshes(run: Run) -> dict[_Place, Any]:
    """Return the meshes over which parameters are divided, by this rank's place in each."""
    divided = [parameter for parameter in run.methods.model.parameters() if hasattr(parameter, "placements")]
    meshes = [each.device_mesh for each in divided]  # pyright: ignore[reportAttributeAccessIssue]
    return {_place(mesh): mesh for mesh in meshes}


def _place(mesh: Any) -> _Place:
    return _Place(mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
