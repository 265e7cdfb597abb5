import types

import pytest
import torch
from galore_runs import data, net
from torch import nn

from tr_optim import Adafactor, AdaLomo, GaLoreAdafactor, GaLoreAdamW, Lomo
from tr_optim.engine.precision import Rounding, round_stochastically, store_rounded

DRAWS = 4000
LOW = [torch.bfloat16, torch.float16]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def values(dtype):
    least = {torch.bfloat16: 1e-30, torch.float16: 2.0**-24}[dtype]
    size = torch.logspace(torch.tensor(least).log10(), 4, 60)
    return torch.cat([size, -size, torch.tensor([1 + 2**-10, -1 - 2**-9, 3e-5, 6.2e-5, 65503.0])])


@pytest.mark.parametrize("dtype", LOW)
def test_rounded_values_are_the_neighbours_and_their_mean_is_exact(dtype):
    exact, draw = values(dtype), generator()
    drawn = torch.stack([round_stochastically(exact, dtype, draw) for _ in range(DRAWS)])
    assert torch.equal(drawn.to(dtype).float(), drawn)  # numbers of the lower precision
    lower, upper = drawn.amin(0), drawn.amax(0)
    nearest = exact.to(dtype).float()
    assert torch.equal(nearest.clamp(lower, upper), nearest)
    step = torch.nextafter(lower.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double() - lower
    assert ((upper == lower) | (upper - lower == step)).all()  # not further than the next
    off = (drawn.double().mean(0) - exact.double()).abs()
    share = ((exact.double() - lower) / step).abs()
    deviation = step * (share * (1 - share).abs() / DRAWS).sqrt()
    assert (off <= 4.5 * deviation + step * 1e-3).all()
    assert (upper > lower).sum() > 100


@pytest.mark.parametrize("dtype", LOW)
def test_what_the_lower_precision_has_is_kept_and_so_is_what_is_not_finite(dtype):
    kept = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-24, -(2.0**-20), torch.inf, -torch.inf])
    for seed in range(20):
        assert torch.equal(round_stochastically(kept, dtype, generator(seed)), kept)
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # the NaN that CUDA makes
    assert round_stochastically(all_ones, dtype, generator()).isnan().all()


def test_a_tensor_that_is_no_block_of_memory_is_put_back_too():
    target = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    store_rounded(target, torch.full((5, 3), 1 + 2**-9), generator())
    assert set(target.flatten().tolist()) == {1.0, 1 + 2**-7}


def test_without_a_seed_or_a_need_it_rounds_to_nearest():
    low, full = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert Rounding(None).generator(low, 0, 1) is None
    assert Rounding(0).generator(full, 0, 1) is None
    store_rounded(low, torch.tensor([1 + 2**-9, 1 + 2**-8 + 2**-9]), None)
    assert low.tolist() == [1.0, 1 + 2**-7]


def bf16_net():
    return net().to(torch.bfloat16)


def groups(model, **projection):
    projection = {"rank": 8, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std", **projection}
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], **projection},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


KINDS = {
    "adafactor": lambda m, **o: Adafactor(m.parameters(), 1e-3, relative_step=False, scale_parameter=False, **o),
    "galore_adamw": lambda m, **o: GaLoreAdamW(groups(m), 1e-3, **o),
    "galore_adamw_deferred": lambda m, **o: GaLoreAdamW(groups(m), 1e-3, mode="deferred", **o),
    "galore_adafactor": lambda m, **o: GaLoreAdafactor(
        groups(m), 1e-3, relative_step=False, scale_parameter=False, **o
    ),
    "lomo": lambda m, **o: Lomo(m.parameters(), 1e-1, **o),
    "lomo_clipped": lambda m, **o: Lomo(m.parameters(), 1.0, clip_grad_norm=1e3, **o),
    "adalomo": lambda m, **o: AdaLomo(m.parameters(), 1e-2, **o),
}


