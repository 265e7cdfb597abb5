"""Train in shards by the older FSDP1: the numbers of one process, states that FSDP2 takes, and refusals."""

import os
from types import SimpleNamespace

import pytest
import torch
from test_fsdp_training import STEPS, Network, alone, batch, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from tr_dist.fsdp import FSDP, Sharding
from tr_dist.fsdp1 import FSDP1
from tr_dist.testing import run_ranks

UNITS = {"wrap": "SIZE_BASED_WRAP", "min_num_params": 20}
FORMS = {
    "one unit": {},
    "units": UNITS,
    "kept after forward": {"strategy": "shard_grad_op", **UNITS},
    "replicas": {"strategy": "no_shard", **UNITS},
    "gathered ahead": {**UNITS, "forward_prefetch": True, "backward_prefetch": "backward_post"},
    "not gathered ahead": {**UNITS, "backward_prefetch": "no_prefetch"},
}


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(form, micro_batches, max_norm, precision="no"):
    with FSDP1(Sharding(**form), precision=precision, limit_all_gathers=False, use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        optimizer = adamw(model)
        strategy.bind_optimizer(model, optimizer)
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
        with torch.no_grad():
            evaluated = model(batch(9)[:, 0])
        held = sum(p.numel() for p in model.parameters())
        return torch.stack(norms), strategy.whole_state(model), evaluated, held


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, None), (2, 0.1)])
def test_flattened_shards_give_the_numbers_of_one_process(form, micro_batches, max_norm):
    norms, weights = alone(max_norm)
    (found, state, evaluated, _), other = run_ranks(train, 2, form, micro_batches, max_norm)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-6)
    assert list(state) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6, msg=name)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert torch.equal(other[0], found)
    assert other[1] == {}
    assert torch.equal(other[2], evaluated)


def train_on_two_machines(strategy):
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return train({"strategy": strategy, **UNITS}, 1, 0.1)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_machines_that_hold_equal_shards_train_one_model(strategy):
    norms, weights = alone(0.1)
    ranks = run_ranks(train_on_two_machines, 4, strategy, timeout_s=90)
    for rank in ranks:
        torch.testing.assert_close(rank[0], norms, rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-5, atol=2e-6, msg=name)
    total = sum(p.numel() for p in Network().parameters())
    assert ranks[0][3] + ranks[1][3] == total == ranks[2][3] + ranks[3][3]


def test_bfloat16_computes_low_and_keeps_float32():
    _, weights = alone(None)
    (_, state, evaluated, _), _ = run_ranks(train, 2, UNITS, 1, None, "bf16")
    assert evaluated.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in state.values())
    moved = [(state[n] - v).abs().max() for n, v in weights.items()]
    assert 1e-5 < max(moved) < 0.1  # four updates of at most 0.05 each: other, and not far


def train_step(strategy, model, optimizer, step):
    tokens = batch(step)[strategy.rank :: strategy.world_size]
    with strategy.accumulate(model, sync=True):
        strategy.backward(loss_of(model, tokens))
    strategy.step(optimizer)
    optimizer.zero_grad()


def resume(form):
    """Train two steps, hand the state to another model that has computed already, and train that for two more."""
    with FSDP1(Sharding(**form), use_cpu=True) as one, FSDP1(Sharding(**form), use_cpu=True) as other:
        model, optimizer = one.prepare(Network()), None
        optimizer = adamw(model)
        for step in range(2):
            train_step(one, model, optimizer, step)
        parts = one.stateful(model, optimizer)
        saved = {name: part.state_dict() for name, part in parts.items()}
        again = other.prepare(Network())
        optimizer = adamw(again)
        with torch.no_grad():
            again(batch(9)[:, 0])  # what was gathered for it must not be computed with any more
            for name, part in other.stateful(again, optimizer).items():
                part.load_state_dict(saved[name])
            evaluated = again(batch(9)[:, 0]), model(batch(9)[:, 0])
        for step in range(2, STEPS):
            train_step(other, again, optimizer, step)
        return other.whole_state(again), evaluated


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_state_is_handed_over_to_a_model_that_has_computed_already(form):
    _, weights = alone(None)
    (state, (found, expected)), _ = run_ranks(resume, 2, form)
    assert torch.equal(found, expected)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6, msg=name)


def look_at_states():
    with FSDP1(Sharding(), whole_checkpoints=True, use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        optimizer = adamw(model)
        train_step(strategy, model, optimizer, 0)
        parts = strategy.stateful(model, optimizer)
        saved = parts["model"].state_dict()
        state = parts["optimizer"].state_dict()
        moments = {
            number: {n: tuple(v.shape) for n, v in entries.items()} for number, entries in state["state"].items()
        }
        return list(saved), moments, state["param_groups"][0]["params"]


def test_states_have_the_names_numbers_and_shapes_of_a_plain_module_and_optimizer():
    model = Network()
    optimizer = adamw(model)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    plain = optimizer.state_dict()
    shapes = {number: {n: tuple(v.shape) for n, v in entries.items()} for number, entries in plain["state"].items()}
    ranks = run_ranks(look_at_states, 2)
    assert [rank[0] for rank in ranks] == [list(model.state_dict()), []]
    for rank in ranks:
        assert rank[1:] == (shapes, plain["param_groups"][0]["params"])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale, self.offset = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, both):
        once = checkpoint(self.one, x, use_reentrant=False) * self.scale  # computed again in the backward pass
        return self.other(once) + self.offset if both else once


