"""Divide matrices over processes by a plan: which modules by their outputs, which by their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from tr_dist.base import some_of
from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.mesh.direction import Direction, computing_with, matching, sizes_that_divide
from tr_dist.mesh.divided_loss import CrossEntropyOfParts, LogitsInParts, whole
from tr_dist.mesh.experts import Tokens, share_out


class OfSplitHeads(ParallelStyle):
    """A module of which each process computes its own heads, `(..., heads, size)`; its weights get all gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def on_all_heads(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Shard(inputs[0].dim() - 2)], run_check=False)

        def own_heads(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, on_all_heads, own_heads)  # type: ignore[arg-type]


class OnPieces(ParallelStyle):
    """A module, as a norm, that each process computes on its piece of the sequence; its weights get all gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def piece(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            given = inputs[0]
            if isinstance(module, nn.Embedding):
                whole_words = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
                return whole_words.redistribute(placements=[Shard(1)]), *inputs[1:]
            if getattr(given, "placements", None) != (Shard(1),):
                raise ValueError(
                    f"tp_plan: a {type(module).__name__} of style 'sequence_parallel' got {tuple(given.shape)}, which "
                    "is not in pieces of a sequence: it is between 'colwise' and 'rowwise', or embeddings have no "
                    "style; leave it out, or give all embeddings 'embedding_rowwise' or 'sequence_parallel'"
                )
            return inputs

        return distribute_module(module, device_mesh, None, piece)  # type: ignore[arg-type]


class WithOwnExperts(ParallelStyle):
    """A module of stacked experts, of which each process computes its own on the tokens that all hold."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        share_out(type(module).__name__, module, device_mesh, Tokens([device_mesh]))
        return module


class WithOwnHeads(ParallelStyle):
    """A module whose own parameters have the heads in dimension 0: each process computes with those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in own.items():
            divided = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        vars(module)["forward"] = partial(_with_local_parameters, module, module.forward)
        return module


def _with_local_parameters(module: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    divided = {name: parameter for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)}
    with computing_with(module, {name: parameter.to_local() for name, parameter in divided.items()}):
        return forward(*given, **named)


class WithKeyOfAllHeads(ParallelStyle):
    """A projection that each process computes whole, and whose last `size` outputs are a key of all heads.

    The others go into a `colwise` module, which sums their gradients; those of the key, which each process has from its
    own heads, are summed here.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def summed(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            others, key = output.split([output.shape[-1] - self._size, self._size], -1)
            of_all = DTensor.from_local(key, device_mesh, [Replicate()], run_check=False)
            return torch.cat([others, of_all.to_local(grad_placements=[Partial()])], -1)

        module.register_forward_hook(summed)
        return module


# style -> how torch does it, the classes of module, and the sizes of the weight that are divided
_STYLES: dict[str, tuple[ParallelStyle | None, tuple[type[nn.Module], ...], str]] = {
    "colwise": (ColwiseParallel(), (nn.Linear,), "out_features"),
    "rowwise": (RowwiseParallel(), (nn.Linear,), "in_features"),
    "rowwise_split_input": (RowwiseParallel(input_layouts=Replicate()), (nn.Linear,), "in_features"),
    "colwise_gather_output": (ColwiseParallel(output_layouts=Replicate()), (nn.Linear,), "out_features"),
    "colwise_loss_parallel": (ColwiseParallel(use_local_output=False), (nn.Linear,), "out_features"),
    "embedding_rowwise": (RowwiseParallel(input_layouts=Replicate()), (nn.Embedding,), "num_embeddings"),
    "embedding_colwise": (ColwiseParallel(output_layouts=Replicate()), (nn.Embedding,), "embedding_dim"),
    "mla_kv_a_proj": (None, (nn.Linear,), ""),  # by the model's config
    "moe_tp_experts": (WithOwnExperts(), (nn.Module,), ""),
    "replicated_with_grad_allreduce": (OfSplitHeads(), (nn.Module,), ""),
    "local_params": (WithOwnHeads(), (nn.Module,), ""),
    "sequence_parallel": (OnPieces(), (nn.Module,), ""),
}
_PIECES: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
# What gives pieces of sequences where the plan has a module that is computed on them.
_INTO_PIECES: dict[str, ParallelStyle] = {
    "rowwise": RowwiseParallel(**_PIECES),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), **_PIECES),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate(), **_PIECES),
    "embedding_colwise": ColwiseParallel(**_PIECES),
}
_ON_PIECES = "sequence_parallel"
_ON_WHOLE = ("mla_kv_a_proj", "moe_tp_experts")  # they take what is not in pieces
_AS_IT_IS = ("replicate", "keep_full_weight")
_OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise"}
HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "decoder_attention_heads")


