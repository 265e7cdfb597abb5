"""Causal attention over a ring: each process keeps its queries, and keys and values go from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tr_dist.mesh.attention import attentions_of
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.sequence import Context

_ASKED = "cp_size with cp_comm_strategy='alltoall'"
_GATHERED = "set cp_comm_strategy='allgather'"


class Ring(Context):
    """Processes that have the beginning and the end of each sequence in two halves of a piece, and pass keys on.

    No process holds the keys and values of a whole sequence, nor a mask. A sequence is cut into twice as many halves as
    there are processes; process r has the halves r and 2 * size - 1 - r, so that causal attention costs all the same.

    Source: Liu et al. 2023, arXiv:2310.01889; Brandon et al. 2023, arXiv:2311.09431, for the balance.

    Args:
        size: number of processes.
        label_names: see `Sequences`.
    """

    computes = "a part of the beginning and one of the end of each sequence, without a mask"
    halves = 2
    attends_in_torch = True

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Make the groups of those that have a sequence; see `Direction.join`."""
        if device.type not in _KERNELS:
            raise ValueError(f"{_ASKED} needs torch's flash attention of the CPU or of CUDA, not {device}; {_GATHERED}")
        super().join(ranks, device, among)

    def check(self, model: nn.Module) -> None:
        """Check that attention is torch's own; see `Direction.check`."""
        if others := attentions_of(model) - {"sdpa"}:
            raise ValueError(
                f"{_ASKED} needs attn_implementation='sdpa', and that of {type(model).__name__} is "
                f"{', '.join(sorted(others))}; set it, or {_GATHERED}"
            )
        super().check(model)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's piece: one of the first halves, and the one as far from the end."""
        cut = whole.chunk(2 * self.size, 1)
        return torch.cat([cut[self.rank], cut[-1 - self.rank]], 1)

    def in_order(self, joined: torch.Tensor) -> torch.Tensor:
        """Return pieces that are joined along dimension 1 in the order of the sequence."""
        cut = joined.chunk(2 * self.size, 1)
        return torch.cat([*cut[::2], *cut[::-2]], 1)

    def enter(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states as they are."""
        return states

    def mask_in_pieces(self, mask_function: Callable[..., Any] | None) -> None:
        """Check that a mask which a model asks for is that of causal attention. Sync, as transformers itself.

        Raises:
            ValueError: it is another one.
        """
        from transformers.masking_utils import causal_mask_function

        now = self.division
        if mask_function is not causal_mask_function or now.positions is not None:
            raise ValueError(
                f"{_ASKED} computes causal attention over whole sequences alone, not windows, chunks, both directions "
                f"or packed sequences (position_ids); {_GATHERED}"
            )
        if now.mask is not None and (now.mask.long().diff(dim=1) > 0).any():
            raise ValueError(f"{_ASKED} needs padding at the end: attention_mask has words after it; {_GATHERED}")

    def whole_mask(self, mask: torch.Tensor | None, *, is_causal: bool, device: torch.device) -> None:
        """Return no mask: causal attention needs none here.

        Raises:
            ValueError: there is a mask, or attention is not causal.
        """
        if mask is not None or not is_causal:
            raise ValueError(f"{_ASKED} computes causal attention without attn_mask alone: is_causal=True; {_GATHERED}")

    @torch.compiler.disable  # which has no form of what processes send to each other
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute attention of pieces `(batch, heads, length, size)`; keys and values may have fewer heads.

        Raises:
            ValueError: dropout, values of more features than keys, or a type that CUDA has no flash attention for.
        """
        if dropout_p:
            raise ValueError(f"{_ASKED}: attention with dropout {dropout_p} is not done; set it to 0, or {_GATHERED}")
        size = value.shape[-1]
        if size > key.shape[-1]:
            raise ValueError(f"{_ASKED}: values have {size} features, and keys {key.shape[-1]}; {_GATHERED}")
        value = F.pad(value, (0, key.shape[-1] - size))  # which go around with the keys
        states, kind = [query, key, value], query.device.type
        if torch.is_autocast_enabled(kind):
            states = [each.to(torch.get_autocast_dtype(kind)) for each in states]
        if kind == "cuda" and states[0].dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{_ASKED} needs bf16=True on CUDA, not {states[0].dtype}; set it, or {_GATHERED}")
        return _Around.apply(*states, self.group, scale)[..., :size]  # type: ignore[index]


class _Around(torch.autograd.Function):
    """Attention to each block of keys and values as it comes by, joined by the logarithms of the sums of exponentials.

    Of queries the two halves, of a block `(2, batch, heads, length, size)` keys and values. What comes from a process
    with a smaller number is seen in its first half alone, by all; what comes from one with a larger number is seen by
    the second half of the queries. So each turn but the first costs half a block.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, scale: float | None
    ) -> torch.Tensor:
        ctx.group, ctx.scale, ctx.rest = group, scale, []
        block, size = torch.stack((key, value)), dist.get_world_size(group)
        output = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        logarithms = torch.full_like(output[..., 0], -torch.inf)
        for turn in range(size):
            coming = _Passed(block, group) if turn + 1 < size else None
            rows, columns = _seen(turn, query.shape[2], group)
            found, sums, *rest = _attend(query[:, :, rows], block[..., columns, :], turn == 0, scale)
            ctx.rest.append(rest)
            both = torch.logaddexp(logarithms[:, :, rows], sums)
            kept, added = ((each - both).exp().unsqueeze(-1) for each in (logarithms[:, :, rows], sums))
            output[:, :, rows] = output[:, :, rows] * kept + found * added
            logarithms[:, :, rows] = both
            block = block if coming is None else coming.wait()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logarithms)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, logarithms = ctx.saved_tensors
        gradient, of_query = gradients[0].to(query.dtype), torch.zeros_like(query, dtype=logarithms.dtype)
        block, size = torch.stack((key, value)), dist.get_world_size(ctx.group)
        of_block, passed = torch.zeros_like(block, dtype=logarithms.dtype), None
        for turn in range(size):
            coming = _Passed(block, ctx.group) if turn + 1 < size else None
            rows, columns = _seen(turn, query.shape[2], ctx.group)
            parts = [each[:, :, rows].contiguous() for each in (gradient, query, output, logarithms)]
            found = _attend_backward(parts, block[..., columns, :], turn == 0, ctx.scale, ctx.rest[turn])
            of_query[:, :, rows] += found[0]
            of_block = of_block if passed is None else passed.wait()
            of_block[..., columns, :] += found[1]
            passed = _Passed(of_block, ctx.group)  # after as many turns it is at home
            block = block if coming is None else coming.wait()
        of_key, of_value = cast("_Passed", passed).wait().to(query.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


class _Passed:
    """A tensor on its way to the next process of a group; `wait` returns what the one before it passes on."""

    def __init__(self, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._sent, self._received = value.contiguous(), torch.empty_like(value, memory_format=torch.contiguous_format)
        ways = [dist.P2POp(dist.isend, self._sent, after, group), dist.P2POp(dist.irecv, self._received, before, group)]
        self._works = dist.batch_isend_irecv(ways)

    def wait(self) -> torch.Tensor:
        """Return what came."""
        for work in self._works:
            work.wait()
        return self._received


def _seen(turn: int, length: int, group: dist.ProcessGroup) -> tuple[slice, slice]:
    """Return which queries see which keys of the block that comes by in a turn; in the first one, causally."""
    rank, half = dist.get_rank(group), length // 2
    if turn == 0:
        return slice(None), slice(None)
    return (slice(None), slice(half)) if turn <= rank else (slice(half, None), slice(None))


# torch's flash attention by its operators, forward and backward: they give the logarithms that blocks are joined by.
_KERNELS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}


def _attend(query: torch.Tensor, block: torch.Tensor, is_causal: bool, scale: float | None) -> Sequence[Any]:
    """Return attention, the logarithms of its sums, and what the backward pass on CUDA needs beside them."""
    kernel = getattr(torch.ops.aten, _KERNELS[query.device.type])
    return kernel(query, *_for_heads(block, query.shape[1]), 0.0, is_causal, scale=scale)


def _attend_backward(
    states: Sequence[torch.Tensor], block: torch.Tensor, is_causal: bool, scale: float | None, rest: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of queries and of a block; states are the output's gradient, queries, output, logarithms."""
    gradient, query, *found = states
    kernel = getattr(torch.ops.aten, f"{_KERNELS[query.device.type]}_backward")
    given = (gradient, query, *_for_heads(block, query.shape[1]), *found)
    of_query, *of_block = kernel(*given, *rest[:4], 0.0, is_causal, *rest[4:6], scale=scale)
    return of_query, torch.stack(of_block).unflatten(2, (block.shape[2], -1)).sum(3)


def _for_heads(block: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    return block.repeat_interleave(heads // block.shape[2], 2).unbind()
