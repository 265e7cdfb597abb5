"""Divide sequences over processes: each has a piece of every sequence, and in attention some heads of the whole."""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from tr_dist.mesh.attention import AttentionOfTorch, AttentionOfTransformers, Exchange, attentions_of
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.direction import Direction, NotGathered, as_in_evaluation, sizes_that_divide
from tr_dist.mesh.tensor import HEADS

_IGNORED = -100
_TAKES_MASKS = {"eager", "sdpa"}  # attention functions of transformers


class _Gather(torch.autograd.Function):
    """Pieces along dimension 1 joined on each process.

    All processes compute the same from what is joined, so each has the gradient of all of it. FSDP takes the mean of
    gradients over these processes, so that of the own piece is multiplied by their number.
    """

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.size, ctx.rank, ctx.length = dist.get_world_size(group), dist.get_rank(group), piece.shape[1]
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(ctx.size)]
        dist.all_gather(pieces, piece.contiguous(), group=group)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].narrow(1, ctx.rank * ctx.length, ctx.length) * ctx.size, None


@dataclass
class Division:
    """How one batch is divided.

    Attributes:
        length: of the sequences, before they were padded.
        piece: length of each process's piece.
        mask: 2-D attention mask of the whole sequences, padded; None if none was given.
        positions: of the whole sequences, padded, `(batch, length)`; None if none were given.
        share: of the targets that a loss is a mean over, those in this piece; a scalar. None without labels.
    """

    length: int
    piece: int
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    share: torch.Tensor | None


class InPieces(NotGathered):
    """Stands for outputs in training, of which each process has a piece, while the model computes the loss."""

    why = (
        "outputs of a model whose sequences are divided are not gathered in training where the model "
        "computes the loss from labels; call it without labels, as compute_loss_func does, and they are whole"
    )


