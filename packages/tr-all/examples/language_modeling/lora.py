"""Put a low-rank adapter into a language model, and load a saved one again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

# peft asks transformers by a name that is deprecated there.
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)


def load_base(folder: Path) -> Any:
    """Return the pretrained model in `folder`, to compute in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def add_adapter(model: Any, rank: int) -> PeftModel:
    """Freeze `model` and add trainable matrices of the given rank to each of its linear layers but the head.

    A new adapter changes nothing: one of its two matrices is zero.

    Source: Hu et al. 2021, "LoRA: Low-rank adaptation of large language models".
    """
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def load_adapted(base: Path, adapter: Path) -> PeftModel:
    """Return the pretrained model in `base` with the adapter saved in `adapter`."""
    return PeftModel.from_pretrained(load_base(base), str(adapter))
