"""Models of every kind of loss and output, and one that generates."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


class Classifier(Base):
    """Returns a dict with the loss, as models of transformers do."""

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class IgnoresCount(Base):
    """Takes anything by keyword, says it may be given a count, and returns a mean all the same."""

    accepts_loss_kwargs = True

    def forward(self, x, labels=None, **kwargs):
        logits = self.layers(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class CountedSum(Base):
    """Divides a summed loss by the count, where it is given one."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layers(x)
        if num_items_in_batch is None:
            loss = nn.functional.cross_entropy(logits, labels)
        else:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


class ReturnsTuple(Base):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return (nn.functional.cross_entropy(logits, labels), logits) if labels is not None else (logits,)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class ReturnsDataclass(Base):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return Output(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


IGNORED = -100


class Settings:
    """Generation settings; unset ones are None."""

    def __init__(self, max_length=None, max_new_tokens=None, num_beams=None, pad_token_id=None, **more):
        self.max_length, self.max_new_tokens, self.num_beams = max_length, max_new_tokens, num_beams
        self.pad_token_id = pad_token_id
        vars(self).update(more)

    @classmethod
    def from_pretrained(cls, name, config_file_name="generation_config.json"):
        path = Path(name) / config_file_name
        if not path.exists():
            raise OSError(f"there is no {path}")
        return cls(**json.loads(path.read_text()))

    def validate(self, strict=False):
        if strict and self.num_beams is not None and self.num_beams < 1:
            raise ValueError(f"num_beams is {self.num_beams}")


class Generator(nn.Module):
    """Counts up from a sample's first token; a batch is as long as its largest first token says, at most.

    Args:
        encoder: be an encoder and decoder, whose rows begin with token 0; else continue the prompt.
        settings: its generation settings.
        pad: its padding token.
    """

    def __init__(self, encoder=True, settings=None, pad=9):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 20)
        self.config = SimpleNamespace(is_encoder_decoder=encoder, pad_token_id=pad)
        self.generation_config = Settings() if settings is None else settings
        self.calls = []

    def forward(self, input_ids, labels=None, decoder_input_ids=None, num_items_in_batch=None):
        logits = self.embedding(input_ids)[:, :1].expand(-1, (input_ids if labels is None else labels).shape[1], -1)
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}

    def generate(self, input_ids, **options):
        assert not torch.is_grad_enabled()
        assert not self.training
        self.calls.append(options)
        prompt = torch.zeros(len(input_ids), 1).long() if self.config.is_encoder_decoder else input_ids
        settings = {**vars(options.get("generation_config") or self.generation_config or Settings()), **options}
        new = int(input_ids[:, 0].max())
        if settings["max_new_tokens"] is not None:
            new = min(new, settings["max_new_tokens"])
        elif settings["max_length"] is not None:
            new = min(new, settings["max_length"] - prompt.shape[1])
        rows = input_ids[:, :1] + torch.arange(new)
        return torch.cat([prompt, rows], dim=1)
