"""lomo_optim's own arithmetic behind tr-optim's adapter: the library's weights, without its faults."""

import copy
import sys

import pytest
import torch
from adapter_runs import check_resume_at_every_step, train, train_in_shards, trainer_of, weights
from torch import nn

with pytest.MonkeyPatch.context() as patch:
    # The library asks where accelerate's launcher says so; without one, it is alone.
    patch.delenv("WORLD_SIZE", raising=False)
    import lomo_optim

from tr_core.testing import check_in_backward
from tr_dist.testing import run_ranks
from tr_optim import AdaLomo, Lomo, LossScaler
from tr_optim.adapters.lomo_optim import LomoOptimAdaLomo, LomoOptimLomo

PAIRS = [(LomoOptimLomo, Lomo), (LomoOptimAdaLomo, AdaLomo)]


class Network(nn.Module):
    """Two layers with a norm between them; what it returns is its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))

    def forward(self, inputs):
        return self.layers(inputs).square().mean()


def batches(number=10):
    return list(torch.randn(number, 8, 16, generator=torch.Generator().manual_seed(1)))


def rates(number=10):
    return [0.1 * (1 - step / number) for step in range(number)]


def train_with_library(optimizer, model, clip=None):
    for inputs, rate in zip(batches(), rates(), strict=True):
        loss = model(inputs.to(next(model.parameters()).dtype))
        if clip is not None:
            optimizer.grad_norm(loss)
        optimizer.fused_backward(loss, rate)


def train_here(optimizer, model, **given):
    for inputs, rate in zip(batches(), rates(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.backward(model(inputs.to(next(model.parameters()).dtype)), **given)
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Let the library build AdaLomo here."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


@pytest.mark.parametrize("adapter", [LomoOptimLomo, LomoOptimAdaLomo])
def test_it_keeps_what_an_optimizer_in_the_backward_pass_promises(adapter):
    check_in_backward(lambda model: adapter(model.parameters(), lr=0.1))
    check_in_backward(lambda model: adapter(model.parameters(), lr=0.1, weight_decay=0.1, accumulate="store"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clipping", [{}, {"clip_grad_norm": 0.05}, {"clip_grad_value": 0.005}])
@pytest.mark.parametrize(("adapter", "own"), PAIRS)
def test_weights_are_the_librarys_and_our_own_class_s(no_gpu_needed, adapter, own, clipping, decay, dtype):
    models = [Network().to(dtype) for _ in range(3)]
    train_here(adapter(models[0].parameters(), lr=0.1, weight_decay=decay, **clipping), models[0])
    library = getattr(lomo_optim, own.__name__)(models[1], lr=0.1, weight_decay=decay, **clipping)
    train_with_library(library, models[1], clipping.get("clip_grad_norm"))
    train_here(own(models[2].parameters(), lr=0.1, weight_decay=decay, **clipping), models[2])
    exact = "clip_grad_norm" not in clipping  # the norm of all is summed up in another order
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=0, atol=0 if exact else _tolerance(dtype))
    torch.testing.assert_close(flat(models[0]), flat(models[2]), rtol=0, atol=_tolerance(dtype))
    assert (flat(models[0]) - flat(Network())).abs().max() > 1e-3


def _tolerance(dtype):
    return 5e-7 if dtype == torch.float32 else 4e-3  # one rounding of bfloat16 near 1


def test_adalomo_is_built_without_a_gpu_where_the_library_is_not():
    if torch.cuda.is_available():
        LomoOptimAdaLomo(Network().parameters())
        return
    with pytest.raises((AssertionError, RuntimeError)):
        lomo_optim.AdaLomo(Network())
    model = Network()
    train_here(LomoOptimAdaLomo(model.parameters(), lr=0.1), model)
    assert flat(model).isfinite().all()


def test_each_step_is_clipped_by_its_own_norm():
    ours, plain = Network(), Network()
    optimizer = LomoOptimLomo(ours.parameters(), lr=0.1, clip_grad_norm=0.05)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for scale in (100.0, 1e-3, 1.0):
        optimizer.backward(ours(batches()[0]) * scale)
        found = optimizer.clip_grad_norm(0.05)
        optimizer.step()
        (plain(batches()[0]) * scale).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        assert found.item() == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(flat(ours), flat(plain), rtol=0, atol=1e-6)


def test_a_plain_backward_trains_with_the_library_and_not_here():
    ours, theirs = Network(), Network()
    kept = [LomoOptimLomo(ours.parameters(), lr=0.1), lomo_optim.Lomo(theirs, lr=0.1)]
    for model in (ours, theirs):
        model(batches()[0]).backward()
    assert torch.equal(flat(ours), flat(Network()))
    assert not torch.equal(flat(theirs), flat(Network()))
    del kept


def test_weights_change_where_autograd_sees_it():
    model = Network()
    optimizer = LomoOptimLomo(model.parameters(), lr=0.1)
    loss = model(batches()[0])
    versions = [p._version for p in model.parameters()]
    optimizer.backward(loss)
    assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))


@pytest.mark.parametrize(("adapter", "own"), PAIRS)
def test_groups_have_rates_and_decays_of_their_own(adapter, own):
    def build(kind):
        model = Network()
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:], "lr": 0.1, "weight_decay": 0.5}]
        optimizer = kind(groups)
        for inputs in batches(3):
            optimizer.backward(model(inputs))
            optimizer.step()
        return model

    ours, expected = build(adapter), build(own)
    torch.testing.assert_close(flat(ours), flat(expected), rtol=0, atol=5e-7)
    assert torch.equal(ours.layers[0].weight, Network().layers[0].weight)


def test_weights_of_any_number_of_dimensions_are_updated_as_by_our_own_class():
    def build(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(4):
            inputs = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(inputs).square().mean())
            optimizer.step()
        return flat(model)

    torch.testing.assert_close(build(LomoOptimAdaLomo), build(AdaLomo), rtol=0, atol=5e-7)


def test_the_state_goes_on_in_our_own_class_and_back_and_the_library_has_none(no_gpu_needed):
    model, theirs = Network().bfloat16(), Network()
    optimizer = LomoOptimAdaLomo(model.parameters(), lr=0.1)
    train_here(optimizer, model)
    train_with_library(reference := lomo_optim.AdaLomo(theirs, lr=0.1), theirs)
    assert reference.state_dict()["state"] == {}
    saved = copy.deepcopy(optimizer.state_dict())
    values = [value for state in saved["state"].values() for value in state.values()]
    assert {(type(value), value.dtype) for value in values} == {(torch.Tensor, torch.float32)}
    same, other = copy.deepcopy(model), copy.deepcopy(model)
    resumed, own = LomoOptimAdaLomo(same.parameters(), lr=0.1), AdaLomo(other.parameters(), lr=0.1)
    resumed.load_state_dict(saved)
    own.load_state_dict(saved)
    back = LomoOptimAdaLomo(copy.deepcopy(model).parameters(), lr=0.1)
    back.load_state_dict(copy.deepcopy(own.state_dict()))
    for number, state in back.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items())
    for run in ((optimizer, model), (resumed, same), (own, other)):
        train_here(*run)
    assert torch.equal(flat(same), flat(model))
    torch.testing.assert_close(flat(other), flat(model), rtol=0, atol=4e-3)


@pytest.mark.parametrize(("adapter", "own"), PAIRS)
def test_micro_batches_are_refused_in_words_or_stored(adapter, own):
    model = Network()
    optimizer = adapter(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"micro-batches cannot add up\. Use gradient_accumulation_steps=1"):
        optimizer.backward(model(batches()[0]), last=False)
    whole = Network()
    stored = adapter(model.parameters(), lr=0.1, accumulate="store")
    optimizer = adapter(whole.parameters(), lr=0.1)
    for inputs in batches(4):
        stored.backward(model(inputs[:4]) / 2, last=False)
        stored.backward(model(inputs[4:]) / 2)
        optimizer.backward(whole(inputs))
        stored.step()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("adapter", "own"), PAIRS)
def test_a_loss_scale_is_taken_out_and_an_overflow_leaves_everything_as_it_was(adapter, own):
    model, plain = Network(), Network()
    optimizer, scaler = adapter(model.parameters(), lr=0.1), LossScaler("cpu", init_scale=2.0**14)
    reference = adapter(plain.parameters(), lr=0.1)
    for inputs in batches(3):
        scaler.backward(optimizer, model(inputs))
        scaler.step(optimizer)
        scaler.update()
        reference.backward(plain(inputs))
        reference.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=5e-7)
    before, state = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
    scaler.backward(optimizer, model(batches()[0]) * torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**13
    assert torch.equal(flat(model), before)
    for number, saved in state.items():
        assert all(torch.equal(value, optimizer.state_dict()["state"][number][name]) for name, value in saved.items())


def test_an_infinite_loss_spoils_all_weights_with_the_librarys_adalomo_and_none_here(no_gpu_needed):
    ours, theirs = Network(), Network()
    optimizer, reference = LomoOptimAdaLomo(ours.parameters(), lr=0.1), lomo_optim.AdaLomo(theirs, lr=0.1)
    optimizer.backward(ours(batches()[0]) * torch.inf)
    optimizer.step()
    reference.fused_backward(theirs(batches()[0]) * torch.inf, 0.1)
    assert torch.equal(flat(ours), flat(Network()))
    assert not flat(theirs).isfinite().any()


def calls(num_layers, adapter):
    """Count the Python functions that a backward pass with updates enters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = adapter(model.parameters(), lr=0.1)
    optimizer.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    loss, number = model(torch.ones(2, 4)).square().mean(), 0

    def count(frame, event, argument):
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        optimizer.backward(loss)
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.parametrize("adapter", [LomoOptimLomo, LomoOptimAdaLomo])
def test_the_cost_of_a_tensor_is_fixed(adapter):
    few, many = calls(20, adapter), calls(80, adapter)
    assert many <= few * 4


