"""Train a language model from scratch: a small GPT that reads the bytes of Python's own reference.

Run it with `python train.py --config train.yaml`. What to replace is marked YOURS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

from tr_all import ArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    """Model."""

    block_length: int = 64
    """Tokens of a sample, and the most that the model sees at once."""

    width: int = 64
    """Width of the model."""

    layers: int = 2
    """Number of its layers."""


def read(block_length: int) -> list[dict[str, torch.Tensor]]:
    """YOURS: blocks of token ids, from your text and tokenizer. A byte is a token here."""
    text = "\n".join(topics.values()).encode()
    whole = len(text) // block_length * block_length
    blocks = torch.tensor(list(text[:whole])).view(-1, block_length)
    labels = blocks.clone()
    labels[:, 0] = -100  # no label: nothing comes before the first token
    return [{"input_ids": block, "labels": label} for block, label in zip(blocks, labels, strict=True)]


class GPT(torch.nn.Module):
    """YOURS: any module that returns `loss` and `logits`, as AutoModelForCausalLM of transformers does."""

    def __init__(self, model: ModelArguments, tokens: int = 256) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(tokens, model.width)
        self.position = torch.nn.Embedding(model.block_length, model.width)
        layer = torch.nn.TransformerEncoderLayer(
            model.width, 4, 4 * model.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, model.layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(model.width, tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> dict[str, Any]:
        """Return logits of shape (batch, length, tokens), and the loss of each next token if there are labels.

        The sum is divided by the number of labels in the whole step, which the Trainer counts: so accumulation and
        several processes give the mean over all tokens.
        """
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        later = torch.nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        logits = self.head(self.layers(self.token(input_ids) + self.position(places), mask=later, is_causal=True))
        if labels is None:
            return {"logits": logits}
        following = labels[:, 1:]
        total = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), following, reduction="sum")
        count = (following != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


def main() -> None:
    """Train, evaluate, and save the model."""
    parser = ArgumentParser((ModelArguments, TrainingArguments))
    model, args = parser.parse_args_into_dataclasses()
    train = read(model.block_length)
    test = train[::25]
    del train[::25]
    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(GPT(model), args, train_dataset=train, eval_dataset=test)
    trainer.train()  # goes on from a checkpoint with --resume_from_checkpoint true
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
