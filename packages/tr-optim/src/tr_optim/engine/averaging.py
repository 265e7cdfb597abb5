"""Average gradients over the ranks: one by one in the backward pass, or what each rank has kept after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tr_optim.engine.hooks import Consume
from tr_optim.engine.shards import exchange_together


class Collectives(Protocol):
    """This process's rank and its exchanges with the others; strategies of tr-core and tr-dist fit."""

    rank: int
    world_size: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank, bit for bit the same."""
        ...


class Averaging:
    """Means over the ranks.

    Args:
        collectives: exchanges values between them.
        dtype: what values are exchanged in; None for their own.
    """

    def __init__(self, collectives: Collectives, dtype: torch.dtype | None = None) -> None:
        self._collectives, self._dtype = collectives, dtype
        self.world_size = collectives.world_size

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a contiguous tensor over all ranks, a new one."""
        if self._dtype is None:
            return self._collectives.sum(tensor) / self.world_size
        return self._collectives.sum(tensor.to(self._dtype)).to(tensor.dtype) / self.world_size

    def average_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means, many in one exchange. Collective: same shapes in the same order."""
        exchange_together(tensors, self)


class FixedOrder:
    """Handle gradients in one order on all ranks, whatever the order of the backward pass.

    So exchanges of different ranks match. A gradient that comes early waits for those before it.

    Args:
        order: the parameters, in the order to handle them.
        take: handles one gradient.
    """

    def __init__(self, order: Sequence[torch.Tensor], take: Consume) -> None:
        self._order, self._take = list(order), take
        self._next = 0
        self._waiting: dict[int, torch.Tensor] = {}
        self._ids = {id(parameter) for parameter in self._order}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def lacks(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient has not come yet."""
        return id(parameter) not in self._waiting and id(parameter) in {id(p) for p in self._order[self._next :]}

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Handle a gradient and those that waited for it, or keep it waiting."""
        self._waiting[id(parameter)] = gradient
        while self._next < len(self._order) and id(self._order[self._next]) in self._waiting:
            following = self._order[self._next]
            self._next += 1
            self._take(following, self._waiting.pop(id(following)))

    def finish(self) -> None:
        """Check that all gradients have come.

        Raises:
            RuntimeError: one is missing.
        """
        if self._next < len(self._order):
            raise RuntimeError(missing_gradient([self._order[self._next]]))


def missing_gradient(parameters: Sequence[torch.Tensor]) -> str:
    """Return the message for parameters that got no gradient on this rank."""
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:5])
    return (
        f"{len(parameters)} trainable parameters got no gradient on this rank in the step's backward passes (shapes "
        f"{shapes}), so that the others would wait for it; use them in the loss, or freeze them with "
        "requires_grad_(False)"
    )


# Elements of a gradient that is exchanged alone. Smaller ones, mostly biases and norms, are exchanged at the end.
_ALONE = 2**14
# Gradients in exchange at a time: one is exchanged while the next is computed.
_IN_FLIGHT = 2

Use = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], None]


class RankAverage:
    """Average the gradients of each backward pass over the ranks, and pass on the means.

    All ranks start exchanges in one order, whatever order gradients come in. At first it is the reverse of the
    parameters' order, then the order of rank 0's first pass. An early gradient waits. A parameter that this rank's loss
    does not use counts as zeros. One that no rank's loss uses is passed on as unused. The results do not depend on the
    order, so all ranks, and a resumed run, have the same bits.

    Args:
        collectives: the ranks (see `tr_core.protocols.Collectives`): `world_size`, `sum` and `gather_objects`
            are used. Where torch's process group has as many ranks, exchanges go through it without waiting.
        parameters: the parameters with gradients, in the same order on all ranks.
        use: called with a parameter, its mean gradient, and a flag on the device that is True if no rank's loss uses
            the parameter, or None if this rank's does.

    Attributes:
        largest_in_order: elements of the largest gradients that are passed on in the same order on all ranks.
    """

    def __init__(self, collectives: Any, parameters: Iterable[torch.Tensor], use: Use) -> None:
        self._collectives, self._use = collectives, use
        self._parameters = list(parameters)
        self._order = [p for p in reversed(self._parameters) if p.numel() >= _ALONE]
        self._small = [p for p in self._parameters if p.numel() < _ALONE]
        self.largest_in_order = _ALONE - 1
        has_double = any(p.dtype == torch.float64 for p in self._small)
        self._dtype = torch.float64 if has_double else torch.float32  # in which the small ones travel
        self._in_background = dist.is_initialized() and dist.get_world_size() == collectives.world_size
        self._order_is_learned = False
        self._begin_pass()

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this rank's gradient of a parameter, at most once in a pass; it may be changed."""
        self._waiting[id(parameter)] = gradient
        self._came.append(parameter)
        while self._begun < len(self._order) and id(self._order[self._begun]) in self._waiting:
            self._begin_next(self._waiting.pop(id(self._order[self._begun])))
            if len(self._in_flight) >= _IN_FLIGHT:
                self._hand_on(*self._in_flight.popleft(), None)

    def finish(self) -> None:
        """End a pass: exchange the remaining gradients and pass on all. Collective."""
        came = {id(parameter) for parameter in self._came}
        last: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        while self._begun < len(self._order):
            parameter = self._order[self._begun]
            gradient = self._waiting.pop(id(parameter), None)
            self._begin_next(torch.zeros_like(parameter) if gradient is None else gradient)
            if id(parameter) not in came:
                last.append(self._in_flight.pop())
            elif len(self._in_flight) >= _IN_FLIGHT:
                self._hand_on(*self._in_flight.popleft(), None)
        while self._in_flight:
            self._hand_on(*self._in_flight.popleft(), None)
        unused = self._finish_small(came)
        for parameter, gradient, work in last:
            self._hand_on(parameter, gradient, work, unused[id(parameter)])
        self._learn_order()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._waiting: dict[int, torch.Tensor] = {}
        self._came: list[torch.Tensor] = []
        self._in_flight: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        self._begun = 0

    def _begin_next(self, gradient: torch.Tensor) -> None:
        parameter = self._order[self._begun]
        self._begun += 1
        # Divided before the sum, because in float16 the sum may overflow where the mean does not.
        gradient = gradient.contiguous().div_(self._collectives.world_size)
        if self._in_background:
            self._in_flight.append((parameter, gradient, dist.all_reduce(gradient, async_op=True)))
        else:
            self._in_flight.append((parameter, self._collectives.sum(gradient), None))

    def _hand_on(self, parameter: torch.Tensor, gradient: torch.Tensor, work: Any, unused: torch.Tensor | None) -> None:
        if work is not None:
            work.wait()
        self._use(parameter, gradient, unused)

    def _finish_small(self, came: set[int]) -> dict[int, torch.Tensor]:
        """Exchange small gradients and usage flags in one piece; return the flags of unused parameters."""
        options: dict[str, Any] = {"device": self._parameters[0].device, "dtype": self._dtype}
        used = torch.ones(len(self._parameters), **options)
        for number, parameter in enumerate(self._parameters):
            if id(parameter) not in came:
                used[number] = 0.0  # filled, not copied: a copy from the host would wait for the device
        own = [self._waiting.pop(id(p), None) for p in self._small]
        parts = [
            torch.zeros(p.numel(), **options) if g is None else g.reshape(-1).to(**options)
            for p, g in zip(self._small, own, strict=True)
        ]
        total = self._collectives.sum(torch.cat([used, *parts]))
        counts, *sums = total.split([len(self._parameters), *(p.numel() for p in self._small)])
        unused = {id(p): flag for p, flag in zip(self._parameters, counts == 0, strict=True)}
        for parameter, summed in zip(self._small, sums, strict=True):
            mean = summed.div_(self._collectives.world_size).view(parameter.shape).to(parameter.device, parameter.dtype)
            self._use(parameter, mean, None if id(parameter) in came else unused[id(parameter)])
        return unused

    def _learn_order(self) -> None:
        if self._order_is_learned:
            return
        number = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        mine = [number[id(parameter)] for parameter in self._came if parameter.numel() >= _ALONE]
        theirs: list[int] = self._collectives.gather_objects(mine)[0]  # once, after the first pass
        rest = [n for n in (number[id(parameter)] for parameter in self._order) if n not in set(theirs)]
        self._order = [self._parameters[n] for n in (*theirs, *rest)]
        self._order_is_learned = True
