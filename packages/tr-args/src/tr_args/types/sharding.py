"""Read how processes share data and shard the model: `accelerator_config`, `parallelism_config`, `fsdp`.

`fsdp` and `fsdp_config` are read in any of their forms. `parallelism_config` gives the numbers of processes that
samples, shards and matrices are spread over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tr_args.constraints import AtLeast, Constraint
from tr_args.conversion import convert
from tr_args.errors import RefusedError, did_you_mean, show


@dataclass(kw_only=True)
class AcceleratorConfig:
    """How data is shared among processes.

    Attributes:
        split_batches: the given batch size is the sum over all processes.
        dispatch_batches: the first process reads for all; None does so for data without a length.
        even_batches: repeat samples so that all processes have equally many batches.
        use_seedable_sampler: draw the order from the seed and the epoch alone.
        non_blocking: copy to the device asynchronously.
        gradient_accumulation_kwargs: `num_steps`, `sync_each_batch`.
        use_configured_state: keep process state that was set up before.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name."""
        return asdict(self)


DATA_SIZES = ("dp_replicate_size", "dp_shard_size")
# Sizes of processes that compute a sample together, from the outermost: layers, sequences, matrices.
WITHIN_SAMPLES = ("pp_size", "cp_size", "sp_size", "tp_size")
# Experts are shared out over processes that other sizes count, so ep_size is no factor of their number.
FACTORS = (*DATA_SIZES, *WITHIN_SAMPLES)
SIZES = (*FACTORS, "ep_size")
# Options of those sizes, without effect alone.
_OF_THOSE = ("cp_comm_strategy", "cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
_KEYS = (*SIZES, *_OF_THOSE)


class Spread(dict[str, Any]):
    """Sizes by name, which are also read as the attributes of Accelerate's `ParallelismConfig`.

    Beside them it has `cp_comm_strategy` if that is `alltoall`.
    A size that was not given is 1. `tp_enabled` is whether `tp_size` is above 1, and so on for the other sizes.
    """

    def __getattr__(self, name: str) -> Any:
        stem, _, end = name.rpartition("_")
        if name in SIZES:
            return self.get(name, 1)
        if end == "enabled" and f"{stem}_size" in SIZES:
            return self.get(f"{stem}_size", 1) > 1
        sizes = {"total_size": FACTORS, "data_parallel_size": DATA_SIZES, "non_data_parallel_size": WITHIN_SAMPLES}
        if name in sizes:
            return math.prod(self.get(size, 1) for size in sizes[name])
        raise AttributeError(f"parallelism_config has no {name}; it has {', '.join(SIZES)}")


class ParallelSizes(Constraint):
    """A mapping of sizes, text as in `tp=2,dp_shard=4`, or an object such as Accelerate's `ParallelismConfig`."""

    def before(self, value: Any) -> Any:
        """Return text, and the attributes of an object, as a mapping."""
        if isinstance(value, str) and "=" in value:
            pairs = [pair.partition("=") for pair in value.split(",")]
            given = {name.strip(): size.strip() for name, _, size in pairs}
            sizes = {n if n in _OF_THOSE else n.removesuffix("_size") + "_size": size for n, size in given.items()}
            return {name: int(size) if size.isdigit() else size for name, size in sizes.items()}
        if not isinstance(value, Mapping) and all(hasattr(value, name) for name in DATA_SIZES):
            return {name: found for name in _KEYS if (found := getattr(value, name, None)) is not None}
        return value

    def after(self, value: Any) -> Any:
        """Return the sizes, under their plain names."""
        return Spread(read_sizes(value))


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a `Spread`, sizes within a sample if above 1; names may have Accelerate's prefix.

    Raises:
        RefusedError: (a ValueError) a key is unknown, a size is not a whole number from 1, or `cp_comm_strategy` is
            neither `allgather` nor `alltoall`.
    """
    sizes: dict[str, Any] = {}
    for given, size in config.items():
        name = given.removeprefix("parallelism_config_")
        if name not in _KEYS:
            raise RefusedError(f"has the unknown key {given}{did_you_mean(name, _KEYS)}")
        options = size if isinstance(size, Mapping) else {name: size, **getattr(size, "__dict__", {})}
        exchange = options.get("cp_comm_strategy")
        if exchange not in (None, "allgather", "alltoall"):
            raise RefusedError(
                f"has cp_comm_strategy={exchange!r}; keys and values are gathered ('allgather'), or go around a ring "
                "('alltoall')"
            )
        if exchange == "alltoall":
            sizes["cp_comm_strategy"] = exchange
        if size is None or name in _OF_THOSE:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RefusedError(f"at {given}={size!r}: needs a number of processes, from 1")
        if name in DATA_SIZES or size > 1:
            sizes[name] = size
    if "cp_size" not in sizes:
        sizes.pop("cp_comm_strategy", None)
    return sizes


SHARDING = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
OPTIONS = (*SHARDING, "auto_wrap", "offload")
BARE = ["full_shard", "auto_wrap"]

KEYS: dict[str, Any] = {
    "activation_checkpointing": bool,
    "auto_wrap_policy": Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "backward_prefetch": Literal["backward_pre", "backward_post", "no_prefetch"],
    "cpu_offload": bool,
    "cpu_ram_efficient_loading": bool,
    "forward_prefetch": bool,
    "limit_all_gathers": bool,
    "min_num_params": Annotated[int, AtLeast(0)],
    "reshard_after_forward": bool,
    "sharding_strategy": Literal[SHARDING],  # type: ignore[valid-type]
    "state_dict_type": Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "sync_module_states": bool,
    "transformer_layer_cls_to_wrap": list[str],
    "use_orig_params": bool,
    "version": Literal[1, 2],
    "xla": bool,
    "xla_fsdp_grad_ckpt": bool,
    "xla_fsdp_settings": dict[str, Any],
    "xla_fsdp_v2": bool,
}
"""Names and types of the options in `fsdp_config`, without their optional prefix."""

# Other names and spellings that existing configuration files use.
_RENAMED = {"backward_prefetch_policy": "backward_prefetch", "offload_params": "cpu_offload"}
_SPELLINGS: dict[str, dict[str, str]] = {
    "backward_prefetch": {"backward_pos": "backward_post"},
    "sharding_strategy": {str(number): name for number, name in enumerate(SHARDING, start=1)},
}


class FsdpOptions(Constraint):
    """A list of words, given as a list, as text ("full_shard auto_wrap") or as a truth value."""

    bare = True
    separator = " "

    def before(self, value: Any) -> Any:
        """Return the list of words."""
        if value is None or value is False:
            return []
        if value is True:
            return list(BARE)
        if isinstance(value, str):
            value = [value]
        words = [word for item in value for word in re.split(r"[\s,]+", str(item).lower()) if word]
        if len(words) == 1 and words[0] in ("true", "1"):
            return list(BARE)
        return [] if len(words) == 1 and words[0] in ("false", "0", "none") else words

    def after(self, value: Any) -> Any:
        """Return the words if they are valid together."""
        for word in value:
            if word not in OPTIONS:
                raise RefusedError(
                    f"needs words out of {', '.join(OPTIONS)}, not {word!r}{did_you_mean(word, OPTIONS)}"
                )
        chosen = [word for word in value if word in SHARDING]
        if value and len(chosen) != 1:
            raise RefusedError(f"needs exactly one of {', '.join(SHARDING)}")
        return value


class FsdpConfig(Constraint):
    """A mapping of sharding options. Prefixes are removed, names and values are checked."""

    def after(self, value: Any) -> Any:
        """Return the options under their plain names, converted to their types."""
        return normalize(value)


def normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return sharding options under their plain names, converted.

    Raises:
        RefusedError: (a ValueError) an option is unknown, given twice, or has a value of the wrong kind.
    """
    plain: dict[str, Any] = {}
    for given, value in config.items():
        name = given.removeprefix("fsdp_")
        name = _RENAMED.get(name, name)
        if name not in KEYS:
            raise RefusedError(f"has the unknown key {given}{did_you_mean(name, KEYS)}")
        if name in plain:
            raise RefusedError(f"has the key {name} twice, with and without its prefix or under two names; keep one")
        if value is None:
            continue
        spelled = _SPELLINGS.get(name, {}).get(str(value).lower(), value)
        try:
            plain[name] = convert(spelled, KEYS[name])
        except RefusedError as refusal:
            raise RefusedError(f"at {given}={show(value)}: {refusal}") from None
    return plain