def train_a_part(form, uses, **options):
    """Make a step of as many micro-batches as `uses` has entries, and one more; return how much `other` changed."""
    with FSDP1(Sharding(**form), use_cpu=True, **options) as strategy:
        model = strategy.prepare(Branching())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = strategy.whole_state(model)
        for step in (uses, uses):
            for number, both in enumerate(step, start=1):
                with strategy.accumulate(model, sync=number == len(step)):
                    strategy.backward(model(torch.ones(2, 3), both=both).sum())
            strategy.step(optimizer)
            optimizer.zero_grad()
        after = strategy.whole_state(model)
        return {name: float((after[name] - before[name]).abs().max()) for name in before}


def train_a_part_with_zeros(form, uses):
    return train_a_part(form, uses, find_unused_parameters=True)


PARTS = {"one unit": {}, "replicas": {"strategy": "no_shard"}}
APART = {"units": {"wrap": "SIZE_BASED_WRAP", "min_num_params": 8}}


@pytest.mark.parametrize("form", [*PARTS.values(), *APART.values()], ids=[*PARTS, *APART])
def test_a_parameter_without_a_gradient_is_an_error_that_names_it(form):
    message = r"3 trainable parameters got no gradient in this step: offset, other\.weight, other\.bias; FSDP1 would"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(train_a_part, 2, form, (False, False))


@pytest.mark.parametrize("form", PARTS.values(), ids=PARTS)
def test_a_parameter_may_take_part_in_one_micro_batch_of_a_step(form):
    changes = run_ranks(train_a_part, 2, form, (False, True, False))[0]
    assert all(change > 0 for change in changes.values())


def test_a_parameter_without_a_gradient_may_be_allowed_and_is_changed_by_decay():
    changes = run_ranks(train_a_part_with_zeros, 2, {}, (False,))[0]
    # Two steps of AdamW with a gradient of zero: a rate of 0.1 times a decay of 0.5 off each time, and nothing more.
    assert changes["other.weight"] == pytest.approx(
        (1 - 0.95**2) * Branching().other.weight.abs().max().item(), rel=1e-5
    )


class Stateful(nn.Linear):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


def with_a_model(function):
    with FSDP1(use_cpu=True) as strategy:
        return function(strategy, strategy.prepare(Network()))


def accumulate_something_else():
    with_a_model(lambda strategy, model: strategy.accumulate(nn.Linear(1, 1), sync=True).__enter__())


def prepare_twice():
    with_a_model(lambda strategy, model: strategy.prepare(model))


def prepare_other_state():
    with FSDP1(use_cpu=True) as strategy:
        strategy.prepare(Stateful(1, 1))


def bind_adafactor():
    with_a_model(lambda strategy, model: strategy.bind_optimizer(model, torch.optim.Adafactor(model.parameters())))


def load_other_weights():
    with_a_model(lambda strategy, model: strategy.stateful(model, None)["model"].load_state_dict({"odd": 1}))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (accumulate_something_else, TypeError, r"needs the module that prepare\(\) returned, not Linear"),
        (prepare_twice, ValueError, "divided by FSDP1 already"),
        (prepare_other_state, ValueError, "and _extra_state is neither; leave version out"),
        (bind_adafactor, ValueError, r"Adafactor needs whole parameters, or may, .* leave version out, or use one of"),
        (load_other_weights, RuntimeError, "the saved model has other tensors than this one, such as"),
    ],
)
def test_misuse_is_named(function, kind, message):
    with pytest.raises(kind, match=message):
        run_ranks(function, 2)


@pytest.mark.parametrize(
    ("sharding", "precision", "message"),
    [
        ({"offload": True}, "no", "version=1 and offload: FSDP1 keeps parameters in pinned memory"),
        ({"rank0_loads": True}, "no", "version=1 and cpu_ram_efficient_loading: FSDP1 needs an accelerator"),
        ({}, "fp16", "version=1 and fp16: FSDP1 has a loss scaler of its own"),
    ],
)
def test_what_the_older_way_cannot_do_is_refused(sharding, precision, message):
    with pytest.raises(ValueError, match=message):
        FSDP1(Sharding(**sharding), precision=precision, use_cpu=True)


def arguments(**options):
    plain = {
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "ddp_backend": None,
        "ddp_timeout": 60,
        "fsdp": ["no_shard"],
        "parallelism_config": None,
        "optim": "adamw_torch",
        "optim_target_modules": None,
    }
    return SimpleNamespace(**{**plain, "ddp_find_unused_parameters": None, "fsdp_config": {"version": 1}, **options})


@pytest.mark.parametrize("name", ["ema_decay", "parameter_rules"])
def test_arguments_that_go_by_parameters_are_refused(name):
    with pytest.raises(ValueError, match=f"version=1 and {name}, which .*; leave version out"):
        FSDP.from_arguments(arguments(**{name: [0.9]}))


def test_an_optimizer_of_projected_matrices_is_refused_where_they_are_flattened():
    given = arguments(fsdp=["full_shard"], optim="galore_adamw", optim_target_modules="all-linear")
    with pytest.raises(ValueError, match="'galore_adamw' projects matrices, and FSDP1 flattens them"):
        FSDP.from_arguments(given)


def build_from_arguments():
    kinds = []
    for version in (1, 2):
        with FSDP.from_arguments(arguments(fsdp_config={"version": version})) as strategy:
            kinds.append(type(strategy).__name__)
    return kinds


def test_the_version_of_the_arguments_says_which():
    assert run_ranks(build_from_arguments, 1) == [["FSDP1", "FSDP"]]