@pytest.mark.parametrize("adapter", [LomoOptimLomo, LomoOptimAdaLomo])
def test_what_the_library_cannot_compute_with_is_refused(monkeypatch, adapter):
    parameter = nn.Parameter(torch.ones(4, 4))
    own = "tr_optim.Lomo" if adapter is LomoOptimLomo else "tr_optim.AdaLomo"
    with pytest.raises(ValueError, match=f"lr is a tensor, which lomo_optim would read back.*use {own}"):
        adapter([parameter], lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match=f"is of torch.float64, and lomo_optim computes in float32.*use {own}"):
        adapter([nn.Parameter(torch.ones(4, dtype=torch.float64))])
    for options in ({"lr": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="-1 must not be negative"):
            adapter([parameter], **options)
    monkeypatch.setattr(
        sys.modules[getattr(lomo_optim, own[9:]).__module__], "is_deepspeed_zero3_enabled", lambda: True
    )
    with pytest.raises(ValueError, match=f"ZeRO-3 has divided; use {own} with replicas"):
        adapter([parameter])


def test_numbers_out_of_range_are_refused():
    parameter = nn.Parameter(torch.ones(4, 4))
    for options in ({"eps": (1.0,)}, {"clip_threshold": 0}, {"decay_rate": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            LomoOptimAdaLomo([parameter], **options)


@pytest.mark.parametrize("name", ["lomo_optim", "adalomo_optim"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0}])
def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path, name, options):
    trainer = check_resume_at_every_step(tmp_path, optim=name, **options)
    assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())


