"""What the ranks of tests do with APOLLO and Fira on parameters that FSDP2 divides over them."""

from unittest import mock

import torch.distributed as dist
from shard_models import batch, build, described, exchanges, goes_on_alike, shard, weights_of, whole_states
from shard_workers import STEPS, projected_groups
from torch.distributed.device_mesh import init_device_mesh

from tr_optim import APOLLOAdamW, FiraAdamW
from tr_optim.engine import updates

# Of a seed by which no channel's projection is so small that its rounding would count as much as the others' values.
APOLLO = {"kind": APOLLOAdamW, "seed": 1}
MINI = {**APOLLO, "rank": 1, "scale_type": "tensor", "scale": 16.0}
FIRA = {"kind": FiraAdamW}

TRAINED = {
    "apollo": APOLLO,
    "apollo, other side": {**APOLLO, "proj_type": "reverse_std"},
    "apollo left": {**APOLLO, "proj_type": "left"},
    "apollo right, clipped": {**APOLLO, "proj_type": "right"},
    "apollo left immediate": {**APOLLO, "proj_type": "left", "mode": "immediate"},
    "apollo right immediate, clipped": {**APOLLO, "proj_type": "right", "mode": "immediate"},
    "apollo accumulated": APOLLO,
    "apollo accumulated immediate, clipped": {**APOLLO, "mode": "immediate"},
    "apollo by svd": {**APOLLO, "proj": "svd", "proj_type": "left"},
    "apollo by subspace": {**APOLLO, "proj": "subspace", "proj_type": "left"},
    "apollo unlimited": {**APOLLO, "norm_growth": None},
    "apollo partly": {**APOLLO, "proj_type": "left"},
    "apollo partly immediate, clipped": {**APOLLO, "proj_type": "left", "mode": "immediate"},
    "apollo as upstream": {**APOLLO, "compat": "apollo-torch"},
    "apollo not finite": APOLLO,
    "mini": MINI,
    "mini left": {**MINI, "proj_type": "left"},
    "mini right": {**MINI, "proj_type": "right"},
    "mini right immediate": {**MINI, "proj_type": "right", "mode": "immediate"},
    "fira": FIRA,
    "fira, other side": {**FIRA, "proj_type": "reverse_std"},
    "fira left": {**FIRA, "proj_type": "left"},
    "fira right, clipped": {**FIRA, "proj_type": "right"},
    "fira left immediate, clipped": {**FIRA, "proj_type": "left", "mode": "immediate"},
    "fira right immediate": {**FIRA, "proj_type": "right", "mode": "immediate"},
    "fira immediate, beside a matrix": {**FIRA, "mode": "immediate", "but": ("second.weight",)},
    "fira accumulated": FIRA,
    "fira accumulated immediate, clipped": {**FIRA, "mode": "immediate"},
    "fira by svd": {**FIRA, "method": "svd"},
    "fira partly": {**FIRA, "proj_type": "left"},
    "fira partly immediate, clipped": {**FIRA, "proj_type": "left", "mode": "immediate"},
    "fira not finite": FIRA,
}
# Of rows that four ranks divide, some have none; and as two replicas of what two ranks divide.
ON_FOUR = (
    "apollo",
    "apollo left",
    "apollo accumulated immediate, clipped",
    "mini left",
    "mini right",
    "fira",
    "fira left immediate, clipped",
)

_OF_GROUPS = ("rank", "scale", "proj", "proj_type", "scale_type", "norm_growth", "update_proj_gap", "but")


def made(model, name, **others):
    options = {**TRAINED[name], **others}
    kind = options.pop("kind")
    projection = {option: options.pop(option) for option in _OF_GROUPS if option in options}
    # A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
    return kind(projected_groups(model, **projection), 1e-2, **{"eps": 1e-3, "weight_decay": 0.1, **options})


def begin(name, ranks, mesh=None, **others):
    """Return a model and its optimizer; without ranks, of whole parameters."""
    model = build()
    if ranks is not None:
        shard(model, mesh=mesh, but="second" if "partly" in name else None)
    optimizer = made(model, name, **others)
    if ranks is not None:
        optimizer.bind(ranks)
    return model, optimizer


