"""What the processes that tests of sharded state start do, and how they are started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckpt_workers import checkpointer
from torch import nn

from tr_ckpt import CheckpointError, RNGState, shard_index, tensor_file
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.sharded import stateful

trains_sharded = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="fully_shard trains on the CPU from torch 2.7 on"
)

ROWS = 12  # of a batch: 1, 2, 3 and 4 ranks take equal shares of it


class Net(nn.Module):
    """Sides of 5, 3 and 1 rows: uneven shards, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(self.norm.weight * torch.tanh(self.first(x)))))


def build(seed: int, *, lr: float = 0.05) -> tuple[Net, torch.optim.Optimizer]:
    """A plain model and its optimizer, whose parameters are not in the model's order."""
    torch.manual_seed(seed)
    model = Net()
    return model, optimizer_of(model, lr=lr)


def optimizer_of(model: nn.Module, *, lr: float = 0.05) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=lr)


def shard(model: nn.Module, mesh: Any = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if not isinstance(layer, nn.BatchNorm1d):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build_sharded(seed: int, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(Net(), mesh)
    return model, optimizer_of(model)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1000 + step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on this rank's share of each batch and return the losses of the whole batches."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)[rank::world_size]).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def whole(state: Any) -> Any:
    """A copy of a state with every DTensor made whole, without the order of its names."""
    if isinstance(state, dict):
        return {key: whole(state[key]) for key in sorted(state, key=str)}
    if isinstance(state, list | tuple):
        return [whole(value) for value in state]
    if isinstance(state, torch.Tensor):
        return state.full_tensor().clone() if hasattr(state, "full_tensor") else state.clone()
    return state


def in_format_1(index: shard_index.Index) -> dict[str, Any]:
    """Return the content of an index that lists the chunks of every tensor."""
    tensors = {}
    for name, saved in index.items():
        chunks = [{"file": chunk.file, "offset": chunk.offset, "size": chunk.size} for chunk in saved.chunks]
        dtype = tensor_file.DTYPES[saved.dtype]
        tensors[name] = {"dtype": dtype, "shape": saved.shape, "distributed": saved.distributed, "chunks": chunks}
    return {"format": 1, "tensors": tensors}


def keep(path: str | Path, value: Any) -> None:
    """Keep what rank 0 found for the test to read."""
    if dist.get_rank() == 0:
        torch.save(value, path)


def train_save_and_train_on(directory: str, named: bool) -> None:
    """3 steps, a checkpoint, and 3 more: the run left alone."""
    model, optimizer = build_sharded(1)
    parts = stateful(model, optimizer) if named else {"model": model, "optimizer": optimizer}
    losses = train(model, optimizer, range(3))
    at_save = whole(stateful(model, optimizer)["optimizer"].state_dict())
    checkpointer(directory).save(3, {**parts, "rng": RNGState()})
    losses += train(model, optimizer, range(3, 6))
    weights = whole(model.state_dict())
    keep(f"{directory}.truth", {"losses": losses, "weights": weights, "optimizer": at_save})


def restore_and_train_on(directory: str, named: bool) -> None:
    """Begin otherwise, restore, and do the last 3 steps."""
    model, optimizer = build_sharded(2)
    parts = stateful(model, optimizer) if named else {"model": model, "optimizer": optimizer}
    assert checkpointer(directory).restore(parts) == 3
    restored = whole(stateful(model, optimizer)["optimizer"].state_dict())
    losses = train(model, optimizer, range(3, 6))
    weights = whole(model.state_dict())
    keep(f"{directory}.{dist.get_world_size()}", {"losses": losses, "weights": weights, "optimizer": restored})


class Counted(CheckpointReader):
    """Files that note how much was taken out of them."""

    taken: list[int] = []

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        Counted.taken.append(self.bytes_read)


class Holder:
    """A part that is nothing but tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"held": [dict(self.tensors)], "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["count"] == 3
        [held] = state["held"]
        assert list(held) == list(self.tensors)
        for name, tensor in self.tensors.items():
            assert type(held[name]) is type(tensor), name
            tensor.copy_(held[name])


SHAPES = {"even": (8, 4), "uneven": (5, 7), "few": (2, 3), "row": (1, 6), "cube": (3, 5, 4), "none": (0, 4), "one": ()}
# gloo sends complex numbers from torch 2.9 on.
EVEN = torch.complex64 if torch.__version__ >= (2, 9) else torch.float64
DTYPES = {"cube": torch.bfloat16, "few": torch.int64, "row": torch.bool, "even": EVEN}


def numbers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: (torch.randn(shape, generator=generator) * 8).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def laid_out(layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Spread tensors over all ranks of this group: `0`, `1` or `r` (replicated) for each dimension of a mesh.

    `plain` makes no DTensors, `half` spreads over the first half of the ranks, `fsdp+tp` is what `fully_shard` makes of
    what is tensor-parallel in the same dimension.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world_size = dist.get_world_size()
    if layout == "plain":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    if layout == "fsdp+tp":
        return fsdp_and_tensor_parallel(tensors)
    if layout == "half":
        mesh, dims = DeviceMesh("cpu", list(range(world_size // 2))), "0"
    else:
        mesh = init_device_mesh("cpu", (world_size,) if len(layout) == 1 else (2, world_size // 2))
        dims = layout
    spread = {}
    for name, tensor in tensors.items():
        wanted = [Replicate() if dim == "r" or int(dim) >= tensor.ndim else Shard(int(dim)) for dim in dims]
        spread[name] = distribute_tensor(tensor.clone(), mesh, wanted)
    return spread


def fsdp_and_tensor_parallel(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
            # fully_shard of torch 2.9 divides no parameter that could not have a gradient
            module.register_buffer(name, tensor.clone())
        else:
            spread = distribute_tensor(tensor.clone(), mesh["tp"], [Shard(0)])
            module.register_parameter(name, nn.Parameter(spread, requires_grad=False))
    fully_shard(module, mesh=mesh["dp"])
    state = module.state_dict()
    return {name: state[name] for name in tensors}


def save_in(directories: dict[str, str]) -> None:
    for layout, directory in directories.items():
        checkpointer(directory).save(1, {"held": Holder(laid_out(layout, numbers()))})


def restore_in(layouts: list[str], directories: list[str]) -> None:
    """Load each checkpoint into each layout and compare whole tensors."""
    expected = numbers()
    for layout in layouts:
        for directory in directories:
            held = Holder(laid_out(layout, {name: torch.zeros_like(tensor) for name, tensor in expected.items()}))
            assert checkpointer(directory).restore({"held": held}) == 1
            for name, tensor in held.tensors.items():
                if not hasattr(tensor, "full_tensor"):
                    assert torch.equal(tensor, expected[name]), (layout, directory, name)
                elif tensor.device_mesh.get_coordinate() is not None:
                    assert torch.equal(tensor.full_tensor(), expected[name]), (layout, directory, name)


class Buffers(nn.Module):
    """A module that is nothing but tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def restore_whole_in(layouts: list[str], directory: str) -> None:
    """Load what one process saved whole into modules in each layout."""
    expected = numbers()
    for layout in layouts:
        module = Buffers(laid_out(layout, {name: torch.zeros_like(tensor) for name, tensor in expected.items()}))
        assert checkpointer(directory).restore({"held": module}) == 1
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, expected[name])


def restore_trained_whole(directory: str, by_name: bool) -> None:
    """Go on, sharded, from what one process without a mesh saved, by the names or the numbers of parameters."""
    for named in (True, False):
        model, optimizer = build_sharded(2)
        parts = stateful(model, optimizer) if named else {"model": model, "optimizer": optimizer}
        if by_name and not named:
            with pytest.raises(
                CheckpointError, match="'state.*exp_avg' is of no parameter of this optimizer.*stateful"
            ):
                checkpointer(directory).restore(parts)
            continue
        assert checkpointer(directory).restore(parts) == 3
        held = optimizer.state[model.first.weight]
        assert {name: hasattr(value, "placements") for name, value in held.items()} == {
            "step": False, "exp_avg": True, "exp_avg_sq": True,
        }  # fmt: skip
        restored = whole(stateful(model, optimizer)["optimizer"].state_dict())
        losses = train(model, optimizer, range(3, 6))
        keep(f"{directory}.{named}", {"losses": losses, "weights": whole(model.state_dict()), "optimizer": restored})


def run_script(source: str, directory: str) -> None:
    """Run a script in this rank of a group that is there already."""
    os.chdir(directory)
    exec(compile(source, "script", "exec"), {"__name__": "__main__"})


def save_and_restore_tied(directory: str) -> None:
    """Tie two weights of 2 rows on 3 ranks: on the last, which holds nothing of them, nothing shows that."""
    from torch.distributed.fsdp import fully_shard

    def build_tied(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        return fully_shard(model)

    model = build_tied(3.0)
    checkpointer(directory).save(1, {"model": model})
    for target in (build_tied(0.0), fully_shard(nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2, bias=False)))):
        assert checkpointer(directory).restore({"model": target}) == 1
        for name in ("0.weight", "1.weight"):
            assert torch.equal(target.state_dict()[name].full_tensor(), torch.full((2, 4), 3.0))


