"""A plain PyTorch loop and the same one with four lines changed, as the tests of own loops run it in every rank."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tr_dist import DDP, Loop
from tr_dist.fsdp import FSDP, Sharding


class Rows:
    """Rows of a data set that note which of them were read."""

    def __init__(self, number):
        generator = torch.Generator().manual_seed(0)
        self.rows = [
            {"number": i, "x": torch.randn(6, generator=generator), "y": torch.randn(2, generator=generator)}
            for i in range(number)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __init__(self, number):
        self.rows = Rows(number).rows

    def __iter__(self):
        return iter(self.rows)


class Uneven(Stream):
    """Has fewer rows on rank 1."""

    def __init__(self, number, fewer=0):
        super().__init__(number - fewer * int(os.environ["RANK"]))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def plain(number, batch_size, *, epochs=2, accumulation=1, max_norm=0.5, shuffle=True):
    """Train in one process without any of this; returns the weights, and the predictions in the data's order."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    loader = DataLoader(Rows(number), batch_size=batch_size, shuffle=shuffle)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), accumulation):
            step = batches[start : start + accumulation]
            for batch in step:
                (nn.functional.mse_loss(model(batch["x"]), batch["y"]) / len(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with torch.no_grad():
            predictions = torch.cat([model(b["x"]) for b in DataLoader(Rows(number), batch_size=batch_size)])
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, predictions


def strategy_named(name):
    if name == "ddp":
        return DDP(use_cpu=True)
    if name == "fsdp":
        return FSDP(Sharding(wrap="SIZE_BASED_WRAP", min_num_params=10), use_cpu=True)
    from tr_dist.deepspeed import DeepSpeed

    divided = {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0}
    return DeepSpeed({"gradient_accumulation_steps": int(name[-3]), "zero_optimization": divided}, use_cpu=True)


def distributed(strategy, number, batch_size, options):
    """Train with four lines changed; returns weights (on rank 0), predictions, and the numbers of the rows seen.

    Args:
        strategy: `ddp`, `fsdp`, or `zero A/S` for DeepSpeed with A micro-batches in a step, at stage S.
        number: rows of the data set.
        batch_size: of a rank.
        options: of the run and of its loader.
    """
    options = dict(options)
    accumulation, workers = options.pop("accumulation", 1), options.pop("workers", 0)
    epochs, stream = options.pop("epochs", 2), options.pop("stream", False)
    with Loop(strategy_named(strategy), gradient_accumulation_steps=accumulation) as loop:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        torch.manual_seed(7 + loop.rank)  # each rank draws another order of its own
        rows = Stream(number) if stream else Rows(number)
        loader = DataLoader(rows, batch_size=batch_size, num_workers=workers, **options)
        eval_loader = DataLoader(Rows(number), batch_size=batch_size)
        loader, eval_loader, model, optimizer = loop.prepare(loader, eval_loader, model, optimizer)
        schedule = loop.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20))
        seen, predictions = [], []
        for _ in range(epochs):
            model.train()
            for batch in loader:
                seen += batch["number"].tolist()
                with loop.accumulate(model):
                    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
                    loop.backward(loss)
                loop.clip_grad_norm(0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                predictions = [loop.gather(model(batch["x"])) for batch in eval_loader]
        weights = loop.strategy.full_state_dict(model)
        return {k: v.float().clone() for k, v in weights.items()}, torch.cat(predictions).float(), seen
