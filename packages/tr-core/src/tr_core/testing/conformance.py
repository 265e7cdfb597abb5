"""Check that an implementation of an interface conforms to it: call these functions from its tests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core.optim.optimizers import has_fused
from tr_core.protocols import Checkpointer, EvaluationWeights, InBackward, Restored, Stateful, Strategy
from tr_core.single_device import complete_strategy
from tr_core.state import TrainerControl, TrainerState


def check_strategy(strategy: Strategy, make: Callable[[], nn.Module] | None = None, *, consumes: bool = True) -> None:
    """Train a small model for two steps of two micro-batches through a strategy. Collective.

    The final model must equal that of one process with the union of all data ranks' batches, within 1e-5.

    Args:
        strategy: that has prepared no model.
        make: builds the model, the same each time, of inputs of 4 numbers; None for a linear module.
        consumes: whether optimizers may consume gradients during the backward pass.
    """
    with contextlib.suppress(TypeError):  # the check below names what it lacks
        complete_strategy(strategy)
    assert isinstance(strategy, Strategy), _missing(strategy, Strategy)
    assert 0 <= strategy.rank < strategy.world_size, "rank lies outside 0 .. world_size - 1"
    check_collectives(strategy)
    make = make or _small_model
    alone, shared = make(), make()
    wrapped = strategy.prepare(shared)
    assert strategy.unwrap(wrapped) is shared, "unwrap does not return the module that was prepared"
    ranks, rank = strategy.data.world_size, strategy.data.rank
    data = torch.sin(torch.arange(2 * 2 * ranks * 3 * 4, dtype=torch.float32).reshape(2, 2, ranks, 3, 4))
    norms = [_train_alone(alone, data), _train_shared(strategy, wrapped, data[:, :, rank])]
    for expected, found in zip(*norms, strict=True):
        assert abs(expected - found) < 1e-4 * (1 + expected), f"norm before clipping is {found}, should be {expected}"
    names = set(strategy.state_parts(wrapped, None)["model"].state_dict())
    state = strategy.full_state_dict(wrapped)
    if strategy.rank == 0:
        assert names == set(alone.state_dict()), "names in the model's state differ from those of the module"
        assert names == set(state), "names in the model's whole state differ from those of the module"
    for name, value in alone.state_dict().items() if strategy.rank == 0 else ():
        torch.testing.assert_close(
            state[name].cpu(), value, rtol=1e-5, atol=1e-5, msg=partial("{} differs from one process: {}".format, name)
        )
    _check_gathered(strategy, wrapped, alone)
    if consumes and not strategy.binds_optimizer:
        _check_fused(strategy, wrapped, data[0, 0, rank])
    for optimizer in (
        torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(wrapped.parameters(), lr=0.1, fused=has_fused(strategy.device)),
    ):
        _check_skipping(strategy, wrapped, optimizer, data[0, 0, rank])
    _check_clearing(strategy, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), data[0, 0, rank])


def check_collectives(strategy: Strategy) -> None:
    """Check sums, gathers and maxima over the ranks."""
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
    first, second = strategy.all_reduce_max([rank + 3, -rank]), strategy.all_reduce_max([7 if rank == 0 else 0])
    assert second() == [7], "all_reduce_max is not the largest value of all ranks"
    assert first() == first() == [world + 2, 0], "the first maximum is another once there is a second"
    strategy.barrier()


def check_checkpointer(make: Callable[[], Checkpointer]) -> None:
    """Check save, restore, fallback and protection, in one process.

    Args:
        make: returns a checkpointer for the same folder every time, at first empty, that keeps at most two checkpoints.
    """
    checkpointer = make()
    assert isinstance(checkpointer, Checkpointer), _missing(checkpointer, Checkpointer)
    _check_claims(make)
    part = _Part({"weight": torch.arange(6.0).reshape(2, 3), "count": 3, "nested": {"list": [1, 2.5, None, "text"]}})
    assert checkpointer.restored is None, "something was restored before the first restore"
    assert checkpointer.restore({"part": part}) is None, "an empty folder restored something"
    _check_restored(checkpointer, None, set())
    assert checkpointer.steps() == []
    extra: list[Path] = []
    committed: list[Path] = []

    def on_commit(folder: Path) -> None:
        committed.append(folder)
        raise RuntimeError("on purpose: it must be logged, and the checkpoint stays")

    for step in (1, 2, 3):
        part.state["count"] = step
        part.state["weight"].fill_(step)
        folder = checkpointer.save(step, {"part": part}, write_extra=extra.append, protected=(1,), on_commit=on_commit)
        assert len(extra) == step, "write_extra was not called once, before save returned"
        # Training continues: the save must hold the state at the call.
        part.state["weight"].fill_(-1)
        assert folder == checkpointer.path(step), "save and path disagree about the folder"
        assert folder.is_dir(), "path did not wait for the save"
        checkpointer.check()
    checkpointer.wait()
    assert committed == [checkpointer.path(step) for step in (1, 2, 3)], "on_commit was not called once a save"
    assert 1 in checkpointer.steps(), "a protected checkpoint was removed"
    assert 3 in checkpointer.steps(), "the newest checkpoint was removed"
    checkpointer.close()
    again, restored = make(), _Part({})
    assert again.restore({"part": restored}) == 3, "the newest checkpoint was not found again"
    assert restored.state["count"] == 3
    expected = torch.full((2, 3), 3.0)
    torch.testing.assert_close(restored.state["weight"], expected, rtol=0, atol=0, msg="not the state of the save")
    assert restored.state["nested"] == part.state["nested"]
    assert again.restore({"part": restored}, source=again.path(1)) == 1, "a named checkpoint was not restored"
    _check_missing_parts(again)
    _check_only_read(again, restored)
    again.close()


def _check_claims(make: Callable[[], Checkpointer]) -> None:
    """Check that a claim may be repeated and shared with others of this process, and that it may be released twice."""
    both: list[Any] = [make(), make()]
    has = {name: [hasattr(each, name) for each in both] for name in ("claim", "release")}
    assert has["claim"] == has["release"], "claim and release go together"
    for name in ("claim", "claim", "release", "release") if all(has["claim"]) else ():
        for each in both:
            assert getattr(each, name)() is None, f"{name} returned something"
    assert both[0].steps() == [], "claiming made a checkpoint"


def _check_missing_parts(checkpointer: Checkpointer) -> None:
    complaint = ""
    try:
        checkpointer.restore({"other": _Part({})}, source=checkpointer.path(3))
    except ValueError as error:
        complaint = str(error)
    assert complaint, "a part that was never saved was restored in silence"
    assert "other" in complaint, "the error does not name the missing part"
    parts = {"part": _Part({}), "other": _Part({"count": 7})}
    assert checkpointer.restore(parts, optional={"other"}) == 3, "an optional part was demanded"
    assert parts["other"].state == {"count": 7}, "an optional part that was never saved was changed"
    _check_restored(checkpointer, 3, {"part"})


def _check_restored(checkpointer: Checkpointer, step: int | None, loaded: set[str]) -> Restored:
    restored = checkpointer.restored
    assert restored is not None, "restored is None after a restore"
    assert restored.step == step, f"restored.step is {restored.step}, should be {step}"
    assert (restored.source is None) == (step is None), "restored.source is not the folder of the checkpoint"
    assert set(restored.loaded) == loaded, f"restored.loaded is {restored.loaded}, should be {loaded}"
    assert list(restored.skipped) == [], "restored.skipped names a checkpoint, and none is damaged"
    return restored


def _check_only_read(checkpointer: Checkpointer, expected: _Part) -> None:
    given = _Part({"count": 7})
    for parts in ({"part": given}, {}):
        assert checkpointer.restore(parts, source=checkpointer.path(1), only_read={"part"}) == 1
        states = _check_restored(checkpointer, 1, set()).states
        assert set(states) == {"part"}, f"restored.states holds {set(states)}, should hold the part that was only read"
        assert states["part"]["count"] == expected.state["count"], "restored.states is not what was saved"
        assert given.state == {"count": 7}, "a part that was only to be read was given a state"


class _Part:
    """Hold any state."""

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
    _bind(strategy, model, optimizer)
    norms = []
    model.train()
    for micro_batches in data:
        for number, batch in enumerate(micro_batches, start=1):
            with strategy.accumulate(model, sync=number == len(micro_batches)):
                with strategy.autocast():
                    loss = model(batch.to(strategy.device)).square().mean() / 2
                strategy.backward(loss)
        norm = strategy.clip_grad_norm(model, optimizer, 0.05)
        assert isinstance(norm, torch.Tensor), "clip_grad_norm must leave the norm on the device"
        norms.append(float(norm))
        assert strategy.step(optimizer), "a step without overflow was skipped"
        optimizer.zero_grad()
    return norms


def _bind(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    strategy.bind_optimizer(model, optimizer)


def _check_gathered(strategy: Strategy, model: nn.Module, alone: nn.Module) -> None:
    """Check each full parameter."""
    for parameter, expected in zip(strategy.unwrap(model).parameters(), alone.parameters(), strict=True):
        with strategy.gathered(parameter) as whole:
            torch.testing.assert_close(
                whole.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5, msg="gathered gives another parameter"
            )


def _check_fused(strategy: Strategy, model: nn.Module, batch: torch.Tensor) -> None:
    """Run a step of two micro-batches whose gradients are consumed during the backward pass."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for last in (False, True):
        with strategy.accumulate_fused(model, last=last):
            with strategy.autocast():
                loss = model(batch.to(strategy.device)).square().mean()
            strategy.backward(loss)
            assert all(parameter.grad is not None for parameter in parameters), "backward gave no gradient to consume"
            model.zero_grad()


