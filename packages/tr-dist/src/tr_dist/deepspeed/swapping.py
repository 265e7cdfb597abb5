"""Read parts that ZeRO-3 has swapped to files back into memory, one by one, and manage the swap folders.

`Piece` locates the numbers of each parameter in the flat tensors that ZeRO divides over the ranks. Gaps that
DeepSpeed leaves in swapped gradients are filled here. Folders belong to one process, and are deleted again.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tr_dist.deepspeed.configuration import swap_paths


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank holds.

    Attributes:
        flat: the tensor that this rank's optimizer updates, which contains the piece.
        group: number of the optimizer's group.
        start: start of the piece in `flat`.
        offset: start of the piece in the flattened parameter.
        size: how many numbers; 0 if this rank holds none of the parameter.
        subgroup: number of `flat` among those that ZeRO-3 can swap out; None at other stages.
    """

    flat: torch.Tensor
    group: int
    start: int = 0
    offset: int = 0
    size: int = 0
    subgroup: int | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the piece of a tensor with the layout of `flat`."""
        return values.narrow(0, self.start, self.size)

    def gather(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Assemble the parameter's numbers from all ranks' tensors with the layout of `flat`. Collective."""
        whole = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
        if self.size:
            whole.narrow(0, self.offset, self.size).copy_(self.of(values))
        dist.all_reduce(whole)
        return whole.view(shape)

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's piece of a full tensor into one with the layout of `flat`."""
        if self.size:
            self.of(values).copy_(whole.reshape(-1).narrow(0, self.offset, self.size))


def pieces_of(zero: Any, groups: list[list[nn.Parameter]], stage: int, rank: int) -> list[Piece]:
    """Return this rank's piece of every parameter of an optimizer's groups, in their order.

    Args:
        zero: DeepSpeed's optimizer of stage 1, 2 or 3.
        groups: the parameters of each group.
        stage: of ZeRO.
        rank: of this process.
    """
    if stage == 3:
        return [_of_stage_3(zero, p, rank) for parameters in groups for p in parameters]
    flats = zero.single_partition_of_fp32_groups
    return [_of_stage_2(flats[group], group, p) for group, parameters in enumerate(groups) for p in parameters]


