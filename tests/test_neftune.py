"""`neftune_noise_alpha` through the Trainer: noise while training, none while evaluating, none afterwards."""

import math

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks


class TokenModel(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(10, 16), nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)
        self.embedded = []

    def forward(self, tokens, attention_mask=None, labels=None):
        vectors = self.embedding(tokens)
        if not torch.compiler.is_compiling():
            self.embedded.append((self.training, vectors.detach() - self.embedding.weight[tokens].detach()))
        weights = torch.ones_like(tokens) if attention_mask is None else attention_mask
        logits = self.head((self.dropout(vectors) * weights[..., None]).sum(1) / weights.sum(1, keepdim=True))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    @property
    def noises(self):
        return [noise for is_training, noise in self.embedded if is_training]


ROWS = [{"tokens": torch.arange(i, i + 5) % 10, "labels": torch.tensor(i % 3)} for i in range(12)]
PADDED = [{**row, "attention_mask": (torch.arange(5) < 2 + i % 4).long()} for i, row in enumerate(ROWS)]


def trainer(folder, callbacks=(), rows=ROWS, dropout=0.0, **options):
    torch.manual_seed(0)
    options = {"save_strategy": "no", "num_train_epochs": 1, "eval_strategy": "epoch", **options}
    args = TrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, report_to="none", **options)
    return Trainer(TokenModel(dropout), args, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))


def trained(*arguments, resume=None, **options):
    run = trainer(*arguments, **options)
    run.train(resume_from_checkpoint=resume)
    return run


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def test_noise_is_there_in_training_within_its_bound_and_only_then(tmp_path):
    run = trained(tmp_path, neftune_noise_alpha=5.0)
    bound = 5.0 / math.sqrt(5 * 16)
    training = [noise.abs().max().item() for noise in run.model.noises]
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
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


def test_without_the_option_there_is_no_noise(tmp_path):
    run = trained(tmp_path)
    assert all(difference.abs().max() == 0 for _, difference in run.model.embedded)


@pytest.mark.parametrize("length", ["real", "padded"])
def test_padding_has_noise_only_where_that_is_asked_for(tmp_path, length):
    options = {"per_device_train_batch_size": 4, "neftune_noise_alpha": 5.0, "neftune_length": length}
    run = trained(tmp_path, rows=PADDED, train_sampling_strategy="sequential", **options)
    mask = torch.stack([row["attention_mask"] for row in PADDED[:4]])
    noise = run.model.noises[0]
    assert (noise[mask == 0].abs().max() == 0) == (length == "real")
    lengths = mask.sum(1, keepdim=True) if length == "real" else torch.full((4, 1), 5)
    assert (noise.abs().amax(-1) <= 1.001 * 5.0 / (lengths * 16).sqrt()).all()
    assert (noise.abs().amax((1, 2)) > 0.7 * 5.0 / (lengths[:, 0] * 16).sqrt()).all()


def test_each_micro_batch_has_noise_of_its_own_and_dropout_stays_what_it_is(tmp_path):
    class Drawn(TrainerCallback):
        def __init__(self):
            self.states = []

        def on_step_end(self, args, state, control, **kwargs):
            self.states.append(torch.get_rng_state())

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "dropout": 0.3}
    without, within = Drawn(), Drawn()
    trained(tmp_path, [without], **options)
    run = trained(tmp_path, [within], neftune_noise_alpha=5.0, **options)
    assert len({round(noise.abs().sum().item(), 5) for noise in run.model.noises}) == 6
    assert all(torch.equal(a, b) for a, b in zip(without.states, within.states, strict=True))


@pytest.mark.parametrize("options", [{}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}])
def test_a_run_resumed_after_any_step_has_the_same_noise_and_weights(tmp_path, options):
    options = {
        "rows": PADDED,
        "dropout": 0.2,
        "neftune_noise_alpha": 5.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_steps": 1,
        **options,
    }
    whole = trained(tmp_path / "whole", save_strategy="steps", **options)
    assert whole.state.global_step == 6
    for step in (3,) if "torch_compile" in options else (1, 3, 5):
        resumed = trained(tmp_path / "other", resume=str(tmp_path / f"whole/checkpoint-{step}"), **options)
        assert torch.equal(weights(whole), weights(resumed)), step
        left, all_of_them = resumed.model.noises, whole.model.noises
        last = all_of_them[len(all_of_them) - len(left) :]
        assert all(torch.equal(a, b) for a, b in zip(left, last, strict=True))


def train_as_rank(folder):
    run = trained(folder, rows=ROWS * 2, neftune_noise_alpha=5.0, per_device_train_batch_size=4, eval_strategy="no")
    return run.model.noises, weights(run)


def test_ranks_have_different_noise_and_the_same_weights(tmp_path):
    (first, one), (second, other) = run_ranks(train_as_rank, 2, str(tmp_path), timeout_s=150)
    assert len(first) == len(second) == 3
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(one, other)
