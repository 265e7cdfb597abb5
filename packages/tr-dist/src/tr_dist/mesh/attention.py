"""Exchange heads for pieces of sequences, around the attention functions of transformers too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Exchange(torch.autograd.Function):
    """Give each process a part of dimension `split`, and join what all have of it along dimension `join`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
        """Exchange; the shapes are those of `exchange`."""
        ctx.group, ctx.split, ctx.join = group, split, join
        return exchange(value, group, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Exchange back."""
        return exchange(gradients[0], ctx.group, ctx.join, ctx.split), None, None, None


def exchange(value: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    """Exchange without gradients, by one all-to-all of as many bytes as `value` has; see `Exchange`."""
    sent = torch.stack(value.chunk(dist.get_world_size(group), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


class AttentionOfTorch(TorchFunctionMode):
    """Exchanges around `scaled_dot_product_attention` where a module calls it in a forward in pieces."""

    def __init__(self, sequences: Any) -> None:
        super().__init__()
        self._sequences = sequences

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, sequences = kwargs or {}, self._sequences
        if func is not F.scaled_dot_product_attention or sequences.state != "pieces":
            return func(*args, **kwargs)
        bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        states = sequences.exchanged(*(bound.pop(name) for name in ("query", "key", "value")))
        mask, is_causal = bound.get("attn_mask"), bool(bound.get("is_causal"))
        bound["attn_mask"] = mask = sequences.whole_mask(mask, is_causal=is_causal, device=states[0].device)
        bound["is_causal"] = is_causal and mask is None
        sequences.seen["torch"] += 1
        return sequences.leave(sequences.attention(*states, **bound), 2)


def attentions_of(model: nn.Module) -> set[str]:
    """Return the names of the attention functions that a model of transformers uses; none of any other."""
    found = (getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules())
    return {name for name in found if isinstance(name, str)} if "transformers" in sys.modules else set()


class AttentionOfTransformers:
    """Has the attention functions that a model of transformers uses exchange, and makes their masks for the whole.

    The functions are registered again under their own names, and what reads the model's name of its attention finds
    what it expects. Modules of other models reach the functions as they were.

    Args:
        sequences: the direction, with `state`, `division`, `group`, `seen`, `queries`, `exchanged` and `leave`.
        model: whose attention it is; one that is not of transformers has none of these.

    Attributes:
        names: of the attention functions.
    """

    def __init__(self, sequences: Any, model: nn.Module) -> None:
        self._sequences, self._modules = sequences, {id(module) for module in model.modules()}
        self._undo = ExitStack()
        self.close = self._undo.close  # puts back the functions that were registered before
        self.names = attentions_of(model)
        for name in self.names:
            self._register(name)

    def _register(self, name: str) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        attend, mask = AttentionInterface().get(name), AttentionMaskInterface().get(name)
        AttentionInterface.register(name, functools.partial(self._attend, attend))
        if attend is None:  # eager, which each model has of its own
            self._undo.callback(AttentionInterface._global_mapping.pop, name)
        else:
            self._undo.callback(AttentionInterface.register, name, attend)
        if mask is not None:
            AttentionMaskInterface.register(name, functools.partial(self._whole_mask, mask))
            self._undo.callback(AttentionMaskInterface.register, name, mask)

    def _attend(
        self,
        attend: Callable[..., Any] | None,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> Any:
        attend, sequences = attend or _eager(module), self._sequences
        if id(module) not in self._modules or sequences.state == "whole" or sequences.attends_in_torch:
            return attend(module, query, key, value, attention_mask, **options)
        if sequences.state is None:
            raise ValueError(
                f"{sequences.asked}: a part of the model was called by itself, and only its own forward divides "
                "sequences; call the model that was given to the Trainer"
            )
        states = sequences.exchanged(query, key, value)
        if options.get("position_ids") is not None:
            options["position_ids"] = sequences.division.positions  # flash attention finds packed sequences in them
        sequences.seen["transformers"] += 1
        state, sequences.state = sequences.state, "whole"  # what it calls in turn is not divided again
        try:
            output, *_ = attend(module, *states, attention_mask, **options)
        finally:
            sequences.state = state
        return sequences.leave(output, 1), None

    def _whole_mask(self, mask_of: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make the mask of whole sequences where the model asks for that of a piece."""
        sequences = self._sequences
        if sequences.state != "pieces":
            return mask_of(*args, **options)
        now = sequences.division
        if sequences.attends_in_torch:
            return sequences.mask_in_pieces(options.get("mask_function"))
        if args or options["q_length"] != now.piece or options["kv_length"] != now.piece:
            raise ValueError(
                f"{sequences.asked}: a mask for attention within pieces of {now.piece} positions was "
                f"expected, and one for {options.get('q_length')} and {options.get('kv_length')} asked for; only "
                "attention within the sequence can be divided"
            )
        mask, device = now.mask, options.get("device")
        (first, number), length = sequences.queries, now.piece * sequences.size
        if number < length:  # without a mask, attention is causal from the first key on
            options["allow_is_causal_skip"] = False
        if mask is None and length > now.length and not options.get("allow_is_causal_skip"):
            # Padding follows the words, so that those of a causal model do not see it.
            mask = (torch.arange(length, device=device) < now.length).expand(options["batch_size"], -1)
        if now.mask is None and now.positions is not None:
            options |= {
                "mask_function": _packed(options["mask_function"], now.positions),
                "allow_is_causal_skip": False,
            }
        options |= {"q_length": number, "kv_length": length, "q_offset": first, "kv_offset": 0}
        return mask_of(**options | {"attention_mask": None if mask is None else mask.bool()})


def _packed(mask_function: Callable[..., Any], positions: torch.Tensor) -> Callable[..., Any]:
    """Return a mask function by which words see only those of their own sequence, in which positions go on by 1."""
    first = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    number = first.cumsum(-1)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        is_own = number[batch, query] == number[batch, key]
        return is_own & mask_function(batch, head, positions[batch, query], positions[batch, key])

    return mask


def _eager(module: nn.Module) -> Callable[..., Any]:
    """Return the attention function that a model has beside its classes, for `eager`."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(f"the eager attention of {type(module).__name__} is not known; set attn_implementation='sdpa'")
