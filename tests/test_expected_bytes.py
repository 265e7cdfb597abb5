"""The bytes of gradients and states that a preflight estimates, for each optimizer by its name, against the run."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from optimizer_settings import INSTALLED, SETTINGS

from tr_core import Trainer, TrainingArguments
from tr_core.preflight import check
from tr_optim.testing import watch_gradients

PROJECTED = {setting.optim for setting in SETTINGS if "optim_target_modules" in setting.options}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attn = nn.LayerNorm(48), nn.Linear(48, 96)
        self.mlp = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 24))

    def forward(self, x, labels):
        return {"loss": (self.mlp(self.attn(self.norm(x))) - labels).square().mean()}


def rows(number=16):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(48, generator=generator), "labels": torch.randn(24, generator=generator)}] * number


def trainer(folder, name, **options):
    if name in PROJECTED:
        options.setdefault("optim_target_modules", ["attn", "mlp"])
        options.setdefault("optim_args", {} if "mini" in name else {"rank": 8})
    options = {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4, **options}
    args = TrainingArguments(
        str(folder), optim=name, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, **options
    )
    return Trainer(Network(), args, train_dataset=rows())


@pytest.mark.parametrize("name", ["adamw_torch", *sorted(INSTALLED)])
def test_the_state_that_a_preflight_estimates_is_that_of_the_run(tmp_path, name):
    report = check(trainer(tmp_path, name))
    assert report.count("error") == 0, report
    assert not report.figures["optimizer_is_assumed"]
    made = trainer(tmp_path, name)
    made.train()
    tensors = [v for state in made.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert report.figures["optimizer_bytes"] == sum(tensor.nbytes for tensor in tensors)


def gradients(folder, name, **options):
    return check(trainer(folder, name, **options)).figures["gradient_bytes"]


def test_the_gradients_that_a_preflight_estimates_are_those_of_the_mode(tmp_path):
    model = Network()
    whole = sum(p.nbytes for p in model.parameters())
    matrices = [model.attn.weight, model.mlp[0].weight, model.mlp[2].weight]
    two, others = sum(sorted(m.nbytes for m in matrices)[-2:]), whole - sum(m.nbytes for m in matrices)
    projections = 4 * 8 * sum(max(m.shape) for m in matrices)
    assert gradients(tmp_path, "galore_adamw") == whole
    assert gradients(tmp_path, "galore_adamw_layerwise") == projections + others + two
    assert gradients(tmp_path, "galore_adamw_layerwise", gradient_accumulation_steps=2) == whole + two
    first = {"rank": 8, "refresh_from": "first"}
    layerwise = {"gradient_accumulation_steps": 2, "optim_args": first}
    assert gradients(tmp_path, "galore_adamw_layerwise", **layerwise) == projections + others + two
    assert gradients(tmp_path, "lomo") == gradients(tmp_path, "adalomo") == two


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_step_keeps_more_of_the_gradients_than_a_preflight_estimates(tmp_path, request, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 4}
    expected, kept = gradients(tmp_path, "galore_adamw_layerwise", **options), []
    made = trainer(tmp_path, "galore_adamw_layerwise", **options)

    def note(beside):
        kept.append(beside + sum(p.grad.nbytes for p in made.model.parameters() if p.grad is not None))

    request.addfinalizer(watch_gradients(note))
    made.train()
    two = 2 * made.model.attn.weight.nbytes
    assert len(kept) == 4 * accumulation
    assert expected - 2 * two < max(kept) <= expected
