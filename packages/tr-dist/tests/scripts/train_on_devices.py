"""Train a small model by a loop of its own and print what came of it: train_on_devices.py STRATEGY PRECISION [cpu]."""

import json
import sys

import torch
from torch import nn

from tr_dist import DDP
from tr_dist.fsdp import FSDP, Sharding


def main(name, precision, *use_cpu):
    torch.manual_seed(0)
    options = {"precision": precision, "use_cpu": bool(use_cpu)}
    with DDP(**options) if name == "ddp" else FSDP(Sharding(), **options) as strategy:
        model = strategy.prepare(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if hasattr(strategy, "bind_optimizer"):
            strategy.bind_optimizer(model, optimizer)
        rows = torch.sin(torch.arange(24 * 8, dtype=torch.float32)).reshape(24, 8)
        mine = rows[strategy.rank :: strategy.world_size].to(strategy.device)
        losses = []
        for _ in range(6):
            for half in mine.chunk(2):
                with strategy.accumulate(model, sync=half.data_ptr() != mine.data_ptr()):
                    with strategy.autocast():
                        loss = (model(half) - half.sum(dim=1, keepdim=True)).square().mean() / 2
                    strategy.backward(loss)
                losses.append(strategy.gather(loss.detach().float().reshape(1)).mean().item())
            strategy.clip_grad_norm(model, optimizer, 1.0)
            strategy.step(optimizer)
            optimizer.zero_grad()
        facts = {"device": str(strategy.device), "world_size": strategy.world_size, "losses": losses}
        if strategy.rank == 0:
            facts["backend"] = strategy.backend
            if torch.cuda.is_available() and not use_cpu:
                facts["uuid"] = str(torch.cuda.get_device_properties(0).uuid)
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
