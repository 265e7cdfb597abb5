"""Hold the settings of `fsdp` and `fsdp_config` for XLA, and refuse unsupported ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tr_dist.fsdp.settings import Sharding

KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")
_UNITS = ("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap")
# Settings that XLA fulfils anyway, or that have no meaning for it. key -> the accepted values
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "version": (1, 2),
    "use_orig_params": (True,),
    "sync_module_states": (True,),
    "limit_all_gathers": (True,),
    "state_dict_type": ("FULL_STATE_DICT",),
    "sharding_strategy": ("full_shard",),
    "reshard_after_forward": (True,),
    "backward_prefetch": ("backward_pre", "backward_post", "no_prefetch"),
    "forward_prefetch": (True, False),
    "cpu_ram_efficient_loading": (False,),
    "cpu_offload": (False,),
    "activation_checkpointing": (True, False),
}


@dataclass(frozen=True)
class XlaSharding:
    """How a model is divided over XLA devices.

    Attributes:
        over_devices: one process divides weights, optimizer state and batches over all devices that it sees, and the
            compiler adds the communication (SPMD, `xla_fsdp_v2`). Otherwise every process has one device and a part of
            each parameter (`XlaFullyShardedDataParallel`).
        units: the modules that are gathered and computed as one.
        recomputes: keep none of a unit's activations: recompute them in the backward pass (`xla_fsdp_grad_ckpt`).
        settings: keyword arguments of `XlaFullyShardedDataParallel` (`xla_fsdp_settings`), such as `compute_dtype`.

    Raises:
        ValueError: they contradict each other.
    """

    over_devices: bool = True
    units: Sharding = field(default_factory=Sharding)
    recomputes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.over_devices and self.settings:
            raise ValueError(
                f"fsdp_config: xla_fsdp_settings ({', '.join(self.settings)}) are XlaFullyShardedDataParallel's, and "
                "xla_fsdp_v2=True has the compiler divide the model; leave one of the two out"
            )
        if self.recomputes and self.units.wrap == "NO_WRAP":
            raise ValueError(
                "fsdp_config: xla_fsdp_grad_ckpt=True computes units again, and there are none; name their class in "
                "transformer_layer_cls_to_wrap, or a size in min_num_params"
            )

    @classmethod
    def from_config(cls, options: Collection[str], config: Mapping[str, Any]) -> XlaSharding | None:
        """Build from the words of `fsdp` and the keys of `fsdp_config`, without prefix; None if none concerns sharding.

        Raises:
            ValueError: they contradict each other, or XLA does not support one; the message gives an alternative.
        """
        if not config.get("xla"):
            _check_nothing_asked(options, config)
            return None
        for option in options:
            if option not in ("full_shard", "auto_wrap"):
                raise ValueError(f"fsdp={option!r} is not supported on XLA; use 'full_shard' or 'full_shard auto_wrap'")
        known = (*KEYS, *_UNITS)
        for key, value in config.items():
            if key not in known and (key not in _AS_IT_IS or value not in _AS_IT_IS[key]):
                raise ValueError(f"fsdp_config: {key}={value!r} is not supported on XLA; leave it out")
        units = Sharding.from_config(options, {key: config[key] for key in _UNITS if key in config})
        return cls(
            over_devices=bool(config.get("xla_fsdp_v2")),
            units=units,
            recomputes=bool(config.get("xla_fsdp_grad_ckpt")),
            settings=config.get("xla_fsdp_settings") or {},
        )


def _check_nothing_asked(options: Collection[str], config: Mapping[str, Any]) -> None:
    if lone := [key for key in KEYS if config.get(key)]:
        raise ValueError(f"fsdp_config: {lone[0]} has no effect without xla=True beside it; add it, or leave it out")
    if options:
        raise ValueError(
            f"fsdp={' '.join(options)!r} with strategy='xla' needs fsdp_config={{'xla': True, 'xla_fsdp_v2': True}}; "
            "without it XLA keeps whole weights on each device; give it, or leave fsdp out"
        )
