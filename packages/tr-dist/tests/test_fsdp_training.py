"""Train in shards, in an own loop: the numbers of one process, in every form, and refusals before they are others."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tr_dist.fsdp import FSDP, Sharding
from tr_dist.testing import run_ranks

STEPS, SAMPLES, WIDTH = 4, 12, 6

FORMS = {
    "one unit": {},
    "units": {"wrap": "SIZE_BASED_WRAP", "min_num_params": 20},
    "kept after forward": {"strategy": "shard_grad_op", "wrap": "SIZE_BASED_WRAP", "min_num_params": 20},
    "replicas": {"strategy": "no_shard"},
    "offloaded": {"offload": True},
    "gathered ahead": {"wrap": "SIZE_BASED_WRAP", "min_num_params": 20, "forward_prefetch": True},
    "not gathered ahead": {"wrap": "SIZE_BASED_WRAP", "min_num_params": 20, "backward_prefetch": "no_prefetch"},
}


class Network(nn.Module):
    """Tied weights, a frozen parameter, a size that no number of ranks divides, a buffer that is not in the state."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(7, WIDTH)
        self.up, self.norm, self.down = nn.Linear(WIDTH, 11), nn.LayerNorm(11), nn.Linear(11, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)
        self.register_buffer("offsets", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, tokens):
        return self.head(self.down(torch.tanh(self.norm(self.up(self.embed(tokens) + self.offsets)))))


def batch(step):
    return torch.randint(0, 7, (SAMPLES, 2), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])


def alone(max_norm):
    model = Network()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    norms = []
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms), model.state_dict()


def train(form, micro_batches, max_norm, precision="no"):
    with FSDP(Sharding(**form), precision=precision, use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        norms = []
        for step in range(STEPS):
            parts = batch(step)[strategy.rank :: strategy.world_size].chunk(micro_batches)
            for index, tokens in enumerate(parts):
                with strategy.accumulate(model, sync=index == micro_batches - 1):
                    with strategy.autocast():
                        loss = loss_of(model, tokens) / micro_batches
                    strategy.backward(loss)
            norms.append(strategy.clip_grad_norm(model, optimizer, max_norm))
            strategy.step(optimizer)
            optimizer.zero_grad()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            evaluated = model(batch(9)[:, 0])
        state = strategy.full_state_dict(model)
        tied = not state or state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        held = sum(p.to_local().numel() for p in model.parameters())
        return torch.stack(norms), {name: value.clone() for name, value in state.items()}, tied, evaluated, held


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("micro_batches", "max_norm"), [pytest.param(1, None, marks=pytest.mark.slow), (2, 0.1)])
def test_shards_give_the_numbers_of_one_process(form, micro_batches, max_norm):
    norms, weights = alone(max_norm)
    (found_norms, state, tied, evaluated, _), *others = run_ranks(train, 2, form, micro_batches, max_norm)
    torch.testing.assert_close(found_norms, norms, rtol=1e-5, atol=1e-6)
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6, msg=name)
    assert tied
    for other in others:
        assert torch.equal(other[0], found_norms)
        assert other[1] == {}
        assert torch.equal(other[3], evaluated)


def test_machines_that_hold_equal_shards_train_one_model():
    norms, weights = alone(None)
    ranks = run_ranks(train_on_two_machines, 4, timeout_s=90)
    torch.testing.assert_close(ranks[0][0], norms, rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-5, atol=2e-6, msg=name)
    total = sum(p.numel() for p in Network().parameters())
    assert ranks[0][4] + ranks[1][4] == total == ranks[2][4] + ranks[3][4]


def train_on_two_machines():
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return train({"strategy": "hybrid_shard"}, 1, None)


def test_bfloat16_computes_low_and_keeps_float32():
    _, weights = alone(None)
    (_, state, _, evaluated, _), _ = run_ranks(train, 2, FORMS["units"], 1, None, "bf16")
    assert evaluated.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in state.values())
    moved = [(state[n] - v).abs().max() for n, v in weights.items()]
    assert 1e-5 < max(moved) < 0.1  # four updates of at most 0.05 each: other, and not far


def load_on_rank_0():
    with FSDP(Sharding(rank0_loads=True, wrap="SIZE_BASED_WRAP", min_num_params=20), use_cpu=True) as strategy:
        if strategy.rank == 0:
            model = Network()
        else:
            with torch.device("meta"):
                model = Network()
        model = strategy.prepare(model)
        return model(batch(0)[:, 0]).detach(), model.offsets, strategy.full_state_dict(model)


