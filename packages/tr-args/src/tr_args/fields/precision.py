"""Precision, memory and compilation."""

from __future__ import annotations

from dataclasses import dataclass

from tr_args.hints import OptionalCount, Options


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PrecisionFields:
    """Precision, memory and compilation."""

    _title = "Precision, memory and compilation"

    bf16: bool = False
    """Compute in bfloat16 where that is safe (mixed precision)."""

    fp16: bool = False
    """Compute in float16 where that is safe, with a scaled loss (mixed precision)."""

    bf16_full_eval: bool = False
    """Turn the whole model to bfloat16 for evaluation and prediction outside training; afterwards it is as before."""

    fp16_full_eval: bool = False
    """Turn the whole model to float16 for evaluation and prediction outside training; afterwards it is as before."""

    tf32: bool | None = None
    """Allow (true) or forbid (false) TF32 in products and convolutions; unset leaves torch's settings."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, slower."""

    activation_checkpointing_kwargs: Options = None
    """Options of torch.utils.checkpoint, such as {"use_reentrant": false}, with two more: every_n_layers checkpoints
    only every so many layers, offload keeps what is needed to compute a layer again in host memory."""

    torch_compile: bool = False
    """Compile the model with torch.compile, in training and evaluation."""

    torch_compile_backend: str | None = None
    """Backend of torch.compile; setting it turns compilation on. Without one it is inductor."""

    torch_compile_mode: str | None = None
    """Mode of inductor, such as max-autotune; setting it turns compilation on."""

    use_liger_kernel: bool = False
    """Patch the model with Liger kernels before training."""

    liger_kernel_config: Options = None
    """Which Liger kernels to use, such as {"rope": true}."""

    use_cache: bool = False
    """Value of the model's use_cache setting while training."""

    torch_empty_cache_steps: OptionalCount = None
    """Release the device's cached memory every so many steps; unset never does."""

    auto_find_batch_size: bool = False
    """When memory runs out, make the step again with smaller micro-batches and more of them, and go on so: a step has
    the same samples as before."""