class RowScaled(torch.optim.Optimizer):
    """Scale each row of a weight's gradient by a running mean of its squares: a state of another shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                squares = parameter.grad.square().mean(dim=-1)
                if not state:
                    state["rows"] = torch.zeros_like(squares)
                    state["numbers"] = torch.zeros(3)
                state["rows"].mul_(0.9).add_(squares, alpha=0.1)
                state["numbers"] += 1
                parameter.sub_(parameter.grad / (state["rows"].sqrt().unsqueeze(-1) + 0.1), alpha=group["lr"])


def row_scaled(seed: int, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(Net()) if sharded else Net()
    return model, RowScaled([model.first.weight, model.second.weight])


def train_with_rows(directory: str) -> None:
    model, optimizer = row_scaled(1, True)
    train(model, optimizer, range(3))
    checkpointer(directory).save(3, stateful(model, optimizer))
    keep(f"{directory}.truth", train(model, optimizer, range(3, 6)))


def go_on_with_rows(directory: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    model, optimizer = row_scaled(2, True)
    checkpointer(directory).restore(stateful(model, optimizer))
    held = optimizer.state[model.first.weight]
    assert isinstance(held["rows"], DTensor)
    assert held["rows"].placements == (Replicate(),)
    assert type(held["numbers"]) is torch.Tensor
    keep(f"{directory}.{dist.get_world_size()}", train(model, optimizer, range(3, 6)))
    # An optimizer that has its state already says itself how it is laid out.
    model, optimizer = row_scaled(2, True)
    train(model, optimizer, range(1))
    before = optimizer.state[model.first.weight]["rows"].placements
    checkpointer(directory).restore(stateful(model, optimizer))
    assert optimizer.state[model.first.weight]["rows"].placements == before
    keep(f"{directory}.{dist.get_world_size()}.begun", train(model, optimizer, range(3, 6)))
