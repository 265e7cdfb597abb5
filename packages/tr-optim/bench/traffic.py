"""Count the bytes that ranks give to all-reduce in each step: two processes, real exchanges, each of them counted.

DDP reduces the whole gradients, in buckets. GaLore in the mode `deferred` reduces projections. The mean gradient is
never formed; where its norm is asked for, to clip by or to log, it is estimated, for which a sketch of 64 x 64 numbers
is reduced, 16 KiB whatever the model. A matrix that gets a new basis exchanges what that takes as well; matrices take
turns. Only matrices are in the model, so that the figures are those of projected parameters; others are reduced whole.

Run: python traffic.py [--small]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import build, update, write_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GOAL, USUAL_GAP = 0.25, 200
WORLD_SIZE = 2
SIZES = {"usual": (1024, 4096), "small": (128, 512)}
GALORE = "galore_adamw_layerwise"
WITHOUT_NORM = " without a norm"
CONTESTANTS = (
    *("adamw under DDP", GALORE + WITHOUT_NORM, GALORE, f"{GALORE}:exchange_dtype=bfloat16"),
    *(f"{GALORE}:reduction=whole", "lomo", "adalomo"),
)


class Counted:
    """Who this process is among the others, as optimizers need it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = self.rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather_objects(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


class Layers(nn.Module):
    """Eight matrices of three shapes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        shapes = [(width, width), (width, inner), (inner, width), (width, width)] * 2
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def count(name: str, size: str, steps: int, gap: int, clip: float) -> list[int]:
    """Train as one rank; return the bytes that this rank has given to all-reduce in each step."""
    width, inner = SIZES[size]
    torch.manual_seed(0)
    model = Layers(width, inner)
    given = [0]

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given[0] += tensor.nbytes
        return whole(tensor, *args, **kwargs)

    whole, dist.all_reduce = dist.all_reduce, counting
    if name.endswith("DDP"):
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), 1e-3)

        def hook(state, bucket):  # DDP refuses annotations that are strings
            given[0] += bucket.buffer().nbytes
            work = whole(bucket.buffer().div_(WORLD_SIZE), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        wrapped.register_comm_hook(None, hook)
    else:
        wrapped, optimizer = model, build(name, model, 1e-3, rank=width // 4, gap=gap, clip=clip)
        optimizer.bind(Counted())
    found = []
    for step in range(steps):
        torch.manual_seed(step * WORLD_SIZE + dist.get_rank())
        given[0] = 0
        update(optimizer, model, wrapped(torch.randn(4, width)), clip)
        found.append(given[0])
    dist.all_reduce = whole
    return found


def work(rank: int, folder: str, measured: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    above = Path(folder)
    meet = f"file://{above / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=120))
    (above / f"{rank}.json").write_text(json.dumps(count(*measured)))
    dist.barrier()
    os._exit(0)  # without gloo's threads being taken down, in which torch 2.13 sometimes aborts


def on_two_ranks(measured: tuple[Any, ...]) -> list[int]:
    """Return what each step gave on both ranks, which is to be the same."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, folder, measured)) for rank in range(WORLD_SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
            if rank.exitcode is None:
                rank.terminate()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"error: counting {measured[0]} failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    if found[0] != found[1]:
        raise SystemExit(f"error: ranks gave different amounts in {measured[0]}: {found}")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small matrices, to try this script")
    parser.add_argument("--gap", type=int, default=16, help="steps from one basis of a matrix to the next (default 16)")
    parser.add_argument("--optimizers", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    shares = {}
    size = "small" if options.small else "usual"
    width, inner = SIZES[size]
    elements = sum(p.numel() for p in Layers(width, inner).parameters())
    print(
        f"{WORLD_SIZE} processes, gloo; 8 matrices: {width} x {width}, {inner} x {width}, {width} x {inner}; float32, "
        f"rank {width // 4}.\nShare of the {elements * 4 / 2**20:.0f} MiB of whole gradients that a rank gives to "
        f"all-reduce; a mean is that over update_proj_gap={USUAL_GAP}.\n"
    )
    print(f"  {'':40}{'first step':>12}{'a step':>10}{'with a new basis':>18}{'mean':>9}")
    for name in options.optimizers:
        clip = 0.0 if "lomo" in name or WITHOUT_NORM in name else 1.0
        found = on_two_ranks((name.removesuffix(WITHOUT_NORM), size, 1 + options.gap, options.gap, clip))
        first, *cycle = (given / (elements * 4) for given in found)
        # In one cycle every matrix gets one new basis.
        mean = min(cycle) + (sum(cycle) / len(cycle) - min(cycle)) * options.gap / USUAL_GAP
        shares[name] = {"first_step": first, "step": min(cycle), "step_with_new_basis": max(cycle), "mean": mean}
        renewed = f"{max(cycle):.4f}" if max(cycle) > min(cycle) else ""
        print(f"  {name:40}{first:12.5f}{min(cycle):10.5f}{renewed:>18}{mean:9.4f}", flush=True)
    print(
        f"\nThe goal is {GOAL} in a step. The sketch for the norm, 16 KiB in any model, is "
        f"{64 * 64 / elements:.5f} here, and {64 * 64 / 6.7e9:.0e} with 6.7 billion parameters."
    )
    write_json(options.json, {"elements": elements, "gap": USUAL_GAP, "goal": GOAL, "shares": shares})


if __name__ == "__main__":
    main()