@pytest.mark.parametrize(("name", "own"), [("lomo_optim", "lomo"), ("adalomo_optim", "adalomo")])
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.3},
        {"bf16": True, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"gradient_accumulation_steps": 2, "optim_args": "accumulate=store"},
        {"on_nonfinite": "skip"},
    ],
)
def test_a_run_is_that_of_our_own_class(tmp_path, name, own, options):
    theirs, ours = train(tmp_path, optim=name, **options), train(tmp_path, optim=own, **options)
    torch.testing.assert_close(weights(theirs), weights(ours), rtol=0, atol=2e-6)
    for key in ("learning_rate", "grad_norm"):
        found = [[entry[key] for entry in run.state.log_history if key in entry] for run in (theirs, ours)]
        assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "optim='lomo_optim' with gradient_accumulation_steps=2: lomo_optim applies",
        ),
        ({"optim_args": "clip_grad_value=1"}, r"max_grad_norm=1 and clip_grad_value=1 \(optim_args\) both clip"),
        ({"optim_args": "loss_scale=2"}, "lomo_optim does not take 'loss_scale'"),
        ({"optim_target_modules": ["layers"]}, "has no effect on optim='lomo_optim'"),
    ],
)
def test_a_run_is_refused_in_words(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, optim="lomo_optim", **options).train()


