"""Keep scripts running that were written for earlier names of the arguments."""

from __future__ import annotations

from typing import Annotated, Any

from tr_args.aliases import Alias
from tr_args.constraints import Between

# Arguments that scripts still pass and that nothing replaces one to one: what to do instead.
_RETIRED = {
    "adafactor": "set optim='adafactor'",
    "dispatch_batches": "set it in accelerator_config",
    "fp16_backend": "remove it: there is one implementation of mixed precision",
    "fp16_opt_level": "remove it: mixed precision is fp16=True or bf16=True",
    "half_precision_backend": "remove it: there is one implementation of mixed precision",
    "include_inputs_for_metrics": "set include_for_metrics=['inputs']",
    "include_tokens_per_second": "set include_num_input_tokens_seen='all'",
    "push_to_hub_model_id": "set hub_model_id",
    "push_to_hub_organization": "set hub_model_id='organization/name'",
    "push_to_hub_token": "set hub_token",
    "save_safetensors": "remove it: weights are always written as safetensors",
    "sharded_ddp": "set fsdp",
    "split_batches": "set it in accelerator_config",
    "torchdynamo": "set torch_compile_backend",
    "use_mps_device": "remove it: an Apple device is used where there is one, unless use_cpu=True",
    "xpu_backend": "set ddp_backend",
}


def _as_ratio(warmup_steps: Any) -> float:
    return float(warmup_steps) if warmup_steps < 1 else 0.0


class OldNames:
    """Former names of training arguments; each says so once and means the present one."""

    _retired = _RETIRED

    evaluation_strategy = Alias("eval_strategy")
    gradient_checkpointing = Alias("activation_checkpointing")
    gradient_checkpointing_kwargs = Alias("activation_checkpointing_kwargs")
    group_by_length = Alias(
        "train_sampling_strategy",
        hint=bool,
        write=lambda grouped: "group_by_length" if grouped else "random",
        read=lambda strategy: strategy == "group_by_length",
    )
    no_cuda = Alias("use_cpu")
    per_gpu_eval_batch_size = Alias("per_device_eval_batch_size")
    per_gpu_train_batch_size = Alias("per_device_train_batch_size")
    warmup_ratio = Alias("warmup_steps", hint=Annotated[float, Between(0, 1, open_end=True)], read=_as_ratio)
