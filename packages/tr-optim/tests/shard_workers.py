"""What the ranks of tests do with parameters that FSDP2 divides over them."""

import functools

import torch
import torch.distributed as dist
from fused_workers import Ranks
from shard_gathering import gathered_by_svd
from shard_models import batch, build, described, exchanges, goes_on_alike, local, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from tr_optim import Adafactor, AdaLomo, GaLoreAdafactor, GaLoreAdamW, Lomo
from tr_optim.moments.adam import AdamRule

STEPS = 5


FUSED = {
    "adalomo": (AdaLomo, {"lr": 2e-2}),
    "adalomo decayed and clipped": (AdaLomo, {"lr": 2e-2, "clip_grad_norm": 0.2, "weight_decay": 0.1}),
    "adalomo clipped by value": (AdaLomo, {"lr": 2e-2, "clip_grad_value": 1e-2}),
    "adalomo stored": (AdaLomo, {"lr": 2e-2, "accumulate": "store"}),
    "adalomo stored and clipped": (AdaLomo, {"lr": 2e-2, "accumulate": "store", "clip_grad_norm": 0.2}),
    "adalomo partly": (AdaLomo, {"lr": 2e-2, "clip_grad_norm": 0.2}),
    "adalomo skipping": (AdaLomo, {"lr": 2e-2}),
    "adalomo skipping steps": (AdaLomo, {"lr": 2e-2, "nonfinite": "skip_step"}),
    "lomo": (Lomo, {"lr": 0.3}),
    "lomo decayed and clipped": (Lomo, {"lr": 0.3, "clip_grad_norm": 0.2, "weight_decay": 0.1}),
    "lomo stored and clipped": (Lomo, {"lr": 0.3, "accumulate": "store", "clip_grad_norm": 0.2}),
    "lomo skipping": (Lomo, {"lr": 0.3, "nonfinite": "skip_tensor"}),
    "lomo skipping steps": (Lomo, {"lr": 0.3, "nonfinite": "skip_step"}),
}


# An optimizer with ordinary gradients, which fits shards too.
ORDINARY = {
    "plain adafactor": {"relative_step": False, "weight_decay": 0.1},
    "plain adafactor, relative": {"beta1": 0.9, "clip_threshold": 0.5},
}