class Tensor(Direction):
    """Processes that hold a part of each large matrix.

    Args:
        size: number of processes.
        plan: which modules they divide, and how; None takes the plan of a model of transformers.
        shares_experts: whether experts are left to another direction, which shares them out over these processes too.
    """

    name = "tp"
    computes = "its own heads and features between 'colwise' and 'rowwise' modules"

    def __init__(self, size: int, plan: Mapping[str, str] | None = None, *, shares_experts: bool = False) -> None:
        self.size, self._plan, self._shares_experts = size, plan, shares_experts

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Take the number of processes; see `Direction.join`."""
        self._started = ranks.numel()
        self._others = [name for name, place in (("pp_size", 0), ("sp_size or cp_size", 3)) if ranks.shape[place] > 1]

    def check(self, model: nn.Module) -> None:
        """Check the plan and the sizes; see `Direction.check`."""
        styles = self._styles(model)
        check_sizes(model, styles, self.size, self._started)
        check_parts(model, styles)
        used = set(styles.values())
        for style, instead in (("colwise_loss_parallel", "use 'colwise_gather_output'"), (_ON_PIECES, "leave it out")):
            others = [*self._others, *(used.intersection(_ON_WHOLE) if style == _ON_PIECES else ())]
            if others and style in used:
                raise ValueError(f"tp_plan: {style!r} is not done with {others[0]}; {instead}")

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the modules of the plan; see `Direction.divide`."""
        styles = self._styles(model)
        self._has_parts = not {"colwise_loss_parallel", _ON_PIECES}.isdisjoint(styles.values())
        take_over(model, mesh["tp"])
        divide(model, styles, mesh["tp"])
        model.register_forward_hook(without_views)
        divided = [
            module
            for name, module in model.named_modules()
            if styles.get(name, "").startswith("colwise") and ".lora_B." not in name  # of inputs of their own
        ]
        self._given = share_inputs(divided, mesh["tp"])

    def finish(self, model: nn.Module) -> None:
        """Have the model compute its loss from logits in parts, if the plan says so, around all that FSDP does."""
        model.register_forward_hook(lambda *_: self._given.clear(), always_call=True)
        if self._has_parts:
            around, losses = ExitStack(), CrossEntropyOfParts()

            def begin(model: nn.Module, inputs: Any) -> None:
                losses.computed = False
                around.enter_context(losses)

            def join(model: nn.Module, inputs: Any, output: Any) -> Any:
                around.close()
                keeps_parts = losses.computed and torch.is_grad_enabled()
                return tree_map_only(DTensor, lambda part: LogitsInParts() if keeps_parts else whole(part), output)

            model.register_forward_pre_hook(begin)
            model.register_forward_hook(join, always_call=True)

    def _styles(self, model: nn.Module) -> dict[str, str]:
        styles = plan_of(model, self._plan)
        return {name: style for name, style in styles.items() if not self._shares_experts or style != "moe_tp_experts"}


