"""Fill unset arguments from the variables of `accelerate launch` and `trainer launch`.

These launchers read precision, sharding and the like from their own file or flags, and pass them on in variables. An
argument from a call, a file or the command line overrides the launcher's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tr_args.checked import Checked
from tr_args.conversion import FALSE_WORDS, TRUE_WORDS
from tr_args.errors import ArgumentsError, Problem
from tr_args.types.sharding import SHARDING, SIZES

# variable -> why its setting is not supported
_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM has a training loop of its own; launch with FSDP or DeepSpeed",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "models are compiled with graph breaks allowed; leave it out",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "torch decides which sizes are dynamic; leave it out",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "models are compiled whole; leave it out",
}
_REFUSED_OF_FSDP = {
    "FSDP_IGNORED_MODULES": "all parameters are sharded; leave it out",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "set activation_checkpointing and activation_checkpointing_kwargs instead",
}
_FSDP_KEYS = {
    "FSDP_AUTO_WRAP_POLICY": "auto_wrap_policy",
    "FSDP_BACKWARD_PREFETCH": "backward_prefetch",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "FSDP_FORWARD_PREFETCH": "forward_prefetch",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_STATE_DICT_TYPE": "state_dict_type",
    "FSDP_SYNC_MODULE_STATES": "sync_module_states",
    "FSDP_USE_ORIG_PARAMS": "use_orig_params",
}

# Fields with their values, and the variable they come from. They are filled together, only if all of them are unset.
_Wish = tuple[dict[str, Any], str]


def follow_launcher(args: Checked, environ: Mapping[str, str] | None = None) -> None:
    """Fill unset arguments from the launcher's variables; a second call changes nothing.

    Args:
        args: the arguments.
        environ: the variables; None reads those of this process.

    Raises:
        ArgumentsError: a variable has a setting that is not supported.
    """
    variables = os.environ if environ is None else environ
    if not any(name.startswith("ACCELERATE_") for name in variables):
        return
    refused = [*_set_ones(_REFUSED, variables)]
    if _is_true(variables.get("ACCELERATE_USE_FSDP")):
        refused += _set_ones(_REFUSED_OF_FSDP, variables)
    if refused:
        raise ArgumentsError(refused)
    for values, variable in _wishes(variables):
        if all(args.origin(name) == "default" for name in values):
            for name, value in values.items():
                _fill(args, name, value, f"environment {variable}")


def filled_by_launcher(args: Checked) -> dict[str, str]:
    """Return the fields that were filled from the launcher's variables, with the variable of each."""
    origins = {name: args.origin(name) for name in args.__dataclass_fields__}
    prefix = "environment ACCELERATE_"
    return {name: origin.split()[1] for name, origin in origins.items() if origin.startswith(prefix)}


def _fill(args: Checked, name: str, value: Any, origin: str) -> None:
    setattr(args, name, value)
    object.__setattr__(args, "_origins", {**args._origins, name: origin})


