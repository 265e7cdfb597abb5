import copy
import types

import pytest
import torch
from fused_models import (
    Shapes,
    Tied,
    assert_same_bits,
    build,
    copy_of_state,
    greatest_difference,
    loss_of,
    train,
    train_plainly,
    weights_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tr_optim import Adafactor, AdaLomo, Lomo


def adafactor(model, **options):
    return Adafactor(model.parameters(), lr=2e-2, relative_step=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"eps": (1e-8, 0.5), "clip_threshold": 0.5, "decay_rate": -0.5, "weight_decay": 0.01},
    ],
)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("joined", [2**13, -1])
def test_weights_and_states_are_those_of_adafactor(monkeypatch, options, clip, dtype, joined):
    monkeypatch.setattr("tr_optim.engine.fused_passes._JOINED", joined)

    def batch(step):
        return Shapes.batch(step).to(dtype)

    ours, theirs = build().to(dtype), build().to(dtype)
    optimizer, plain = AdaLomo(ours.parameters(), lr=2e-2, clip_grad_norm=clip, **options), adafactor(theirs, **options)
    norms = train(ours, optimizer, 8, max_norm=clip, batch=batch)
    expected = train_plainly(theirs, plain, 8, max_norm=clip, batch=batch)
    # In float32, eight steps of another order of operations: five roundings each of numbers up to 1.
    tolerance = 8 * 5 * 2**-24 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), atol=tolerance, rtol=0)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert greatest_difference(ours, build()) > 1e-2
    assert optimizer.num_passes == (8 if clip is None else 16)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert set(optimizer.state[mine]) == set(plain.state[other])
        for name, value in plain.state[other].items():
            torch.testing.assert_close(optimizer.state[mine][name], value.to(dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip_step"}, {"clip_grad_norm": 0.5}])
def test_calls_do_not_grow_with_the_number_of_small_tensors(options):
    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    def calls(layers, optimizer_of):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        backward = optimizer_of(model.parameters())
        for _ in range(2):
            loss = model(torch.ones(2, 8)).square().mean()
            with Calls() as counted:
                backward(loss)
            model.zero_grad()
        return counted.number

    def adalomo(parameters):
        optimizer = AdaLomo(parameters, **options)

        def backward(loss):
            optimizer.backward(loss)
            optimizer.step()

        return backward

    def beyond_plain(layers):
        passes = 1 if options == {} else 2
        return calls(layers, adalomo) - passes * calls(layers, lambda parameters: torch.Tensor.backward)

    few, many = beyond_plain(10), beyond_plain(60)
    # Where all is measured first, a call or two for the norm of each of a hundred more tensors.
    assert many - few <= (200 if options else 0)


def test_small_tensors_that_are_updated_together_have_the_bits_of_one_by_one(monkeypatch):
    def trained(at_a_time):
        monkeypatch.setattr("tr_optim.engine.fused_passes._JOINED_AT_A_TIME", at_a_time)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(12)))
        optimizer = AdaLomo(model.parameters(), lr=2e-2, weight_decay=0.1)
        for _ in range(3):
            optimizer.backward(model(torch.ones(2, 10)).square().mean())
            optimizer.step()
        return weights_of(model)

    assert_same_bits(trained(4), trained(128))


def test_state_is_a_row_and_a_column_of_tensors():
    weight, bias = nn.Parameter(torch.ones(7, 5, dtype=torch.bfloat16)), nn.Parameter(torch.ones(()))
    optimizer = AdaLomo([weight, bias])
    optimizer.backward((weight.sum() * bias).float())
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in optimizer.state[weight].items()}
    assert shapes == {
        "step": ((), torch.float32),
        "exp_avg_sq_row": ((7,), torch.float32),
        "exp_avg_sq_col": ((5,), torch.float32),
    }
    assert optimizer.state[bias]["exp_avg_sq"].shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_it_expects_are_those_of_its_state(dtype):
    model = build().to(dtype)
    model.unused.requires_grad_(False)
    optimizer = AdaLomo(model.parameters(), lr=1e-2)
    gradients, state = optimizer.expected_bytes()
    train(model, optimizer, 1, batch=lambda step: Shapes.batch(step).to(dtype))
    assert state == sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    assert gradients == model.experts.nbytes + model.convolution.weight.nbytes
    assert Lomo(model.parameters()).expected_bytes() == (gradients, 0)
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert Lomo(model.parameters(), accumulate="store").expected_bytes() == (trainable, 0)


