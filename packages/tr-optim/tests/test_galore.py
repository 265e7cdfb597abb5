import copy
from functools import partial

import pytest
import torch
from galore_runs import ALIKE, STEPS, data, distance, groups, net, run, train, weights
from torch import nn

from tr_optim import Adafactor, APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit

All8bit = partial(GaLoreAdamW8bit, min_8bit_size=0)


def galore_in_float64(matrix, gradients, *, rank, gap, scale, lr, betas, eps, weight_decay):
    """The equations of the class, with bases by singular value decomposition, as plainly as they are written."""
    w, m, v, p = matrix.double().clone(), 0.0, 0.0, None
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        if p is None or (t - 1) % gap == 0:
            u = torch.linalg.svd(g, full_matrices=False)[0][:, :rank]
            new = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
            if p is not None:
                c = new.T @ p
                m, v = c @ m, (c * c) @ v
            p = new
        r = p.T @ g
        m = betas[0] * m + (1 - betas[0]) * r
        v = betas[1] * v + (1 - betas[1]) * r * r
        n = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        w = w * (1 - lr * weight_decay) - lr * scale * p @ n
    return w


def test_updates_are_those_of_the_equations():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(10, 16, generator=generator, dtype=torch.float64) for _ in range(9)]
    own = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    projection = {"rank": 4, "scale": 0.3}
    parameter = nn.Parameter(start.clone())
    optimizer = GaLoreAdamW([parameter], **own, **projection, update_proj_gap=4, method="svd", stagger=False)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = galore_in_float64(start, gradients, gap=4, **own, **projection)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12)