@pytest.mark.parametrize("name", ["lomo_optim", "adalomo_optim"])
def test_two_ranks_are_equal_bit_for_bit_and_one_process_with_both_batches(tmp_path, name):
    first, second = run_ranks(_rank, 2, str(tmp_path), name, timeout_s=120)
    assert first == second
    alone = _without_dropout(tmp_path / "alone", name, per_device_train_batch_size=4)
    torch.testing.assert_close(torch.tensor(first), alone, rtol=0, atol=2e-6)


def _rank(folder, name):
    return _without_dropout(folder, name, strategy="ddp", per_device_train_batch_size=2).tolist()


def _without_dropout(folder, name, **options):
    from adapter_runs import Network as Classifier

    model = Classifier()
    model.layers[1].p = 0.0
    return weights(train(folder, optim=name, model=model, **options))


@pytest.mark.parametrize("name", ["lomo_optim", "adalomo_optim"])
def test_divided_parameters_are_refused(tmp_path, name):
    own = "tr_optim.AdaLomo" if name == "adalomo_optim" else "tr_optim.Lomo"
    with pytest.raises(ValueError, match=f"is a DTensor.*lomo_optim knows whole ones only; use {own}, or replicas"):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": name}, timeout_s=120)


def test_a_state_of_another_optimizer_is_refused_in_words(no_gpu_needed):
    model = Network()
    saved = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).square().mean().backward()
    saved.step()
    with pytest.raises(ValueError, match="has exp_avg, exp_avg_sq, step, and LomoOptimAdaLomo needs exp_avg_sq_row"):
        LomoOptimAdaLomo(model.parameters()).load_state_dict(saved.state_dict())


def test_a_state_that_it_would_only_keep_is_refused():
    model = Network()
    saved = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).backward()
    saved.step()
    optimizer = LomoOptimLomo(model.parameters())
    with pytest.raises(ValueError, match="has exp_avg, exp_avg_sq, step, which LomoOptimLomo would keep in memory and"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    optimizer.load_state_dict(LomoOptimLomo(model.parameters(), lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("adapter", [LomoOptimLomo, LomoOptimAdaLomo])
def test_a_copy_goes_on_as_the_original(adapter):
    model = Network()
    optimizer = adapter(model.parameters(), lr=0.1, weight_decay=0.1, clip_grad_norm=0.05)
    train_here(optimizer, model)
    other, its_optimizer = copy.deepcopy((model, optimizer))
    train_here(optimizer, model)
    train_here(its_optimizer, other)
    assert torch.equal(flat(model), flat(other))


def test_a_group_that_is_refused_is_not_there():
    optimizer = LomoOptimLomo(Network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is of torch.float64, and lomo_optim computes in float32"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("name", "own"), [("lomo_optim", "tr_optim.Lomo"), ("adalomo_optim", "tr_optim.AdaLomo")])
def test_stochastic_rounding_is_refused_in_words(tmp_path, name, own):
    with pytest.raises(ValueError, match=f"stochastic_rounding=True is not in lomo_optim's arithmetic.* use {own}"):
        trainer_of(tmp_path, optim=name, optim_args="stochastic_rounding=true").train()
