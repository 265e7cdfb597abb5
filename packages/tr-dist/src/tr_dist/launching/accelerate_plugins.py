"""Name the environment variables through which `accelerate launch` passes sharding and compilation to a script."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
    "use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
}
_COMPILERS = (
    *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT"),
    *("ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON", "IPEX"),
)
# Sizes that spread samples over processes, by replicas and by shards of the model, and those that compute a sample.
_WITHIN_SAMPLES = ("cp_size", "sp_size", "tp_size")
_SPREAD = ("dp_replicate_size", "dp_shard_size", *_WITHIN_SAMPLES)
# Their companions.
_OF_THOSE = (
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
    "sp_attn_implementation",
)
# Keys about starting other machines, which is up to the user of this launcher.
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


def parallelism_variables(config: Mapping[str, Any], kind: str, total: int) -> dict[str, str]:
    """Return the variables for the keys of `parallelism_config`, with or without their prefix.

    Args:
        config: the section, not empty.
        kind: the file's `distributed_type`.
        total: processes of all machines; less than 1 if the file does not set it.
    """
    section, plain = "parallelism_config", {str(k).removeprefix("parallelism_config_"): v for k, v in config.items()}
    _check_known(section, plain, (*_SPREAD, *_OF_THOSE))
    sizes = {key: _size(section, key, plain[key]) for key in _SPREAD if plain.get(key) is not None}
    sizes = {key: size for key, size in sizes.items() if size > 1 or key not in _WITHIN_SAMPLES}
    if kind == "DEEPSPEED":
        raise LaunchError(f"{section}: is not read with ZeRO, whose configuration says how it divides; leave it out")
    if kind != "FSDP" and sizes.get("dp_shard_size", 1) > 1:
        raise LaunchError(f"{section}: dp_shard_size divides a model with distributed_type: FSDP, not {kind}")
    if total > 0 and math.prod(sizes.values()) != total:
        shown = " x ".join(f"{key}: {size}" for key, size in sizes.items()) or "nothing"
        raise LaunchError(
            f"{section}: spreads the work over {shown}, and num_processes is {total}; it must be their product"
        )
    exchange = plain.get("cp_comm_strategy")
    handed_on = sizes | ({} if exchange in (None, "allgather") else {"cp_comm_strategy": exchange})
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{key.upper()}": str(value) for key, value in handed_on.items()},
    }


def _size(section: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
        raise LaunchError(f"{section}: {key}: {value!r} is not a number of processes, from 1")
    return int(value)


def dynamo_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for the keys of `dynamo_config`."""
    plain = {str(key).removeprefix("dynamo_"): value for key, value in config.items()}
    backend = plain.get("backend")
    if backend not in (None, False) and str(backend).upper() not in _COMPILERS:
        raise LaunchError(f"dynamo_config: backend: {backend} is not known{_hint(str(backend).upper(), _COMPILERS)}")
    return _renamed("dynamo_config", plain | ({"backend": "NO"} if backend is False else {}), _DYNAMO)


def _renamed(section: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    _check_known(section, config, names)
    for key, value in config.items():
        if value is None:
            continue
        if isinstance(value, list):
            value = ",".join(map(str, value))
        variables[names[key]] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


def _check_known(section: str, config: Mapping[str, Any], names: Collection[str]) -> None:
    for key in config:
        if key not in names:
            raise LaunchError(f"{section}: {key} is not known{_hint(str(key), names)}")


def _hint(key: str, names: Collection[str]) -> str:
    close = get_close_matches(key, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}"
