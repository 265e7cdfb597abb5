"""How much of whole gradients a rank of `svd` gathers where parameters are divided over ranks."""

import weakref

import torch.distributed as dist
from fused_workers import Ranks
from shard_models import batch, build, shard
from torch.distributed.tensor import DTensor

from tr_optim import GaLoreAdamW, find_targets


def gathered_by_svd():
    """Return how many whole gradients each of two steps gathers, and how many of them are ever there at once."""
    model, gathered, at_once, counts = shard(build()), [], 0, []
    matrices = [p for p in find_targets(model, "all-linear").parameters.values() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "rank": 3, "update_proj_gap": len(matrices)}, {"params": others}]
    optimizer = GaLoreAdamW(groups, 1e-2, mode="deferred", method="svd")
    optimizer.bind(Ranks())
    full_tensor = DTensor.full_tensor

    def counted(self, *args, **kwargs):
        nonlocal at_once
        whole = full_tensor(self, *args, **kwargs)
        gathered.append(weakref.ref(whole))
        at_once = max(at_once, sum(reference() is not None for reference in gathered))
        return whole

    DTensor.full_tensor = counted
    try:
        for step in range(2):
            gathered.clear()
            optimizer.backward(model(batch(step, dist.get_rank(), dist.get_world_size())))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(gathered))
    finally:
        DTensor.full_tensor = full_tensor
    return len(matrices), counts, at_once