def _set_ones(reasons: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[Problem]:
    for name, reason in reasons.items():
        value = variables.get(name, "")
        if value and value.lower() not in {*FALSE_WORDS, "none"}:
            yield Problem(name, value, reason, "environment")


def _wishes(variables: Mapping[str, str]) -> Iterator[_Wish]:
    yield from _precision(variables)
    if _is_true(variables.get("ACCELERATE_USE_CPU")):
        yield {"use_cpu": True}, "ACCELERATE_USE_CPU"
    if _is_true(variables.get("ACCELERATE_USE_FSDP")):
        yield _sharding(variables), "ACCELERATE_USE_FSDP"
        if _is_true(variables.get("FSDP_ACTIVATION_CHECKPOINTING")):
            yield {"activation_checkpointing": True}, "ACCELERATE_USE_FSDP"
    if _is_true(variables.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        yield {"parallelism_config": _spread(variables)}, "ACCELERATE_USE_PARALLELISM_CONFIG"
    if _is_true(variables.get("ACCELERATE_USE_DEEPSPEED")):
        yield from _deepspeed(variables)
    backend = variables.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in ("no", "none", ""):
        mode = variables.get("ACCELERATE_DYNAMO_MODE", "default")
        modes = {} if mode == "default" else {"torch_compile_mode": mode}
        yield {"torch_compile": True, "torch_compile_backend": backend, **modes}, "ACCELERATE_DYNAMO_BACKEND"


def _precision(variables: Mapping[str, str]) -> Iterator[_Wish]:
    name = "ACCELERATE_MIXED_PRECISION"
    precision = variables.get(name, "no").lower()
    if precision in ("no", "none", ""):
        return
    if precision not in ("bf16", "fp16"):
        raise ArgumentsError([Problem(name, precision, "needs no, bf16 or fp16", "environment")])
    yield {"bf16": precision == "bf16", "fp16": precision == "fp16"}, name


def _sharding(variables: Mapping[str, str]) -> dict[str, Any]:
    given = variables.get("FSDP_SHARDING_STRATEGY", "1").lower()
    numbers = {str(number): word for number, word in enumerate(SHARDING, start=1)}
    word = numbers.get(given, given)
    config: dict[str, Any] = {}
    for variable, key in _FSDP_KEYS.items():
        value = variables.get(variable, "none")
        if value.lower() != "none":
            config[key] = value.lower() if key == "backward_prefetch" else value
    # accelerate launch sets these without being asked to, so they count only where they have an effect.
    policy = config.get("auto_wrap_policy")
    if policy == "SIZE_BASED_WRAP" and variables.get("FSDP_MIN_NUM_PARAMS"):
        config["min_num_params"] = variables["FSDP_MIN_NUM_PARAMS"]
    classes = variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "None")
    if policy in (None, "TRANSFORMER_BASED_WRAP") and classes != "None":
        config["transformer_layer_cls_to_wrap"] = [name.strip() for name in classes.split(",")]
    # FSDP_VERSION is ignored otherwise: models are always sharded by FSDP2, and this key belongs to it.
    reshards = variables.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if variables.get("FSDP_VERSION") == "2" and reshards in FALSE_WORDS:
        config["reshard_after_forward"] = False
    return {"fsdp": [word], "fsdp_config": config}


def _spread(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes. Text that is not a number stays, and the argument's own check refuses it."""
    names = {name: f"PARALLELISM_CONFIG_{name.upper()}" for name in (*SIZES, "cp_comm_strategy")}
    given = {name: variables[variable] for name, variable in names.items() if variable in variables}
    return {name: int(value) if value.isdigit() else value for name, value in given.items()}


def _deepspeed(variables: Mapping[str, str]) -> Iterator[_Wish]:
    for variable, field in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
        ("ACCELERATE_GRADIENT_CLIPPING", "max_grad_norm"),
    ):
        value = variables.get(variable, "auto").lower()
        if value not in ("auto", "none"):
            yield {field: value}, variable
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() != "none":
        yield {"deepspeed": file}, "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    else:
        yield {"deepspeed": _zero(variables)}, "ACCELERATE_USE_DEEPSPEED"


def _zero(variables: Mapping[str, str]) -> dict[str, Any]:
    prefix = "ACCELERATE_DEEPSPEED_"
    stage = int(variables.get(f"{prefix}ZERO_STAGE", "2"))
    zero: dict[str, Any] = {"stage": stage}
    # Parameters are whole on each rank below stage 3: there is nothing to offload.
    for part in ("optimizer", "param") if stage == 3 else ("optimizer",):
        device = variables.get(f"{prefix}OFFLOAD_{part.upper()}_DEVICE", "none").lower()
        path = variables.get(f"{prefix}OFFLOAD_{part.upper()}_NVME_PATH", "none")
        if device != "none":
            place = {} if path.lower() == "none" else {"nvme_path": path}
            zero[f"offload_{part}"] = {"device": device, **place}
    if _is_true(variables.get(f"{prefix}ZERO3_SAVE_16BIT_MODEL")):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }


def _is_true(value: str | None) -> bool:
    return value is not None and value.lower() in TRUE_WORDS
