"""Train a language model on the World English Bible: a small GPT from scratch, or an adapter in a pretrained model.

    python language_modeling.py
    python language_modeling.py --model smollm2

Shows: the next token as the label, loss and perplexity as means over tokens, whatever the batches; with
`--model smollm2`, a low-rank adapter (LoRA, of the package peft) that is trained, saved and loaded by itself. The
settings are in `gpt.args` and `smollm2.args`; what is given on the command line goes before them, and `--help` lists
all that can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from english_bible import installed_file, read_chapters, split
from token_blocks import bits_per_character, spread, token_blocks
from transformers import AutoTokenizer

from tr_all import DataCollatorForLanguageModeling, HfArgumentParser, Trainer, TrainingArguments, set_seed

_ABOUT = "Train a language model on the Bible; gpt.args and smollm2.args hold what is not given here."


@dataclass
class ExampleArguments:
    """Model and data."""

    model: Literal["gpt", "smollm2"] = "gpt"
    """A small GPT with random weights and a tokenizer of its own, or SmolLM2-135M with an adapter."""

    block_length: int = 64
    """Tokens of a sample."""

    max_test_blocks: int | None = None
    """Test on so many blocks, spread evenly over the text; unset takes all."""

    prompt: str = "God said to Moses,"
    """Beginning of the text that the trained model continues."""

    vocab_size: int = 2048
    """Tokens of the GPT's tokenizer."""

    hidden_size: int = 128
    """Width of the GPT."""

    num_layers: int = 2
    """Transformer layers of the GPT."""

    base_folder: str = "outputs/smollm2-135m"
    """Where SmolLM2 is put when it is taken out of its package."""

    lora_rank: int = 8
    """Rank of the adapter's matrices."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    example, args = parse(argv)
    texts = split(read_chapters(installed_file()))
    set_seed(args.seed)  # new weights are drawn from it
    model, tokenizer = build_gpt(example, texts["train"]) if example.model == "gpt" else build_smollm2(example)
    data = {name: token_blocks(chapters, tokenizer, example.block_length) for name, chapters in texts.items()}
    data["test"] = spread(data["test"], example.max_test_blocks)
    trainer = Trainer(
        model,
        args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
    )
    metrics: dict[str, float] = {}
    if example.model == "smollm2":
        metrics |= trainer.evaluate(data["test"], metric_key_prefix="before")
    trainer.train()
    trainer.save_model()
    metrics |= trainer.evaluate(data["test"], metric_key_prefix="test")
    metrics["test_bits_per_character"] = bits_per_character(metrics["test_loss"], data["test"], tokenizer)
    if example.model == "smollm2":
        model = reload(trainer, example, data["test"])
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    set_seed(args.seed)
    print("", continued(model, tokenizer, example), sep="\n")
    return metrics


def parse(argv: Sequence[str] | None) -> tuple[ExampleArguments, TrainingArguments]:
    """Return the arguments; what is not given comes from the file of the model's name, `gpt.args` or `smollm2.args`."""
    chooser = HfArgumentParser(ExampleArguments, add_help=False)
    chosen, *_ = chooser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    parser = HfArgumentParser((ExampleArguments, TrainingArguments), description=_ABOUT)
    settings = Path(__file__).with_name(f"{chosen.model}.args")
    example, args = parser.parse_args_into_dataclasses(argv, args_filename=settings)
    return example, args


def build_gpt(example: ExampleArguments, texts: Sequence[str]) -> tuple[Any, Any]:
    """Return a new model and its tokenizer, made from `texts`."""
    from small_gpt import small_gpt, train_tokenizer

    tokenizer = train_tokenizer(texts, example.vocab_size)
    return small_gpt(tokenizer, example.block_length, example.hidden_size, example.num_layers), tokenizer


def build_smollm2(example: ExampleArguments) -> tuple[Any, Any]:
    """Return the pretrained model with a new adapter, and its tokenizer."""
    from lora import add_adapter, load_base
    from smollm2 import checkpoint_folder

    folder = checkpoint_folder(Path(example.base_folder))
    return add_adapter(load_base(folder), example.lora_rank), AutoTokenizer.from_pretrained(folder)


def reload(trainer: Trainer, example: ExampleArguments, blocks: Sequence[Any]) -> Any:
    """Return the pretrained model with the adapter that was saved, after comparing it with the trained model.

    Raises:
        RuntimeError: they do not give the same logits.
    """
    from lora import load_adapted

    trained: Any = trainer.model
    model: Any = load_adapted(Path(example.base_folder), Path(trainer.args.output_dir)).to(trained.device)
    tokens = torch.tensor([block["input_ids"] for block in blocks[:2]], device=trained.device)
    with torch.no_grad():
        same = torch.equal(model.eval()(tokens).logits, trained.eval()(tokens).logits)
    if not same:
        raise RuntimeError(f"the adapter in {trainer.args.output_dir} does not give what the trained model gives")
    return model


def continued(model: Any, tokenizer: Any, example: ExampleArguments) -> str:
    """Return the prompt and what the model goes on with, each token drawn from its twenty most probable ones."""
    tokens = tokenizer(example.prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
    output = model.eval().generate(
        **tokens, max_length=example.block_length, do_sample=True, top_k=20, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


if __name__ == "__main__":
    main()
