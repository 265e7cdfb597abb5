"""Share out experts over processes: each holds some of them, and tokens go to the processes of their experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tr_dist.base import some_of
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.direction import Direction, computing_with, matching, sizes_that_divide

_OF_MODULES = ("experts", "ep_dispatch_experts")
_OF_WEIGHTS = "grouped_gemm"  # in plans of transformers: the weights of such a module, which are found without


class Experts(Direction):
    """Processes with other samples, or other pieces of them, that share out the experts of each layer.

    Experts are divided over `ep` first, and what then repeats is divided as shards are. Those of `tp` share them out
    too: they hold the same tokens, and each computes its own experts on them.

    Args:
        size: number of processes whose tokens are brought together.
        plan: pattern of names -> `experts`; None takes the plan of a model of transformers.
    """

    name = "ep"
    computes = "its own experts"

    def __init__(self, size: int, plan: Mapping[str, str] | None = None) -> None:
        self.size, self._plan = size, plan

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Make the groups that share experts; see `Direction.join`."""
        stages, replicas, shards, pieces, parts = ranks.shape
        holders = shards * pieces
        number = replicas * holders
        if (holders % self.size and self.size % holders) or number % self.size:
            good = [n for n in range(2, number + 1) if not (number % n or (holders % n and n % holders))]
            raise ValueError(
                f"ep_size={self.size} does not divide the {number} processes that hold other tokens ({replicas} "
                f"replicas x {holders} shards); {', '.join(map(str, good)) or 'no size above 1'} would: start others, "
                "or change ep_size"
            )
        self.replicas_a_copy = max(1, self.size // holders)
        copies = replicas // self.replicas_a_copy
        shape = (stages, copies, number // copies // self.size, self.size * parts)
        names = ("pp", "expert_replicate", "expert_shard", "expert")
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        together = ranks.view(stages, number // self.size, self.size, parts).transpose(2, 3)
        self._ep = among(together.reshape(-1, self.size).tolist())
        self._sharding = self._mesh["expert_shard"] if copies == 1 else self._mesh["expert_replicate", "expert_shard"]

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Share out the experts of the plan; see `Direction.divide`."""
        modules = experts_of(model, self._plan)
        peers = [mesh["tp"]] if mesh["tp"].size() > 1 else []
        self._tokens = tokens = Tokens(peers, self._ep)
        for name, module in modules.items():
            share_out(name, module, self._mesh["expert"], tokens)
        model.register_forward_pre_hook(tokens.begin)
        model.register_forward_hook(tokens.end, always_call=True)
        self._modules = list(modules.values())

    def apart(self) -> list[tuple[nn.Module, DeviceMesh]]:
        """Return the experts, which have shards of their own; see `Direction.apart`."""
        return [(module, self._sharding) for module in self._modules]

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `expert_load_max`: the part of a layer's routes that its most loaded expert has, times its experts."""
        counted = [*self._tokens.loads.values()]
        if not counted:
            return {}
        self._tokens.loads = {}
        parts = total(torch.cat(counted)).split([len(counts) for counts in counted])
        return {"expert_load_max": torch.stack([part.max() / part.mean().clamp(min=1e-9) for part in parts]).max()}


def experts_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, nn.Module]:
    """Return the modules of stacked experts, by name.

    Raises:
        ValueError: there is no plan, a pattern fits no module, or a style is not known.
    """
    plan = getattr(model, "_ep_plan", None) if given is None else given
    modules, found = dict(model.named_modules()), dict[str, nn.Module]()
    for pattern, style in (plan or {}).items():
        names = matching(pattern, modules)
        if given is not None and not names:
            raise ValueError(f"ep_plan: no module is called {pattern!r}; there are {some_of(sorted(modules)[1:])}")
        if style not in (*_OF_MODULES, _OF_WEIGHTS):
            raise ValueError(f"ep_plan: {pattern!r} has {style!r}, which is not done here; the style is 'experts'")
        found |= {name: modules[name] for name in names if style in _OF_MODULES}
    if not found:
        raise ValueError(
            f"ep_size shares out experts by a plan, and {type(model).__name__} has no experts that one names; leave "
            "ep_size out, or name the modules as ep_plan, such as {'layers.*.experts': 'experts'}"
        )
    return found


def share_out(name: str, module: nn.Module, mesh: DeviceMesh, tokens: Tokens) -> None:
    """Keep this process's experts of a module, and have its forward compute with those of all; in place.

    Args:
        name: of the module.
        module: its parameters have the experts in dimension 0. Its forward takes hidden `(tokens, size)`, the numbers
            of experts `(tokens, k)`, and their weights `(tokens, k)`, and returns `(tokens, size)`. It gets numbers
            of the experts that are here; what is elsewhere has the number of experts here, which it must skip, and
            weight 0. Its attribute `num_experts`, if it has one, becomes the number of experts here.
        mesh: the processes that share them, with one dimension.
        tokens: which of them hold which tokens.

    Raises:
        ValueError: the parameters are not stacked experts, or their number is not a multiple.
    """
    parameters, size = dict(module.named_parameters()), mesh.size()
    numbers = {parameter.shape[0] if parameter.dim() else 0 for parameter in parameters.values()}
    if len(numbers) != 1 or parameters.keys() != module._parameters.keys():
        shapes = ", ".join(f"{key} {tuple(parameter.shape)}" for key, parameter in parameters.items())
        raise ValueError(
            f"{name} is to be shared out by experts, and its parameters are not all stacked by them in dimension 0: "
            f"{shapes or 'it has none'}; leave it out of the plan, or stack its weights as (experts, ...)"
        )
    number = numbers.pop()
    if number % size:
        sizes = {"ep_size": tokens.brought, "tp_size": size // tokens.brought}
        of = " x ".join(f"{key}={value}" for key, value in sizes.items() if value > 1)
        raise ValueError(f"{of} does not divide the {number} experts of {name}; {sizes_that_divide(number)} do")
    here, first = number // size, mesh.get_local_rank() * (number // size)
    for key, parameter in parameters.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        local = whole.detach()[first : first + here].clone().to(mesh.device_type)
        divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module._parameters[key] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
    if getattr(module, "num_experts", number) == number:
        vars(module)["num_experts"] = here
    if hasattr(module, "_is_expert_parallel"):  # those of transformers skip what is elsewhere only then
        vars(module)["_is_expert_parallel"] = True
    vars(module)["forward"] = partial(_on_all_tokens, name, module, module.forward, (first, here, number), tokens)


def _on_all_tokens(
    name: str,
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    experts: tuple[int, int, int],
    tokens: Tokens,
    *arguments: torch.Tensor,
    **named: torch.Tensor,
) -> torch.Tensor:
    """Compute this process's experts on the tokens of all processes that share them, and bring the sums back."""
    given, (first, here, number) = (*arguments, *named.values()), experts
    if len(given) != 3 or given[0].dim() != 2 or given[1].shape != given[2].shape or given[1].dim() != 2:
        shapes = ", ".join(str(tuple(getattr(value, "shape", ()))) for value in given)
        raise ValueError(
            f"{name} was called with the shapes {shapes}; shared out by experts its forward takes hidden (tokens, "
            "size), numbers of experts (tokens, k) and their weights (tokens, k)"
        )
    hidden, numbers, weights = given
    own = hidden.shape[0]
    most = tokens.most(name, own)
    if module.training and torch.is_grad_enabled() and tokens.brought > 1:  # not where a loss is looked at
        tokens.count(name, numbers, number)
    hidden, weights = tokens.bring(_padded(hidden, most)), tokens.bring(_padded(weights, most))
    numbers = tokens.bring(_padded(numbers, most, -1))
    is_elsewhere = (numbers < first) | (numbers >= first + here)
    numbers = torch.where(is_elsewhere, here, numbers - first)
    parameters = {key: parameter.to_local() for key, parameter in module._parameters.items()}  # type: ignore[union-attr]
    tie, hidden, weights, *local = _Tied.apply(tokens.brought, hidden, weights, *parameters.values())
    with computing_with(module, dict(zip(parameters, local, strict=True))):
        output = forward(hidden, numbers, weights.masked_fill(is_elsewhere, 0.0)) + tie
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / tokens.brought)
    return tokens.sum_of_own(output)[:own].clone()  # fully_shard wants no views


class Tokens:
    """The tokens of the processes that share experts: those of `ranks` differ, those of `peers` are the same.

    How many each process brings at most is agreed on the host once a forward of the model.

    Attributes:
        ranks: the processes whose tokens are brought together; None if all have the same.
        brought: number of processes whose tokens are brought together.
        loads: routes of this process's tokens to each expert since the loads were last taken, by module.
    """

    def __init__(self, peers: Sequence[DeviceMesh], ranks: DataRanks | None = None) -> None:
        self.ranks, self.brought = ranks, 1 if ranks is None else ranks.world_size
        self.loads: dict[str, torch.Tensor] = {}
        self._places: list[tuple[DeviceMesh, Shard | Replicate]] = [(mesh, Replicate()) for mesh in peers]
        if ranks is not None:
            self._places.append((DeviceMesh.from_group(ranks.group, ranks.device.type), Shard(0)))
        self._is_within, self._agreed = False, (0, 0)

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes; the backward sums the gradients of each one's rows."""
        for mesh, place in self._places:
            rows = DTensor.from_local(values, mesh, [place], run_check=False).redistribute(placements=[Replicate()])
            values = rows.to_local(grad_placements=[Partial()])
        return values

    def sum_of_own(self, values: torch.Tensor) -> torch.Tensor:
        """Return this process's own rows, summed over all; the backward brings the gradients of all rows."""
        for mesh, place in self._places:
            parts = DTensor.from_local(values, mesh, [Partial()], run_check=False)
            values = parts.redistribute(placements=[place]).to_local()
        return values

    def begin(self, model: nn.Module, inputs: Any) -> None:
        """Begin a forward of the model."""
        self._is_within, self._agreed = True, (0, 0)

    def end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """End it. What computes experts after that, such as a backward that repeats a layer, agrees each time."""
        self._is_within = False

    def most(self, name: str, own: int) -> int:
        """Return the largest number of tokens over the processes, each of which gives its own.

        Raises:
            ValueError: it is not that of the layers before, so that the processes would have to agree again.
        """
        if self.ranks is None:
            return own
        if self._is_within and self._agreed[1]:
            if own != self._agreed[0]:
                raise ValueError(
                    f"{name} got {own} tokens, and the experts before it got {self._agreed[0]}; under ep_size all "
                    "experts of a forward get the same number of tokens: leave those with others out of ep_plan"
                )
            return self._agreed[1]
        self._agreed = own, self.ranks.all_reduce_max([own])()[0]
        return self._agreed[1]

    def count(self, name: str, numbers: torch.Tensor, experts: int) -> None:
        """Count the routes of this process's tokens; they stay on the device."""
        if name not in self.loads:
            self.loads[name] = torch.zeros(experts, device=numbers.device)
        routes = numbers.flatten().to(torch.int64)
        self.loads[name].scatter_add_(0, routes, torch.ones_like(routes, dtype=torch.float32))


def _padded(values: torch.Tensor, number: int, value: float = 0.0) -> torch.Tensor:
    missing = number - values.shape[0]
    return nn.functional.pad(values, (0, 0, 0, missing), value=value) if missing else values


class _Tied(torch.autograd.Function):
    """What the experts compute with, and a zero that ties it to their output.

    Where no token has an expert here, nothing else does: yet its backward must exchange with the others, and give the
    weights gradients of zero.

    The weights' gradients are those of the tokens of `brought` processes together, and are averaged over the others
    alone. So those of the output are divided by that number, and those of the tokens multiplied here.
    """

    @staticmethod
    def forward(ctx: Any, brought: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.brought = brought
        return values[0].new_zeros(()), *(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, hidden, weights, *parameters = gradients
        return None, hidden * ctx.brought, weights * ctx.brought, *parameters
