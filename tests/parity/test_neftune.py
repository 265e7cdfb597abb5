"""NEFTune's noise: what is the same if that is asked for, and what the reference does otherwise."""

import math

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_callbacks import At
from parity_harness import OURS, REFERENCE, Scenario, run, same_tensors
from torch import nn

from tr_optim import NEFTune

ALPHA = 5.0


class Draws(At):
    """Draw what the reference's data loader draws for a pass."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        torch.empty((), dtype=torch.int64).random_()


class Noise(At):
    def on_train_begin(self, args, state, control, *, model, **kwargs):
        self.noise = NEFTune(model, ALPHA, length="padded", seed=None).__enter__()

    def on_train_end(self, args, state, control, **kwargs):
        self.noise.__exit__()


def test_padded_noise_of_the_default_generator_makes_the_run_of_the_reference(tmp_path):
    reference = run(
        REFERENCE, Scenario(models.llama, data.tokens(), arguments={"neftune_noise_alpha": ALPHA}), tmp_path / "theirs"
    )
    scenario = Scenario(models.llama, data.tokens())
    clean = run(OURS, scenario, tmp_path / "clean")
    scenario.callbacks = lambda: [Noise("", 0), Draws("", 0)]
    ours = run(OURS, scenario, tmp_path / "ours")
    assert reference.losses != clean.losses
    assert ours.losses == reference.losses
    assert same_tensors(ours.weights, reference.weights)


class Noisy(nn.Module):
    """A classifier of padded rows that keeps the noise that its embedding's output has in training."""

    def __init__(self, fails=False):
        super().__init__()
        self.words, self.head = nn.Embedding(17, 64), nn.Linear(64, 2)
        self.noises, self.fails = [], fails

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask, labels):
        vectors = self.words(input_ids)
        self.noises.append((vectors - self.words.weight[input_ids]).detach())
        if self.fails:
            raise RuntimeError("on purpose")
        weights = attention_mask[..., None]
        logits = self.head((vectors * weights).sum(1) / weights.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


LENGTHS = [64, 32, 16, 4]


def rows():
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(17, (64,), generator=generator),
            "attention_mask": (torch.arange(64) < length).long(),
            "labels": torch.tensor(number % 2),
        }
        for number, length in enumerate(LENGTHS)
    ]


def noisy_run(side, folder, model, **arguments):
    arguments = {
        "neftune_noise_alpha": ALPHA,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        **arguments,
    }
    return run(side, Scenario(lambda: model, rows(), arguments=arguments), folder)


def norms(model):
    mask = torch.stack([row["attention_mask"] for row in rows()])[..., None]
    noise = model.noises[0]
    return (noise * mask).flatten(1).norm(dim=1).tolist(), (noise * (1 - mask)).norm().item()


@pytest.mark.reference_fails
def test_short_rows_get_as_much_noise_as_long_ones_and_padding_none(tmp_path):
    theirs, ours, padded = Noisy(), Noisy(), Noisy()
    noisy_run(REFERENCE, tmp_path / "theirs", theirs)
    noisy_run(OURS, tmp_path / "ours", ours)
    noisy_run(OURS, tmp_path / "padded", padded, neftune_length="padded")
    full = ALPHA / math.sqrt(3)
    for model in (theirs, padded):
        of_rows, of_padding = norms(model)
        assert of_rows == pytest.approx([full * math.sqrt(length / 64) for length in LENGTHS], rel=0.1)
        assert of_padding > full
    of_rows, of_padding = norms(ours)
    assert of_rows == pytest.approx([full] * 4, rel=0.1)
    assert of_padding == 0


@pytest.mark.reference_fails
def test_no_noise_is_left_after_an_exception(tmp_path):
    hooks = {}
    for side in (REFERENCE, OURS):
        model = Noisy(fails=True)
        with pytest.raises(RuntimeError, match="on purpose"):
            noisy_run(side, tmp_path / side.name, model)
        hooks[side.name] = len(model.words._forward_hooks)
    assert hooks == {"reference": 1, "ours": 0}
