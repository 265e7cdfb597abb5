"""Tiny models: plain modules, and transformers' built from a configuration; each is built once and copied."""

import copy
from functools import cache

import torch
import transformers
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """One layer with the mean squared error."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 1)

    def forward(self, x, labels=None):
        logits = self.last(x)
        return {"logits": logits} if labels is None else {"loss": F.mse_loss(logits, labels), "logits": logits}


class Mlp(nn.Module):
    """Two layers for classes, with what `middle` puts between them."""

    def __init__(self, middle=None, width=5):
        super().__init__()
        self.first, self.middle, self.norm = nn.Linear(5, width), middle, nn.LayerNorm(width)
        self.last = nn.Linear(width, 3)

    def logits(self, x):
        hidden = F.gelu(self.first(x))
        return self.last(self.norm(hidden if self.middle is None else self.middle(hidden)))

    def forward(self, x, labels=None):
        logits = self.logits(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class CountedMlp(Mlp):
    """The same, which divides by the number of targets that it is given."""

    accepts_loss_kwargs = True  # transformers asks for this

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.logits(x)
        if labels is None:
            return {"logits": logits}
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch, "logits": logits}


class CountedDropout(nn.Module):
    """Dropout of which each mask is a function of how many came before: no generator has a part in it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not self.training:
            return x
        self.calls += 1
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(self.calls))) > 0.3
        return x * mask / 0.7


class Norm(nn.Module):
    """A batch norm that also takes a batch of one: it sees every feature twice, in two sizes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(torch.stack([x, -2 * x], dim=-1))[..., 0]


class FrozenNorm(Mlp):
    """A model that keeps its batch norm in evaluation mode, by the usual override."""

    def __init__(self):
        super().__init__(Norm())

    def train(self, mode=True):
        super().train(mode)
        self.middle.eval()
        return self


def _tied():
    model = Mlp(nn.Linear(5, 5))
    model.middle.weight = model.first.weight
    return model


def _frozen():
    model = Mlp()
    model.first.requires_grad_(False)
    return model


_SMALL = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def _llama():
    config = transformers.LlamaConfig(
        **_SMALL, intermediate_size=8, num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config)


def _llama_even(**options):
    sizes = {**_SMALL, "vocab_size": 18, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=16, pad_token_id=0, **options)
    )


def _moe():
    sizes = {**_SMALL, "vocab_size": 18, "num_hidden_layers": 2, "head_dim": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, **experts, intermediate_size=8, max_position_embeddings=16, pad_token_id=0)
    )


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def _bert():
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**_SMALL, intermediate_size=8, max_position_embeddings=16, num_labels=2, **none)
    return transformers.BertForSequenceClassification(config)


MODELS = {
    "linear": Linear,
    "mlp": Mlp,
    "mlp_counted": CountedMlp,
    "mlp_dropout": lambda: Mlp(nn.Dropout(0.3)),
    "mlp_masks": lambda: Mlp(CountedDropout()),
    "mlp_norm": lambda: Mlp(Norm()),
    "mlp_frozen_norm": FrozenNorm,
    "mlp_tied": _tied,
    "mlp_frozen": _frozen,
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "mlp_even": lambda: CountedMlp(width=6),
    "llama_even": _llama_even,
    "llama_even_tied": lambda: _llama_even(tie_word_embeddings=True),
    "moe": _moe,
}


@cache
def _built(name):
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.set_rng_state(state)
    return model


def model_of(name):
    """Return a model, the same every time."""
    return copy.deepcopy(_built(name))
