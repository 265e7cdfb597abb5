"""Scale losses in shards: an overflow in one rank's shard leaves the update out on all, as in one process.

float16 is refused on the CPU, for it is slow there; torch computes in it nonetheless. So the strategies here are given
the scaler, and the type, that they have on an accelerator.
"""

import pytest
import torch
from torch import nn

from tr_dist.fsdp import FSDP, Sharding
from tr_dist.testing import run_ranks

STEPS, SPOILED, LIMIT = 6, (2, 4), 65504.0
FORMS = {
    "one unit": {},
    "units": {"wrap": "SIZE_BASED_WRAP", "min_num_params": 20},
    "replicas": {"strategy": "no_shard"},
    "offloaded": {"offload": True},
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


class Network(nn.Module):
    """One bias of a single number: of its gradient one rank has all, and the others nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(4, 7), nn.Linear(7, 1), nn.Linear(1, 3)

    def forward(self, x):
        return self.head(self.down(torch.tanh(self.up(x))))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


def alone(max_norm, optimizer_name, dtype):
    """Train on one process, with torch's scaler; returns weights, norms, whether each step was made, and scales."""
    model, grad_scaler = Network(), scaler()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    norms, applied, scales = [], [], []
    for step in range(STEPS):
        x, labels = batch(step)
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x).float(), labels)
        grad_scaler.scale(loss).backward()
        if step in SPOILED:
            model.down.bias.grad.fill_(torch.inf)
        grad_scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf))
        before = grad_scaler.get_scale()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scales.append(grad_scaler.get_scale())
        applied.append(scales[-1] >= before)
        optimizer.zero_grad()
    return model.state_dict(), torch.stack(norms), applied, scales


def scaled(form, dtype):
    strategy = FSDP(Sharding(**form), use_cpu=True)
    strategy._precision.scaler, strategy._precision.dtype = scaler(), dtype
    return strategy


def train(form, max_norm, optimizer_name, dtype, clips=True):
    """Run in every rank; in two steps the rank that has the number `down.bias` finds its gradient infinite."""
    with scaled(form, dtype) as strategy:
        model = strategy.prepare(Network())
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        norms, applied, scales, found = [], [], [], 0
        for step in range(STEPS):
            x, labels = (each[strategy.rank :: strategy.world_size] for each in batch(step))
            with strategy.accumulate(model, sync=True):
                with strategy.autocast():
                    loss = nn.functional.cross_entropy(model(x).float(), labels)
                strategy.backward(loss)
            mine = model.down.bias.grad.to_local()
            if step in SPOILED and mine.numel():
                mine.fill_(torch.inf)
                found += 1
            if clips:
                norms.append(strategy.clip_grad_norm(model, optimizer, max_norm))
            applied.append(strategy.step(optimizer))
            scales.append(strategy.state_parts(model, optimizer)["scaler"].get_scale())
            optimizer.zero_grad()
        return strategy.full_state_dict(model), torch.stack(norms) if clips else None, applied, scales, found


@pytest.mark.parametrize(
    ("form", "optimizer_name"), [*((form, "adamw") for form in FORMS.values()), (FORMS["units"], "fused")]
)
def test_an_overflow_in_one_ranks_shard_is_left_out_on_all_as_in_one_process(form, optimizer_name):
    weights, norms, applied, scales = alone(0.5, optimizer_name, None)
    assert applied == [step not in SPOILED for step in range(STEPS)]
    assert min(scales) < 2.0**12 < max(scales)
    ranks = run_ranks(train, 2, form, 0.5, optimizer_name, None)
    if form.get("strategy") != "no_shard":
        assert [rank[4] for rank in ranks] == [len(SPOILED), 0]
    for rank in ranks:
        assert (rank[2], rank[3]) == (applied, scales)
        assert torch.equal(rank[1].isfinite(), norms.isfinite())
        torch.testing.assert_close(rank[1], norms, rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(ranks[0][0][name], value, rtol=1e-5, atol=2e-6, msg=name)


def test_an_overflow_is_found_without_clipping_too():
    weights, _, applied, scales = alone(None, "adamw", None)
    for rank in run_ranks(train, 3, FORMS["units"], None, "adamw", None, False):
        assert (rank[2], rank[3]) == (applied, scales)
        for name, value in rank[0].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=2e-6, msg=name)


def test_units_are_gathered_and_computed_in_float16():
    weights, _, applied, scales = alone(0.5, "adamw", torch.float16)
    (found, _, *same), _ = run_ranks(train, 2, FORMS["units"], 0.5, "adamw", torch.float16)
    assert same[:2] == [applied, scales]
    exact, *_ = alone(0.5, "adamw", None)
    for name, value in weights.items():
        assert found[name].dtype == torch.float32
        # 11 bits of mantissa, over four updates of at most 0.05 each.
        torch.testing.assert_close(found[name], value, rtol=0, atol=4 * 0.05 * 2**-10, msg=name)
    assert any(not torch.allclose(found[name], exact[name], rtol=1e-5, atol=1e-5) for name in exact)


def overflow_in_one_rank():
    """One rank's own gradient is too large for float16, before any exchange."""
    with scaled({}, torch.float16) as strategy:
        model = strategy.prepare(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scales = []
        for large in (1.0, LIMIT, 1.0):
            with strategy.accumulate(model, sync=True), strategy.autocast():
                x = torch.full((2, 4), large if strategy.rank == 1 else 1.0)
                strategy.backward(model(x).float().sum())
            scales.append((strategy.step(optimizer), strategy.state_parts(model, None)["scaler"].get_scale()))
            optimizer.zero_grad()
        return scales, all(bool(p.to_local().isfinite().all()) for p in model.parameters())


def test_a_gradient_too_large_for_float16_halves_the_scale_of_all_ranks():
    for scales, is_finite in run_ranks(overflow_in_one_rank, 2):
        assert scales == [(True, 2.0**12), (False, 2.0**11), (True, 2.0**11)]
        assert is_finite


def test_float16_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="fp16=True cannot train on a CPU"):
        FSDP(precision="fp16", use_cpu=True)
