"""Look whether every name in the arguments has something installed behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn

from tr_core import plugins
from tr_core.optimization.optimizers import build_optimizer, optimizer_factory, optimizer_names, parameter_groups
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_plugins(subject: Subject) -> Iterator[Problem]:
    """Find names of optimizers, strategies, checkpointers and trackers that nothing installed offers."""
    args = subject.args
    yield from _callbacks(subject)
    yield from _optimizer(subject)
    strategy = str(args.strategy)
    if strategy == "auto":
        strategy = "ddp" if int(os.environ.get("WORLD_SIZE") or "1") > 1 else "single"
    yield from _named(subject, "tr.strategies", strategy, "strategy")
    if args.save_strategy != "no" or args.resume_from_checkpoint not in (None, False):
        yield from _named(subject, "tr.checkpointers", str(args.checkpointer), "checkpointer", "save_strategy")


def _named(subject: Subject, group: str, name: str, *options: str) -> Iterator[Problem]:
    try:
        plugins.load(group, name)
    except plugins.PluginError as error:
        values = " and ".join(f"{option}={str(getattr(subject.args, option))!r}" for option in options)
        yield Problem("T301", f"{values}: {error}", subject.origin(options[0]))
    except ImportError as error:
        yield Problem("T302", f"{options[0]}={name!r}: {error}", subject.origin(options[0]))


def _callbacks(subject: Subject) -> Iterator[Problem]:
    args = subject.args
    for name in [name for name in args.report_to if name not in ("none", "all")]:
        try:
            plugins.load("tr.callbacks", name)(args)
        except plugins.PluginError as error:
            yield Problem("T301", f"report_to={name!r}: {error}", subject.origin("report_to"))
        except ImportError as error:
            yield Problem("T302", str(error), subject.origin("report_to"))
    for option, name in (("neftune_noise_alpha", "neftune"), ("push_to_hub", "hub")):
        if getattr(args, option):
            yield from _named(subject, "tr.callbacks", name, option)


def _optimizer(subject: Subject) -> Iterator[Problem]:
    args, origin = subject.args, subject.origin("optim")
    name = str(args.optim)
    if name not in optimizer_names():
        try:
            optimizer_factory(args)
        except plugins.PluginError as error:
            yield Problem("T301", f"optim={name!r}: {error}", origin)
        return
    if name in plugins.available("tr.optimizers"):
        yield from _named(subject, "tr.optimizers", name, "optim")
        return
    try:  # torch's own: a layer of one number shows whether they take the options
        with torch.random.fork_rng(devices=[]):
            layer = nn.Linear(1, 1)
        build_optimizer(*optimizer_factory(args), parameter_groups(layer, args.weight_decay))
    except (ValueError, TypeError) as error:
        yield Problem("T304", str(error), subject.origin("optim_args"))