def run_ordinary(name, ranks, mesh=None):
    model = build()
    if ranks is not None:
        shard(model, mesh=mesh)
    options = ORDINARY[name]
    optimizer = Adafactor(model.parameters(), 1e-2 if "relative_step" in options else None, eps=(1e-6, 1e-3), **options)
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    for step in range(STEPS):
        model(batch(step, rank, world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return described(model, optimizer, ranks, [])


def run_fused(name, ranks, mesh=None):
    """Train with parameters that FSDP2 divides, or, without ranks, with whole ones and all data."""
    kind, options = FUSED[name]
    model = build()
    if ranks is not None:
        shard(model, mesh=mesh, but="second" if "partly" in name else None)
    optimizer = kind(model.parameters(), **options)
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    if ranks is not None:
        optimizer.bind(ranks)
    norms, parts = [], 2 if "stored" in name else 1
    for step in range(STEPS):
        for number in range(parts):
            is_spoiled = "skipping" in name and step == 2 and rank == world_size - 1
            loss = model(batch(10 * step + number, rank, world_size), is_spoiled=is_spoiled)
            optimizer.backward(loss / parts, last=number == parts - 1)
        norms.append(optimizer.clip_grad_norm(None).item())
        optimizer.step()
    return described(model, optimizer, ranks, norms)


LAZY = {"refresh": "lazy", "refresh_window": 1, "refresh_cosine": 0.2}
PROJECTED = {
    "std": {},
    "reverse_std": {"proj_type": "reverse_std"},
    "left": {"proj_type": "left"},
    "right": {"proj_type": "right"},
    "full": {"proj_type": "full"},
    "left in step": {"proj_type": "left", "mode": "step"},
    "right in step": {"proj_type": "right", "mode": "step"},
    "full in step, clipped": {"proj_type": "full", "mode": "step"},
    "left immediate": {"proj_type": "left", "mode": "immediate"},
    "right immediate": {"proj_type": "right", "mode": "immediate"},
    "left immediate, beside a matrix": {"proj_type": "left", "mode": "immediate", "but": ("second.weight",)},
    "full accumulated immediate": {"proj_type": "full", "mode": "immediate"},
    "partly immediate": {"proj_type": "left", "mode": "immediate", "reduction": "whole"},
    "adafactor left": {"proj_type": "left", "adafactor": {}},
    "adafactor right": {"proj_type": "right", "adafactor": {"beta1": 0.9, "scale_parameter": False}},
    "adafactor full, clipped": {"proj_type": "full", "adafactor": {"scale_parameter": True}},
    "adafactor std in step": {"mode": "step", "adafactor": {"clip_threshold": 0.5}},
    "left clipped": {"proj_type": "left"},
    "right clipped": {"proj_type": "right"},
    "left accumulated": {"proj_type": "left"},
    "right accumulated, from the first": {"proj_type": "right", "refresh_from": "first"},
    "left accumulated, clipped": {"proj_type": "left"},
    "right accumulated, clipped": {"proj_type": "right"},
    "full accumulated, clipped": {"proj_type": "full"},
    "left scaled": {"proj_type": "left"},
    "moments kept": {"proj_type": "left", "rotate_moments": False},
    "together": {"stagger": False},
    "another rank": {"proj_type": "left"},
    "partly": {"proj_type": "left"},
    "partly whole": {"proj_type": "left", "reduction": "whole"},
    "not finite": {"proj_type": "full"},
    "lazy left": {"proj_type": "left", **LAZY},
    "lazy right in step": {"proj_type": "right", "mode": "step", **LAZY},
    "lazy full, changing": {"proj_type": "full", **LAZY, "refresh_cosine": 0.999},
    "svd std": {"method": "svd"},
    "svd left accumulated, clipped": {"proj_type": "left", "method": "svd"},
    "svd full": {"proj_type": "full", "method": "svd"},
    "svd in step": {"proj_type": "reverse_std", "method": "svd", "mode": "step"},
    "svd, not finite": {"proj_type": "full", "method": "svd"},
}
# As these, but not to the same tolerance.
IN_BFLOAT16 = {
    "bfloat16 left": {"proj_type": "left", "basis_dtype": "bfloat16"},
    "bfloat16 right, clipped": {"proj_type": "right", "basis_dtype": "bfloat16"},
    "bfloat16 svd": {"proj_type": "full", "basis_dtype": "bfloat16", "method": "svd"},
}
IN_CODES = {
    name: {"proj_type": "right", "but": ("experts.weight",), "basis_dtype": name.split()[0]}
    for name in ("int8 right", "int4 right, clipped")
}
LIKE_PROJECTED = {**PROJECTED, **IN_BFLOAT16, **IN_CODES, "compat": {"compat": "galore-torch"}}


def projected_groups(model, *, but=(), **projection):
    """Return groups of matrices, but some, and of what is not projected."""
    projection = {"rank": 3, "update_proj_gap": 2, "scale": 0.5, **projection}
    named = {name: p for name, p in model.named_parameters() if p.dim() in (2, 3) and name not in but}
    others = [p for name, p in model.named_parameters() if name not in named]
    return [{"params": list(named.values()), **projection}, {"params": others, "weight_decay": 0.0}]


def run_projected(name, ranks, mesh=None):
    """Train by projections of gradients in shards, or, without ranks, of whole ones of all data."""
    options = dict(LIKE_PROJECTED[name])
    model = build()
    if ranks is not None:
        shard(model, mesh=mesh, but="second" if "partly" in name else None)
    projection = {option: options.pop(option) for option in ("proj_type", "but") if option in options}
    # A small eps would let the smallest gradients, which are rounding for the most part, make updates as large as all.
    kind, own = GaLoreAdamW, {"eps": 1e-3}
    if "adafactor" in options:
        kind, own = GaLoreAdafactor, {"eps": (1e-6, 1e-3), "relative_step": False, **options.pop("adafactor")}
    how = {"mode": "deferred", "weight_decay": 0.1, **own, **options}
    optimizer = kind(projected_groups(model, **projection), 1e-2, **how)
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    if ranks is not None:
        optimizer.bind(ranks)
    norms, parts = [], 2 if "accumulated" in name else 1
    scale = torch.tensor(64.0) if "scaled" in name else None
    for step in range(STEPS):
        if name == "another rank" and step == 3:
            optimizer.param_groups[0]["rank"] = 4
        for number in range(parts):
            is_spoiled = "not finite" in name and step == 3 and rank == world_size - 1
            loss = model(batch(10 * step + number, rank, world_size), is_spoiled=is_spoiled) / parts
            optimizer.backward(loss, last=number == parts - 1, scale=scale)
        norms.append(optimizer.clip_grad_norm(0.05 if "clipped" in name else None).item())
        if norms[-1] < float("inf"):
            optimizer.step()
        optimizer.zero_grad()
    return {**described(model, optimizer, ranks, norms), "estimated": optimizer.norm_is_estimated}


def function_of(name):
    return run_fused if name in FUSED else run_ordinary if name in ORDINARY else run_projected


def train_all(ranks):
    found = {name: run_fused(name, ranks) for name in FUSED}
    found |= {name: run_projected(name, ranks) for name in LIKE_PROJECTED}
    found["rounded"] = rounded(ranks)
    found |= {name: run_ordinary(name, ranks) for name in ORDINARY}
    found |= {f"resumed {name}": resume(name) for name in RESUMED}
    found["exchanges"] = {name: exchanges_of(name) for name in EXCHANGES}
    found["gathered by svd"] = gathered_by_svd()
    found["kept memory"] = kept_memory(ranks)
    found["refusals"] = {name: refuse(name) for name in REFUSED}
    return found


def galore(model, *, rank=3, gap=2, proj_type="std", but=(), **options):
    groups = projected_groups(model, but=but, proj_type=proj_type, rank=rank, update_proj_gap=gap)
    return GaLoreAdamW(groups, 1e-2, **{"mode": "deferred", **options})


RESUMED = {
    "plain adafactor": lambda model: Adafactor(model.parameters(), 1e-2, relative_step=False),
    "adalomo": lambda model: AdaLomo(model.parameters(), 2e-2),
    "left": lambda model: galore(model, proj_type="left"),
    "right": lambda model: galore(model, proj_type="right"),
    "full in step": lambda model: galore(model, proj_type="full", mode="step"),
    "svd": lambda model: galore(model, proj_type="left", method="svd"),
    "compat": lambda model: galore(model, compat="galore-torch"),
    "bfloat16": lambda model: galore(model, proj_type="full", basis_dtype="bfloat16"),
    "lazy": lambda model: galore(model, proj_type="left", gap=1, **LAZY),
    "int4": lambda model: galore(model, **IN_CODES["int4 right, clipped"]),
}


def bound(name):
    """Return a model and its optimizer."""
    model = shard(build())
    optimizer = RESUMED[name](model)
    if getattr(optimizer, "fused_in_backward", False):
        optimizer.bind(Ranks())
    return model, optimizer


def resume(name):
    """Return whether an optimizer that got another's state at one step or another goes on with the same bits."""

    def train(model, optimizer, first, last):
        for step in range(first, last):
            loss = model(batch(step, dist.get_rank(), dist.get_world_size()))
            loss.backward() if isinstance(optimizer, Adafactor) else optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    found = []
    for saved_at in range(1, 4):
        model, optimizer = bound(name)
        train(model, optimizer, 0, saved_at)
        go_on = functools.partial(train, first=saved_at, last=4)
        found.append(goes_on_alike((model, optimizer), bound(name), optimizer.state_dict(), go_on))
    return found


def rounded(ranks):
    """Return how far weights in bfloat16 went, as a share of the way that they should go."""

    def train(**options):
        torch.manual_seed(0)
        layer = nn.Linear(16, 64, bias=False, dtype=torch.bfloat16)  # rows of a rank: 32
        layer.weight.data.fill_(1.0)
        fully_shard(layer)
        groups = [{"params": list(layer.parameters()), "rank": 1, "scale": 4.0, "update_proj_gap": 10**6}]
        optimizer = GaLoreAdamW(groups, 1e-4, mode="deferred", **options)
        optimizer.bind(ranks)
        for _ in range(50):  # each is to take away 1e-4: of one direction in 16, with the scale, as much as AdamW's
            optimizer.backward(layer(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum())
            optimizer.step()
        return layer.weight

    def way(weights):
        return (1 - weights.float().mean()).item() / (50 * 1e-4)

    weights, again = train(stochastic_rounding=True), train(stochastic_rounding=True)
    whole = weights.full_tensor().detach()
    return {
        "to nearest": way(train().full_tensor().detach()),
        "stochastically": way(whole),
        "replicas are equal": torch.equal(local(weights), local(again)),
        "rows of ranks are alike": torch.equal(whole[:32], whole[32:]),
    }


EXCHANGES = {
    "adalomo": RESUMED["adalomo"],
    "adalomo, no flags": lambda model: AdaLomo(model.parameters(), 2e-2, nonfinite="skip_step"),
    "left": lambda model: galore(model, proj_type="left", gap=100),
    "right": lambda model: galore(model, proj_type="right", gap=100),
    "left in step": lambda model: galore(model, proj_type="left", gap=100, mode="step"),
    "left, each step": lambda model: galore(model, proj_type="left", gap=1),
    "right, each step": lambda model: galore(model, proj_type="right", gap=1),
}


def exchanges_of(name):
    model = shard(build())
    optimizer = EXCHANGES[name](model)
    optimizer.bind(Ranks())
    return exchanges(model, optimizer)


class RuleOfWholeOnes(AdamRule):
    """Needs all of a gradient, and cannot add up over ranks."""

    is_elementwise = False


def with_rule_of_whole_ones(model):
    class Optimizer(GaLoreAdamW):
        _rule_type = RuleOfWholeOnes

    return Optimizer(projected_groups(model), 1e-2)


def by_columns(model):
    fully_shard(model.first, shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() > 1 else None)
    return model


def on_meta(model):
    return shard(model.to("meta"))


def over_two_meshes(model):
    fully_shard(model.first, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("rows",)))
    fully_shard(model.second, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "rows")))
    return model


