"""Optimizers and schedules of a run, built by hand: what a Trainer builds is held against them."""

import torch
import transformers
from torch import nn

SCHEDULES = {
    "linear": {},
    "cosine": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "polynomial": {"power": 2.0},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2},
    "reduce_lr_on_plateau": {"patience": 0},
}
NAMED = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop")
GIVEN = ("given", "given_both", "class", "created", "groups")


def groups_of(run, model):
    """Return the parameters to train, with weight decay and without it."""
    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    spared = [id(p) in norms or "bias" in name or "norm" in name.lower() for name, p in named]
    return [
        {"params": [p for (_, p), no in zip(named, spared, strict=True) if not no], "weight_decay": run.decay},
        {"params": [p for (_, p), no in zip(named, spared, strict=True) if no], "weight_decay": 0.0},
    ]


def optimizer_of(run, model):
    """Build the optimizer of a run."""
    if run.optimizer in ("given", "given_both", "class", "created"):
        parameters = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(
            groups_of(run, model) if run.optimizer == "class" else parameters, lr=run.rate, momentum=0.9
        )
    groups = groups_of(run, model)
    if run.optimizer == "groups":
        groups[1]["lr"] = run.rate / 10
        return torch.optim.AdamW(groups, lr=run.rate)
    if run.optimizer == "adafactor":
        return transformers.Adafactor(groups, lr=run.rate, scale_parameter=False, relative_step=False)
    adam = {"betas": run.betas, "eps": 1e-8}
    kind, options = {
        "adamw_torch": (torch.optim.AdamW, adam),
        "adamw_torch_fused": (torch.optim.AdamW, {**adam, "fused": True}),
        "sgd": (torch.optim.SGD, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
    }[run.optimizer]
    return kind(groups, lr=run.rate, **options)


def schedule_of(run, optimizer, steps):
    """Build the schedule of a run of so many steps."""
    if run.optimizer == "given_both":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    warmup = int(run.warmup) if run.warmup >= 1 else -int(-run.warmup * steps // 1)
    options = dict(SCHEDULES[run.schedule])
    return transformers.get_scheduler(run.schedule, optimizer, warmup, steps, scheduler_specific_kwargs=options)
