"""What every optimizer of this package does, each in all of its ways: resume, copies, closures, refusals, reads."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from optimizer_rows import ENTRIES, STEPS, WAYS, Network, Row, backward, batch, rows
from reads import Reads
from torch import nn

PLAIN = [Row(name) for name in ENTRIES]
# On a CPU the cosines of lazy bases are read where they are; test_lazy_refresh.py shows that a GPU is not waited for.
READING_NOTHING = [row for row in rows(torch.bfloat16) if "lazy" not in row.optim_args]


def nightly(*some):
    return [pytest.param(*each, marks=pytest.mark.slow) for each in some]


WAYS_IN_FLOAT32 = [row for row in rows() if row not in PLAIN]


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def states(optimizer):
    return {
        (number, name): value.clone()
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def test_ways_are_of_optimizers_that_are_installed():
    assert set(WAYS) <= set(ENTRIES)


@pytest.mark.parametrize(
    "row",
    [
        *rows(torch.bfloat16),
        *PLAIN,
        *nightly(*([row] for row in WAYS_IN_FLOAT32), *([Row(name, dtype=torch.float64)] for name in ENTRIES)),
    ],
    ids=str,
)
def test_a_run_resumed_at_any_step_gives_the_same_bits(tmp_path, row):
    parts = 2 if row.accumulates else 1
    model, optimizer = row.build()
    for step in range(STEPS):
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{step}.pt")
        row.train(model, optimizer, step, step + 1, parts)
    for step in range(1, STEPS, 2):
        resumed, other = row.build()
        for group in other.param_groups:
            group["lr"] = 0.5  # that of the saved groups counts
        saved = torch.load(tmp_path / f"{step}.pt", weights_only=True)
        resumed.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        row.train(resumed, other, step, parts=parts)
        assert_same_bits(weights(resumed), weights(model))
        assert_same_bits(states(other), states(optimizer))


def unpickled(both):
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize(
    ("row", "copied"),
    [
        *((row, copy.deepcopy) for row in rows(torch.bfloat16)),
        *((row, unpickled) for row in PLAIN),
        *nightly(*((row, copy.deepcopy) for row in rows()), *((row, unpickled) for row in WAYS_IN_FLOAT32)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # str() of a function has its address
)
def test_a_copy_goes_on_as_the_original_and_leaves_that_alone(row, copied):
    model, optimizer = row.build()
    row.train(model, optimizer, last=4)
    before = weights(model), states(optimizer)
    other, its_optimizer = copied((model, optimizer))
    row.train(other, its_optimizer, 4)
    assert_same_bits(weights(model), before[0])
    assert_same_bits(states(optimizer), before[1])
    row.train(model, optimizer, 4)
    assert_same_bits(weights(model), weights(other))
    assert_same_bits(states(optimizer), states(its_optimizer))


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_loaded_state_is_a_copy(row):
    model, optimizer = row.build()
    row.train(model, optimizer, last=3)
    saved = optimizer.state_dict()
    before = states(optimizer)
    other, loading = row.build()
    loading.load_state_dict(saved)
    row.train(other, loading, 3, 5)
    assert_same_bits(states(optimizer), before)
    assert all(torch.equal(saved["state"][number][name], value) for (number, name), value in before.items())


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_a_closure_is_called_with_gradients_and_its_loss_is_returned_or_it_is_refused(row):
    model, optimizer = row.build()
    (tokens, targets), before = batch(0, row.dtype)[0], weights(model)

    def closure():
        optimizer.zero_grad()
        loss = (model(tokens) - targets).square().mean()
        backward(optimizer, loss)
        return loss

    if row.name in ("lomo", "adalomo"):
        with pytest.raises(ValueError, match="takes no closure: it updates during the backward pass"):
            optimizer.step(closure)
        assert_same_bits(weights(model), before)
        return
    with torch.no_grad():
        expected = (model(tokens) - targets).square().mean()
    assert torch.equal(optimizer.step(closure), expected)
    assert not torch.equal(model.last.weight, before["last.weight"])


@pytest.mark.parametrize("row", READING_NOTHING, ids=str)
def test_a_step_reads_nothing_back_also_where_a_basis_is_found(row):
    model, optimizer = row.build()
    with Reads() as reads:
        row.train(model, optimizer, last=4, parts=2 if row.accumulates else 1)
        if getattr(optimizer, "fused_in_backward", False) and getattr(optimizer, "mode", "deferred") != "immediate":
            tokens, targets = batch(4, row.dtype)[0]
            optimizer.backward((model(tokens) - targets).square().mean(), scale=torch.tensor(4.0))
            optimizer.clip_grad_norm(None)
            optimizer.step()
    assert reads.count == 0


@pytest.mark.parametrize("row", rows(torch.bfloat16), ids=str)
def test_moments_of_low_precision_weights_are_in_float32_or_in_codes_also_after_a_resume(row):
    model, optimizer = row.build()
    row.train(model, optimizer, last=3)
    other = row.optimizer(model)
    other.load_state_dict(optimizer.state_dict())
    for state in (states(optimizer), states(other)):
        moments = {value.dtype for (_, name), value in state.items() if not name.startswith("basis")}
        assert not moments & {torch.bfloat16, torch.float16}


@pytest.mark.parametrize("row", [row for row in rows() if row.max_norm is None], ids=str)
def test_micro_batches_add_up_to_one_batch_or_are_refused(row):
    (one, its), (several, their) = row.build(), row.build()
    if not row.accumulates:
        before = weights(several)
        with pytest.raises(ValueError, match="so that micro-batches cannot add up.*; or accumulate='store'"):
            row.train(several, their, last=1, parts=2)
        assert_same_bits(weights(several), before)
        return
    row.train(one, its)
    row.train(several, their, parts=4)
    # A rounding error may become another code, or turn singular vectors.
    tolerance = 1e-3 if "8bit" in row.name or "int8" in row.optim_args else 1e-5
    pairs = zip(one.parameters(), several.parameters(), strict=True)
    greatest = max((a - b).abs().max().item() for a, b in pairs if a.numel())
    assert greatest < tolerance or "refresh_from=first" in row.optim_args


@pytest.mark.parametrize(
    "row", [row for row in rows(torch.float32, torch.bfloat16) if row.name.endswith("_layerwise")], ids=str
)
def test_updates_in_the_backward_pass_are_those_of_the_step(row):
    ways = (way for way in row.optim_args.split(", ") if way.split("=")[0] not in ("mode", "refresh_from"))
    ordinary = replace(row, name=row.name.removesuffix("_layerwise"), optim_args=", ".join(ways))
    (model, optimizer), (other, its_optimizer) = row.build(), ordinary.build()
    row.train(model, optimizer)
    ordinary.train(other, its_optimizer)
    if row.max_norm is None:
        assert_same_bits(weights(model), weights(other))
    elif row.dtype == torch.float32:  # norms are added up in another order
        for name, value in weights(model).items():
            torch.testing.assert_close(value, weights(other)[name], rtol=0, atol=1e-3 if "8bit" in row.name else 1e-6)


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_an_empty_parameter_and_those_without_a_gradient_stay_as_they_are(row):
    model, optimizer = row.build()
    row.train(model, optimizer)
    for parameter in (model.unused.weight, model.unused.bias, model.empty):
        assert not optimizer.state.get(parameter)
    assert torch.equal(model.unused.weight, Network().unused.weight)
    moved = [name for name, p in Network().named_parameters() if not torch.equal(p, model.get_parameter(name))]
    assert {"embedding.weight", "first.weight", "first.bias", "norm.weight", "experts"} <= set(moved)


@pytest.mark.parametrize("row", rows(), ids=str)
def test_the_learning_rate_of_a_schedule_is_used_and_may_be_a_tensor(row):
    results = []
    for rate in (1e-2, torch.tensor(1e-2)):
        model = Network()
        optimizer = row.optimizer(model, learning_rate=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step >= 3 else 0.5**step)
        for step in range(5):
            before = weights(model)
            row.train(model, optimizer, step, step + 1)
            schedule.step()
            same = all(torch.equal(before[name], value) for name, value in weights(model).items())
            assert same == (step >= 3) or "beta1" in row.optim_args  # moves on by its first moment
        results.append(weights(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_a_group_that_is_added_later_trains_and_is_in_the_state(row):
    model, optimizer = row.build()
    row.train(model, optimizer, last=2)
    layer = nn.Linear(14, 14)
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1, "rank": None})
    both, before = nn.Sequential(model, layer), weights(layer)
    row.train(both, optimizer, 2, 4)
    assert not torch.equal(before["weight"], layer.weight)
    other = row.optimizer(Network())
    with pytest.raises(ValueError, match="group"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_sparse_gradients_are_refused(row):
    model = Network(sparse=True)
    optimizer = row.optimizer(model)
    with pytest.raises(
        RuntimeError, match=r"sparse gradient of shape \(11, 12\)|gradient of shape \(11, 12\) is sparse"
    ):
        row.train(model, optimizer, last=1)


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_complex_parameters_are_refused(row):
    model = nn.Module()
    model.weight, model.layer = nn.Parameter(torch.ones(4, dtype=torch.complex64)), nn.Linear(3, 3)

    def build_and_step():
        optimizer = row.optimizer(model)
        backward(optimizer, model.weight.abs().sum())
        optimizer.step()

    words = r"complex gradient of shape \(4,\)|of shape \(4,\) is complex"
    with pytest.raises((RuntimeError, ValueError), match=words):
        build_and_step()


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_arguments_out_of_range_and_unknown_options_are_refused(row):
    with pytest.raises(ValueError, match="lr=-1 must not be negative"):
        row.optimizer(Network(), learning_rate=-1.0)
    with pytest.raises(ValueError, match=f"{row.name} does not take 'unheard_of'; it takes "):
        row.optimizer(Network(), optim_args="unheard_of=1")


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_a_state_of_another_model_is_refused_and_nothing_is_changed(row):
    model, optimizer = row.build()
    row.train(model, optimizer, last=2)
    other = Network()
    other.first = nn.Linear(12, 25)
    loading, before = row.optimizer(other), states(optimizer)
    if row.name == "lomo":
        loading.load_state_dict(optimizer.state_dict())  # it has no state
        return
    with pytest.raises(ValueError, match=r"of shape \(25, 12\) has (the shape|moments of shape)"):
        loading.load_state_dict(optimizer.state_dict())
    assert not loading.state
    assert_same_bits(states(optimizer), before)
