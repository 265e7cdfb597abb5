"""Every optimizer with every backend, by arguments alone: the weights of one process, or a sentence that refuses.

The table is that of packages/tr-dist/docs/optimizers.md.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from variants import VARIANTS, chosen

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

STEPS, RATE = 4, 3e-3
TABLE = Path(__file__).parents[2] / "packages/tr-dist/docs/optimizers.md"

# A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
ADAM = {"adam_epsilon": 1e-3}
ALL = {"optim_target_modules": "all-linear"}
GALORE = {**ALL, "optim_args": "rank=4,update_proj_gap=2"}
CODED = {**ALL, "optim_args": "rank=4,update_proj_gap=2,min_8bit_size=0"}
# Ranks that exchange projections alone know the norm by an estimate, and clip by that.
UNCLIPPED = {"max_grad_norm": 0.0}
OPTIMIZERS = {
    "adamw_torch": ADAM,
    "adamw_8bit": {**ADAM, "optim_args": "min_8bit_size=0"},
    "adafactor": {},
    "lomo": {"learning_rate": 0.1},
    "lomo, stored": {"learning_rate": 0.1, "optim_args": "accumulate=store", "gradient_accumulation_steps": 2},
    "adalomo": UNCLIPPED,
    "galore_adamw": {**GALORE, **ADAM},
    "galore_adamw_layerwise": {**GALORE, **ADAM, **UNCLIPPED},
    "galore_adamw_layerwise, clipped": {
        **ALL,
        **ADAM,
        "optim_args": "rank=4,update_proj_gap=2,reduction=whole",
        "max_grad_norm": 0.3,
    },
    "galore_adamw_layerwise, accumulated": {**GALORE, **ADAM, **UNCLIPPED, "gradient_accumulation_steps": 2},
    "galore_adamw_8bit": {**CODED, **ADAM},
    "galore_adamw_8bit_layerwise": {**CODED, **ADAM, **UNCLIPPED},
    "galore_adafactor": GALORE,
    "galore_adafactor_layerwise": {**GALORE, **UNCLIPPED},
    "apollo_adamw": {**GALORE, **ADAM},
    "apollo_adamw_layerwise": {**GALORE, **ADAM},
    "apollo_mini": {**ALL, **ADAM},
    "fira_adamw": {**GALORE, **ADAM},
    "fira_adamw_layerwise": {**GALORE, **ADAM},
}

# 32-bit sums in another order: some units in the last place, over four steps.
SUMS = 3e-6
# Moments that lie in other blocks, or in none, have other codes: M may be half a level off, of 1/8, in each step.
CODES = RATE * STEPS / 16
_NEED_MATRICES = "needs each parameter as a matrix.*strategy='fsdp'"
_IN_BACKWARD = "consumes gradients in the backward pass, which DeepSpeed averages after it; use strategy='fsdp'"


def expected(name, variant):
    """Return how near weights come to those of one process, or what is said."""
    optim = name.partition(",")[0]
    in_backward = optim.endswith(("layerwise", "lomo"))
    of_matrices = optim.startswith(("galore", "apollo", "fira", "lomo", "adalomo", "adafactor"))
    if variant == "zero_0" and in_backward:
        return _IN_BACKWARD
    if variant.startswith("zero") and variant != "zero_0" and of_matrices:
        return _NEED_MATRICES
    if "8bit" in optim:
        return CODES
    return SUMS


class Network(nn.Module):
    """Sides that two ranks cannot share evenly, and one row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x):
        return {"loss": (self.layers(x) - x[:, :1]).square().mean()}


def train(folder, names, options):
    """Return what each optimizer made of the weights, or the message that refused it."""
    found = {}
    for name in names:
        settings = {"learning_rate": RATE, **OPTIMIZERS[name], **options}
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        settings["per_device_train_batch_size"] //= micro_batches
        rows = [{"x": torch.randn(10, generator=torch.Generator().manual_seed(n))} for n in range(48)]
        with contextlib.ExitStack() as stack:
            try:
                args = TrainingArguments(
                    output_dir=folder,
                    optim=name.partition(",")[0],
                    max_steps=STEPS,
                    use_cpu=True,
                    save_strategy="no",
                    disable_tqdm=True,
                    log_level="error",
                    **settings,
                )
                trainer = Trainer(Network(), args, train_dataset=rows)
                stack.callback(trainer.strategy.close)
                trainer.train()
                weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
                found[name] = {key: value.detach().float().clone() for key, value in weights.items()}
            except ValueError as error:
                found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)
    return train(str(tmp_path_factory.mktemp("alone")), OPTIMIZERS, {"per_device_train_batch_size": 12})


def test_each_optimizer_trains_in_one_process(alone):
    start = Network().state_dict()
    for name, weights in alone.items():
        assert max((value - start[key]).abs().max() for key, value in weights.items()) > 1e-3, name


def test_each_optimizer_trains_as_in_one_process_or_is_refused(tmp_path, backend, alone):
    [variant] = [name for of in VARIANTS.values() for name, options in of.items() if options == backend]
    options = {**backend, "per_device_train_batch_size": 6}
    first, *others = run_ranks(train, 2, str(tmp_path), list(OPTIMIZERS), options, timeout_s=300)
    for name, found in first.items():
        wanted = expected(name, variant)
        if isinstance(wanted, str):
            assert isinstance(found, str), f"{name} was to be refused"
            assert re.search(wanted, found), f"{name}: {found}"
        else:
            assert not isinstance(found, str), f"{name}: {found}"
            for key, value in alone[name].items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=wanted, msg=lambda m, n=name: f"{n}: {m}")
        assert all(isinstance(other[name], str) == isinstance(wanted, str) for other in others)


def test_the_table_of_the_documentation_says_so():
    lines = [line.strip("|\n").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line] for line in lines]
    variants = [name for name, _ in chosen(sorted(VARIANTS))]
    assert sorted(head[1:]) == sorted(variants)
    assert [row[0] for row in rows] == list(OPTIMIZERS)
    words = {
        SUMS: "same",
        CODES: "codes",
        _NEED_MATRICES: "matrix",
        _IN_BACKWARD: "backward",
    }
    for row in rows:
        assert [words[expected(row[0], variant)] for variant in head[1:]] == row[1:], row[0]
