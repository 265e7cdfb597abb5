"""Estimate the memory of a device for a plan: how many processes divide what of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tr_dist.fsdp.settings import Sharding, choose_units
from tr_dist.mesh.stages import cut_of
from tr_dist.mesh.tensor import check_sizes, plan_of

# Numbers that an optimizer keeps for each parameter, of its type: those whose updates need no whole matrices.
STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "adagrad": 1, "sgd": 0}
SMALLEST_UNIT = 1_000_000  # parameters of a unit, in a model that does not say which its layers are


@dataclass(frozen=True)
class Plan:
    """How many processes there are in each direction; `replicas` and `shards` share out the samples."""

    replicas: int = 1
    shards: int = 1
    tp: int = 1
    sp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def divides(self) -> bool:
        """Whether the processes hold parts of the model; if not, they are plain replicas."""
        return self != Plan(self.replicas)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of `parallelism_config`, without those of 1."""
        every = {"pp": self.pp, "dp_replicate": self.replicas, "dp_shard": self.shards, "sp": self.sp, "tp": self.tp}
        return {name: size for name, size in (every | {"ep": self.ep}).items() if size > 1}


@dataclass(frozen=True)
class Work:
    """What is done in a step.

    Attributes:
        batch: samples of a replica in a micro-batch.
        length: positions of a sample.
        accumulation: micro-batches of a step.
        bf16: whether is computed in bfloat16.
        recomputes: whether layers keep only their inputs for the backward pass (`gradient_checkpointing`).
        optim: a name in `STATES`.
    """

    batch: int = 1
    length: int = 2048
    accumulation: int = 1
    bf16: bool = False
    recomputes: bool = False
    optim: str = "adamw_torch"


PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")