def plan_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the style of each module that is divided, by its name.

    Args:
        model: not divided.
        given: pattern of names, with `*` for one word -> style; None takes the plan that a model of transformers has.

    Raises:
        ValueError: there is no plan, it divides nothing, a pattern fits no module, or a style is not known or not for
            the module.
    """
    plan = getattr(model, "_tp_plan", None) if given is None else given
    if not plan:
        raise ValueError(
            f"tp_size divides matrices by a plan, and {type(model).__name__} has none; give one as tp_plan, such as "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    modules, styles, base = dict(model.named_modules()), dict[str, str](), _base(model)
    for pattern, style in plan.items():
        style = _OTHER_NAMES.get(style, style)
        found = matching(pattern, modules) or matching(base + pattern, modules)
        if not found and given is not None:
            raise ValueError(f"tp_plan: no module is called {pattern!r}; there are {some_of(sorted(modules)[1:])}")
        if found and style not in (*_STYLES, *_AS_IT_IS):
            raise ValueError(
                f"tp_plan: {pattern!r} is to be divided by {style!r}, which is not done here; the styles are "
                f"{', '.join(_STYLES)}"
            )
        styles |= {name: style for name in found if style not in _AS_IT_IS}
    if not styles:
        raise ValueError(
            f"tp_size: the plan of {type(model).__name__} names none of its modules ({', '.join(plan)}); give one as "
            f"tp_plan, for {some_of(sorted(modules)[1:])}"
        )
    return _within_adapters(modules, styles)


def _base(model: nn.Module) -> str:
    """Return what names of modules begin with in an adapter's wrapper (PEFT), which a plan of the model leaves out."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def _within_adapters(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles with those of a module and of its adapter's half in place of one that LoRA has wrapped.

    What divides the outputs divides those of `lora_B`; what divides the inputs divides those of `lora_A`.

    Raises:
        ValueError: an adapter is not of two matrices alone, or norms are computed on pieces of the sequence.
    """
    found = dict[str, str]()
    for name, style in styles.items():
        adapter: Any = modules[name]
        half = {"out_features": "lora_B", "in_features": "lora_A"}.get(_STYLES[style][2], "")
        if not half or not hasattr(adapter, "base_layer"):
            found[name] = style
            continue
        if not hasattr(adapter, half) or getattr(adapter, "lora_variant", True) or _ON_PIECES in styles.values():
            raise ValueError(
                f"tp_plan: {name} is an adapter ({type(adapter).__name__}), of which {style!r} divides those of LoRA "
                "without variants (use_dora), beside no 'sequence_parallel'; leave it out of tp_plan, or of "
                "target_modules"
            )
        parts = (f"{half}.{key}" for key in getattr(adapter, half))
        found |= dict.fromkeys([f"{name}.base_layer", *(f"{name}.{part}" for part in parts)], style)
    return found


def check_sizes(model: nn.Module, styles: Mapping[str, str], size: int, started: int = 0) -> None:
    """Check that `size` of the processes `started` (0: unknown) can divide what the plan divides.

    Raises:
        ValueError: a module is of another class, or a number of heads or features is not a multiple.
    """
    config = getattr(model, "config", None)
    for name in HEADS:
        if isinstance(number := getattr(config, name, None), int) and number % size:
            raise ValueError(f"tp_size={size} does not divide {name}={number}; {sizes_that_divide(number, started)} do")
    for name, module in model.named_modules():
        if name in styles:
            _, classes, divided = _STYLES[styles[name]]
            if not isinstance(module, classes):
                raise ValueError(
                    f"tp_plan: {name} is to be divided by {styles[name]!r}, which is for {classes[0].__name__}, and is "
                    f"a {type(module).__name__}"
                )
            if styles[name] == "mla_kv_a_proj" and not _of_text(config):
                raise ValueError(f"tp_plan: 'mla_kv_a_proj' of {name} needs qk_rope_head_dim in the model's config")
            number = getattr(module, divided) if divided else size
            if number % size:
                others = sizes_that_divide(number, started)
                raise ValueError(f"tp_size={size} does not divide {divided}={number} of {name}; {others} do")


def check_parts(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise `ValueError` if the model is divided already in another way than by these styles."""
    for name, module in model.named_modules():
        divided = _STYLES[styles[name]][2] if name in styles else ""
        expected = Shard(0 if divided in ("out_features", "num_embeddings") else 1)
        parts = {key: parameter for key, parameter in module._parameters.items() if isinstance(parameter, DTensor)}
        if styles.get(name) in ("moe_tp_experts", "local_params", _ON_PIECES):
            parts = {}
        for key, part in parts.items():
            if not divided or (key != "bias" and part.placements != (expected,)):
                raise ValueError(
                    f"{name}.{key} is divided as {part.placements} already, which the plan does not "
                    f"({styles.get(name, 'no style')}); leave tp_plan out, or load the model whole"
                )
        forward = vars(module).get("forward")
        if getattr(module, "_is_hooked", False) and forward and not _surrounds_own_class(forward, module):
            raise ValueError(
                f"the forward of {name} was replaced before or after transformers divided it; replace it after the "
                "Trainer is made, or load the model whole"
            )


