import copy
import types

import pytest
import torch
from reads import Reads
from torch import nn

from tr_optim import Adafactor
from tr_optim.moments.adafactor import AdafactorRule

VARIANTS = [
    {"lr": 1e-2, "scale_parameter": False, "relative_step": False},
    {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "weight_decay": 0.1},
    {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "weight_decay": 0.1, "beta1": 0.9},
    {"lr": None, "scale_parameter": True, "relative_step": True},
    {"lr": None, "scale_parameter": True, "relative_step": True, "warmup_init": True, "beta1": 0.5},
    {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "clip_threshold": 0.5, "decay_rate": -0.5},
    {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "eps": (1e-2, 0.5)},
]
SHAPES = [(5, 3), (4,), (), (2, 3, 4), (1, 6), (3, 2, 2, 2)]


def _parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        # The last one has no gradient in every third step, so parameters have step counts of their own.
        skipped = number == len(parameters) - 1 and step % 3 == 1
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if skipped else gradient


def _train(optimizer, parameters, steps, start=0):
    for step in range(start, start + steps):
        _set_gradients(parameters, step)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_transformers_adafactor(variant, dtype):
    reference_class = pytest.importorskip("transformers.optimization").Adafactor
    ours, theirs = _parameters(dtype), _parameters(dtype)
    options = dict(variant)
    found = _train(Adafactor(ours, options.pop("lr"), **options), ours, 20)
    expected = _train(reference_class(theirs, **variant), theirs, 20)
    for shape, mine, other in zip(SHAPES, found, expected, strict=True):
        # float32: another order of the same operations. bfloat16: equal but where that falls on a rounding boundary.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=1e-6, msg=lambda text, shape=shape: f"{shape}: {text}"
        )


def _by_hand(weights, gradients, *, lr, scale_parameter, relative_step, warmup_init=False, beta1=None,
             weight_decay=0.0, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8):  # fmt: skip
    """The equations of the paper in float64, as plainly as they are written."""
    w, row, column, whole, first = weights.double(), 0.0, 0.0, 0.0, 0.0
    for t, gradient in enumerate([g.double() for g in gradients if g is not None], start=1):
        new, square = t**decay_rate, gradient**2 + eps[0]
        if gradient.dim() < 2:
            whole = (1 - new) * whole + new * square
            update = gradient / whole.sqrt()
        else:
            row = (1 - new) * row + new * square.mean(-1)
            column = (1 - new) * column + new * square.mean(-2)
            mean = row.mean(-1, keepdim=True).unsqueeze(-1)
            update = gradient / (row.unsqueeze(-1) * column.unsqueeze(-2) / mean).sqrt()
        update = update / max(1.0, float((update**2).mean().sqrt()) / clip_threshold)
        rate = min(1e-6 * t if warmup_init else 1e-2, t**-0.5) if relative_step else lr
        rate *= max(eps[1], float((w**2).mean().sqrt())) if scale_parameter else 1.0
        update = rate * update
        if beta1 is not None:
            update = first = beta1 * first + (1 - beta1) * update
        w = w - weight_decay * rate * w - update
    return w


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_the_equations(variant):
    ours, options = _parameters(), dict(variant)
    gradients = []
    for step in range(20):
        _set_gradients(ours, step)
        gradients.append([None if p.grad is None else p.grad.clone() for p in ours])
    expected = [_by_hand(p.detach(), of, **variant) for p, of in zip(ours, zip(*gradients, strict=True), strict=True)]
    found = _train(Adafactor(ours, options.pop("lr"), **options), ours, 20)
    for shape, mine, other in zip(SHAPES, found, expected, strict=True):
        torch.testing.assert_close(
            mine.double(), other, rtol=1e-5, atol=1e-6, msg=lambda text, shape=shape: f"{shape}: {text}"
        )


def test_the_state_of_a_matrix_is_a_row_and_a_column_of_tensors():
    weight = nn.Parameter(torch.ones(7, 5, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = Adafactor([weight], 1e-2, relative_step=False)
    optimizer.step()
    state = optimizer.state[weight]
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "step": ((), torch.float64),
        "exp_avg_sq_row": ((7,), torch.float32),
        "exp_avg_sq_col": ((5,), torch.float32),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_reads_nothing_back(variant):
    options = dict(variant)
    parameters = _parameters(torch.bfloat16)
    optimizer = Adafactor(parameters, options.pop("lr"), **options)
    with Reads() as reads:
        _train(optimizer, parameters, 3)
    assert reads.count == 0


def test_an_update_is_not_the_moment_that_is_kept():
    """Who changes the update afterwards, as a projection's scale does, must not change what is remembered."""
    rule, gradient, weights = AdafactorRule(), torch.randn(3, 4), torch.ones(3, 4)
    group = {"beta1": 0.9, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "lr": 1e-2}
    group |= {"relative_step": False, "scale_parameter": False}
    state = {"step": torch.ones((), dtype=torch.float64)}
    rule.start(state, gradient, group)
    update, _ = rule.update(gradient, state, group, weights)
    kept = state["exp_avg"].clone()
    assert torch.equal(update, kept)
    update.mul_(2)
    assert torch.equal(state["exp_avg"], kept)


def test_a_state_of_transformers_adafactor_is_taken_over():
    reference_class = pytest.importorskip("transformers.optimization").Adafactor
    theirs = _parameters()
    options = {"lr": 1e-2, "scale_parameter": True, "relative_step": False}
    reference = reference_class(theirs, **options)
    _train(reference, theirs, 4)
    ours = copy.deepcopy(theirs)
    optimizer = Adafactor(ours, 1e-2, relative_step=False)
    optimizer.load_state_dict(reference.state_dict())
    expected = _train(reference, theirs, 4, start=4)
    for mine, other in zip(_train(optimizer, ours, 4, start=4), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def _from_arguments(optim_args):
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.1}]
    return Adafactor.from_arguments(groups, types.SimpleNamespace(learning_rate=3e-4, optim_args=optim_args))


def test_training_arguments_set_the_learning_rate_and_the_groups_the_decay():
    (group,) = _from_arguments(None).param_groups
    chosen = {name: group[name] for name in ("lr", "weight_decay", "scale_parameter", "relative_step", "beta1")}
    assert chosen == {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "scale_parameter": False,
        "relative_step": False,
        "beta1": None,
    }


def test_optim_args_reach_the_optimizer():
    (group,) = _from_arguments("beta1=0.9, eps=(1e-20, 1e-2), scale_parameter=true").param_groups
    assert (group["beta1"], group["eps"], group["scale_parameter"]) == (0.9, (1e-20, 1e-2), True)
    (group,) = _from_arguments("eps=(0, 0)").param_groups
    assert group["eps"] == (0, 0)
    (group,) = _from_arguments({"clip_threshold": "2", "decay_rate": -0.7, "beta1": "none"}).param_groups
    assert (group["clip_threshold"], group["decay_rate"], group["beta1"]) == (2.0, -0.7, None)


def test_an_option_that_adafactor_does_not_take_is_refused():
    with pytest.raises(
        ValueError, match="optim_args: adafactor does not take 'clip_treshold'.*did you mean clip_threshold"
    ):
        _from_arguments("clip_treshold=1")
    with pytest.raises(ValueError, match="does not take 'relative_step'"):
        _from_arguments("relative_step=true")
