"""Handle parameters of which each rank holds some rows, as with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # imported only with sharded parameters, because the import is slow
    from torch.distributed.device_mesh import DeviceMesh


State = dict[str, torch.Tensor]
# Whether the tensor of a name in a parameter's state has the parameter's rows, or is the same on all ranks; None of one
# that is in no layout, on the CPU perhaps, and the same too. It gets the parameter's group.
IsDivided = Callable[[str, "Shards", Mapping[str, Any]], "bool | None"]

# Numbers that travel together, at most.
_TOGETHER = 2**22


@dataclass(frozen=True)
class Shards:
    """The rows of a parameter that this rank holds, and the ranks that hold the others.

    Rows are divided as by `torch.chunk`: the last ranks may hold fewer, or none. A stack is divided into whole
    matrices.

    Attributes:
        mesh: the ranks.
        dimension: the mesh's dimension over which rows are divided; over others there are replicas.
        shape: the whole parameter's.
        start: the first row that this rank holds.
        stop: the one after the last.
    """

    mesh: DeviceMesh
    dimension: int
    shape: torch.Size
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of ranks that rows are divided over."""
        return self.mesh.size(self.dimension)

    @property
    def divides_matrix(self) -> bool:
        """Whether sums over the rows of a matrix are sums over ranks; in a stack each matrix is whole."""
        return len(self.shape) == 2

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the ranks that hold other rows, equal bit for bit on all.

        Collective: same shapes in the same order on all ranks. Several tensors share one exchange.
        """
        if self.count == 1 or any(tensor.is_meta for tensor in tensors):  # meta tensors estimate bytes
            return
        exchange_together(tensors, self._reduced)

    def _reduced(self, joined: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(joined, group=self.mesh.get_group(self.dimension))
        return joined

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's sum over the ranks that hold other rows; the tensor itself, changed."""
        tensor = tensor.contiguous()
        self.add_up([tensor])
        return tensor

    def distributed(self, local: torch.Tensor, *, is_divided: bool) -> torch.Tensor:
        """Return a DTensor of what this rank has: of some rows, or of what is the same on all ranks."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((self.shape[0], *local.shape[1:])) if is_divided else local.shape
        stride = torch.empty(shape, device="meta").stride()
        placements = self._placements(is_divided)
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return of something that has the parameter's rows those that this rank holds."""
        return whole[self.start : self.stop]

    def held_of(self, value: torch.Tensor, *, is_divided: bool) -> torch.Tensor:
        """Return of a state in any layout what this rank is to hold, a copy.

        Communicates where the layout is another one: all ranks call it then.
        """
        held: Any = value.detach()
        is_laid_out = is_distributed(held) and held.device_mesh == self.mesh
        if is_laid_out and list(held.placements) == self._placements(is_divided):
            held = held.to_local()
        else:
            held = held.full_tensor() if is_distributed(held) else held
            held = self.part_of(held) if is_divided else held
        return held.clone(memory_format=torch.contiguous_format)

    def _placements(self, is_divided: bool) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        placements: list[Any] = [Replicate()] * self.mesh.ndim
        if is_divided:
            placements[self.dimension] = Shard(0)
        return placements