def test_parameters_without_a_rank_are_updated_as_by_adamw():
    ours, theirs = net(), net()
    galore = GaLoreAdamW(ours.parameters(), 1e-2, (0.8, 0.9), 1e-7, 0.1)
    adamw = torch.optim.AdamW(theirs.parameters(), 1e-2, (0.8, 0.9), 1e-7, 0.1, foreach=False)
    inputs, targets = data()
    for step in range(STEPS):
        for model, optimizer in ((ours, galore), (theirs, adamw)):
            (model(inputs[step]) - targets[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(weights(ours), weights(theirs)) < ALIKE


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_parameters_without_a_rank_are_updated_as_by_adafactor(beta1):
    ours, theirs = net(), net()
    options = {"relative_step": False, "beta1": beta1, "weight_decay": 0.1}
    galore = GaLoreAdafactor(ours.parameters(), 1e-2, **options)
    adafactor = Adafactor(theirs.parameters(), 1e-2, **options)
    train(galore, ours)
    adafactor.backward, adafactor.fused_in_backward = lambda loss, last: loss.backward(), False
    train(adafactor, theirs)
    assert distance(weights(ours), weights(theirs)) < ALIKE


def test_clipping_is_that_of_clip_grad_norm():
    usual_norms, deferred_norms = [], []
    usual = run("step", max_norm=0.02, norms=usual_norms)
    deferred = run("deferred", max_norm=0.02, norms=deferred_norms)
    assert distance(usual, run("step")) > 1e-3  # it clipped
    assert distance(usual, deferred) < ALIKE
    assert usual_norms == pytest.approx(deferred_norms, rel=ALIKE)


def test_a_norm_that_needs_no_clipping_changes_no_bit():
    assert torch.equal(run("deferred", max_norm=1e6), run("deferred"))


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_the_norm_of_accumulated_gradients_is_said_to_be_an_estimate(mode):
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode=mode)
    train(optimizer, model, last=2)
    model(data()[0][0]).sum().backward()
    optimizer.zero_grad()
    optimizer.backward(model(data()[0][0]).square().mean())
    norm = optimizer.clip_grad_norm(None)
    assert not optimizer.norm_is_estimated
    assert norm.shape == ()
    optimizer.step()
    optimizer.zero_grad()
    for last in (False, True):
        optimizer.backward(model(data()[0][0]).square().mean(), last=last)
    optimizer.clip_grad_norm(None)
    assert optimizer.norm_is_estimated


@pytest.mark.parametrize(("form", "limit"), [("float32", 0.03), ("int8", 0.05)])
def test_the_estimated_norm_is_within_a_few_percent_and_not_biased(form, limit):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    options = {"mode": "deferred", "basis_dtype": form}
    optimizer = GaLoreAdamW(groups(model, rank=16, update_proj_gap=10**6), 1e-3, **options)
    errors = []
    for step in range(60):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        for k in range(2):
            optimizer.backward(model(x.chunk(2)[k]).square().sum(), last=k == 1)
        true = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        true_norm = torch.stack([g.norm() for g in true]).norm()
        estimate = optimizer.clip_grad_norm(None)
        if step:  # the whole gradients are there where bases are found
            errors.append((estimate / true_norm - 1).item())
        optimizer.step()
        optimizer.zero_grad()
    errors = torch.tensor(errors)
    assert errors.square().mean().sqrt() < limit
    assert errors.abs().max() < 2 * limit
    assert errors.mean().abs() < limit / 3


def test_what_follows_from_noise_in_the_data_is_as_small_as_the_noise():
    assert distance(run("deferred"), run("deferred", noise=1e-7)) < ALIKE


@pytest.mark.parametrize(
    ("kind", "besides"),
    [
        (GaLoreAdamW, {"basis_left": (40, 8)}),
        (APOLLOAdamW, {"scaled_norm": ()}),
        (FiraAdamW, {"basis_left": (40, 8), "scaled_norm": ()}),
    ],
)
def test_the_state_is_tensors_only_of_the_size_that_is_documented(kind, besides):
    parameter = nn.Parameter(torch.randn(40, 110))
    optimizer = kind([parameter], rank=8)
    parameter.grad = torch.randn(40, 110)
    optimizer.step()
    state = optimizer.state[parameter]
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes == {"exp_avg": (8, 110), "exp_avg_sq": (8, 110), "step": (), **besides}
    numbers = sum(value.numel() for value in state.values())
    assert sum(value.nbytes for value in state.values()) == 4 * numbers + 4, "all in float32 but the step, in float64"


@pytest.mark.parametrize(("kind", "tolerance"), [(GaLoreAdamW, 1e-5), (All8bit, 1e-3)])
def test_a_stack_of_matrices_is_updated_as_its_matrices_are(kind, tolerance):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 16, 256)  # each row of the projections of 4 x 256 is a block of codes, also of the stack
    start = torch.randn(shape, generator=generator)
    stack = nn.Parameter(start.clone())
    single = [nn.Parameter(start[n].clone()) for n in range(3)]
    options = {"lr": 1e-2, "rank": 4, "update_proj_gap": 3, "scale": 1.0, "method": "svd", "stagger": False}
    together, alone = kind([stack], **options), kind(single, **options)
    for _ in range(7):
        stack.grad = torch.randn(shape, generator=generator)
        for n in range(3):
            single[n].grad = stack.grad[n].clone()
        together.step()
        alone.step()
    assert (stack - start).abs().max() > 1e-2
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [GaLoreAdamW, All8bit, FiraAdamW])
def test_a_changed_rank_takes_effect_and_keeps_what_was_learnt(kind):
    model = net()
    optimizer = kind(groups(model), 1e-2)
    train(optimizer, model, last=3)
    optimizer.param_groups[0]["rank"] = 12
    train(optimizer, model, first=3, last=4)
    state = optimizer.state[model[0].weight]
    assert state["basis_right"].shape == (48, 12)
    assert state["exp_avg"].shape == (96, 12)
    assert (state["exp_avg"].dtype == torch.int8) == (kind is All8bit)
    assert int(state["step"]) == 4


LAZY = {"refresh": "lazy", "refresh_cosine": 0.05, "refresh_window": 2}


@pytest.mark.parametrize("options", [{}, LAZY])
def test_a_left_out_step_leaves_no_trace(options):
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred", **options)
    train(optimizer, model, last=5)  # a basis is due in the next
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    bad = data()[0][5].clone()
    bad[0, 0] = float("inf")
    for last in (False, True):
        optimizer.backward(model(bad).square().mean(), last=last)
    assert not optimizer.clip_grad_norm(1.0).isfinite()
    optimizer.zero_grad()
    assert torch.equal(weights(model), before)
    for number, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], value)
    other_model = net()
    other = GaLoreAdamW(groups(other_model), 1e-2, mode="deferred", **options)
    assert torch.equal(train(other, other_model), train(optimizer, model, first=5))


