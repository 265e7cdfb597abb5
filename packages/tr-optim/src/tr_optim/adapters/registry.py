"""Build optimizers of other libraries by their names in training arguments.

An entry point in the group `tr.optimizers` names each function. A library is imported when its name is used.
`galore_adamw` is this package's own optimizer, and `galore_torch_adamw` is galore-torch's. transformers' names for
the other libraries are kept, except `adamw_8bit`, which is this package's own.

galore-torch's optimizers are refused on ranks with different hardware, where replicas would drift apart.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tr_optim.engine.settings import GROUP_OPTIONS, GaLoreOptions
from tr_optim.options import (
    ADAFACTOR_OPTIONS,
    adam_arguments,
    converters,
    flag,
    number,
    optional_number,
    read_options,
    whole_number,
    word,
)
from tr_optim.registry import Groups, divide_groups, projects_modules, resolve_targets


def check_same_hardware(device: torch.device, name: str, own: str) -> None:
    """Raise if ranks would compute different singular vectors of the same matrix. Collective.

    Args:
        device: where this rank computes.
        name: the optimizer, for the message.
        own: what to use instead.

    Raises:
        ValueError: the ranks have different hardware; raised on every rank.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, _hardware(device))
    if len(set(kinds)) > 1:
        seen = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(
            f"{name} decomposes each gradient on every rank, and different hardware finds singular vectors of other "
            f"signs, by which replicas would drift apart: {seen}; use {own}, whose ranks share one basis"
        )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"on {torch.cuda.get_device_name(device)} with torch {torch.__version__}"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"on {processor} with {torch.get_num_threads()} threads and torch {torch.__version__}"


_PROJECTION = {name: convert for name, convert in converters(GaLoreOptions).items() if name in GROUP_OPTIONS}