def with_another_gradient(model):
    shard(model)
    optimizer = galore(model, mode="step")
    for parameter in model.parameters():
        parameter.grad = parameter.detach().redistribute(placements=[Replicate()])
    optimizer.step()


def step_of(optimizer, model, *, binds=True):
    if binds:
        optimizer.bind(Ranks())
    optimizer.backward(model(batch(0)))


class OnlyWhole(AdaLomo):
    takes_shards = False


REFUSED = {
    "partly immediate": lambda model: galore(shard(model, but="second"), mode="immediate").bind(Ranks()),
    "int8 basis": lambda model: galore(shard(model), proj_type="left", basis_dtype="int8"),
    "int4 basis of a stack": lambda model: galore(shard(model), proj_type="right", basis_dtype="int4"),
    "another rule": lambda model: with_rule_of_whole_ones(shard(model)),
    "by columns": lambda model: galore(by_columns(model)),
    "on meta": lambda model: galore(on_meta(model)),
    "over two meshes": lambda model: galore(over_two_meshes(model)),
    "over two meshes, adalomo": lambda model: step_of(AdaLomo(over_two_meshes(model).parameters()), model),
    "whole ones alone": lambda model: step_of(OnlyWhole(shard(model).parameters()), model),
    "not bound, deferred": lambda model: step_of(galore(model), model, binds=False),
    "not bound, immediate": lambda model: step_of(galore(model, mode="immediate"), model, binds=False),
    "another gradient": with_another_gradient,
}


def kept_memory(ranks):
    """Return whether a step's gradients leave nothing in `.grad`, and keep no memory but their own, after each pass."""
    model = shard(build())
    optimizer = galore(model)
    optimizer.bind(ranks)
    found = []
    for number in range(2):
        optimizer.backward(model(batch(number, ranks.rank, ranks.world_size)), last=number == 1)
        window = optimizer._gathering.window
        kept = [
            *window.whole.values(),
            *window.projected.values(),
            *(window.sketch.sums.values() if window.sketch else ()),
        ]
        found.append(all(p.grad is None for p in model.parameters()))
        found.append(all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kept))
    return found


def refuse(name):
    try:
        REFUSED[name](build())
    except (ValueError, RuntimeError) as error:
        return str(error)


# Of rows that four ranks divide, some have none; and as two replicas of what two ranks divide.
ON_FOUR = (
    "adalomo decayed and clipped",
    "adalomo skipping",
    "std",
    "full",
    "left accumulated, clipped",
    "right clipped",
)


def train_on_four(ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "rows"))
    return {
        f"{name}{how}": function_of(name)(name, ranks, mesh=mesh_of_it)
        for how, mesh_of_it in (("", None), (" in replicas", mesh))
        for name in ON_FOUR
    }