def _check_skipping(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> None:
    """Run a step, a skipped one with a gradient that is not finite, and another step."""
    _bind(strategy, model, optimizer)
    states = []
    for factor, skips in ((1.0, 0.0), (float("nan"), 1.0), (1.0, 0.0)):
        with strategy.accumulate(model, sync=True):
            with strategy.autocast():
                loss = model(batch.to(strategy.device)).square().mean() * factor
            strategy.backward(loss)
        strategy.clip_grad_norm(model, optimizer, None)
        strategy.step(optimizer, skip=torch.full((), skips, device=strategy.device))
        optimizer.zero_grad()
        tensors = (value for state in optimizer.state.values() for value in state.values())
        weights = strategy.full_state_dict(model).values()  # parameters may be sharded, to empty ones
        states.append([t.detach().clone() for t in (*weights, *tensors) if isinstance(t, torch.Tensor)])
    name = type(optimizer).__name__
    pairs = [zip(states[number], states[number + 1], strict=True) for number in (0, 1)]
    assert all(torch.equal(a, b) for a, b in pairs[0]), f"a step of {name} that was to be skipped changed something"
    assert not any(torch.equal(a, b) for a, b in pairs[1]), f"a step of {name} after a skipped one changed nothing"


def _check_clearing(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> None:
    """Check that `zero_grad` between two micro-batches drops the gradients so far, or that an error says why not."""

    def compute(*, sync: bool) -> None:
        with strategy.accumulate(model, sync=sync):
            with strategy.autocast():
                loss = model(batch.to(strategy.device)).square().mean()
            strategy.backward(loss)

    def norm_of_step() -> float:
        compute(sync=True)
        norm = float(strategy.clip_grad_norm(model, optimizer, None))
        strategy.step(optimizer, skip=torch.ones((), device=strategy.device))  # the weights stay
        optimizer.zero_grad()
        return norm

    _bind(strategy, model, optimizer)
    alone = norm_of_step()
    for owner in (optimizer, strategy.unwrap(model)):
        compute(sync=False)
        try:
            owner.zero_grad()
        except RuntimeError as error:
            if "zero_grad" not in str(error):  # no refusal
                raise
            return
        assert math.isclose(norm_of_step(), alone, rel_tol=1e-4), "zero_grad between micro-batches left a gradient"


def _missing(thing: object, protocol: type) -> str:
    declared = {name for base in protocol.__mro__ for name in getattr(base, "__annotations__", ())} | set(dir(protocol))
    names = [name for name in sorted(declared) if not name.startswith("_") and not hasattr(thing, name)]
    return f"{type(thing).__name__} lacks {', '.join(names)}, which {protocol.__name__} has"


def check_evaluation_weights(callback: Any) -> None:
    """Train a small model for two steps with a callback that swaps in other weights, and check all weights.

    The callback must hold other weights than the model after these steps.
    """
    promised: Any = EvaluationWeights
    assert isinstance(callback, promised), _missing(callback, promised)
    model, state, control = _small_model(), TrainerState(max_steps=2), TrainerControl()
    weight = next(model.parameters())
    callback.on_train_begin(None, state, control, model=model)
    for _ in range(2):
        with torch.no_grad():
            weight.add_(1.0)
        callback.on_optimizer_step(None, state, control, model=model, applied=True)
        state.global_step += 1
    parts = callback.weight_parts(model)
    assert parts, "nothing is saved of the weights"
    assert all(isinstance(part, Stateful) for part in parts.values()), "a part has no state_dict or load_state_dict"
    own, inside = weight.detach().clone(), []
    with contextlib.suppress(KeyError), callback.evaluation_weights(model):
        inside.append(weight.detach().clone())
        with callback.evaluation_weights(model):
            inside.append(weight.detach().clone())
        inside.append(weight.detach().clone())
        raise KeyError
    assert torch.equal(weight, own), "after an exception the model has not its own weights"
    assert not torch.equal(own, inside[0]), "the weights inside the block are those outside"
    assert torch.equal(inside[1], inside[0]), "a block inside another changed the weights"
    assert torch.equal(inside[2], inside[0]), "a block inside another ended the outer one"
    callback.keep_evaluation_weights(model, state)
    assert torch.equal(weight, inside[0]), "what is kept is not what was evaluated"
    callback.on_train_end(None, state, control)
    with callback.evaluation_weights(model):
        assert torch.equal(weight, inside[0]), "after the end of a run the weights were changed again"


def check_in_backward(make: Callable[[nn.Module], Any]) -> None:
    """Train a small model for a few steps with an optimizer that consumes gradients in the backward pass.

    Args:
        make: builds the optimizer over all parameters of a model, with a nonzero learning rate and no clipping.
    """
    promised: Any = InBackward
    model = _small_model()
    optimizer = make(model)
    assert isinstance(optimizer, promised), _missing(optimizer, promised)
    assert optimizer.fused_in_backward is True, "fused_in_backward is not True"
    weights = [p.detach().clone() for p in model.parameters()]
    loss = _loss_in_backward(model, 0)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert not any(g is None for g in gradients), "a plain backward was consumed"
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients if g is not None])))
    model.zero_grad()
    _same(model, weights, "a plain backward changed weights")

    optimizer.backward(_loss_in_backward(model, 0))
    assert any(p.grad is None for p in model.parameters()), "backward has consumed no gradient"
    found = optimizer.clip_grad_norm(None)
    assert isinstance(found, torch.Tensor), "clip_grad_norm must leave the norm on the device"
    assert abs(float(found) - norm) < 1e-4 * (1 + norm), f"the norm is {float(found)}, should be {norm}"
    assert optimizer.norm_is_estimated is False, "the norm of one micro-batch is called an estimate"
    if not optimizer.updates_in_backward:
        _same(model, weights, "weights changed before the step, and updates_in_backward is False")
        optimizer.zero_grad()
        optimizer.step()
        _same(model, weights, "zero_grad left something that a step applied")
        optimizer.backward(_loss_in_backward(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    assert not any(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)), (
        "a step changed nothing"
    )
    assert all(p.grad is None for p in model.parameters()), "zero_grad left a gradient"
    _check_resuming(make, model, optimizer)
    _check_learning_rate(model, optimizer)
    optimizer.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "detach left a hook"
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    weights = [p.detach().clone() for p in model.parameters()]
    _step_in_backward(model, optimizer, 5)
    assert not torch.equal(next(model.parameters()), weights[0]), "after detach the next backward consumed nothing"


def _check_resuming(make: Callable[[nn.Module], Any], model: nn.Module, optimizer: Any) -> None:
    """Continue with a copy that has only the saved states: it must stay the same bit for bit."""
    copy = _small_model()
    copy.load_state_dict(model.state_dict())
    other = make(copy)
    other.load_state_dict(optimizer.state_dict())
    for seed in (1, 2):
        _step_in_backward(model, optimizer, seed)
        _step_in_backward(copy, other, seed)
    _same(copy, list(model.parameters()), "a restored optimizer goes on otherwise")


def _check_learning_rate(model: nn.Module, optimizer: Any) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    weights = [p.detach().clone() for p in model.parameters()]
    _step_in_backward(model, optimizer, 3)
    _same(model, weights, "a learning rate of 0 in param_groups was not used")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _step_in_backward(model: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.backward(_loss_in_backward(model, seed))
    optimizer.step()
    optimizer.zero_grad()


def _loss_in_backward(model: nn.Module, seed: int) -> torch.Tensor:
    inputs = torch.sin(torch.arange(12.0) + seed).reshape(3, 4)
    return model(inputs.to(next(model.parameters()).device)).square().mean()


def _same(model: nn.Module, weights: list[torch.Tensor], complaint: str) -> None:
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)), complaint
