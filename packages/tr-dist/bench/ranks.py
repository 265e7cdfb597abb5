"""Tell what each rank of FSDP holds and exchanges in a step, for jobs of any size, without any of the ranks.

    python packages/tr-dist/bench/ranks.py --size 7b --ranks 8 64 1024

Both tables of 7 billion parameters take some minutes; `--table` and `--forms` choose parts of them.

Needs tr-dist and tr-optim.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import llama
import torch
from shapes import Exchanges, nbytes, without_numbers
from torch import nn

from tr_dist.fake_ranks import fake_rank
from tr_dist.fsdp import FSDP, Sharding
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
)
from tr_optim.engine.memory_estimate import optimizer_bytes

_BY_LAYER = {"wrap": "TRANSFORMER_BASED_WRAP", "layer_classes": ("Layer",)}
FORMS: dict[str, dict[str, Any]] = {
    "full_shard": _BY_LAYER,
    "full_shard, one unit": {},
    "shard_grad_op": {"strategy": "shard_grad_op", **_BY_LAYER},
    "hybrid_shard": {"strategy": "hybrid_shard", **_BY_LAYER},
    "hybrid_shard_zero2": {"strategy": "hybrid_shard_zero2", **_BY_LAYER},
}
RANKS_OF_A_MACHINE = 8
_RANK = 128

Build = Callable[[nn.Module], Any]


def projected(kind: type[Any], **options: Any) -> Build:
    """Return what builds a low-rank optimizer that projects all matrices of layers, and the head."""

    def build(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        taken = {name for name, p in named.items() if p.dim() == 2 and not name.startswith("embed")}
        matrices, others = [named[n] for n in named if n in taken], [named[n] for n in named if n not in taken]
        rank = min(_RANK, min(min(p.shape) for p in matrices) // 4)
        return kind([{"params": matrices, "rank": rank}, {"params": others}], lr=1e-3, **options)

    return build


def of_all(kind: type[Any], **options: Any) -> Build:
    """Return what builds an optimizer of all parameters."""
    return lambda model: kind(model.parameters(), lr=1e-3, **options)


OPTIMIZERS: dict[str, Build] = {
    "AdamW": of_all(torch.optim.AdamW, foreach=False),
    "AdamW8bit": of_all(AdamW8bit),
    "Adafactor": of_all(Adafactor, relative_step=False),
    "GaLoreAdamW": projected(GaLoreAdamW),
    "GaLoreAdamW, layer-wise": projected(GaLoreAdamW, mode="deferred"),
    "GaLoreAdamW8bit, layer-wise": projected(GaLoreAdamW8bit, mode="deferred"),
    "GaLoreAdafactor, layer-wise": projected(GaLoreAdafactor, mode="deferred", relative_step=False),
    "APOLLOAdamW, layer-wise": projected(APOLLOAdamW, mode="immediate"),
    "FiraAdamW, layer-wise": projected(FiraAdamW, mode="immediate"),
    "Lomo": of_all(Lomo, clip_grad_norm=1.0),
    "AdaLomo": of_all(AdaLomo),
}


@dataclass(frozen=True)
class Held:
    """What a rank holds, in bytes, and what it exchanges in a step, as (times, bytes) by kind; None without a step."""

    parameters: int
    gradients: int
    state: int
    exchanges: dict[str, tuple[int, int]] | None


@contextmanager
def prepared(
    size: str, form: str, rank: int, ranks: int, *, are_real: bool = False, steps: bool = True
) -> Iterator[tuple[FSDP, Any]]:
    """Yield the strategy of a rank and its shards of a model in bfloat16, as `FSDP.prepare` makes them.

    With shapes only, it begins with a model that has no values, which `prepare` is not asked to look for; unless a step
    is to be made it stays on the meta device.
    """
    with fake_rank(rank, ranks, local_world_size=RANKS_OF_A_MACHINE):
        sharding = Sharding(**FORMS[form], sync_module_states=are_real)
        with FSDP(sharding, use_cpu=True) as strategy:
            model = llama.build(size, torch.bfloat16, "cpu" if are_real else "meta")
            with mock.patch("tr_dist.fsdp.strategy.check_trainable"):
                model = strategy.prepare(model)
            with without_numbers(are_real or not steps):
                yield strategy, model.to_empty(device="cpu") if steps and not are_real else model


def largest_unit(model: nn.Module) -> int:
    """Return the bytes of the unit that has the most, whole."""
    sizes: dict[int, int] = {}
    units = [module for module in model.modules() if hasattr(module, "unshard")][::-1]  # inner ones first
    seen: set[int] = set()
    for unit in units:
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes[id(unit)] = sum(p.numel() * p.element_size() for p in own)
    return max(sizes.values())


def compute_sizes(model: nn.Module, build: Build) -> Held:
    """Return what a rank will hold, without a step."""
    optimizer = build(model)
    tells = getattr(optimizer, "expected_bytes", lambda: optimizer_bytes(optimizer))
    return Held(nbytes(model.parameters()), *tells(), None)


def measure(strategy: FSDP, model: nn.Module, build: Build) -> Held:
    """Make one step, and return what is held after it and was exchanged in it.

    Raises:
        AssertionError: the state is not what was computed before.
    """
    computed, optimizer, exchanges = compute_sizes(model, build), build(model), Exchanges()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with exchanges:
        if getattr(optimizer, "fused_in_backward", False):
            optimizer.bind(strategy)
            with strategy.accumulate_fused(model, last=True):
                optimizer.backward(model(tokens))
        else:
            with strategy.accumulate(model, sync=True):
                strategy.backward(model(tokens))
        optimizer.step()
    state = nbytes(value for each in optimizer.state.values() for value in each.values())
    if state != computed.state:
        raise AssertionError(f"{type(optimizer).__name__} has {state} bytes, and {computed.state} were computed")
    if hasattr(optimizer, "detach"):
        optimizer.detach()
    optimizer.zero_grad()
    gc.collect()
    found = {kind: (number, exchanges.bytes[kind]) for kind, number in exchanges.counts.items()}
    return replace(computed, exchanges=found)


def shown(size: float) -> str:
    """Return bytes as MiB, with more places below a tenth of one."""
    return f"{size / 2**20:,.1f}" if size >= 2**20 / 10 or size == 0 else f"{size / 2**20:.4f}"


def exchanged(held: Held, *kinds: str) -> str:
    """Return what was exchanged, as `times: MiB`."""
    if held.exchanges is None:
        return " | ".join([""] * len(kinds))
    return " | ".join(
        f"{number:,}: {shown(carried)}" if number else "0"
        for number, carried in (held.exchanges.get(kind, (0, 0)) for kind in kinds)
    )


def held_by(size: str, form: str, ranks: int, builds: dict[str, Build], *, steps: bool) -> dict[str, list[Held]]:
    """Return what the first, the middle and the last rank hold with each optimizer; the first may make a step."""
    found: dict[str, list[Held]] = {name: [] for name in builds}
    for rank in (0, ranks // 2, ranks - 1):
        with prepared(size, form, rank, ranks, steps=steps or len(builds) > 1) as (strategy, model):
            for name, build in builds.items():
                found[name].append(
                    measure(strategy, model, build) if steps and rank == 0 else compute_sizes(model, build)
                )
    return found


def forms_table(size: str, forms: list[str], numbers: list[int], step_at: int) -> Iterator[str]:
    """Yield the lines of the table of FSDP's forms."""
    yield "| form | ranks | parameters | gradients | AdamW | unit | all-gather | reduce-scatter | all-reduce |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for form in forms:
        for ranks in numbers:
            found = held_by(size, form, ranks, {"AdamW": OPTIMIZERS["AdamW"]}, steps=ranks == step_at)["AdamW"]
            columns = [of_ranks(found, name) for name in ("parameters", "gradients", "state")]
            with prepared(size, form, 0, ranks, steps=False) as (_, model):
                columns.append(shown(largest_unit(model)))
            carried = exchanged(found[0], "all-gather", "reduce-scatter", "all-reduce")
            yield f"| {form} | {ranks:,} | {' | '.join(columns)} | {carried} |"


