"""A small model under GaLore, alone and on ranks that were not told of each other."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tr_optim import GaLoreAdamW


def build(dtype=torch.float32, mode="deferred"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)).to(dtype)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return model, GaLoreAdamW([{"params": matrices, "rank": 4}, {"params": others}], 1e-2, mode=mode)


def batch(seed=0):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))


def train(rank, folder):
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    words = "2 ranks train together, and GaLoreAdamW would apply the gradients of each rank alone; call optimizer.bind"
    for mode in ("deferred", "immediate"):
        model, optimizer = build(mode=mode)
        with pytest.raises(RuntimeError, match=words):
            optimizer.backward(model(batch(rank)).square().mean())
    dist.barrier()
    dist.destroy_process_group()