def test_ranks_without_weights_get_those_of_rank_0_buffers_too():
    ranks = run_ranks(load_on_rank_0, 3)
    model = Network()
    for logits, offsets, _ in ranks:
        torch.testing.assert_close(logits, model(batch(0)[:, 0]).detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(offsets, model.offsets)
    assert all(torch.equal(ranks[0][2][name], value) for name, value in model.state_dict().items())


def prepare_unequal_weights():
    with FSDP(use_cpu=True) as strategy:
        model = Network()
        with torch.no_grad():
            model.up.weight.add_(strategy.rank)
            model.offsets.add_(strategy.rank)
        model = strategy.prepare(model)
        return strategy.full_state_dict(model), model.offsets


def test_all_ranks_begin_with_the_weights_of_rank_0():
    (state, _), (_, offsets) = run_ranks(prepare_unequal_weights, 2)
    assert torch.equal(state["up.weight"], Network().up.weight)
    assert torch.equal(offsets, Network().offsets)


def load_a_whole_state():
    with FSDP(whole_checkpoints=True, use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        part = strategy.state_parts(model, None)["model"]
        saved = part.state_dict()
        assert (saved == {}) == (strategy.rank > 0)
        part.load_state_dict({name: value + 1 for name, value in Network().state_dict().items()})
        return saved, strategy.full_state_dict(model)


def test_a_checkpoint_may_hold_whole_weights():
    (saved, loaded), _ = run_ranks(load_a_whole_state, 2)
    for name, value in Network().state_dict().items():
        assert torch.equal(saved[name], value)
        assert torch.equal(loaded[name], value + 1)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, both):
        return self.other(self.one(x)) if both else self.one(x)


def train_a_part(finds_unused, ranks=(), form="full_shard", frozen=False):
    with FSDP(Sharding(strategy=form), find_unused_parameters=finds_unused, use_cpu=True) as strategy:
        model = strategy.prepare(Branching())
        model.other.requires_grad_(not frozen)
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.ones(2, 3), both=strategy.rank in ranks).sum())
        return None if frozen else model.other.weight.grad.full_tensor()


@pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs a newer torch")
@pytest.mark.parametrize("form", ["full_shard", "no_shard"])
@pytest.mark.parametrize("ranks", [(), (0,), (1,)])
def test_a_parameter_without_a_gradient_on_a_rank_is_an_error_before_ranks_exchange(form, ranks):
    message = (
        r"parameters of a Branching got no gradient on this rank: \d+ of \d+ numbers, other\.weight, other\.bias; call"
    )
    with pytest.raises(RuntimeError, match=message):
        run_ranks(train_a_part, 2, False, ranks, form)


def train_a_part_later():
    with FSDP(use_cpu=True) as strategy:
        model = strategy.prepare(Branching())
        for both in (True, strategy.rank == 0):
            with strategy.accumulate(model, sync=True):
                strategy.backward(model(torch.ones(2, 3), both=both).sum())


@pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs a newer torch")
def test_a_parameter_without_a_gradient_in_a_later_step_is_an_error_too():
    with pytest.raises(RuntimeError, match=r"of a Branching got no gradient .* numbers, some of one\.weight, .*; call"):
        run_ranks(train_a_part_later, 2)


def leave_out_a_unit():
    with FSDP(Sharding(wrap="SIZE_BASED_WRAP", min_num_params=10), use_cpu=True) as strategy:
        model = strategy.prepare(Branching())
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.ones(2, 3), both=False).sum())


def test_a_unit_that_no_rank_uses_is_an_error_that_names_its_parameters():
    with pytest.raises(
        RuntimeError, match=r"2 trainable parameters got no gradient .*other\.weight, other\.bias; call"
    ):
        run_ranks(leave_out_a_unit, 2)


def test_parameters_that_are_frozen_after_they_were_divided_need_no_gradient():
    run_ranks(train_a_part, 2, False, (), "full_shard", True)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs a newer torch")
def test_a_parameter_without_a_gradient_may_be_allowed():
    assert not run_ranks(train_a_part, 2, True)[0].any()
    assert run_ranks(train_a_part, 2, True, (1,))[0].any()


def accumulate_something_else():
    with FSDP(use_cpu=True) as strategy:
        strategy.prepare(Branching())
        with strategy.accumulate(nn.Linear(1, 1), sync=True):
            pass


def prepare_twice():
    with FSDP(use_cpu=True) as strategy:
        strategy.prepare(strategy.prepare(Branching()))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (accumulate_something_else, TypeError, r"needs the module that prepare\(\) returned, not Linear"),
        (prepare_twice, ValueError, "divided over the processes"),
    ],
)
def test_misuse_is_named(function, kind, message):
    with pytest.raises(kind, match=message):
        run_ranks(function, 1)


def evaluate_other_weights(form):
    with FSDP(Sharding(**form), use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        with torch.no_grad():
            model(batch(0)[:, 0])
            for parameter in model.parameters():
                parameter.to_local().mul_(2)
            without_gradients = model(batch(0)[:, 0])
        return without_gradients, model(batch(0)[:, 0]).detach()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights_changed_between_two_evaluations_are_those_that_the_second_sees(form):
    model = Network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        expected = model(batch(0)[:, 0])
    for found in run_ranks(evaluate_other_weights, 2, form)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def machines_that_differ():
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) % 2))
    FSDP(Sharding(strategy="hybrid_shard"), use_cpu=True)


def test_machines_with_unequal_numbers_of_processes_cannot_hold_equal_shards():
    with pytest.raises(
        ValueError, match="needs as many processes on every machine, and a total of 3 is not a multiple"
    ):
        run_ranks(machines_that_differ, 3)


def test_a_torch_whose_fully_shard_fails_on_the_cpu_is_refused_before_the_ranks_meet(monkeypatch):
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    with pytest.raises(ValueError, match=r"'fsdp' on the CPU needs torch 2.7: .*; update torch, use strategy='ddp'"):
        FSDP(use_cpu=True)
