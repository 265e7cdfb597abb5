"""A model whose parameters ranks divide, what is looked at of it, and how processes are started."""

import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from fused_workers import Ranks, join
from torch import nn
from torch.distributed.fsdp import fully_shard

ROWS = 12  # of a batch: 1, 2, 3 and 4 ranks have equal shares of it


class Shapes(nn.Module):
    """Has rows that ranks cannot share evenly, fewer of them than ranks, a stack, and four dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.experts = Experts(3, 9, 7)
        self.convolution = nn.Conv2d(1, 5, 3)  # (5, 1, 3, 3)
        self.second = nn.Linear(5, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, inputs, *, is_spoiled=False):
        """Return a loss; a spoiled one has an infinite gradient in the last row of `second`, and nowhere else."""
        hidden = self.experts(torch.tanh(self.first(inputs)))  # (n, 21)
        image = nn.functional.pad(hidden, (0, 4)).unflatten(1, (1, 5, 5))
        hidden = torch.tanh(self.convolution(image)).flatten(2).mean(2)  # (n, 5)
        *hidden, extra = self.second(torch.cat([hidden, torch.ones(1, 5, dtype=hidden.dtype)]))
        loss = (self.last(torch.tanh(torch.stack(hidden))) - inputs[:, :1]).square().mean()
        return loss + (extra[-1] - extra[-1].detach()).sqrt() if is_spoiled else loss


class Experts(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / 3)

    def forward(self, inputs):
        return torch.einsum("ni,eij->nej", inputs, self.weight).flatten(1).clone()


def build():
    torch.manual_seed(0)
    return Shapes()


def batch(step, rank=0, world_size=1):
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))
    return rows[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]


def shard(model, *, mesh=None, but=None):
    """Divide all parameters, of several layers together; or those of all layers but one."""
    if but is None:
        fully_shard(model.first, mesh=mesh)
        fully_shard(model.second, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    for name, layer in model.named_children():
        if name != but:
            fully_shard(layer, mesh=mesh)
    return model


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights_of(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same_bits_on_all(tensor):
    """Whether every rank has the same of a tensor that all have."""
    own = local(tensor).detach()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(own, other) for other in found)


def replicated(optimizer, model):
    """Return what all ranks have of a state and of weights."""
    tensors = [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    return [t for t in [*tensors, *model.parameters()] if not any(p.is_shard() for p in getattr(t, "placements", ()))]


def placements(state):
    return {n: {k: str(getattr(v, "placements", None)) for k, v in values.items()} for n, values in state.items()}


def whole_states(optimizer):
    state = optimizer.state_dict()["state"]
    return {number: {name: whole(value) for name, value in values.items()} for number, values in state.items()}


def described(model, optimizer, ranks, norms):
    found = {"weights": weights_of(model), "norms": norms, "states": whole_states(optimizer)}
    if ranks is not None:
        found["equal"] = all(map(same_bits_on_all, replicated(optimizer, model)))
        found["placements"] = placements(optimizer.state_dict()["state"])
    return found


def goes_on_alike(pair, other, saved, train):
    """Whether another model and optimizer, with a saved state of a pair, end with the bits that the pair ends with."""
    (model, optimizer), (twin, resumed) = pair, other
    twin.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    resumed.load_state_dict(saved)
    train(model, optimizer)
    train(twin, resumed)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.equal(local(first), local(second)) for first, second in pairs)


def exchanges(model, optimizer):
    """Return the number of numbers of each exchange of the second step, beside what FSDP2 does itself."""
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    for step in range(2):
        sizes.clear()
        with mock.patch.object(dist, "all_reduce", counted):
            optimizer.backward(model(batch(step, dist.get_rank(), dist.get_world_size())))
            optimizer.step()
        optimizer.zero_grad()
    return sizes


def run(world_size, work, *arguments, limit_s=200):
    """Return what `work(ranks, *arguments)` returned in each of so many processes."""
    if torch.__version__ < (2, 7):
        pytest.skip("fully_shard trains on the CPU from torch 2.7 on")
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            _enter, (world_size, folder, work, arguments), nprocs=world_size, join=False, start_method="forkserver"
        )
        end = time.monotonic() + limit_s
        try:
            while not context.join(timeout=max(0.0, end - time.monotonic())):
                assert time.monotonic() < end, f"{work.__name__} took longer than {limit_s} s"
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world_size)]


def _enter(rank, world_size, folder, work, arguments):
    join(rank, world_size, folder)
    torch.save(work(Ranks(), *arguments), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
