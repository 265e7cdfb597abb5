"""What the ranks of tests do with moments in 8 bits of parameters that FSDP2 divides over them."""

import torch.distributed as dist
from fused_workers import Ranks
from shard_models import batch, build, goes_on_alike, placements, shard, weights_of, whole_states
from shard_workers import projected_groups

from tr_optim import AdamW8bit, GaLoreAdamW8bit

STEPS = 6


def galore(model, **options):
    projection = {name: options.pop(name) for name in ("proj_type",) if name in options}
    how = {"mode": "deferred", "eps": 1e-3, "weight_decay": 0.1, "min_8bit_size": 0, **options}
    return GaLoreAdamW8bit(projected_groups(model, **projection), 1e-2, **how)


# A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
KINDS = {
    "adamw": lambda model: AdamW8bit(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.1, min_8bit_size=0),
    "adamw of some": lambda model: AdamW8bit(model.parameters(), 1e-2, eps=1e-3, min_8bit_size=40),
    "left": lambda model: galore(model, proj_type="left"),
    "right": lambda model: galore(model, proj_type="right"),
    "full in step": lambda model: galore(model, proj_type="full", mode="step"),
}


def train(model, optimizer, first, last, rank=0, world_size=1):
    in_backward = getattr(optimizer, "fused_in_backward", False)
    for step in range(first, last):
        loss = model(batch(step, rank, world_size))
        if in_backward:
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def begin(name):
    model = shard(build())
    optimizer = KINDS[name](model)
    if hasattr(optimizer, "bind"):
        optimizer.bind(Ranks())
    return model, optimizer


def dtypes_differ(optimizer):
    """Whether a state is in 8 bits on some ranks only."""
    own = [str(value.dtype) for state in optimizer.state.values() for _, value in sorted(state.items())]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return any(other != own for other in found)


def train_all(ranks):
    def go_on(model, optimizer):
        train(model, optimizer, 4, STEPS, ranks.rank, ranks.world_size)

    found = {}
    for name in KINDS:
        model, optimizer = begin(name)
        train(model, optimizer, 0, 4, ranks.rank, ranks.world_size)
        saved = optimizer.state_dict()
        found[name] = {
            "middle": {"weights": weights_of(model), "states": whole_states(optimizer)},
            "layout": placements(saved["state"]),
            "differ": dtypes_differ(optimizer),
        }
        found[name]["same layout"] = goes_on_alike((model, optimizer), begin(name), saved, go_on)
        found[name]["weights"] = weights_of(model)
        # As from a checkpoint of another number of ranks, where whole tensors are read.
        model, optimizer = begin(name)
        train(model, optimizer, 0, 4, ranks.rank, ranks.world_size)
        gathered = {**optimizer.state_dict(), "state": whole_states(optimizer)}
        found[name]["whole"] = goes_on_alike((model, optimizer), begin(name), gathered, go_on)
    return found
