"""Choose the modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from tr_dist.fsdp.settings import Sharding


def choose_units(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Return the modules that become units, inner ones first, without the model itself.

    A module that shares a parameter with a module outside it cannot be a unit: the parameter would be in two units. It
    stays part of the enclosing unit.

    Raises:
        ValueError: a named class is not in the model.
    """
    if sharding.wrap == "TRANSFORMER_BASED_WRAP":
        chosen = _of_classes(model, sharding.layer_classes or _own_layers(model))
    elif sharding.wrap == "SIZE_BASED_WRAP":
        chosen = _of_size(model, sharding.min_num_params)
    else:
        chosen = []
    shared = _shared_parameters(model)
    return [module for module in chosen if not _reaches_outside(module, shared)]


def _own_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the layer classes that a transformers model marks as not to be split."""
    names = getattr(model, "_no_split_modules", None)
    if not names:
        raise ValueError(
            f"fsdp: auto_wrap does not know the layers of {type(model).__name__}, which has no _no_split_modules; name "
            "their class in fsdp_config's transformer_layer_cls_to_wrap, or a size in min_num_params. It has modules "
            f"of the classes {_class_names(model)}"
        )
    found = {type(module).__name__ for module in model.modules()}
    return tuple(name for name in names if name in found)


def _of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    modules = [module for _, module in _inner_first(model) if _class_name(module) in names]
    missing = sorted(set(names) - {_class_name(module) for module in modules})
    if missing:
        raise ValueError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {', '.join(missing)}, and {type(model).__name__} has no "
            f"module of that class; it has {_class_names(model)}"
        )
    return modules


def _of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return modules with at least so many parameters that are in no unit yet."""
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for name, module in _inner_first(model):
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if name and sum(own.values()) >= least and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            chosen.append(module)
            taken |= own.keys()
    return chosen


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, after its submodules; the model itself is last."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in module.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                yield from walk(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    yield from walk("", model)


def _shared_parameters(model: nn.Module) -> dict[int, set[int]]:
    """Return, for each parameter that several modules hold, those modules, all by identity."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}


def _reaches_outside(module: nn.Module, shared: dict[int, set[int]]) -> bool:
    inside = {id(each) for each in module.modules()}
    return any(not shared.get(id(p), set()) <= inside for p in module.parameters())


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _class_names(model: nn.Module) -> str:
    names = {_class_name(m) for m in model.modules() if m is not model and any(True for _ in m.children())}
    return ", ".join(sorted(names or {_class_name(m) for m in model.modules()}))