def _of_stage_2(flat: torch.Tensor, group: int, parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:
        return Piece(flat, group)
    inside, here = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(flat, group, here.start, inside.start, inside.numel)


def _of_stage_3(zero: Any, parameter: Any, rank: int) -> Piece:
    subgroup, start, size = zero.grad_position[zero.get_param_id(parameter)]
    flat, group = zero.fp32_partitioned_groups_flat[subgroup], zero.sub_group_to_group_id[subgroup]
    offset = rank * size  # the last ranks' pieces are padded to this size
    return Piece(flat, group, start, offset, max(0, min(size, parameter.ds_numel - offset)), subgroup)


_BLOCK = 4096  # bytes of the largest logical blocks of disks


def in_memory(zero: Any, pieces: Iterable[tuple[Any, Piece]], *, changed: bool) -> Iterator[tuple[Any, Piece]]:
    """Yield parameters with their pieces, each while its flat tensor and the state of it are in memory.

    Args:
        zero: DeepSpeed's optimizer.
        pieces: in the order of `pieces_of`.
        changed: whether to write the tensors back afterwards.
    """
    for subgroup, members in groupby(pieces, key=lambda item: item[1].subgroup):
        with _subgroup_in_memory(zero, subgroup, changed=changed):
            yield from members


def keep_unaligned_gradients(zero: Any) -> None:
    """Keep gradients in memory if DeepSpeed could not read them back from a file.

    It reads each into the middle of a buffer. Direct I/O needs an address of whole blocks; at other addresses
    DeepSpeed silently reads nothing.
    """
    if not _swaps_optimizer(zero):
        return
    swapper = zero.optimizer_swapper
    swap_out, alignment = swapper.swap_out_gradients, max(_BLOCK // swapper.swap_element_size, 1)

    def swap_out_gradients(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        info = swapper.swap_params_info[swapper.parameter_id(parameter)]
        pairs = list(zip(gradient_offsets, gradient_tensors, strict=True))
        info.unswapped_gradients.update({offset: value for offset, value in pairs if offset % alignment})
        aligned = [(offset, value) for offset, value in pairs if offset % alignment == 0]
        if aligned:
            swap_out(parameter, [offset for offset, _ in aligned], [value for _, value in aligned])

    swapper.swap_out_gradients = swap_out_gradients


def drop_swapped_state(zero: Any) -> None:
    """Drop the swapped state of an optimizer that was just emptied."""
    if _swaps_optimizer(zero):
        zero.optimizer_swapper.purge_state()


def refresh_masters(zero: Any) -> None:
    """Copy a model's parameters to the optimizer's, whether in memory or swapped out."""
    if not (_swaps_optimizer(zero) or _swaps_parameters(zero)):
        if (refresh := getattr(zero, "refresh_fp32_params", None)) is not None:
            refresh()
        return
    _release_fetched(zero)
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        with _subgroup_in_memory(zero, number, changed=True):
            zero._swap_in_sub_group_to_flat_buffer(flat.data, number)


def prepare_step(zero: Any) -> None:
    """Prepare swapped tensors for DeepSpeed's step.

    Parameters without a gradient in this step get zeros, if their optimizer is offloaded. DeepSpeed would otherwise
    use the content of a buffer or file, such as the gradient of an earlier step. Parameters that were
    fetched too early are released: the step would change them in memory alone.

    Raises:
        ValueError: there are too few buffers for the optimizer's tensors.
    """
    if _swaps_parameters(zero):
        _release_fetched(zero)
    if _swaps_optimizer(zero):
        _check_buffers(zero)
    if not getattr(zero, "offload_optimizer", False):
        return
    for number, parameters in enumerate(zero.fp16_groups):
        ids = [zero.get_param_id(parameter) for parameter in parameters]
        places = [zero.grad_position[each][1:] for each in ids if each not in zero.norm_for_param_grads]
        _put_zeros(zero, number, places)


def _put_zeros(zero: Any, number: int, places: list[tuple[int, int]]) -> None:
    """Write zeros as gradients into ranges (start, size) of a sub-group's flat tensor."""
    flat = zero.fp32_partitioned_groups_flat[number]
    if not _swaps_optimizer(zero) or not zero._swappable_optimizer_subgroup(number):
        for start, size in places:
            flat.grad.narrow(0, start, size).zero_()
    elif places:
        zero.optimizer_swapper.swap_out_gradients(
            parameter=flat,
            gradient_offsets=[start for start, _ in places],
            gradient_tensors=[torch.zeros(size, dtype=flat.dtype) for _, size in places],
        )


@contextmanager
def _subgroup_in_memory(zero: Any, number: int | None, *, changed: bool) -> Iterator[None]:
    if number is None or not _swaps_optimizer(zero) or not zero._swappable_optimizer_subgroup(number):
        yield
        return
    zero._optimizer_states_and_gradient_swap_in(number)
    finish = zero._release_swap_buffers
    try:
        yield
        if changed:
            finish = zero._optimizer_states_and_gradient_swap_out
    finally:
        finish(number)


def _check_buffers(zero: Any) -> None:
    """Refuse too few buffers for an optimizer's tensors of each parameter.

    Raises:
        ValueError: a parameter, its gradient and its state need more.
    """
    swapper = zero.optimizer_swapper
    needed = 1 + max((info.num_tensors() for info in swapper.swap_params_info.values()), default=0)
    if needed > (count := swapper.swap_buffer_manager.count):
        raise ValueError(
            f"zero_optimization.offload_optimizer.buffer_count={count}: this optimizer needs {needed}, for a "
            f"parameter, its gradient and {needed - 2} tensors of state; set it to {needed}"
        )


def _release_fetched(zero: Any) -> None:
    """Release parts of parameters that were read from files, and not gathered since."""
    fetched = []
    for parameter in (each for group in zero.fp16_groups for each in group):
        swapper, part = parameter.nvme_swapper, parameter.ds_tensor
        if swapper is None or part.final_location != "nvme":
            continue
        swapper.synchronize_reads()
        if part.status.name == "AVAILABLE" and parameter.ds_status.name == "NOT_AVAILABLE":
            fetched.append(parameter)
    if fetched:
        fetched[0].nvme_swapper.remove_partition_and_release_buffers(fetched)


def _swaps_optimizer(zero: Any) -> bool:
    return bool(getattr(zero, "swap_optimizer", False))


def _swaps_parameters(zero: Any) -> bool:
    return bool(getattr(zero, "params_in_nvme_and_cpu", False))


class SwapFolders:
    """Folders of one process, below those that a configuration names for offload to NVMe.

    DeepSpeed would use one folder for all runs, and empty it when a run starts. These are deleted by `remove`, with
    this object, and when the interpreter exits; a killed process leaves them behind.

    Args:
        configuration: of DeepSpeed.
        rank: of this process; part of the folders' names.
    """

    def __init__(self, configuration: Mapping[str, Any], rank: int) -> None:
        self._wanted, self._rank = swap_paths(configuration), rank
        self._made: dict[str, Path] = {}
        self.remove = weakref.finalize(self, _remove, self._made)

    def place(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with this process's folders in it; made on the first call.

        A module that was divided by one engine stays in its folders under the next.
        """
        placed = copy.deepcopy(configuration)
        for name, path in self._wanted.items():
            if name not in self._made:
                self._made[name] = Path(tempfile.mkdtemp(prefix=f"swapped-by-rank-{self._rank}-", dir=path))
            placed["zero_optimization"][name]["nvme_path"] = str(self._made[name])
        return placed


def check_swap_paths(configuration: Mapping[str, Any]) -> None:
    """Refuse folders that cannot be swapped to.

    Raises:
        ValueError: a folder does not exist, cannot be written to, or is on a file system without direct I/O.
    """
    for name, path in swap_paths(configuration).items():
        setting = f"zero_optimization.{name}.nvme_path={path!r}"
        if not Path(path).is_dir():
            raise ValueError(f"{setting}: there is no such folder on this machine; make it, or name another")
        try:
            _write_directly(path)
        except OSError as error:
            raise ValueError(
                f"{setting}: cannot be swapped to ({error.strerror}); it has to be a folder that this process may "
                "write to, on a file system that is written past the page cache (O_DIRECT), which those in memory "
                "may not be"
            ) from None


def _write_directly(folder: str) -> None:
    """Write a file with direct I/O, as DeepSpeed does, and delete it."""
    descriptor, path = tempfile.mkstemp(prefix="swapped-", dir=folder)
    os.close(descriptor)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
        os.close(descriptor)
    finally:
        os.unlink(path)


def _remove(made: dict[str, Path]) -> None:
    for path in made.values():
        shutil.rmtree(path, ignore_errors=True)