def test_a_gradient_that_is_not_finite_never_reaches_a_basis():
    model = net()
    optimizer = GaLoreAdamW(groups(model, update_proj_gap=1), 1e-2, mode="deferred")
    train(optimizer, model, last=2)
    basis = optimizer.state[model[0].weight]["basis_right"].clone()
    optimizer.backward(model(data()[0][2]).square().mean() * float("nan"))
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight]["basis_right"], basis)


def test_a_scaled_loss_gives_the_same_step():
    usual = run("deferred", max_norm=0.02)
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred")
    inputs, targets = data()
    for step in range(STEPS):
        loss = (model(inputs[step]) - targets[step]).square().mean()
        optimizer.backward(loss, scale=torch.tensor(1024.0))
        optimizer.clip_grad_norm(0.02)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(usual, weights(model)) < ALIKE


def test_gradients_are_freed_in_the_backward_pass():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred")
    optimizer.backward(model(data()[0][0]).square().mean())
    assert [p.grad is None for p in model.parameters()] == [p.dim() == 2 for p in model.parameters()]
    held = sum(value.numel() for value in optimizer._gathering.window.projected.values())
    assert held == 8 * (96 + 96 + 80)


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_bases_from_the_first_micro_batch_keep_no_whole_gradient(mode):
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode=mode, refresh_from="first")
    one = net()
    reference = GaLoreAdamW(groups(one), 1e-2, mode=mode)
    optimizer.backward(model(data()[0][0]).square().mean() / 2, last=False)
    assert not any(p.dim() == 2 for p in optimizer._gathering.window.whole)
    reference.backward(one(data()[0][0]).square().mean())
    reference.step()
    optimizer.backward(model(data()[0][1]).square().mean() / 2)
    optimizer.step()
    found, expected = optimizer.state[model[2].weight], reference.state[one[2].weight]
    torch.testing.assert_close(found["basis_left"], expected["basis_left"], rtol=0, atol=1e-5)
    whole = run(mode, micro_batches=1, refresh_from="first")
    assert torch.equal(whole, run(mode, micro_batches=1))
    resumed = run(mode, micro_batches=4, refresh_from="first")
    assert torch.equal(resumed, run(mode, micro_batches=4, refresh_from="first"))