def optimizers_table(size: str, numbers: list[int], step_at: int) -> Iterator[str]:
    """Yield the lines of the table of optimizers."""
    yield "| optimizer | ranks | gradients at once | state | all-reduce |"
    yield "|---|---|---|---|---|"
    rows: dict[str, list[str]] = {name: [] for name in OPTIMIZERS}
    for ranks in numbers:
        for name, found in held_by(size, "full_shard", ranks, OPTIMIZERS, steps=ranks == step_at).items():
            columns = [of_ranks(found, what) for what in ("gradients", "state")]
            rows[name].append(f"| {name} | {ranks:,} | {' | '.join(columns)} | {exchanged(found[0], 'all-reduce')} |")
    for lines in rows.values():
        yield from lines


def of_ranks(found: list[Held], name: str) -> str:
    """Return one number of the first, the middle and the last rank; one where they are equal."""
    values = [shown(getattr(held, name)) for held in found]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


_WORDS = """# What each rank holds and exchanges

LLaMA's shapes of {size}, in bfloat16; sizes in MiB. All parameters together have {whole}.

    {command}

One process simulates one rank after another with torch's fake process group. It uses the strategy, hooks and optimizers
of a real run, over shapes without numbers. Each size is of the first, the middle and the last rank, or one number if
all are equal. {how} No network and no other rank took part, and no time was measured.
"""
_COMPUTED = "Sizes are computed from the shards (`optimizer.expected_bytes`), and no step is made."
_STEPPED = """Sizes are computed from the shards (`optimizer.expected_bytes`); at {step_at} ranks the first makes a
step, and its state has the computed size. What it exchanges is `times: MiB`, of whole tensors: those gathered,
to be scattered, or summed; how often does not depend on the number of ranks."""
_FORMS = """## Forms of FSDP

Units are layers, but in one form; there are {machine} ranks on each machine. Rows are divided as by `torch.chunk`, so
the last ranks may hold less, or nothing of a parameter with fewer rows than ranks. AdamW's state is of the parameters'
dtype, and has a count of steps for each parameter. "unit" is the largest of those that are whole while they compute, of
which there are at most two at a time; the outermost has the embedding and the head.
"""
_OPTIMIZERS = """## Optimizers

`full_shard` by layers; rank {rank} for those that project. All-gathers and reduce-scatters are as in the first table;
`Lomo`, which clips here and so has two backward passes, has half as many all-gathers more, and twice the
reduce-scatters. "gradients at once" are this rank's parts of them, or what is kept of those. Bases and moments that do
not lie with the rows are the same on all ranks. What GaLore sums is for its first bases, and later for projections
alone; so does Fira, and one number of each matrix, and APOLLO the latter two.
"""


def main(arguments: list[str] | None = None) -> None:
    """Print both tables, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(llama.SIZES), default="7b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument(
        "--step-at", type=int, default=64, help="the number of ranks with which a step is made; 0 for none"
    )
    parser.add_argument("--table", choices=["forms", "optimizers"], help="print this one alone")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="rows of the first table")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # torch, of inputs that need no gradient
    whole = sum(p.numel() * p.element_size() for p in llama.build(options.size, torch.bfloat16, "meta").parameters())
    command = shlex.join(["python", "packages/tr-dist/bench/ranks.py", *given])
    if options.table != "optimizers":
        how = _STEPPED.format(step_at=options.step_at) if options.step_at in options.ranks else _COMPUTED
        print(_WORDS.format(size=options.size.upper(), whole=shown(whole), command=command, how=how))
        print(_FORMS.format(machine=RANKS_OF_A_MACHINE))
        for line in forms_table(options.size, options.forms, options.ranks, options.step_at):
            print(line, flush=True)
    if options.table != "forms":
        print("\n" + _OPTIMIZERS.format(rank=_RANK))
        for line in optimizers_table(options.size, options.ranks, options.step_at):
            print(line, flush=True)


if __name__ == "__main__":
    main()