def take_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Take over what transformers divided as it loaded the model: the parts go on this mesh, its hooks go."""
    taken = dict[int, nn.Parameter]()
    for module in model.modules():
        if vars(module).pop("_is_hooked", False):
            vars(module).pop("forward", None)  # the hook, which surrounds that of the class
        for name in ("_device_mesh", "_mesh_manager", "_tp_size", "_is_distributed_loading_by_transformers"):
            vars(module).pop(name, None)
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                part = DTensor.from_local(parameter.to_local().detach(), mesh, parameter.placements, run_check=False)
                new = nn.Parameter(part, requires_grad=parameter.requires_grad)
                module._parameters[name] = taken.setdefault(id(parameter), new)
    vars(getattr(model, "config", model)).pop("distributed_config", None)  # or save_pretrained waits for all processes


def _surrounds_own_class(forward: Any, module: nn.Module) -> bool:
    """Whether a function is that of transformers, around the forward of the module's class; if unknown, it is not."""
    if getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0] != "transformers":
        return False  # also of a wrapper, whatever it says of itself
    inner = inspect.getclosurevars(forward).nonlocals.get("original_forward")
    return getattr(inner, "__func__", None) is type(module).forward


def _of_text(config: Any) -> int:
    """Return the numbers of a key with positions in a model's config, or in that of its text part; 0 if unknown."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "qk_rope_head_dim", 0)


def divide(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide the modules in place. A parameter that several of them share stays one.

    Raises:
        ValueError: a parameter is shared by a module that is divided and one that is not, or not in the same way.
    """
    shared = _shared(model)
    config = getattr(model, "config", None)
    ways = {name: _STYLES[style][0] or WithKeyOfAllHeads(_of_text(config)) for name, style in styles.items()}
    if _ON_PIECES in styles.values():
        ways |= {name: _INTO_PIECES[style] for name, style in styles.items() if style in _INTO_PIECES}
    parallelize_module(model, mesh, ways)
    modules = dict(model.named_modules())
    for places in shared:
        held = [modules[module]._parameters[name] for module, name in places]
        layouts = {str(getattr(parameter, "placements", "whole")) for parameter in held}
        if len(layouts) > 1:
            names = " and ".join(f"{module}.{name}" for module, name in places)
            raise ValueError(
                f"tp_plan: {names} are one parameter, and are divided as {' and '.join(sorted(layouts))}; give each or "
                "none a style that divides it so, as 'embedding_rowwise' and 'colwise_gather_output'"
            )
        for module, name in places:
            modules[module]._parameters[name] = held[0]


def without_views(model: nn.Module, inputs: Any, output: Any) -> Any:
    """Return outputs that a loss may change in place: the part of a divided tensor that a style returns is a view."""
    return tree_map_only(torch.Tensor, lambda v: v.clone() if v.requires_grad and v._base is not None else v, output)


def share_inputs(modules: Iterable[nn.Module], mesh: DeviceMesh) -> list[Any]:
    """Have modules of style `colwise` that get one tensor in turn, as queries, keys and values, sum its gradient once.

    Of a tensor in pieces they gather it once.

    Returns:
        The last of these tensors, which is kept until the list is cleared.
    """
    last: list[Any] = []

    def share(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        given = inputs[0]
        version = 0 if given.is_inference() else given._version  # changed in place, it has another gradient
        if not last or last[0] is not given or last[1] != version:
            shared = (
                given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [Replicate()], run_check=False)
            )
            last[:] = given, version, shared.redistribute(placements=[Replicate()])
        return last[2], *inputs[1:]

    for module in modules:
        module.register_forward_pre_hook(share, prepend=True)  # before that of the style, which then finds it done
    return last


def _shared(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the places of each parameter that several modules hold."""
    places: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module_name, name))
    return [found for found in places.values() if len(found) > 1]