@pytest.mark.parametrize("mode", ["step", "deferred", "immediate"])
@pytest.mark.parametrize("refresh_from", ["all", "first"])
def test_a_gradient_of_earlier_micro_batches_alone_is_applied_too(mode, refresh_from):
    """As of an expert that the last micro-batch does not use; in steps with a new basis and without."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    x = torch.randn(4, 8)
    optimizer = GaLoreAdamW(groups(layers, rank=2, update_proj_gap=2), 1e-2, mode=mode, refresh_from=refresh_from)
    for _ in range(4):
        before = layers[1].weight.detach().clone()
        optimizer.backward(layers[1](layers[0](x)).square().mean(), last=False)
        optimizer.backward(layers[0](x).square().mean(), last=True)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, layers[1].weight)
    assert int(optimizer.state[layers[1].weight]["step"]) == 4


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(24), "has one dimension, .* as FSDP1 and ZeRO make them, there is no matrix to project"),
        (torch.zeros(4, 3, 2, 2), "is neither a matrix nor a stack of matrices"),
        (torch.zeros(4, 3, dtype=torch.complex64), "is complex"),
    ],
)
def test_parameters_that_cannot_be_projected_are_refused(parameter, message):
    with pytest.raises(ValueError, match=message):
        GaLoreAdamW([nn.Parameter(parameter)], rank=2)


def test_gradients_of_another_shape_are_refused():
    class Flat(nn.Parameter):
        grad = torch.zeros(24)

    parameter = Flat(torch.zeros(4, 6))
    with pytest.raises(RuntimeError, match=r"has the shape \(24,\): a part of flattened gradients, as ZeRO and FSDP1"):
        GaLoreAdamW([parameter], rank=2).step()


def test_a_plain_backward_under_deferred_is_refused_at_the_step():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred")
    model(data()[0][0]).sum().backward()
    with pytest.raises(RuntimeError, match="call optimizer.backward\\(loss\\) in place of loss.backward\\(\\)"):
        optimizer.step()


def test_a_second_last_micro_batch_is_refused():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred")
    optimizer.backward(model(data()[0][0]).sum())
    with pytest.raises(RuntimeError, match="give last=False for all micro-batches of a step but the last"):
        optimizer.backward(model(data()[0][0]).sum())


def test_a_step_before_the_last_micro_batch_is_refused():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="deferred")
    optimizer.backward(model(data()[0][0]).sum(), last=False)
    with pytest.raises(RuntimeError, match="step was called before the step's last micro-batch"):
        optimizer.step()


def test_clipping_of_immediate_updates_is_refused():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode="immediate")
    optimizer.backward(model(data()[0][0]).square().mean())
    with pytest.raises(ValueError, match="max_norm=1 cannot be held with mode='immediate'"):
        optimizer.clip_grad_norm(1.0)
    assert optimizer.clip_grad_norm(None) > 0


@pytest.mark.parametrize(
    ("mode", "message"), [("step", "use torch.amp.GradScaler as usual"), ("immediate", "overflow")]
)
def test_loss_scaling_where_it_cannot_work_is_refused(mode, message):
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2, mode=mode)
    with pytest.raises(ValueError, match=message):
        optimizer.backward(model(data()[0][0]).sum(), scale=torch.tensor(8.0))


def test_a_state_of_another_projection_is_refused():
    model = net()
    optimizer = GaLoreAdamW(groups(model), 1e-2)
    train(optimizer, model, last=2)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["proj_type"] = "left"
    with pytest.raises(ValueError, match="projects a parameter of shape .* from another side than its state"):
        train(optimizer, model, last=1)
    del saved["state"][0]["basis_right"]
    with pytest.raises(ValueError, match="has no basis, and basis_right is needed"):
        optimizer.load_state_dict(saved)


def whole_gradients_kept(refresh_from):
    """Return how many matrices' whole gradients are kept after the first of two micro-batches, in step after step."""
    model = net(bias=False)
    optimizer = GaLoreAdamW(groups(model)[:1], 1e-2, mode="deferred", refresh_from=refresh_from)
    kept = []
    for step in range(7):
        for last in (False, True):
            optimizer.backward((model(data()[0][step]) - data()[1][step]).square().mean(), last=last)
            if not last:
                kept.append(len(optimizer._gathering.window.whole))
        optimizer.step()
        optimizer.zero_grad()
    return kept


def test_which_whole_gradients_are_kept_between_micro_batches_is_as_said():
    assert whole_gradients_kept("all")[0] == 3  # all matrices find their first basis
    assert set(whole_gradients_kept("first")) == {0}
    later = whole_gradients_kept("all")[1:]
    assert sum(later) == 3  # then they take turns
    assert max(later) == 1


def test_bases_of_the_first_micro_batch_are_near_those_of_all():
    assert 1e-4 < distance(run("deferred", micro_batches=4, refresh_from="first"), run()) < 0.1


class EqualRanks:
    """Two ranks with the same gradients."""

    rank, world_size = 0, 2

    def __init__(self):
        self.dtypes = set()

    def sum(self, tensor):
        self.dtypes.add(tensor.dtype)
        return tensor * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_exchange_values_of_the_dtype_that_is_asked_for(dtype):
    def trained(**options):
        torch.manual_seed(0)
        model, ranks = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 10)), EqualRanks()
        groups = [{"params": [layer.weight for layer in model], "rank": 4}, {"params": [layer.bias for layer in model]}]
        optimizer = GaLoreAdamW(groups, lr=1e-2, mode="deferred", update_proj_gap=2, **options)
        if options:
            optimizer.bind(ranks)
        norms = []
        for step in range(4):
            data = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(data).square().mean())
            norms.append(optimizer.clip_grad_norm(1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], norms, ranks.dtypes

    (alone, exact, _), (found, estimated, dtypes) = trained(), trained(exchange_dtype=dtype)
    assert dtypes == {getattr(torch, dtype)}
    # Of steps of 1e-2: a number near zero may be rounded to one of the other sign, and take a step the other way.
    tolerance = ALIKE if dtype == "float32" else 2e-2
    torch.testing.assert_close(found, alone, rtol=0, atol=tolerance)
    assert estimated == pytest.approx(exact, rel=0.2), "of two small matrices"
