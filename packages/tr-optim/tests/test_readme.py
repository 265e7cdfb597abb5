"""What the README shows works; its tables of memory and of options are what the optimizers say of themselves."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_optim import (
    Adafactor,
    AdaLomo,
    AdamW8bit,
    APOLLOAdamW,
    FiraAdamW,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lomo,
    registry,
)
from tr_optim.engine.memory_estimate import optimizer_bytes, state_bytes

README = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
GIB = 2**30


def test_the_readmes_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def llama_7b():
    """Return the weights of LLaMA-7B without their memory: those that are projected, and the others."""

    def weights(*shapes):
        return [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]

    layer = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    return weights(*layer * 32, (32000, 4096)), weights((32000, 4096), *[(4096,)] * 65)


def groups(**projection):
    projected, others = llama_7b()
    return [{"params": projected, "rank": 128, **projection}, {"params": others}]


def flat():
    return [parameter for some in llama_7b() for parameter in some]


def row(name):
    """Return the numbers of a row of the table, each cell's as a list."""
    [cells] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE)
    return [[float(number) for number in re.findall(r"\d+\.\d+|\b\d+\b", cell)] for cell in cells.split("|")]


def close(measured, told):
    # As many digits as the table shows.
    return measured / GIB == pytest.approx(told, abs=0.006 if told < 0.5 else 0.051)


def test_the_table_of_memory_is_what_optimizers_without_projection_expect():
    [[at_once], [several], [state]] = row("AdamW with float32 state")
    numel = sum(parameter.numel() for parameter in flat())
    assert close(2 * numel, at_once)
    assert close(2 * numel, several)
    assert close(8 * numel, state)
    for name, kind in (("`AdamW8bit`", AdamW8bit), ("`Adafactor`", Adafactor)):
        [[at_once], [several], [state]] = row(name)
        options = {"lr": 1e-3, "relative_step": False} if kind is Adafactor else {}
        optimizer = kind(flat(), **options)
        assert close(2 * numel, at_once)
        assert close(2 * numel, several)
        expected = optimizer_bytes(optimizer)[1] if kind is Adafactor else state_bytes(optimizer, kind.step)
        assert close(expected, state)


ADAFACTOR = {"lr": 1e-3, "relative_step": False}
APOLLO_MINI = {"scale_type": "tensor", "scale": 128.0}
PROJECTED = [
    ("`GaLoreAdamW`, `step`", GaLoreAdamW, {"mode": "step"}, {}),
    ("`GaLoreAdamW`, `deferred`", GaLoreAdamW, {"mode": "deferred"}, {}),
    ("`GaLoreAdamW8bit`, `deferred`", GaLoreAdamW8bit, {"mode": "deferred"}, {}),
    ("`GaLoreAdafactor`, `deferred`", GaLoreAdafactor, {"mode": "deferred", **ADAFACTOR}, {}),
    ("`FiraAdamW`, `immediate`", FiraAdamW, {"mode": "immediate"}, {}),
    ("`APOLLOAdamW`, `immediate`, rank 256 / 1", APOLLOAdamW, {"mode": "immediate"}, {"rank": 256}),
]


@pytest.mark.parametrize(("name", "kind", "options", "projection"), PROJECTED, ids=[case[0] for case in PROJECTED])
def test_the_table_of_memory_is_what_optimizers_that_project_expect(name, kind, options, projection):
    at_once, several, state = row(name)
    optimizer = kind(groups(**projection), **options)
    gradients, expected = optimizer.expected_bytes(1)
    assert close(gradients, at_once[0])
    assert close(expected, state[0])
    if several:  # else: as above
        assert close(optimizer.expected_bytes(4)[0], several[0])
    if len(several) == 2:
        assert close(kind(groups(), refresh_from="first", **options).expected_bytes(4)[0], several[1])
    if len(state) == 2:
        assert close(kind(groups(rank=1), **APOLLO_MINI, **options).expected_bytes()[1], state[1])


def test_the_table_of_memory_is_what_lomo_and_adalomo_expect():
    [[at_once], _, states] = row("`Lomo` / `AdaLomo`")
    for kind, state in zip((Lomo, AdaLomo), states, strict=True):
        gradients, expected = kind(flat()).expected_bytes()
        assert close(gradients, at_once)
        assert close(expected, state)
    assert close(Lomo(flat(), accumulate="store").expected_bytes(4)[0], 12.6)


def options_told(name):
    """Return the names of the row of options that a name for `optim` has in the table."""
    [cell] = re.findall(rf"^\| `{re.escape(name)}` \|(.*)\|$", README, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", cell))


def options_taken(factory):
    """Return what the error of an unknown option lists."""
    args = SimpleNamespace(optim_args="unheard_of=1", seed=0, max_grad_norm=0.0, gradient_accumulation_steps=1)
    args.learning_rate, args.on_nonfinite = 1e-3, "log"
    parts = [{"params": [nn.Parameter(torch.zeros(2))]}]
    with pytest.raises(ValueError, match="does not take 'unheard_of'") as error:
        factory(parts, args, *[nn.Linear(2, 2)] * (len(inspect.signature(factory).parameters) - 2))
    return set(re.search(r"it takes ([\w, ]+)", str(error.value))[1].split(", "))


def test_the_table_of_options_is_what_the_optimizers_of_the_trainer_take():
    galore, layerwise = options_told("galore_*"), options_told("galore_*_layerwise")
    bits, adafactor = options_told("galore_adamw_8bit*"), options_told("galore_adafactor*")
    names = registry
    assert options_taken(names.galore_adamw) == galore
    assert options_taken(names.galore_adamw_layerwise) == galore | layerwise
    assert options_taken(names.galore_adamw_8bit) == galore | bits
    assert options_taken(names.galore_adamw_8bit_layerwise) == galore | layerwise | bits
    assert options_taken(names.galore_adafactor) == galore | adafactor
    assert options_taken(names.galore_adafactor_layerwise) == galore | layerwise | adafactor
    apollo, names = options_told("apollo_*"), registry
    for factory in (names.apollo_adamw, names.apollo_adamw_layerwise, names.apollo_mini, names.apollo_mini_layerwise):
        assert options_taken(factory) == apollo
    fira = apollo - {"proj", "scale_type"} | {"method"}
    assert options_taken(names.fira_adamw) == options_taken(names.fira_adamw_layerwise) == fira
    lomo = options_told("lomo")
    assert options_taken(Lomo.from_arguments) == lomo
    assert options_taken(AdaLomo.from_arguments) == lomo | options_told("adalomo")
