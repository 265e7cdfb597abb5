"""Bring what ZeRO-3 has swapped out to files into memory, part by part, and see to gaps that DeepSpeed leaves there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from tr_dist.deepspeed.pieces import Piece

_BLOCK = 4096  # bytes, of the largest logical blocks of disks


def in_memory(zero: Any, pieces: Iterable[tuple[Any, Piece]], *, changed: bool) -> Iterator[tuple[Any, Piece]]:
    """Yield parameters with their pieces, each while its flat tensor and the state of it are in memory.

    Args:
        zero: DeepSpeed's optimizer.
        pieces: in the order of `pieces_of`.
        changed: whether what is in memory is to be written back.
    """
    for subgroup, members in groupby(pieces, key=lambda item: item[1].subgroup):
        with _subgroup_in_memory(zero, subgroup, changed=changed):
            yield from members


def keep_unaligned_gradients(zero: Any) -> None:
    """Have gradients stay in memory where DeepSpeed could not read them back from a file.

    It reads each into the midst of a buffer. Past the page cache that takes an address of whole blocks; at others
    nothing is read, and nothing is said.
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


def forget_swapped_state(zero: Any) -> None:
    """Forget the optimizer's state that is in files, of which the optimizer was just emptied."""
    if _swaps_optimizer(zero):
        zero.optimizer_swapper.purge_state()


def refresh_masters(zero: Any) -> None:
    """Copy a model's parameters to what the optimizer changes, wherever the two are."""
    if not (_swaps_optimizer(zero) or _swaps_parameters(zero)):
        if (refresh := getattr(zero, "refresh_fp32_params", None)) is not None:
            refresh()
        return
    _release_fetched(zero)
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        with _subgroup_in_memory(zero, number, changed=True):
            zero._swap_in_sub_group_to_flat_buffer(flat.data, number)


def prepare_step(zero: Any) -> None:
    """See to what DeepSpeed's step expects of what is in files.

    Parameters that were without a gradient in this step get zeros, where their optimizer is offloaded; DeepSpeed would
    take what a buffer or a file happens to hold, such as the gradient of an earlier step. And parameters that were
    fetched before they were needed go: the step would change them in memory alone.

    Raises:
        ValueError: there are too few buffers for what the optimizer keeps.
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
    """Put zeros for gradients into parts (start, size) of a sub-group's flat tensor."""
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
    """Refuse too few buffers for what an optimizer keeps of each parameter.

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
    """Let go of parts of parameters that were read from files, and not gathered since."""
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
