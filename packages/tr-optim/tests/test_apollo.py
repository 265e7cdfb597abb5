import math
from types import SimpleNamespace

import pytest
import torch
from galore_runs import data, groups, net, train
from torch import nn
from whole_gradient_equations import apollo

from tr_optim import APOLLOAdamW, registry
from tr_optim.projection.basis import seeded_normal

OWN = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"std": (10, 16), "reverse_std": (10, 16), "left": (16, 10), "right": (10, 16)}


def gradients(shape, number=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    # Of sizes that grow and shrink, so that the limiter acts.
    return [torch.randn(shape, generator=generator, dtype=dtype) * (1 + 5 * t % 3) for t in range(number)]


def step_by_step(optimizer, parameter, given):
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def directions(columns, rank, gap, seed=0, index=0):
    """What the class documents: numbers of variance 1/r from (seed, parameter, step // gap)."""
    like = torch.zeros((), dtype=torch.float64)
    return lambda t: seeded_normal((columns, rank), like, (seed, index, "basis", (t - 1) // gap)) / math.sqrt(rank)


@pytest.mark.parametrize("proj_type", SHAPES)
@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_updates_are_those_of_the_equations(proj_type, scale_type):
    shape = SHAPES[proj_type]
    given = gradients(shape)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    options = {"rank": 4, "update_proj_gap": 4, "scale": 3.0, "proj_type": proj_type, "scale_type": scale_type}
    optimizer = APOLLOAdamW([parameter], **OWN, **options, seed=7)
    found = step_by_step(optimizer, parameter, given)
    turns = proj_type in ("reverse_std", "right")  # from the right: the equations of the transpose
    as_left = [g.T for g in given] if turns else given
    expected = apollo(
        start.T if turns else start,
        as_left,
        directions(as_left[0].shape[0], 4, 4, seed=7),
        scale=3.0,
        by_tensor=scale_type == "tensor",
        **OWN,
    )
    torch.testing.assert_close(found, expected.T if turns else expected, rtol=0, atol=1e-12)
    assert (found - start).abs().max() > 1e-2


@pytest.mark.parametrize("growth", [None, 1.5])
def test_the_growth_that_is_allowed_may_be_chosen(growth):
    given = gradients((10, 16))
    start = torch.randn(10, 16, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = APOLLOAdamW([parameter], **OWN, rank=4, update_proj_gap=4, norm_growth=growth)
    found = step_by_step(optimizer, parameter, given)
    used = {"scale": 1.0, "growth": math.inf if growth is None else growth}
    expected = apollo(start, given, directions(10, 4, 4), **used, **OWN)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with_default = apollo(start, given, directions(10, 4, 4), scale=1.0, **OWN)
    assert (found - with_default).abs().max() > 1e-3


def test_apollo_mini_has_one_direction_and_one_step_size_times_the_root_of_128():
    given = gradients((10, 16))
    start = torch.randn(10, 16, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    options = {"rank": 1, "scale_type": "tensor", "scale": 128}
    optimizer = APOLLOAdamW([parameter], **OWN, **options, update_proj_gap=3)
    found = step_by_step(optimizer, parameter, given)
    expected = apollo(start, given, directions(10, 1, 3), scale=128, by_tensor=True, **OWN)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("proj", ["svd", "subspace"])
def test_directions_may_be_those_in_which_the_gradient_is_large(proj):
    model = net()
    optimizer = APOLLOAdamW(groups(model, proj=proj), 1e-2)
    train(optimizer, model, last=7)
    for parameter in (model[0].weight, model[2].weight):
        state = optimizer.state[parameter]
        basis = state.get("basis_left", state.get("basis_right"))
        torch.testing.assert_close(basis.mT @ basis, torch.eye(8), rtol=0, atol=1e-5)
    with_random = APOLLOAdamW(groups(other := net()), 1e-2)
    train(with_random, other, last=7)
    assert not torch.equal(model[0].weight, other[0].weight)


def test_groups_may_be_those_of_apollo_torch():
    model = net()
    low_rank = {"rank": 1, "proj": "random", "scale_type": "tensor", "scale": 128, "update_proj_gap": 200}
    optimizer = APOLLOAdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() == 1]},
            {"params": [p for p in model.parameters() if p.dim() == 2], **low_rank, "proj_type": "std"},
        ],
        lr=0.01,
    )
    train(optimizer, model, last=2)
    assert "scaled_norm" in optimizer.state[model[0].weight]
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (96, 1)
    assert "scaled_norm" not in optimizer.state[model[0].bias]


def test_directions_are_made_once_for_each_update():
    model = net()
    optimizer = APOLLOAdamW(groups(model), 1e-2)
    made = []
    ours = optimizer._bases.current

    def counted(parameter, state, place):
        basis = ours(parameter, state, place)
        if basis is not None and not any(basis is other for other in made):
            made.append(basis)
        return basis

    optimizer._bases.current = counted
    train(optimizer, model, last=2)
    assert len(made) == 2 * 3


def test_moments_stay_as_they_are_when_the_directions_change():
    parameter = nn.Parameter(torch.randn(6, 9))
    optimizer = APOLLOAdamW([parameter], rank=2, update_proj_gap=1, betas=(0.5, 0.5))
    first, second = gradients((6, 9), 2, torch.float32)
    step_by_step(optimizer, parameter, [first])
    before = optimizer.state[parameter]["exp_avg"].clone()
    step_by_step(optimizer, parameter, [second])
    projected = seeded_normal((6, 2), second, (0, 0, "basis", 1)).div(math.sqrt(2)).T @ second
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.5 * before + 0.5 * projected)


