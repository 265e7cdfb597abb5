"""Read what the arguments `fsdp` and `fsdp_config` say in any of their forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from tr_args.constraints import AtLeast, Constraint
from tr_args.conversion import convert
from tr_args.errors import RefusedError, show
from tr_args.suggestion import did_you_mean

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
"""Names and types of the options in `fsdp_config`, without the prefix they may have."""

# Other names, and other spellings of values, that configuration files in use hold.
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
        """Return the words if they go together."""
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
    """A mapping of sharding options; prefixes are taken off, names and values are checked."""

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
