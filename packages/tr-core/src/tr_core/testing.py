"""Check that an implementation of a seam keeps its promises: run these from its tests.

Each function raises `AssertionError` with the promise that was broken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core.protocols import Checkpointer, Strategy


def check_strategy(strategy: Strategy) -> None:
    """Train a small model for two steps of two micro-batches through a strategy; every rank calls it.

    The model must end as one process with the union of all ranks' batches has it, within 1e-5.
    """
    assert isinstance(strategy, Strategy), _missing(strategy, Strategy)
    assert 0 <= strategy.rank < strategy.world_size, "rank lies outside 0 .. world_size - 1"
    check_collectives(strategy)
    alone, shared = _small_model(), _small_model()
    wrapped = strategy.prepare(shared)
    assert strategy.unwrap(wrapped) is shared, "unwrap does not return the module that was prepared"
    data = torch.arange(2 * 2 * strategy.world_size * 3 * 4, dtype=torch.float32).reshape(
        2, 2, strategy.world_size, 3, 4
    )
    data = torch.sin(data)
    norms = [_train_alone(alone, data), _train_shared(strategy, wrapped, data)]
    for expected, found in zip(*norms, strict=True):
        assert abs(expected - found) < 1e-4 * (1 + expected), f"norm before clipping is {found}, should be {expected}"
    state = strategy.stateful(wrapped, None)["model"].state_dict()
    assert set(state) == set(alone.state_dict()), "names in the model's state differ from those of the module"
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(
            state[name].cpu(), value, rtol=1e-5, atol=1e-5, msg=f"{name} differs from one process"
        )


def check_collectives(strategy: Strategy) -> None:
    """Check sums and gathers over the ranks."""
    rank, world = strategy.rank, strategy.world_size
    mine = torch.full((), float(rank + 1), device=strategy.device)
    total = strategy.sum(mine)
    assert total.item() == world * (world + 1) / 2, "sum is not the sum over ranks"
    assert mine.item() == rank + 1, "sum changed its argument"
    rows = strategy.gather(torch.full((2, 3), float(rank), device=strategy.device))
    assert rows.shape == (2 * world, 3), f"gather gave shape {tuple(rows.shape)}"
    assert rows[:, 0].tolist() == [float(r) for r in range(world) for _ in range(2)], "gather is not in rank order"
    assert strategy.gather_objects(("rank", rank)) == [("rank", r) for r in range(world)], (
        "objects are not in rank order"
    )
    strategy.barrier()


def check_checkpointer(make: Callable[[], Checkpointer]) -> None:
    """Save, restore, fall back and protect, in one process.

    Args:
        make: returns a checkpointer for one and the same empty folder every time, that keeps at most two checkpoints.
    """
    checkpointer = make()
    assert isinstance(checkpointer, Checkpointer), _missing(checkpointer, Checkpointer)
    part = _Part({"weight": torch.arange(6.0).reshape(2, 3), "count": 3, "nested": {"list": [1, 2.5, None, "text"]}})
    assert checkpointer.restore({"part": part}) is None, "an empty folder restored something"
    assert checkpointer.steps() == []
    extra: list[Path] = []
    for step in (1, 2, 3):
        part.state["count"] = step
        folder = checkpointer.save(step, {"part": part}, write_extra=extra.append, protected=(1,))
        assert folder == checkpointer.path(step), "save and path disagree about the folder"
        assert folder.is_dir()
    assert len(extra) == 3, "write_extra was not called once a save"
    assert 1 in checkpointer.steps(), "a protected checkpoint was removed"
    assert 3 in checkpointer.steps(), "the newest checkpoint was removed"
    checkpointer.close()
    again, restored = make(), _Part({})
    assert again.restore({"part": restored}) == 3, "the newest checkpoint was not found again"
    assert restored.state["count"] == 3
    torch.testing.assert_close(restored.state["weight"], part.state["weight"], rtol=0, atol=0)
    assert restored.state["nested"] == part.state["nested"]
    assert again.restore({"part": restored}, source=again.path(1)) == 1, "a named checkpoint was not restored"
    complaint = ""
    try:
        again.restore({"other": _Part({})}, source=again.path(3))
    except ValueError as error:
        complaint = str(error)
    assert complaint, "a part that was never saved was restored in silence"
    assert "other" in complaint, "the error does not name the missing part"
    again.close()


class _Part:
    """Anything with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = state_dict


def _small_model() -> nn.Module:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).reshape(2, 4) / 10)
        model.bias.zero_()
    return model


def _train_alone(model: nn.Module, data: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for micro_batches in data:
        for batch in micro_batches:
            (model(batch.flatten(0, 1)).square().mean() / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _train_shared(strategy: Strategy, model: nn.Module, data: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    model.train()
    for micro_batches in data:
        for number, batch in enumerate(micro_batches, start=1):
            with strategy.accumulate(model, sync=number == len(micro_batches)):
                with strategy.autocast():
                    loss = model(batch[strategy.rank].to(strategy.device)).square().mean() / 2
                strategy.backward(loss)
        norm = strategy.clip_grad_norm(model, optimizer, 0.05)
        assert isinstance(norm, torch.Tensor), "clip_grad_norm must leave the norm on the device"
        norms.append(float(norm))
        assert strategy.step(optimizer), "a step without overflow was skipped"
        optimizer.zero_grad()
    return norms


def _missing(thing: object, protocol: type) -> str:
    names = [name for name in dir(protocol) if not name.startswith("_") and not hasattr(thing, name)]
    return f"{type(thing).__name__} lacks {', '.join(names)}, which {protocol.__name__} has"