def test_a_changed_rank_or_side_is_refused_for_random_directions():
    model = net()
    optimizer = APOLLOAdamW(groups(model), 1e-2)
    train(optimizer, model, last=2)
    saved = optimizer.state_dict()
    for option, value in (("rank", 4), ("proj_type", "left")):
        other = APOLLOAdamW(groups(net(), **{option: value}), 1e-2)
        with pytest.raises(ValueError, match="moments of random directions cannot be carried over to others"):
            other.load_state_dict({**saved, "param_groups": other.state_dict()["param_groups"]})
    optimizer.param_groups[0]["rank"] = 4
    with pytest.raises(ValueError, match=r"moments of shape \(96, 8\), and rank=4 .* needs \(96, 4\)"):
        train(optimizer, model, first=2, last=3)


def test_a_state_with_bases_is_refused_for_random_directions():
    model = net()
    found = APOLLOAdamW(groups(model, proj="svd"), 1e-2)
    train(found, model, last=2)
    other = APOLLOAdamW(groups(net()), 1e-2)
    saved = {**found.state_dict(), "param_groups": other.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match="has basis_right, and proj='random' keeps none"):
        other.load_state_dict(saved)
    random_model = net()
    random = APOLLOAdamW(groups(random_model), 1e-2)
    train(random, random_model, last=2)
    saved = {**random.state_dict(), "param_groups": found.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match="has no basis, and basis_right is needed"):
        APOLLOAdamW(groups(net(), proj="svd"), 1e-2).load_state_dict(saved)


def test_a_stack_has_step_sizes_and_limits_for_each_of_its_matrices():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 6, 9, generator=generator, dtype=torch.float64)
    stack = nn.Parameter(start.clone())
    optimizer = APOLLOAdamW([stack], **OWN, rank=2, update_proj_gap=3)
    sizes = torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)[:, None, None]
    given = [torch.randn(3, 6, 9, generator=generator, dtype=torch.float64) * sizes**t for t in range(7)]
    found = step_by_step(optimizer, stack, given)

    def of(n):
        like = torch.zeros((), dtype=torch.float64)
        return lambda t: seeded_normal((3, 6, 2), like, (0, 0, "basis", (t - 1) // 3))[n] / math.sqrt(2)

    expected = [apollo(start[n], [g[n] for g in given], of(n), scale=1.0, **OWN) for n in range(3)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)
    assert optimizer.state[stack]["scaled_norm"].shape == (3,)


def test_options_of_the_projection_do_not_matter_where_there_is_none():
    model = nn.Linear(3, 2)
    optimizer = APOLLOAdamW(model.parameters(), 1e-2, proj_type="full")
    model(data()[0][0][:, :3]).square().mean().backward()
    optimizer.step()
    assert set(optimizer.state[model.weight]) == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("name", ["apollo_adamw_layerwise", "fira_adamw_layerwise"])
def test_loss_scaling_is_refused_for_updates_in_the_backward_pass(name):
    args = SimpleNamespace(optim_args=None, seed=0, fp16=True, max_grad_norm=0)
    factory = getattr(registry, name)
    ordinary = name.removesuffix("_layerwise")
    with pytest.raises(ValueError, match=f"fp16=True cannot be used .* use bf16=True, or optim='{ordinary}'"):
        factory([], args, net())
