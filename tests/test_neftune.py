"""`neftune_noise_alpha` through the Trainer: noise while training, none while evaluating, none afterwards."""

import math

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.head = nn.Linear(16, 3)
        self.embedded = []

    def forward(self, tokens, labels=None):
        vectors = self.embedding(tokens)
        self.embedded.append((self.training, vectors.detach() - self.embedding.weight[tokens].detach()))
        logits = self.head(vectors.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


ROWS = [{"tokens": torch.arange(i, i + 5) % 10, "labels": torch.tensor(i % 3)} for i in range(12)]


def trainer(folder, callbacks=(), **options):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        num_train_epochs=1,
        eval_strategy="epoch",
        **options,
    )
    return Trainer(TokenModel(), args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=list(callbacks))


def test_noise_is_there_in_training_within_its_bound_and_only_then(tmp_path):
    run = trainer(tmp_path, neftune_noise_alpha=5.0)
    run.train()
    bound = 5.0 / math.sqrt(5 * 16)
    training = [difference.abs().max().item() for mode, difference in run.model.embedded if mode]
    evaluating = [difference.abs().max().item() for mode, difference in run.model.embedded if not mode]
    assert training
    assert all(0.5 * bound < largest <= bound * 1.001 for largest in training)
    assert evaluating
    assert set(evaluating) == {0.0}
    assert not run.model.embedding._forward_hooks


def test_noise_is_gone_after_an_exception(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("broken")

    run = trainer(tmp_path, [Fails()], neftune_noise_alpha=5.0)
    with pytest.raises(RuntimeError, match="broken"):
        run.train()
    assert not run.model.embedding._forward_hooks


def test_without_the_option_there_is_no_noise(tmp_path):
    run = trainer(tmp_path)
    run.train()
    assert all(difference.abs().max() == 0 for _, difference in run.model.embedded)