class Subject:
    """A model whose memory is estimated; it may be on the meta device.

    Args:
        model: not divided.
        tp_plan: which modules `tp` divides; None takes the model's own plan.
    """

    def __init__(self, model: nn.Module, tp_plan: Mapping[str, str] | None = None) -> None:
        self.model, self.smallest_unit = model, SMALLEST_UNIT
        self.knows_layers = bool(getattr(model, "_no_split_modules", None))
        by_size = Sharding(wrap="SIZE_BASED_WRAP", min_num_params=SMALLEST_UNIT)
        units = choose_units(model, Sharding(wrap="TRANSFORMER_BASED_WRAP") if self.knows_layers else by_size)
        owners = {id(p): number for number, unit in reversed([*enumerate(units)]) for p in unit.parameters()}
        self._units = len(units)
        self._styles, self._why_not = dict[str, str](), ""
        try:
            self._styles = plan_of(model, tp_plan)
        except ValueError as error:
            self._why_not = str(error)
        divided = {
            id(p)
            for name, module in model.named_modules()
            if (style := self._styles.get(name, "replicated")).startswith(("colwise", "rowwise", "embedding"))
            for kind, p in module.named_parameters(recurse=False)
            if kind == "weight" or style.startswith("colwise")
        }
        # (unit, or -1 for what is in none; divided by tp; of an expert) -> (numbers, bytes)
        self._numbers, self._bytes = Counter[tuple[int, bool, bool]](), Counter[tuple[int, bool, bool]]()
        for name, p in model.named_parameters():
            key = (owners.get(id(p), -1), id(p) in divided, ".experts." in name)
            self._numbers[key] += p.numel()
            self._bytes[key] += p.nbytes
        self.num_parameters = sum(self._numbers.values())
        self.types = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
        config: Any = getattr(model, "config", None)
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.num_experts = _first(self._config, "num_experts", "num_local_experts", "n_routed_experts")
        self.counts_activations = _first(self._config, "hidden_size") > 0

    def refusal(self, plan: Plan, length: int) -> str:
        """Return why the model cannot be divided so, empty if it can."""
        if plan.tp > 1 and self._why_not:
            return self._why_not
        try:
            if plan.tp > 1:
                check_sizes(self.model, self._styles, plan.tp)
            if plan.pp > 1:
                cut_of(self.model)
        except ValueError as error:
            return str(error)
        heads = _first(self._config, "num_key_value_heads", "num_attention_heads")
        for size, number, what in (
            (plan.pp, self._units, "layers"),
            (plan.sp * plan.tp if plan.sp > 1 else 1, heads, "heads"),
            (plan.sp, length, "positions"),
            (plan.ep, self.num_experts, "experts"),
        ):
            if size > 1 and (not number or number % size):
                return f"{size} does not divide {number} {what}"
        return ""

    def estimate(self, plan: Plan, work: Work) -> dict[str, float]:
        """Return the bytes of a device by part, at the fullest moment of a step.

        - parameters: those of the matrices divided by `tp` and of experts divided by `ep`, all divided by `pp`, by
          `shards` and by `sp`.
        - gradients: as the parameters; with accumulation not divided by `shards` and `sp`, as they are exchanged once.
        - optimizer: `STATES` times the parameters.
        - gathered: what is in no layer and two layers, in the type of computing; the gradient of one layer in it and,
          under bfloat16, in float32. Of plain replicas the buckets of gradients, and under bfloat16 a copy of weights.
        - activations: for each layer and position 24 bytes times the hidden size (26 under bfloat16), which `tp` does
          not divide, and 2 queries, 2 keys and 4 times the features inside, which it does. With recomputing one hidden
          size a layer, and one layer whole. A stage of `pp` keeps as many micro-batches as there are stages.
        - logits: 12 bytes for each position and word, which a loss needs in float32 with their gradient.

        Left out: dropout's masks, attention that is written out (scores of length x length), biases of attention,
        layers of an encoder beside a decoder, buffers of the communication, the device's own context, fragmentation.
        With `pp` what is in no layer counts on each stage, though only the first and the last one hold it.
        """
        shares, compute = plan.shards * plan.sp, 2 if work.bf16 else 4
        whole = self._of_a_stage(plan, self._bytes)
        parameters = whole / shares
        found = {
            "parameters": parameters,
            "gradients": whole if work.accumulation > 1 else parameters,
            "optimizer": parameters * STATES[work.optim],
        }
        numbers = [self._of_unit(plan, self._numbers, unit) for unit in range(-1, self._units)]
        layer = max(numbers[1:], default=0.0)
        if plan.divides:
            found["gathered"] = (numbers[0] + 3 * layer) * compute + (4 * layer if work.bf16 else 0)
        else:
            buckets = whole if plan.replicas > 1 else 0
            found["gathered"] = buckets + (2 * sum(numbers) if work.bf16 else 0)
        positions = work.batch * work.length / plan.sp
        each, hidden = self._of_a_layer(plan, compute), 4 * _first(self._config, "hidden_size")
        found["activations"] = positions * (self._units * hidden + each if work.recomputes else self._units * each)
        found["logits"] = positions * 12 * _first(self._config, "vocab_size") if hidden else 0
        return found

    def _of_unit(self, plan: Plan, count: Mapping[tuple[int, bool, bool], int], wanted: int) -> float:
        return sum(
            number / (plan.tp if by_tp else 1) / (plan.ep if of_expert else 1)
            for (unit, by_tp, of_expert), number in count.items()
            if unit == wanted
        )

    def _of_a_stage(self, plan: Plan, count: Mapping[tuple[int, bool, bool], int]) -> float:
        layers = sum(self._of_unit(plan, count, unit) for unit in range(self._units))
        return self._of_unit(plan, count, -1) + layers / plan.pp

    def _of_a_layer(self, plan: Plan, compute: int) -> float:
        """Return the bytes that a layer keeps for each position."""
        config = self._config
        hidden, heads = _first(config, "hidden_size"), _first(config, "num_attention_heads") or 1
        size = _first(config, "head_dim") or hidden / heads
        queries, keys = size * heads, size * (_first(config, "num_key_value_heads") or heads)
        inside = _first(config, "intermediate_size", "ffn_dim", "d_ff") or 4 * hidden
        if self.num_experts:
            chosen = _first(config, "num_experts_per_tok") or 1
            inside = chosen * (_first(config, "moe_intermediate_size") or inside)
        return hidden * (24 if compute == 4 else 26) + compute * (2 * queries + 2 * keys + 4 * inside) / plan.tp


def _first(config: Any, *names: str) -> int:
    """Return the first of some numbers of a configuration that is there; 0 if none is."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