def exchange_together(tensors: Iterable[torch.Tensor], exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace tensors by what an exchange over ranks returns for them, many in one.

    Args:
        tensors: are changed; all ranks give the same shapes in the same order.
        exchange: of a contiguous tensor, which it may change and return.
    """
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel()
        if not buckets or tensor.dtype != buckets[-1][0].dtype or size > _TOGETHER:
            buckets.append([])
            size = tensor.numel()
        buckets[-1].append(tensor)
    for bucket in buckets:
        is_alone = len(bucket) == 1 and bucket[0].is_contiguous()
        joined = bucket[0].view(-1) if is_alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
        found = exchange(joined)
        if not is_alone or found is not joined:
            for tensor, part in zip(bucket, found.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def shards_of(tensor: torch.Tensor) -> Shards | None:
    """Return how a tensor's rows are divided; None if it is whole, or is divided in another way."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return None
    from torch.distributed.tensor import Replicate, Shard

    divided = [number for number, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(divided) != 1 or type(placements[divided[0]]) is not Shard or placements[divided[0]].dim != 0:
        return None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    dimension, rows = divided[0], tensor.shape[0]
    each = -(-rows // mesh.size(dimension))
    start = min(each * mesh.get_local_rank(dimension), rows)
    return Shards(mesh, dimension, tensor.shape, start, min(start + each, rows))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided over ranks, and any other as it is."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def in_layout(
    state_dict: dict[str, Any], param_groups: Iterable[Mapping[str, Any]], is_divided: IsDivided
) -> dict[str, Any]:
    """Return an optimizer's state with DTensors, which share its memory, in place of this rank's parts.

    Args:
        state_dict: what `torch.optim.Optimizer.state_dict` returned.
        param_groups: the optimizer's own.
        is_divided: which tensors have the rows of their parameters.
    """
    state = dict(state_dict["state"])
    placed = ((group, parameter) for group in param_groups for parameter in group["params"])
    for number, (group, parameter) in enumerate(placed):
        shards = shards_of(parameter)
        if shards is not None and number in state:
            divided = {name: is_divided(name, shards, group) for name, value in state[number].items() if value.dim()}
            laid_out = {
                name: shards.distributed(state[number][name], is_divided=has_rows)
                for name, has_rows in divided.items()
                if has_rows is not None
            }
            state[number] = {**state[number], **laid_out}
    return {**state_dict, "state": state}


def out_of_layout(
    state: Mapping[str, torch.Tensor], parameter: torch.Tensor, group: Mapping[str, Any], is_divided: IsDivided
) -> State:
    """Return of a parameter's state in any layout what this rank is to hold, copies where it is in shards.

    All ranks call it, for a state of another layout is gathered.
    """
    shards = shards_of(parameter)
    if shards is None:
        return dict(state)
    divided = {name: is_divided(name, shards, group) for name, value in state.items() if value.dim()}
    return {
        name: value if divided.get(name) is None else shards.held_of(value, is_divided=bool(divided[name]))
        for name, value in state.items()
    }


def load_states(
    optimizer: torch.optim.Optimizer,
    states: Sequence[State | None],
    copies: Callable[[State, torch.Tensor, dict[str, Any]], State],
    is_divided: IsDivided,
) -> None:
    """Set an optimizer's state to what this rank is to hold of a saved one, in any layout. Collective with shards.

    Args:
        optimizer: whose state is set.
        states: the saved state of each parameter, None where there is none.
        copies: returns copies of the saved moments for a parameter, from its saved state, itself and its group; of the
            step too, if it is to be another than a float64 on the CPU.
        is_divided: which tensors have the rows of their parameters.
    """
    placed = ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])
    for saved, (group, parameter) in zip(states, placed, strict=True):
        if saved is not None:
            held = out_of_layout(copies(saved, parameter, group), parameter, group, is_divided)
            step = torch.tensor(float(saved["step"]), dtype=torch.float64)
            optimizer.state[parameter] = {"step": step, **held}


def as_copies(saved: State, parameter: torch.Tensor, _group: Mapping[str, Any]) -> State:
    """Return copies of a saved state where a step needs them; torch would round them to their parameter's dtype."""
    on_host = ("step", "refreshed")
    return {n: value.to("cpu" if n in on_host else parameter.device, copy=True) for n, value in saved.items()}


def with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of one that is a piece of a larger one and would keep that from being freed."""
    own_bytes = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() <= own_bytes else tensor.clone()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return getattr(tensor, "placements", None) is not None


def sharded_parameters(
    parameters: Iterable[torch.Tensor], owner: str, *, takes: bool, instead: str = ""
) -> dict[int, Shards]:
    """Return how those of the parameters are divided that are DTensors, by their ids.

    Args:
        parameters: those to look at.
        owner: whose they are.
        takes: whether it can update parts of parameters.
        instead: end of the message if it cannot.

    Raises:
        ValueError: one is divided, and its owner cannot update parts; or in another way than by rows; or two over
            different ranks; or where gradients are not to be exchanged.
    """
    found: dict[int, Shards] = {}
    for parameter in parameters:
        if not is_distributed(parameter):
            continue
        tensor, mesh = f"a parameter of shape {tuple(parameter.shape)}", parameter.device_mesh  # type: ignore[attr-defined]
        if not takes:
            raise ValueError(f"{owner}: {tensor} is a DTensor, of which each rank holds a part, {instead}")
        shards = shards_of(parameter)
        if shards is None:
            raise ValueError(
                f"{owner}: {tensor} is a DTensor with {parameter.placements} over {tuple(mesh.shape)} ranks; "  # type: ignore[attr-defined]
                "what is built is rows divided over ranks, as fully_shard(module) does, with replicas or without"
            )
        if parameter.device.type != mesh.device_type:
            raise ValueError(
                f"{owner}: {tensor} is on {parameter.device.type}, and its gradients are exchanged on "
                f"{mesh.device_type}, from where they are still on their way when they are to be used; give "
                "fully_shard no CPUOffloadPolicy, and materialise parameters before the first step"
            )
        other = next(iter(found.values()), shards)
        if (shards.mesh, shards.dimension) != (other.mesh, other.dimension):
            raise ValueError(
                f"{owner}: {tensor} is divided over other ranks than one of shape {tuple(other.shape)}; divide all "
                "over the same mesh, or give them to two optimizers"
            )
        found[id(parameter)] = shards
    return found


def norm_of_parts(norms: Iterable[torch.Tensor], shards: Shards, device: torch.device | None) -> torch.Tensor:
    """Return the norm of all rows on all ranks, of the norms of those on this one; all ranks call it."""
    stacked = torch.stack([norm.to(device) for norm in norms] or [torch.zeros((), device=device)])
    square = torch.linalg.vector_norm(stacked).to(torch.float64).square()  # of a float32 it can be out of range
    return shards.sum(square).sqrt().to(stacked.dtype)