class Sequences(Direction):
    """Processes that have a piece of each sequence; in attention each has some heads of all of it (Ulysses).

    Whatever a model computes at each position by itself needs nothing; attention is exchanged where a model of
    transformers calls its attention function, and any other module `scaled_dot_product_attention`. Each form of call
    (names of inputs) is computed once on a short batch, whole and in pieces: what differs is refused, so that no model
    is divided wrongly in silence.

    Source: Jacobs et al. 2023, arXiv:2309.14509.

    Args:
        size: number of processes.
        label_names: inputs that are labels; None for those parameters of the forward whose names contain `label`.

    Attributes:
        asked: the size, as it is set.
    """

    name = "sp"
    computes = "its own piece of each sequence, and in attention its own heads"
    shares_heads = True
    halves = 1  # that a piece is made of
    attends_in_torch = False  # with what transformers calls there too, so that its attention functions stay as they are
    attention = staticmethod(F.scaled_dot_product_attention)
    division: Division  # of the batch that is computed

    def __init__(self, size: int, label_names: Sequence[str] | None = None) -> None:
        self.size, self._label_names, self.asked = size, label_names, f"{self.name}_size={size}"
        self.state: str | None = None  # whether now "pieces" are computed, or a "whole" short batch; None outside
        self.seen = Counter()
        self._forms: dict[Any, list[str]] = {}
        self._is_looking = False
        self._around = ExitStack()  # what a forward in pieces is in
        self._rules: list[str] = []
        self._mode = AttentionOfTorch(self)
        self._of_transformers: AttentionOfTransformers | None = None

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Make the groups of those that have a sequence; see `Direction.join`."""
        self._parts = ranks.shape[4]
        if ranks.shape[0] > 1 or ranks.shape[3] != self.size:
            raise ValueError(f"{self.asked} is not done with pp_size, nor cp_size with sp_size; set one of them to 1")
        pieces = among(ranks.transpose(3, 4).reshape(-1, self.size).tolist())
        self.group, self.rank = pieces.group, pieces.rank

    def check(self, model: nn.Module) -> None:
        """Check the sizes; see `Direction.check`."""
        config, parts = getattr(model, "config", None), self._parts
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{self.asked} divides one sequence, and {type(model).__name__} has two, of encoder and decoder; use "
                "tp_size"
            )
        for name in HEADS if self.shares_heads else ():
            if isinstance(number := getattr(config, name, None), int) and number % (self.size * parts):
                of_each = f"{name}={number}" + (f" of which tp_size={parts} leaves {number // parts}" * (parts > 1))
                others = sizes_that_divide(number // parts)
                raise ValueError(f"{self.asked} does not divide {of_each}; {others} do")

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Have attention exchange; see `Direction.divide`."""
        self._of_transformers = AttentionOfTransformers(self, model)

    def finish(self, model: nn.Module) -> None:
        """Have the model's forward divide its inputs and join its outputs, around all that FSDP does."""
        not_compiled: Any = torch.compiler.disable  # torch.compile has no form of an ExitStack
        model.register_forward_pre_hook(not_compiled(self._before), prepend=True, with_kwargs=True)
        model.register_forward_hook(not_compiled(self._after), always_call=True)

    def close(self) -> None:
        """Give transformers its attention functions back."""
        if self._of_transformers is not None:
            self._of_transformers.close()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Have attention that is computed again in the backward pass exchange too."""
        self.state = "pieces"
        try:
            with self._mode if self.seen["torch"] else nullcontext():
                yield
        finally:
            self.state = None

    # Around the forward

    def _before(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if self._is_looking:
            return None
        named = _named(model, args, given)
        # Sequences of a word for each process are not padded as those are at which it is looked.
        form = (_form(named), _main(model, named).shape[1] > self.size)
        if form not in self._forms:
            self._forms[form] = self._look(model, named)
        self._rules = self._forms[form]
        pieces = self._split(model, named)
        self._enter(model)
        return (), pieces

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        if self._is_looking or self.state is None:
            return None
        self._around.close()
        if output is None:  # the forward failed
            return None
        leaves, structure = tree_flatten(output)
        if len(leaves) != len(self._rules):
            raise ValueError(
                f"{self.asked}: {type(model).__name__} returned {len(leaves)} values, and {len(self._rules)} "
                "when it was looked at; return the same for the same inputs"
            )
        return tree_unflatten(list(map(self._join, leaves, self._rules)), structure)

    def _enter(self, model: nn.Module) -> None:
        """Begin a forward in pieces, which `_around` ends."""
        self.state = "pieces"
        self._around.callback(setattr, self, "state", None)
        if self._is_looking or self.seen["torch"]:
            self._around.enter_context(self._mode)
        if model.training:
            self._around.enter_context(_other_numbers(self.rank, next(model.parameters()).device))

    def _split(self, model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return this process's pieces of the inputs, and note how they are divided.

        Raises:
            ValueError: which inputs are of the sequence cannot be decided.
        """
        main = _main(model, named)
        rows, length = main.shape[:2]
        piece = self.halves * -(-length // (self.halves * self.size))
        padding = piece * self.size - length
        inputs, parameters, labels = dict(named), _parameters(model), self._labels(model, named)
        if "position_ids" in parameters and inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(length, device=main.device)[None]
        if labels and labels[0] != "shift_labels" and _shifts(model):
            inputs["shift_labels"] = F.pad(inputs[labels[0]], (0, 1), value=_IGNORED)[..., 1:]
            labels.insert(0, "shift_labels")
        whole: dict[str, torch.Tensor] = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape[:2] not in ((rows, length), (1, length)):
                    raise ValueError(
                        f"{self.asked}: {name} of shape {tuple(value.shape)} is not of sequences of shape "
                        f"{(rows, length)}, so how it is divided cannot be decided; leave it out of the batch"
                    )
                filling = _IGNORED if name in labels else 0
                whole[name] = F.pad(value, (*(0, 0) * (value.dim() - 2), 0, padding), value=filling)
                inputs[name] = self.own(whole[name]).contiguous()
        counted = whole[labels[0]] != _IGNORED if labels else None
        share = None if counted is None else self.own(counted).sum().double() / counted.sum()
        positions = whole["position_ids"].expand(rows, -1) if named.get("position_ids") is not None else None
        self.division = Division(length, piece, whole.get("attention_mask"), positions, share)
        asks = self._of_transformers and self._of_transformers.names and "attention_mask" in parameters
        if asks and inputs.get("attention_mask") is None:
            # With a mask transformers looks for no packed sequences, which it cannot see in a piece.
            inputs["attention_mask"] = torch.ones((rows, piece), dtype=torch.long, device=main.device)
        return inputs

    def _labels(self, model: nn.Module, named: Mapping[str, Any]) -> list[str]:
        """Return the names of the labels that are given; first those by which targets are counted."""
        names = self._label_names
        if names is None:
            names = [name for name in _parameters(model) if "label" in name]
        return [name for name in dict.fromkeys(("shift_labels", *names)) if getattr(named.get(name), "ndim", 0)]

    def _join(self, value: Any, rule: str) -> Any:
        if rule == "mean":
            share = cast("torch.Tensor", self.division.share).to(value.device)
            # A mean over no target is NaN, and is no part of the mean over all.
            value = torch.where(share == 0, 0, value) * share.to(value.dtype)
        if rule in ("sum", "mean"):
            return self.gather(value.reshape(1, 1)).sum()
        if rule == "piece" and torch.is_grad_enabled() and self.division.share is not None:
            return InPieces()
        return self.in_order(self.gather(value))[:, : self.division.length] if rule == "piece" else value

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's piece of what is whole along dimension 1."""
        return whole.chunk(self.size, 1)[self.rank]

    def in_order(self, joined: torch.Tensor) -> torch.Tensor:
        """Return pieces that are joined along dimension 1 in the order of the sequence."""
        return joined

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the pieces of all processes joined along dimension 1."""
        return _Gather.apply(piece, self.group)  # type: ignore[return-value]

    # Attention

    @property
    def queries(self) -> tuple[int, int]:
        """Return the first position whose attention this process computes, and their number."""
        return 0, self.division.piece * self.size

    def exchanged(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Return what attention is computed of, from pieces of queries, keys and values `(batch, heads, length, size)`.

        Raises:
            ValueError: it is not attention within the sequence, or heads cannot be shared out.
        """
        for value in states:
            if value.dim() != 4 or value.shape[2] != self.division.piece:
                raise ValueError(
                    f"{self.asked}: attention over {tuple(value.shape)} is not (batch, heads, length, size) with the "
                    f"{self.division.piece} positions of a piece; only attention within the sequence can be divided"
                )
            if self.shares_heads and value.shape[1] % self.size:
                others = sizes_that_divide(value.shape[1])
                raise ValueError(f"{self.asked} does not divide {value.shape[1]} heads; {others} do")
        return self.enter([*states])

    def enter(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole sequences of this process's heads: `(batch, heads, length, size)`."""
        return [Exchange.apply(value, self.group, 1, 2) for value in states]

    def leave(self, output: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return a piece of all heads from the output of attention, whose positions are in dimension 1 or 2."""
        return Exchange.apply(output, self.group, dimension, 3 - dimension)  # type: ignore[return-value]

    def whole_mask(self, mask: torch.Tensor | None, *, is_causal: bool, device: torch.device) -> torch.Tensor | None:
        """Return the mask of whole sequences from the one that a module made of its piece.

        Raises:
            ValueError: what it is for other pieces is unknown.
        """
        now = self.division
        is_there = torch.arange(now.piece * self.size, device=device)[None, None, None] < now.length
        if mask is None:
            return is_there if is_there.shape[-1] > now.length and not is_causal else None
        if mask.dim() != 4 or mask.shape[1:] != (1, 1, now.piece):
            raise ValueError(
                f"{self.asked}: attn_mask of shape {tuple(mask.shape)} is not (batch, 1, 1, {now.piece}), of "
                "the keys of a piece; use is_causal=True, or such a mask"
            )
        mask = self.gather(mask.flatten(1))[:, None, None]
        return mask & is_there if mask.dtype == torch.bool else mask.masked_fill(~is_there, float("-inf"))

    # Whether it is the same in pieces

    @torch.no_grad()
    def _look(self, model: nn.Module, named: Mapping[str, Any]) -> list[str]:
        """Compute a short batch whole and in pieces, and return how each output is joined. Collective. Sync: once.

        Raises:
            ValueError: an output is not that of the whole sequence, however it is joined.
        """
        self._split(model, named)  # refuses first what is not of the sequences
        short = _short(model, named, self.size, self._labels(model, named))
        seen, self._is_looking = self.seen.copy(), True
        try:
            with as_in_evaluation(model), self._around:
                self.state = "whole"
                expected, _ = tree_flatten(model(**short))
                pieces = self._split(model, short)
                self._enter(model)
                found, _ = tree_flatten(model(**pieces))
        finally:
            self.state, self._is_looking = None, False
            torch.clear_autocast_cache()  # it has weights without gradients
        if self.seen == seen:
            raise ValueError(
                f"{self.asked}: {type(model).__name__} called no attention that can be divided; a module calls "
                "torch.nn.functional.scaled_dot_product_attention, and a model of transformers takes its attention "
                "function from AttentionInterface (not nn.MultiheadAttention, which hides it)"
            )
        return self._compare(type(model).__name__, expected, found, short)

    def _compare(self, model: str, expected: list[Any], found: list[Any], short: Mapping[str, Any]) -> list[str]:
        rules = [self._candidates(*pair, short) for pair in zip(expected, found, strict=False)]
        if len(expected) != len(found):
            rules.append({"number of outputs": torch.full((), torch.inf)})
        errors = [error for candidates in rules for error in candidates.values()]
        device = next(value.device for value in short.values() if isinstance(value, torch.Tensor))
        largest = torch.stack([error.to(device, torch.float32) for error in errors])
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # of all processes, so that all join in the same way
        values, chosen, tolerance = iter(largest.tolist()), list[str](), _tolerance(expected)  # sync
        for number, candidates in enumerate(rules):
            measured = {name: next(values) for name in candidates}
            chosen.append(next((name for name, error in measured.items() if error <= tolerance), ""))
            if not chosen[-1]:
                seen = ", ".join(f"{name}: {error:.2g}" for name, error in measured.items())
                raise ValueError(
                    f"{self.asked}: output {number} of {model} is another one for a sequence in pieces than for "
                    f"the whole one (relative error by how pieces are joined: {seen}). A model that can be divided "
                    "takes the place of a word from position_ids, works on each position by itself but for attention, "
                    "and has a loss that is a mean over targets, or their sum divided by num_items_in_batch; where it "
                    "predicts the next position, its forward or loss_function takes shift_labels. Labels are named by "
                    "label_names, or by parameters of its forward that are called so"
                )
        return chosen

    def _candidates(self, whole: Any, part: Any, short: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return ways to join one output of a short batch, with the relative error of each."""
        if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
            return {"as it is": torch.full((), 0.0 if type(whole) is type(part) else torch.inf)}
        now, is_there = self.division, ...
        ways = ["as it is"] if whole.shape == part.shape else []
        if whole.dim() == 0 and whole.is_floating_point():
            mean = ["mean"] if now.share is not None else []
            ways = ["sum", *mean, *ways] if short.get("num_items_in_batch") is not None else [*mean, "sum", *ways]
        elif whole.shape[1:2] == (now.length,) and part.shape == (whole.shape[0], now.piece, *whole.shape[2:]):
            mask, ways = short.get("attention_mask"), ["piece"]
            is_there = ... if mask is None or mask.shape != whole.shape[:2] else mask.bool()
        found = {way: _error(whole[is_there], self._join(part, way)[is_there]) for way in ways}
        return found or {f"shape {tuple(part.shape)} in place of {tuple(whole.shape)}": torch.full((), torch.inf)}


class Context(Sequences):
    """Processes that have a piece of each sequence; in attention each has its queries, and the keys and values of all.

    Heads are not shared out, so their number is no limit. Masks are explicit, so that each piece costs the same, as it
    follows the one before.

    Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2, whose pieces are of the beginning and of the end.

    Args:
        size: number of processes.
        label_names: see `Sequences`.
    """

    name = "cp"
    computes = "its own piece of each sequence"
    shares_heads = False

    @property
    def queries(self) -> tuple[int, int]:
        """Return the first position whose attention this process computes, and their number."""
        return self.rank * self.division.piece, self.division.piece

    def check(self, model: nn.Module) -> None:
        """Check the sizes, and that attention takes a mask; see `Direction.check`."""
        super().check(model)
        if others := attentions_of(model) - _TAKES_MASKS:
            raise ValueError(
                f"{self.asked} needs attention that takes a mask, and that of {type(model).__name__} is "
                f"{', '.join(sorted(others))}; set attn_implementation='sdpa', or use sp_size"
            )

    def enter(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the queries, and keys and values of whole sequences: `(batch, heads, length, size)`."""
        query, *others = states
        return [query, *(Exchange.apply(each.repeat(1, self.size, 1, 1), self.group, 1, 2) for each in others)]

    def leave(self, output: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the output as it is: a piece of all heads."""
        return output

    def whole_mask(self, mask: torch.Tensor | None, *, is_causal: bool, device: torch.device) -> torch.Tensor | None:
        """Return the mask of a piece's queries, from the one that a module made; see `Sequences.whole_mask`."""
        if not is_causal:
            return super().whole_mask(mask, is_causal=False, device=device)
        first, number = self.queries
        return torch.ones(number, self.size * number, dtype=torch.bool, device=device).tril(first)


@contextmanager
def _other_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Draw other numbers for each piece in a block, and go on afterwards from what all pieces have in common.

    So the state that is saved is that of all processes of a sequence, and does not change where nothing is drawn.
    """
    generators: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    before = generators.get_rng_state()
    generators.manual_seed(zlib.crc32(before.numpy().tobytes()) + (rank << 32))
    seeded = generators.get_rng_state()
    try:
        yield
    finally:
        drew = not torch.equal(generators.get_rng_state(), seeded)
        generators.set_rng_state(before)
        if drew:
            torch.rand((), device=device)


def _named(model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a forward by name."""
    names = [name for name, parameter in _parameters(model).items() if parameter.kind.name == "POSITIONAL_OR_KEYWORD"]
    if len(args) > len(names):
        raise ValueError(f"{type(model).__name__} got {len(args)} inputs by position; give them by name")
    named = {**dict(zip(names, args, strict=False)), **given}
    if named.get("past_key_values") is not None:
        raise ValueError(
            "sequences in pieces: generation with a cache is not done; use use_cache=False, or generate on one process"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        named["use_cache"] = False  # a cache would hold a piece
    return named


def _form(named: Mapping[str, Any]) -> frozenset[Any]:
    return frozenset(
        (name, value if isinstance(value, bool | int | float | str) else (type(value), getattr(value, "ndim", 0)))
        for name, value in named.items()
        if value is not None
    )


def _parameters(model: nn.Module) -> dict[str, Any]:
    unwrap: Any = getattr(model, "get_base_model", lambda: model)  # of an adapter's wrapper
    return dict(inspect.signature(unwrap().forward).parameters)


def _shifts(model: nn.Module) -> bool:
    """Whether the loss takes labels that are shifted already, by its signature: then it shifts those that are not."""
    function = getattr(model, "loss_function", None)
    declared = inspect.signature(function).parameters if callable(function) else {}
    return "shift_labels" in {*declared, *_parameters(model)}


def _main(model: nn.Module, named: Mapping[str, Any]) -> torch.Tensor:
    """Return the input whose first two dimensions are the number and the length of the sequences."""
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    if not tensors:
        raise ValueError("sequences in pieces: no input has them, as a tensor of shape (batch, length)")
    return tensors.get(getattr(model, "main_input_name", "input_ids"), next(iter(tensors.values())))


def _short(model: nn.Module, named: Mapping[str, Any], size: int, labels: Sequence[str]) -> dict[str, Any]:
    """Return two sequences of a batch, so short that they can be computed whole, and so long that they are padded."""
    length = _main(model, named).shape[1]
    cut = min(length, 16 * size)
    cut -= int(cut % size == 0 and cut > size)
    mask, start = named.get("attention_mask"), 0
    if mask is not None and mask.dim() == 2 and mask[:2, :cut].sum() < mask[:2, -cut:].sum():  # sync
        start = length - cut
    short = {
        name: value[:2, start : start + cut]
        if isinstance(value, torch.Tensor) and value.shape[1:2] == (length,)
        else value
        for name, value in named.items()
    }
    mask = short.get("attention_mask")
    for number, name in enumerate(labels):
        if not short[name].is_floating_point():
            # Words are targets, that each piece has some, but those by which a count of anything else shows. The first
            # class is one that every model has.
            short[name] = short[name].clamp_min(0)
            if mask is not None and mask.shape == short[name].shape:
                short[name].masked_fill_(mask == 0, _IGNORED)
            short[name][:1, 1 : 2 + number] = _IGNORED
    return short


def _error(whole: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of the difference by that of the whole; infinite where only one is finite."""
    if whole.numel() == 0:
        return torch.zeros((), device=whole.device)
    whole, joined = whole.double(), joined.double()
    is_same = (whole == joined) | (whole.isnan() & joined.isnan())
    difference = torch.where(is_same, 0, joined - whole).square().mean().sqrt()
    size = torch.where(whole.isfinite(), whole, 0).square().mean().sqrt().clamp_min(1e-30)
    return (difference / size).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _tolerance(values: Sequence[Any]) -> float:
    """Return what rounding may make of a relative error: more where numbers have few digits."""
    kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")
    if kinds & {torch.bfloat16, torch.float16} or torch.is_autocast_enabled(device):
        return 0.03
    return 3e-5 if device == "cpu" else 2e-3  # TF32