def train(model, optimizer, first=0, last=6):
    inputs, targets = (part.to(torch.bfloat16) for part in data(12))
    for step in range(first, last):
        loss = (model(inputs[step]) - targets[step]).square().mean()
        backward = getattr(optimizer, "backward", None)
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def pull(kind, dtype, **options):
    """Pull weights of 1 the same way 64 times, each time by less than an eighth of their last bit."""
    gradient = torch.randn(64, 16, generator=generator()).to(torch.bfloat16)
    model = nn.Linear(16, 64, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    optimizer = KINDS[kind](model, **options)
    for group in optimizer.param_groups:
        group["lr"] = 2.0**-13
    for _ in range(64):
        loss = (model.weight * gradient.to(dtype)).sum()
        getattr(optimizer, "backward", torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().double() - 1


@pytest.mark.parametrize("kind", KINDS)
def test_updates_below_the_last_bit_of_a_weight_are_lost_by_rounding_to_nearest(kind):
    assert pull(kind, torch.bfloat16).count_nonzero() == 0


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_below_the_last_bit_of_a_weight_add_up_with_stochastic_rounding(kind, dtype):
    exact = pull(kind, torch.float32)
    rounded = pull(kind, dtype, stochastic_rounding=True)
    assert exact.abs().mean() > 1e-3
    assert ((rounded * exact).sum() / (exact * exact).sum()).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_another_does_not_and_torchs_generator_is_left_alone(kind):
    def run(**options):
        model = bf16_net()
        return train(model, KINDS[kind](model, **options))

    torch.manual_seed(7)
    expected = torch.rand(3)
    first = run(stochastic_rounding=True, seed=1)
    torch.manual_seed(7)
    model = bf16_net()
    torch.manual_seed(7)
    again = train(model, KINDS[kind](model, stochastic_rounding=True, seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, run(stochastic_rounding=True, seed=2))
    assert not torch.equal(first, run(seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_lose_nothing_are_refused(kind):
    with pytest.raises(ValueError, match=r"stochastic_rounding=True, but the weights are float32.*in bfloat16"):
        KINDS[kind](net(), stochastic_rounding=True)


@pytest.mark.parametrize("kind", [Adafactor, Lomo, AdaLomo])
def test_training_arguments_take_it_with_the_runs_seed(kind):
    args = types.SimpleNamespace(
        learning_rate=1e-3,
        optim_args="stochastic_rounding=true",
        seed=11,
        gradient_accumulation_steps=1,
        max_grad_norm=0.0,
        on_nonfinite="ignore",
    )
    optimizer = kind.from_arguments([{"params": list(bf16_net().parameters())}], args)
    assert vars(optimizer._rounding)["_seed"] == 11


def test_lomo_counts_its_steps_in_its_groups_only_where_they_are_needed():
    model = bf16_net()
    optimizer = Lomo(model.parameters(), 1e-3, stochastic_rounding=True)
    train(model, optimizer, last=3)
    assert optimizer.state_dict()["param_groups"][0]["rounded_steps"] == 3
    plain = Lomo(model.parameters(), 1e-3)
    train(model, plain, last=3)
    assert "rounded_steps" not in plain.state_dict()["param_groups"][0]


def test_lomo_leaves_a_step_out_bit_for_bit_also_with_stochastic_rounding():
    model = bf16_net()
    optimizer = Lomo(model.parameters(), 1e-3, nonfinite="skip_step", stochastic_rounding=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(model(torch.full((4, 48), torch.inf, dtype=torch.bfloat16)).sum())
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", LOW)
def test_rounding_on_a_gpu_is_exact_in_the_mean_and_reads_nothing_back(dtype):
    exact = torch.full((DRAWS,), 1 + 2**-12, device="cuda")
    weights = torch.zeros(DRAWS, dtype=dtype, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        store_rounded(weights, exact.clone(), Rounding(0).generator(weights, 0, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weights.float().mean().item() == pytest.approx(1 + 2**-12, abs=2**-12)
    assert len(weights.unique()) == 2