@projects_modules
def galore_torch_adamw(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build galore-torch's GaLoreAdamW."""
    from tr_optim.adapters.galore_torch import GaLoreTorchAdamW

    name = "galore_torch_adamw"
    options = {"rank": 128, **read_options(args.optim_args, {**_PROJECTION, "correct_bias": flag}, name)}
    divided = divide_groups(groups, resolve_targets(name, args, model))
    check_same_hardware(next(model.parameters()).device, f"optim={name!r}", "optim='galore_adamw'")
    return GaLoreTorchAdamW(divided, **adam_arguments(args), **options)


@projects_modules
def galore_torch_adafactor(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build galore-torch's GaLoreAdafactor."""
    from tr_optim.adapters.galore_torch import GaLoreTorchAdafactor

    name = "galore_torch_adafactor"
    given = read_options(args.optim_args, {**_PROJECTION, **ADAFACTOR_OPTIONS}, name)
    options = {"rank": 128, "scale_parameter": False, **given}
    divided = divide_groups(groups, resolve_targets(name, args, model))
    check_same_hardware(next(model.parameters()).device, f"optim={name!r}", "optim='galore_adafactor'")
    return GaLoreTorchAdafactor(divided, args.learning_rate, **options, relative_step=False)


def lomo_optim(groups: Groups, args: Any) -> Optimizer:
    """Build lomo_optim's Lomo."""
    from tr_optim.adapters.lomo_optim import LomoOptimLomo

    return LomoOptimLomo.from_arguments(groups, args)


def adalomo_optim(groups: Groups, args: Any) -> Optimizer:
    """Build lomo_optim's AdaLomo."""
    from tr_optim.adapters.lomo_optim import LomoOptimAdaLomo

    return LomoOptimAdaLomo.from_arguments(groups, args)


def schedule_free_adamw(groups: Groups, args: Any) -> Optimizer:
    """Build schedulefree's AdamWScheduleFree, with its own warmup of `warmup_steps`."""
    from tr_optim.adapters.schedulefree import ScheduleFreeAdamW

    options = {**adam_arguments(args), **_schedule_free(args), "warmup_steps": _whole_warmup(args)}
    return ScheduleFreeAdamW(groups, **options)


def schedule_free_radam(groups: Groups, args: Any) -> Optimizer:
    """Build schedulefree's RAdamScheduleFree, which needs no warmup."""
    from tr_optim.adapters.schedulefree import ScheduleFreeRAdam

    return ScheduleFreeRAdam(groups, **adam_arguments(args), **_schedule_free(args))


def schedule_free_sgd(groups: Groups, args: Any) -> Optimizer:
    """Build schedulefree's SGDScheduleFree, with its own warmup of `warmup_steps`."""
    from tr_optim.adapters.schedulefree import ScheduleFreeSGD

    options = {**_schedule_free(args), "warmup_steps": _whole_warmup(args)}
    return ScheduleFreeSGD(groups, args.learning_rate, **options)


def stable_adamw(groups: Groups, args: Any) -> Optimizer:
    """Build torch-optimi's StableAdamW."""
    from tr_optim.adapters.optimi import OptimiStableAdamW

    takes = {"decouple_lr": flag, "max_lr": optional_number, "kahan_sum": flag}
    return OptimiStableAdamW(groups, **adam_arguments(args), **read_options(args.optim_args, takes, "stable_adamw"))


def grokadamw(groups: Groups, args: Any) -> Optimizer:
    """Build grokadamw's GrokAdamW."""
    from tr_optim.adapters.grokadamw import GrokAdamW

    names = ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping")
    return GrokAdamW(
        groups, **adam_arguments(args), **read_options(args.optim_args, dict.fromkeys(names, number), "grokadamw")
    )


def muon(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build torch's Muon for hidden matrices, with torch's AdamW for all other parameters.

    The matrices are those that `optim_target_modules` names; without it, of all linear layers but the output layer.
    """
    from tr_optim.adapters.torch_muon import MuonAdamW, hidden_matrices

    takes = {"momentum": number, "nesterov": flag, "ns_steps": whole_number, "adjust_lr_fn": word}
    options = read_options(args.optim_args, takes, "muon")
    targets = hidden_matrices(model, args.optim_target_modules)
    return MuonAdamW(divide_groups(groups, targets), **adam_arguments(args), **options)


vars(muon).update(needs_model=True, takes_target_modules=True)


def adamw_torch_8bit(groups: Groups, args: Any) -> Optimizer:
    """Build torchao's AdamW with moments of 8 bits."""
    from tr_optim.adapters.torchao import TorchAOAdamW8bit

    return _torchao(TorchAOAdamW8bit, "adamw_torch_8bit", groups, args)


def adamw_torch_4bit(groups: Groups, args: Any) -> Optimizer:
    """Build torchao's AdamW with moments of 4 bits."""
    from tr_optim.adapters.torchao import TorchAOAdamW4bit

    return _torchao(TorchAOAdamW4bit, "adamw_torch_4bit", groups, args)


def _schedule_free(args: Any) -> dict[str, Any]:
    return read_options(args.optim_args, {"weight_lr_power": number, "r": number}, str(args.optim))


def _whole_warmup(args: Any) -> int:
    steps = args.warmup_steps
    if not isinstance(steps, int | float) or not float(steps).is_integer():
        raise ValueError(
            f"warmup_steps={steps!r} with optim={str(args.optim)!r}, which warms up by itself and does not know how "
            "many steps the run has: give a whole number of steps, or use schedule_free_radam, which needs no warmup"
        )
    return int(steps)


def _torchao(kind: Callable[..., Optimizer], name: str, groups: Groups, args: Any) -> Optimizer:
    options = read_options(args.optim_args, {"compile": flag}, name)
    return kind(groups, **adam_arguments(args), **options)


def _embeddings_whole(groups: Groups, model: nn.Module) -> Groups:
    """Divide each group into embeddings, with states of 32 bits, and the others, without empty ones beside them.

    Rows of words that are rare have gradients far smaller than others in their block: their codes would be 0.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}

    def parts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        members = [p for p in group["params"] if id(p) in embeddings]
        others = [p for p in group["params"] if id(p) not in embeddings]
        if others or not members:
            yield {**group, "params": others}
        if members:
            yield {**group, "params": members, "optim_bits": 32}

    return list(chain.from_iterable(parts(group) for group in groups))


def _bitsandbytes(build: Callable[..., Optimizer], bits: int, *, is_paged: bool = False) -> Callable[..., Optimizer]:
    """Return a function that builds an optimizer of bitsandbytes.

    Args:
        build: builds it from groups, training arguments and what follows here.
        bits: of its moments.
        is_paged: a GPU can move them to host memory.
    """

    def factory(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
        return build(_embeddings_whole(groups, model), args, optim_bits=bits, is_paged=is_paged)

    vars(factory).update(needs_model=True)
    return factory


def _adamw_bnb(groups: Groups, args: Any, **kind: Any) -> Optimizer:
    from tr_optim.adapters.bitsandbytes import BitsAndBytesAdamW

    read_options(args.optim_args, {}, str(args.optim))
    return BitsAndBytesAdamW(groups, **adam_arguments(args), **kind)


def _lion(groups: Groups, args: Any, **kind: Any) -> Optimizer:
    from tr_optim.adapters.bitsandbytes import BitsAndBytesLion

    read_options(args.optim_args, {}, str(args.optim))
    return BitsAndBytesLion(groups, args.learning_rate, (args.adam_beta1, args.adam_beta2), **kind)


def _ademamix(groups: Groups, args: Any, **kind: Any) -> Optimizer:
    from tr_optim.adapters.bitsandbytes import BitsAndBytesAdEMAMix

    numbers = dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), number)
    takes = {**numbers, "t_alpha": whole_number, "t_beta3": whole_number}
    usual = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "beta3": 0.9999, "eps": args.adam_epsilon}
    options = {**usual, **read_options(args.optim_args, takes, str(args.optim))}
    options["betas"] = tuple(options.pop(name) for name in ("beta1", "beta2", "beta3"))
    return BitsAndBytesAdEMAMix(groups, args.learning_rate, **options, **kind)


def _rmsprop(groups: Groups, args: Any, *, optim_bits: int, **_: Any) -> Optimizer:
    from tr_optim.adapters.bitsandbytes import BitsAndBytesRMSprop

    options = read_options(args.optim_args, {"alpha": number, "eps": number}, str(args.optim))
    return BitsAndBytesRMSprop(groups, args.learning_rate, **options, optim_bits=optim_bits)


adamw_bnb_8bit = _bitsandbytes(_adamw_bnb, 8)
paged_adamw_8bit = _bitsandbytes(_adamw_bnb, 8, is_paged=True)
paged_adamw_32bit = _bitsandbytes(_adamw_bnb, 32, is_paged=True)
lion_8bit = _bitsandbytes(_lion, 8)
lion_32bit = _bitsandbytes(_lion, 32)
paged_lion_8bit = _bitsandbytes(_lion, 8, is_paged=True)
paged_lion_32bit = _bitsandbytes(_lion, 32, is_paged=True)
ademamix = _bitsandbytes(_ademamix, 32)
ademamix_8bit = _bitsandbytes(_ademamix, 8)
paged_ademamix_32bit = _bitsandbytes(_ademamix, 32, is_paged=True)
paged_ademamix_8bit = _bitsandbytes(_ademamix, 8, is_paged=True)
rmsprop_bnb = _bitsandbytes(_rmsprop, 32)  # its other name is rmsprop_bnb_32bit
rmsprop_bnb_8bit = _bitsandbytes(_rmsprop, 8)
