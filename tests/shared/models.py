"""Models of one or two layers that return their loss, as models of transformers do."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class LinearClassifier(nn.Module):
    """One layer that classifies rows of numbers.

    Args:
        width: numbers of a row.
        classes: number of classes.
        seed: of the weights; None takes torch's default generator as it is.
    """

    main_input_name = "x"

    def __init__(self, width=8, classes=3, *, seed=None):
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.layer = nn.Linear(width, classes)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Classifier(nn.Module):
    """Two layers with dropout between them, for rows of 8 numbers and 3 classes.

    Args:
        width: of the hidden layer.
        seed: of the weights; None takes torch's default generator as it is.
    """

    def __init__(self, width=16, *, seed=None):
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.3), nn.GELU(), nn.Linear(width, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tied(nn.Module):
    """A head that is the embedding, and a matrix that is used three times; activations can be computed again."""

    supports_gradient_checkpointing = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.mlp = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 20, bias=False)
        self.lm_head.weight = self.embed.weight
        self.reentrant = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.reentrant = (gradient_checkpointing_kwargs or {}).get("use_reentrant", False)

    def forward(self, x, labels):
        hidden = self.embed(x)
        for _ in range(3):
            if self.reentrant is None:
                hidden = torch.tanh(self.mlp(hidden))
            else:
                hidden = checkpoint(lambda h: torch.tanh(self.mlp(h)), hidden, use_reentrant=self.reentrant)
        logits = self.lm_head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
