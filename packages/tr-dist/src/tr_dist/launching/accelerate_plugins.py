"""Name the environment variables by which `accelerate launch` tells a script how to shard and to compile."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tr_dist.launching.launch import LaunchError

_FSDP = {
    "version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "offload_params": "FSDP_OFFLOAD_PARAMS",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_DYNAMO = {
    "backend": "ACCELERATE_DYNAMO_BACKEND",
    "mode": "ACCELERATE_DYNAMO_MODE",
    "use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
}
# Keys about starting other machines, which this launcher leaves to whoever starts it there.
_OTHER_MACHINES = ("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")


def fsdp_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for the keys of `fsdp_config`, with or without their prefix."""
    plain = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    return {"ACCELERATE_USE_FSDP": "true", **_renamed("fsdp_config", plain, _FSDP)}


def deepspeed_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for the keys of `deepspeed_config`."""
    if machines := [key for key in _OTHER_MACHINES if config.get(key)]:
        raise LaunchError(
            f"deepspeed_config: {machines[0]} is about starting other machines; start `trainer launch` on each of them"
        )
    multinode = config.get("deepspeed_multinode_launcher", "standard")
    if multinode != "standard":
        raise LaunchError(
            f"deepspeed_config: deepspeed_multinode_launcher: {multinode} is DeepSpeed's own launcher; write standard, "
            "and start `trainer launch` on each machine"
        )
    dropped = (*_OTHER_MACHINES, "deepspeed_multinode_launcher")
    kept = {key: value for key, value in config.items() if key not in dropped}
    return {"ACCELERATE_USE_DEEPSPEED": "true", **_renamed("deepspeed_config", kept, _DEEPSPEED)}


def dynamo_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for the keys of `dynamo_config`."""
    plain = {str(key).removeprefix("dynamo_"): value for key, value in config.items()}
    return _renamed("dynamo_config", plain, _DYNAMO)


def _renamed(section: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for key, value in config.items():
        if key not in names:
            close = get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}"
            raise LaunchError(f"{section}: {key} is not known{hint}")
        if value is None:
            continue
        if isinstance(value, list):
            value = ",".join(map(str, value))
        variables[names[key]] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables
