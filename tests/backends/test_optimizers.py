"""Every optimizer with every backend, by arguments alone: the weights of one process, or a sentence that refuses.

The table is that of packages/tr-dist/docs/optimizers.md. What the registry lists and is not named here has plain
settings.
"""

import contextlib
import itertools
import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from variants import BACKEND_OF, FARTHER, ONE_PROCESS, VARIANTS, chosen, together

from tr_core import Trainer, TrainingArguments
from tr_core.testing import optimizer_names
from tr_dist.testing import run_ranks

STEPS, RATE = 4, 3e-3
# Where the weights are kept is no matter of an optimizer's: `nox -s backend(fsdp)` has it all the same.
LEFT_TO_ITS_BACKEND = ("offload", "units")
TABLE = Path(__file__).parents[2] / "packages/tr-dist/docs/optimizers.md"

# A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
ADAM = {"adam_epsilon": 1e-3}
ALL = {"optim_target_modules": "all-linear"}
GALORE = {**ALL, "optim_args": "rank=4,update_proj_gap=2"}
CODED = {**ALL, "optim_args": "rank=4,update_proj_gap=2,min_8bit_size=0"}
# Ranks that exchange projections alone know the norm by an estimate, and clip by that.
UNCLIPPED = {"max_grad_norm": 0.0}
AVERAGED = {"lr_scheduler_type": "constant"}
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
    "apollo_mini_layerwise": {**ALL, **ADAM},
    "fira_adamw": {**GALORE, **ADAM},
    "fira_adamw_layerwise": {**GALORE, **ADAM},
    "galore_torch_adamw": {**GALORE, **ADAM},
    "galore_torch_adafactor": GALORE,
    "lomo_optim": {"learning_rate": 0.1},
    "adalomo_optim": UNCLIPPED,
    "schedule_free_adamw": {**ADAM, **AVERAGED},
    "schedule_free_radam": {**ADAM, **AVERAGED, "max_steps": 16},  # its first steps have no update
    "schedule_free_sgd": AVERAGED,
}
OPTIMIZERS |= {name: ADAM for name in optimizer_names() if name not in OPTIMIZERS}

# 32-bit sums in another order: some units in the last place, over four steps.
SUMS = 3e-6
# Moments that lie in other blocks, or in none, have other codes: M may be half a level off, of 1/8, in each step.
CODES = RATE * STEPS / 16
# Muon computes in bfloat16, which XLA rounds at other places than torch. In float32 the same steps end 3.3e-4 away from
# both; they are 1.5e-4 apart.
BFLOAT16 = RATE * STEPS / 32
# Where a code is of 4 bits, or decides about a sign, or all of an update divides by it.
COARSE = 1e-2
# Words of the table, the reason, and the message.
REFUSALS = {
    "matrix": ("it needs matrices, and ZeRO from stage 1 on has flat buffers",
               "needs each parameter as a matrix.*strategy='fsdp'"),
    "backward": ("it consumes gradients in the backward pass, and DeepSpeed averages them after it",
                 "consumes gradients in the backward pass, which DeepSpeed averages after it; use strategy='fsdp'"),
    "flat": (
        "it works on whole parameters, and ZeRO from stage 1 on has flat buffers",
        r"where DeepSpeed \(ZeRO stage \d\) has flat buffers; use strategy=",
    ),
    "replaced": (
        "DeepSpeed replaces it by one without its groups and learning rates",
        "DeepSpeed replaces torch's Adagrad by one without its groups and learning rates",
    ),
    "rows": ("it works on whole rows, which a divided matrix has not", "what is built is rows divided over ranks"),
    "in backward": (
        "it consumes gradients in the backward pass, and knows nothing of divided matrices",
        "consumes gradients in the backward pass is not for tp_size; choose another optim",
    ),
    "whole": ("its library takes no DTensor, which FSDP's parameters are",
              "is a DTensor, of which each rank holds a part"),
    "paged": ("paged state needs a GPU", "paged state moves between the memory of a GPU and of its host"),
    "kernels": ("bitsandbytes has no kernels for XLA", "and bitsandbytes has no kernels for XLA; use adamw_torch"),
    "sketches": ("its norm is estimated with random numbers in every step, for which XLA has no generators",
                 "sketches draw from generators of their own, which XLA devices do not have; leave them out"),
}  # fmt: skip
BITSANDBYTES = ("adamw_bnb", "paged_", "lion_", "ademamix", "rmsprop_bnb")
OF_LIBRARIES = (*BITSANDBYTES, "adamw_torch_4bit", "adamw_torch_8bit", "schedule_free", "stable_adamw", "grokadamw",
                "muon", "galore_torch", "lomo_optim", "adalomo_optim")  # fmt: skip
OF_ROWS = ("adamw_8bit", "adafactor", "lomo", "adalomo", "galore", "apollo", "fira")


def expected(name, variant):
    """Return how near weights come to those of one process, or the word for why they do not."""
    optim = name.partition(",")[0]
    if variant.startswith("zero") and variant != "zero_0" and (found := in_flat_buffers(optim)):
        return found
    if BACKEND_OF.get(variant) in ("fsdp", "mesh") and optim.startswith(OF_LIBRARIES):
        return "whole"
    if BACKEND_OF.get(variant) == "mesh" and optim.startswith(OF_ROWS):
        return "in backward" if "lomo" in optim else "rows"
    if variant == "xla" and (found := on_xla(name)):
        return found
    if optim.startswith("paged") and variant != "cuda":
        return "paged"
    if variant == "zero_0" and optim.endswith(("layerwise", "lomo", "lomo_optim")):
        return "backward"
    return CODES if optim.endswith(("8bit", "4bit")) or "8bit" in optim else SUMS


def in_flat_buffers(optim):
    """Return what ZeRO from stage 1 on makes of an optimizer, where it is not what other backends make of it."""
    if optim.startswith(("galore", "apollo", "fira", "lomo", "adalomo", "adafactor")):
        return "matrix"
    if optim.startswith(("muon", "schedule_free", "stable_adamw", "grokadamw")):
        return "flat"
    if optim in ("lion_8bit", "rmsprop_bnb_8bit", "adamw_torch_4bit"):
        return COARSE
    return "replaced" if optim == "adagrad" else None


def on_xla(name):
    """Return what XLA makes of an optimizer, where it is not what other backends make of it."""
    if name.startswith(BITSANDBYTES):
        return "kernels"
    if name == "galore_adamw_layerwise, accumulated":
        return "sketches"
    return BFLOAT16 if name == "muon" else None


class Network(nn.Module):
    """Sides that two ranks cannot share evenly, and one row; wide enough for codes where these have a least size."""

    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        sides = (10, 64, 68, 1) if wide else (10, 13, 7, 1)
        first, second, third = (nn.Linear(*pair) for pair in itertools.pairwise(sides))
        self.layers = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)

    def forward(self, x):
        return {"loss": (self.layers(x) - x[:, :1]).square().mean()}


def network(name):
    """Return the network that an optimizer trains."""
    return Network(wide=name.startswith((*BITSANDBYTES, "adamw_torch_")) and name.endswith("bit"))


def train(folder, options, names=tuple(OPTIMIZERS)):
    """Return what each optimizer made of the weights, or the message that refused it."""
    found = {}
    for name in names:
        try:
            found[name] = train_one(folder, name, options)
        except ValueError as error:
            found[name] = str(error)
        except ImportError as error:  # of the library that it is of
            found[name] = error
        except Exception as error:
            found[name] = RuntimeError("".join(traceback.format_exception(error)))
    return found


def train_one(folder, name, options):
    settings = {"learning_rate": RATE, "max_steps": STEPS, **OPTIMIZERS[name], **options}
    settings["per_device_train_batch_size"] //= settings.get("gradient_accumulation_steps", 1)
    rows = [{"x": torch.randn(10, generator=torch.Generator().manual_seed(n))} for n in range(48)]
    quiet = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "log_level": "error", "report_to": "none"}
    with contextlib.ExitStack() as stack:
        args = TrainingArguments(output_dir=folder, optim=name.partition(",")[0], **{**quiet, **settings})
        trainer = Trainer(network(name), args, train_dataset=rows)
        stack.callback(trainer.strategy.close)
        trainer.train()
        weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
        return {key: value.detach().float().cpu().clone() for key, value in weights.items()}


def train_in_variants(folder, variants):
    """Train on each of some variants; libraries are imported once for all."""
    plan = {"tp_plan": {"layers.0": "rowwise_split_input"}}  # the others' sides do not divide by two
    forms = {each: VARIANTS[each] | (plan if "tp_plan" in VARIANTS[each] else {}) for each in variants}
    return {variant: train(folder, {"per_device_train_batch_size": 6, **form}) for variant, form in forms.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)
    return train(str(tmp_path_factory.mktemp("alone")), {"per_device_train_batch_size": 12, "strategy": "single"})


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Train on all variants of a backend when the first of them is asked for; returns what each rank has of one."""
    known = {}

    def look_up(variant):
        if variant not in known:
            backends = request.config.getoption("--backend", None)
            left_out = () if backends else LEFT_TO_ITS_BACKEND
            wanted = [each for each in chosen(backends) if each not in left_out]
            variants = [each for each in wanted if BACKEND_OF[each] == BACKEND_OF[variant]]
            try:
                number = 2 * together(variant)
                found = run_ranks(
                    train_in_variants, number, str(tmp_path_factory.mktemp("n")), variants, timeout_s=1800
                )
                known.update({each: [rank[each] for rank in found] for each in variants})
            except Exception as error:  # of all optimizers: none is tried again
                known.update(dict.fromkeys(variants, error))
        if isinstance(known[variant], Exception):
            raise known[variant]
        return known[variant]

    return look_up


def optimizers():
    return [
        pytest.param(name, id=name, marks=pytest.mark.row(f"optim {name.partition(',')[0]}")) for name in OPTIMIZERS
    ]


def check(name, variant, found, reference):
    """Compare what an optimizer made of weights, or its refusal, with what is expected; return the refusal's reason."""
    if isinstance(found, ImportError):
        pytest.skip("needs " + re.search(r"is that of (\w+)", str(found))[1])
    assert not isinstance(found, Exception), found
    wanted = expected(name, variant)
    if isinstance(wanted, str):
        why, message = REFUSALS[wanted]
        assert isinstance(found, str), f"{name} was to be refused"
        assert re.search(message, found), found
        return why
    assert not isinstance(found, str), found
    start = network(name).state_dict()
    assert max((value - start[key]).abs().max() for key, value in found.items()) > 1e-3
    for key, value in reference.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=wanted * FARTHER.get(variant, 1))
    return None


@pytest.mark.parametrize("name", optimizers())
def test_each_optimizer_trains_as_in_one_process_or_is_refused(tmp_path, name, variant, alone, ranks, record_property):
    if variant in ONE_PROCESS:
        options = {"per_device_train_batch_size": 12, **VARIANTS[variant]}
        each = [alone if variant == "cpu" else {name: train_one(str(tmp_path), name, options)}]
    else:
        each = ranks(variant)
    if why := check(name, variant, each[0][name], alone[name]):
        record_property("refused", why)
    assert all(isinstance(rank[name], str) == (why is not None) for rank in each)


def table():
    """Return the table of the documentation: a row an optimizer, a column a variant of several processes."""
    variants = [name for name in VARIANTS if name not in ONE_PROCESS]
    words = {SUMS: "same", CODES: "codes", COARSE: "coarse"}
    rows = [[name, *(expected(name, variant) for variant in variants)] for name in OPTIMIZERS]
    lines = [["`optim`", *variants], *([words.get(each, each) for each in row] for row in rows)]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(lines[0]), *written[1:]])


@pytest.mark.column("ddp")
def test_the_table_of_the_documentation_says_so():
    assert table() in TABLE.read_text(), "run `nox -s regen`"
