"""What the ranks of tests do with optimizers that update during the backward pass."""

import types
from pathlib import Path

import torch
import torch.distributed as dist
from fused_models import Shapes, Tied, build, loss_of, weights_of
from torch import nn

from tr_optim import AdaLomo, Lomo
from tr_optim.engine import averaging


class Ranks:
    """Who this process is among the others, by torch alone."""

    def __init__(self):
        self.device, self.rank, self.world_size = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
        self.local_rank, self.num_sums = self.rank, 0

    def sum(self, tensor):
        self.num_sums += 1
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather_objects(self, value):
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


class Branches(nn.Module):
    """Uses one of two layers, and lists its layers in another order than it calls them."""

    def __init__(self):
        super().__init__()
        self.last, self.right, self.left, self.first = (nn.Linear(6, 6) for _ in range(4))
        self.idle = nn.Linear(6, 6)

    def forward(self, inputs):
        inputs, is_left = inputs
        return self.last(torch.tanh((self.left if is_left else self.right)(torch.tanh(self.first(inputs)))))

    @staticmethod
    def batch(step, rank, world_size):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        return torch.randn(4, 6, generator=generator), (step + rank) % 3 == 0


def part(kind, step, rank, world_size):
    if kind is Branches:
        return Branches.batch(step, rank, world_size)
    return kind.batch(step, 6 * world_size)[6 * rank : 6 * (rank + 1)]


SCENARIOS = {
    "lomo": (Lomo, Shapes, {"lr": 0.3}),
    "lomo clipped": (Lomo, Shapes, {"lr": 0.3, "clip_grad_norm": 0.4}),
    "lomo tied": (Lomo, Tied, {"lr": 0.2, "clip_grad_norm": 0.4}),
    "lomo branches": (Lomo, Branches, {"lr": 0.3, "weight_decay": 0.1}),
    "lomo branches clipped": (Lomo, Branches, {"lr": 0.3, "weight_decay": 0.1, "clip_grad_norm": 0.1}),
    "lomo stored": (Lomo, Shapes, {"lr": 0.3, "accumulate": "store", "clip_grad_norm": 0.4}),
    "adalomo": (AdaLomo, Shapes, {"lr": 2e-2}),
    "adalomo clipped": (AdaLomo, Shapes, {"lr": 2e-2, "clip_grad_norm": 0.4}),
    "adalomo branches": (AdaLomo, Branches, {"lr": 2e-2, "weight_decay": 0.1}),
}
STEPS = 5


def run_scenario(name, ranks):
    """Train as one rank, or, without ranks, with the mean loss of what two would have."""
    optimizer_kind, kind, options = SCENARIOS[name]
    model = build(kind, reentrant=True) if kind is Tied and ranks is not None else build(kind)
    optimizer = optimizer_kind(model.parameters(), **options)
    norms, clip = [], options.get("clip_grad_norm")
    if isinstance(ranks, Ranks):
        optimizer.bind(ranks)
        mine, world_size = [ranks.rank], ranks.world_size
    else:
        mine, world_size = range(ranks or 2), ranks or 2
    for step in range(STEPS):
        losses = [loss_of(model, part(kind, step, rank, world_size)) for rank in mine]
        if options.get("accumulate") == "store":
            optimizer.backward(sum(losses) / len(losses) / 2, last=False)
            losses = [loss_of(model, part(kind, step + 100, rank, world_size)) / 2 for rank in mine]
        optimizer.backward(sum(losses) / len(losses))
        norms.append(optimizer.clip_grad_norm(clip).item())
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return {"weights": weights_of(model), "norms": norms, "states": states}


def train_as_rank(rank, world_size, folder):
    join(rank, world_size, folder)
    averaging._ALONE = 20
    ranks, results = Ranks(), {}
    for name in SCENARIOS:
        results[name] = run_scenario(name, ranks)
    results["half"] = half_precision(ranks)
    results["one bad"] = one_bad_rank(ranks)
    results["unbound"] = unbound()
    results["exchanges"] = exchanges(ranks)
    # As where torch's process group is not what carries values.
    averaging.dist = types.SimpleNamespace(is_initialized=lambda: False)
    results["through sum"] = run_scenario("lomo clipped", ranks)
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def join(rank, world_size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "meet")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def half_precision(ranks):
    model = build().bfloat16()
    optimizer = AdaLomo(model.parameters(), lr=2e-2, clip_grad_norm=0.4)
    optimizer.bind(ranks)
    for step in range(STEPS):
        optimizer.backward(loss_of(model, part(Shapes, step, ranks.rank, ranks.world_size).bfloat16()))
        optimizer.step()
    return weights_of(model)


def one_bad_rank(ranks):
    """Return weights after steps that are not finite on rank 1 alone, in the gradient or in the loss."""
    model, found = build(), []
    optimizer = Lomo(model.parameters(), lr=0.1, nonfinite="skip_step")
    optimizer.bind(ranks)
    for add, times in ((0.0, 1.0), (torch.inf, 1.0), (0.0, torch.nan)):
        loss = loss_of(model, part(Shapes, 0, ranks.rank, ranks.world_size))
        optimizer.backward(loss * times + add if ranks.rank == 1 else loss)
        optimizer.step()
        found.append(weights_of(model))
    return found


def unbound():
    model = build()
    try:
        Lomo(model.parameters()).backward(loss_of(model, model.batch(0)))
    except RuntimeError as error:
        return str(error)


def exchanges(ranks):
    """Count what travels in a step, and how many gradients wait for their turn."""
    model = build(Branches)
    optimizer = Lomo(model.parameters(), lr=0.1)
    optimizer.bind(ranks)
    counts, all_reduce = [], dist.all_reduce
    for _ in range(3):
        calls, waiting = [], []

        def counted(*args, calls=calls, waiting=waiting, **kwargs):
            if kwargs.get("async_op"):
                calls.append("one")
                waiting.append(sum(g.numel() >= averaging._ALONE for g in optimizer._average._waiting.values()))
            return all_reduce(*args, **kwargs)

        ranks.num_sums = 0
        averaging.dist.all_reduce = counted
        try:
            optimizer.backward(loss_of(model, (torch.ones(4, 6), True)))
        finally:
            averaging.dist.all_reduce = all_reduce
        optimizer.step()
        counts.append((len(calls), ranks.num_sums, max(waiting)))
    return counts