def train(name, model, optimizer, ranks, first=0, last=STEPS):
    """Make some steps and return the norms that were measured."""
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    norms, parts = [], 2 if "accumulated" in name else 1
    max_norm = 0.05 if "clipped" in name else None
    for step in range(first, last):
        optimizer.clip_to(max_norm)
        for number in range(parts):
            is_spoiled = "not finite" in name and step == 3 and rank == world_size - 1
            loss = model(batch(10 * step + number, rank, world_size), is_spoiled=is_spoiled) / parts
            optimizer.backward(loss, last=number == parts - 1)
        if optimizer.mode == "step":
            average_whole(model, world_size)
        norms.append(optimizer.clip_grad_norm(max_norm).item())
        if norms[-1] < float("inf"):
            optimizer.step()
        optimizer.zero_grad()
    return norms


def average_whole(model, world_size):
    """Do for whole parameters beside those in shards what a wrapper does."""
    for parameter in model.parameters():
        if world_size > 1 and not hasattr(parameter, "placements") and parameter.grad is not None:
            dist.all_reduce(parameter.grad.div_(world_size))


def run(name, ranks, mesh=None):
    model, optimizer = begin(name, ranks, mesh)
    norms = train(name, model, optimizer, ranks)
    assert not optimizer.norm_is_estimated
    return described(model, optimizer, ranks, norms)


RESUMED = ("apollo left", "apollo right immediate, clipped", "mini", "apollo by svd", "fira", "fira, other side")


def resume(name, ranks):
    """Return a state, and whether an optimizer that got it, as it is or whole, goes on with the same bits."""
    found = {}
    for how in ("as it is", "whole"):
        model, optimizer = begin(name, ranks)
        train(name, model, optimizer, ranks, 0, 3)
        saved = optimizer.state_dict()
        if how == "whole":  # as from a checkpoint of another number of ranks
            found["states"], found["weights"] = whole_states(optimizer), weights_of(model)
            saved = {**saved, "state": found["states"]}

        def go_on(model, optimizer):
            train(name, model, optimizer, ranks, 3, STEPS)

        found[how] = goes_on_alike((model, optimizer), begin(name, ranks), saved, go_on)
    found["end"] = weights_of(model)
    return found


def go_on_alone(name, found):
    """Return the weights that one process ends with, from a state of several."""
    model, optimizer = begin(name, None)
    model.load_state_dict(found["weights"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": found["states"]})
    train(name, model, optimizer, None, 3, STEPS)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# What is exchanged in a step that finds no basis, beside what FSDP2 does itself.
EXCHANGES = (
    "apollo left",
    "apollo right, clipped",
    "mini left",
    "mini right",
    "fira, other side",
    "fira left",
    "fira left immediate, clipped",
)


def exchanges_of(name, ranks):
    return exchanges(*begin(name, ranks, update_proj_gap=100))


def reckoned(name, ranks):
    """Return the bytes of this rank's state, those that were expected, and whether random numbers are kept in it."""
    model, optimizer = begin(name, ranks)
    expected = optimizer.expected_bytes()[1]
    train(name, model, optimizer, ranks, 0, 1)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    kept = [value.untyped_storage().nbytes() for value in tensors]
    basis = optimizer._bases._last[1]
    numbers = [side for side in (basis.left, basis.right) if side is not None]
    return expected, sum(kept), all(n.untyped_storage().nbytes() == n.numel() * n.element_size() for n in numbers)


def train_all(ranks):
    found = {name: run(name, ranks) for name in TRAINED}
    found["resumed"] = {name: resume(name, ranks) for name in RESUMED}
    found["exchanges"] = {name: exchanges_of(name, ranks) for name in EXCHANGES}
    found["reckoned"] = {name: reckoned(name, ranks) for name in ("apollo left", "apollo")}
    with mock.patch.object(updates, "_TOGETHER", 40):  # parts of 27 and 95 numbers wait together, then of 13 and 3
        found["few at a time"] = {**run("fira left", ranks), "exchanges": exchanges_of("fira left", ranks)}
    return found


def train_on_four(ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "rows"))
    return {
        f"{name}{how}": run(name, ranks, mesh=mesh_of_it)
        for how, mesh_of_it in (("", None), (" in replicas", mesh))
        for name in ON_FOUR
    }