@pytest.mark.parametrize("chunk", [7, 40, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_computed_in_pieces_to_the_same_weights(monkeypatch, chunk, dtype):
    def trained():
        model = build().to(dtype)
        optimizer = AdaLomo(model.parameters(), lr=2e-2, weight_decay=0.1, clip_grad_norm=0.5)
        train(model, optimizer, 4, batch=lambda step: Shapes.batch(step).to(dtype))
        return model

    monkeypatch.setattr("tr_optim.engine.fused_passes._JOINED", -1)
    whole = trained()
    monkeypatch.setattr("tr_optim.engine.precision.piece_size", lambda tensor: chunk)
    assert greatest_difference(trained(), whole) <= (2e-7 if dtype == torch.float32 else 2**-7)


def test_half_precision_weights_are_computed_in_float32_and_rounded_once():
    ours, theirs = build().bfloat16(), build().bfloat16()
    train(ours, AdaLomo(ours.parameters(), lr=2e-2, weight_decay=0.1), 4, batch=lambda s: Shapes.batch(s).bfloat16())
    plain = adafactor(theirs, weight_decay=0.1)
    train_plainly(theirs, plain, 4, batch=lambda s: Shapes.batch(s).bfloat16())
    assert greatest_difference(ours, theirs) <= 2**-7  # of weights below 2: where a sum falls on a boundary


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tied_and_repeated_weights_are_updated_once(reentrant):
    ours, theirs = build(Tied, reentrant=reentrant), build(Tied)
    train(ours, AdaLomo(ours.parameters(), lr=2e-2), 6)
    train_plainly(theirs, adafactor(theirs), 6)
    assert greatest_difference(ours, theirs) <= 1e-6


def test_micro_batches_are_refused_with_adafactor_as_the_alternative():
    model = build()
    with pytest.raises(ValueError, match="AdaLomo applies and frees.*or adafactor, which does the same"):
        AdaLomo(model.parameters()).backward(loss_of(model, model.batch(0)), last=False)


def test_a_state_of_adafactor_is_taken_over():
    theirs = build()
    plain = adafactor(theirs)
    train_plainly(theirs, plain, 4)
    ours = copy.deepcopy(theirs)
    optimizer = AdaLomo(ours.parameters(), lr=2e-2)
    optimizer.load_state_dict(copy_of_state(plain))
    train(ours, optimizer, 4, start=4)
    train_plainly(theirs, plain, 4, start=4)
    assert greatest_difference(ours, theirs) <= 1e-6


def test_a_tensor_whose_gradient_is_not_finite_is_left_out_with_its_state():
    model = build()
    optimizer = AdaLomo(model.parameters(), lr=2e-2, weight_decay=0.1)
    train(model, optimizer, 2)
    weights, states = weights_of(model), {p: copy.deepcopy(s) for p, s in optimizer.state.items()}
    handle = model.head.weight.register_hook(lambda gradient: gradient * torch.nan)
    norms = train(model, optimizer, 1, start=2)
    handle.remove()
    assert torch.equal(model.head.weight, weights["head.weight"])
    for name, value in states[model.head.weight].items():
        assert torch.equal(optimizer.state[model.head.weight][name], value)
    assert not torch.equal(model.norm.weight, weights["norm.weight"])
    assert norms == pytest.approx([torch.nan], nan_ok=True), "the norm is shown as what it is"
    train(model, optimizer, 1, start=3)
    assert optimizer.state[model.head.weight]["step"].item() == 3.0
    assert optimizer.state[model.norm.weight]["step"].item() == 4.0


@pytest.mark.parametrize("options", [{"nonfinite": "skip_step"}, {"clip_grad_norm": 0.5}])
def test_a_step_that_is_not_finite_is_left_out_whole_on_request_and_where_all_is_measured_first(options):
    model = build()
    optimizer = AdaLomo(model.parameters(), lr=2e-2, weight_decay=0.1, **options)
    train(model, optimizer, 2)
    weights, states = weights_of(model), copy_of_state(optimizer)
    optimizer.backward(loss_of(model, model.batch(2)) * torch.inf)
    optimizer.step()
    assert_same_bits(weights_of(model), weights)
    for number, state in optimizer.state_dict()["state"].items():
        assert_same_bits(state, states["state"][number])


def test_training_arguments_reach_it():
    args = types.SimpleNamespace(
        learning_rate=3e-4,
        optim_args="clip_threshold=2, eps=(1e-20, 1e-2), decay_rate=-0.7",
        gradient_accumulation_steps=1,
        max_grad_norm=0.0,
        on_nonfinite="allow",
    )
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.1}]
    (group,) = AdaLomo.from_arguments(groups, args).param_groups
    assert {name: group[name] for name in ("lr", "weight_decay", "eps", "clip_threshold", "decay_rate")} == {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "eps": (1e-20, 1e-2),
        "clip_threshold": 2.0,
        "decay_rate": -0.7,
    }
    with pytest.raises(
        ValueError, match="adalomo does not take 'beta1'; it takes accumulate, clip_grad_value, clip_thr"
    ):
        AdaLomo.from_arguments(groups, types.SimpleNamespace(**{**vars(args), "optim_args": "beta1=0.9"}))
