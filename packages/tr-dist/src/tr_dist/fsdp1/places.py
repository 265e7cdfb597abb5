"""Say where a model that FSDP1 has flattened keeps each tensor of its state, and which part of it this rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Places:
    """The tensors of a module's state, by the names that they had before the module was divided.

    Made of the module as it was built; `find_units` is called once it is divided. The modules stay the same objects.

    Attributes:
        parameters: module and attribute of each parameter, by the first of its names.
        buffers: likewise, of the buffers that are in a state dict.
        aliases: the first name of each parameter, by every name that it has in a state dict, in the order of that.

    Raises:
        ValueError: a module has state beside its tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, tuple[nn.Module, str]] = {}
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        self.aliases: dict[str, str] = {}
        self._units: dict[str, FullyShardedDataParallel] = {}
        modules = dict(module.named_modules(remove_duplicate=False))
        first_names: dict[int, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            path, _, attribute = name.rpartition(".")
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"fsdp_config: version=1 saves parameters and buffers, and {name} is neither; leave version out"
                )
            self.aliases[name] = first = first_names.setdefault(id(value), name)
            if first == name:
                places = self.parameters if isinstance(value, nn.Parameter) else self.buffers
                places[name] = modules[path], attribute

    def find_units(self, divided: FullyShardedDataParallel) -> None:
        """Take down which unit holds each parameter. Collective."""
        with _summoned(divided, changed=False):
            pass  # the first unit that is summoned takes itself for the outermost
        owners: dict[int, FullyShardedDataParallel] = {}

        def visit(module: nn.Module, unit: FullyShardedDataParallel) -> None:
            unit = module if isinstance(module, FullyShardedDataParallel) else unit
            owners.setdefault(id(module), unit)
            for child in module.children():
                visit(child, unit)

        visit(divided, divided)
        self._units = {name: owners[id(module)] for name, (module, _) in self.parameters.items()}

    def parts(self) -> dict[str, nn.Parameter]:
        """Return what this rank holds of each parameter between two steps, by its first name."""
        return {name: module._parameters[attribute] for name, (module, attribute) in self.parameters.items()}  # pyright: ignore[reportReturnType]

    def whole(self, *, changed: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every parameter and buffer whole, one unit's at a time. Collective, and to be gone through to the end.

        Args:
            changed: keep what is done to the tensors, on every rank alike.
        """
        for unit in dict.fromkeys(self._units.values()):
            with _summoned(unit, changed=changed):
                for name, (module, attribute) in self.parameters.items():
                    if self._units[name] is unit:
                        yield name, getattr(module, attribute).data
        for name, (module, attribute) in self.buffers.items():
            yield name, getattr(module, attribute)


@contextmanager
def _summoned(unit: FullyShardedDataParallel, *, changed: bool) -> Iterator[None]:
    with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=changed):
        yield


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that each rank of its shards has: so many numbers of it flattened, in rank order.

    Attributes:
        shape: of the parameter.
        sizes: how many numbers each rank has.
        rank: of this process among them.
        group: these ranks.
    """

    shape: torch.Size
    sizes: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        return whole.reshape(-1).narrow(0, sum(self.sizes[: self.rank]), self.sizes[self.rank])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Put a tensor together from all ranks' parts. Collective.

        Args:
            part: this rank's; on a rank that has none, an empty tensor of the others' dtype and device.
        """
        padded = part.new_zeros(max(self.sizes))
        padded[: part.numel()] = part.reshape(-1)
        parts = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(parts, padded, group=self.group)
        flat = torch.cat([each[:size] for each, size in zip(parts, self.sizes, strict=True)])
        return flat.view(self.shape)


def pieces_of(places: Places, shapes: dict[str, torch.Size], group: dist.ProcessGroup) -> dict[str, Piece]:
    """Return how each parameter is divided, by its first name. Collective.

    Raises:
        RuntimeError: the ranks' parts do not make up a parameter.
    """
    mine = {name: part.numel() for name, part in places.parts().items()}
    sizes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(sizes, mine, group=group)
    rank = dist.get_rank(group)
    pieces = {n: Piece(shape, tuple(each[n] for each in sizes), rank, group) for n, shape in shapes.items()}
    for name, piece in pieces.items():
        if sum(piece.sizes) != piece.shape.numel():
            raise RuntimeError(
                f"FSDP1 divides parameter {name} of {piece.shape.numel()} numbers into parts of {piece.sizes}"
            )
    return pieces
