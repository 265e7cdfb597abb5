"""Ranks of jobs of any size, played in one process: what each holds, what it exchanges, and how it is refused."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tr_dist import DDP
from tr_dist.fake_ranks import fake_rank
from tr_dist.fsdp import FSDP, Sharding
from tr_dist.process_group import ProcessGroup

LAYERS, WIDTH, VOCABULARY = 3, 24, 100
BY_LAYER = {"wrap": "TRANSFORMER_BASED_WRAP", "layer_classes": ("Layer",)}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens))).sum()


def local_numel(tensors):
    return sum(tensor.to_local().numel() for tensor in tensors)


def rows_of(parameter, ranks, rank):
    each = math.ceil(len(parameter) / ranks)
    return max(0, min(each, len(parameter) - rank * each))


@pytest.mark.parametrize("ranks", [8, 64])
def test_parts_of_all_ranks_are_the_whole(ranks):
    whole, held = dict(Network().named_parameters()), 0
    for rank in range(ranks):
        with fake_rank(rank, ranks), FSDP(Sharding(**BY_LAYER), use_cpu=True) as strategy:
            model = strategy.prepare(Network())
            assert (strategy.rank, strategy.world_size) == (rank, ranks)
            for name, parameter in model.named_parameters():
                assert len(parameter.to_local()) == rows_of(whole[name], ranks, rank)
            held += local_numel(model.parameters())
    assert held == sum(p.numel() for p in whole.values())


class Exchanged(CommDebugMode):
    """Counts collectives, and notes the elements that each gathers."""

    def __init__(self):
        super().__init__()
        self.gathered = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_allgather_base_":
            self.gathered.append(args[0].numel())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def counts(self):
        kinds = {"_allgather_base_": 0, "_reduce_scatter_base_": 0, "allreduce_": 0}
        for operator, number in self.get_comm_counts().items():
            kinds[str(operator).rpartition(".")[2].strip("')>")] += number
        return tuple(kinds.values())


UNITS = LAYERS + 1  # and the rest of the model
# (all-gathers, reduce-scatters, all-reduces) of a step
COUNTS = {
    "full_shard": (2 * UNITS, UNITS, 0),  # for forward and backward
    "shard_grad_op": (UNITS, UNITS, 0),
    "hybrid_shard": (2 * UNITS, UNITS, UNITS),
    "hybrid_shard_zero2": (UNITS, UNITS, UNITS),
}


def one_step(strategy, model):
    with Exchanged() as exchanged:
        micro_batch(strategy, model, sync=True)
    return exchanged


def micro_batch(strategy, model, *, sync):
    with strategy.accumulate(model, sync=sync):
        strategy.backward(model(torch.zeros(2, 3, dtype=torch.int64)))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of CommDebugMode's hooks
@pytest.mark.parametrize("form", COUNTS)
@pytest.mark.parametrize("ranks", [16, 64])
def test_each_unit_is_gathered_and_scattered_as_often_as_its_form_says(form, ranks):
    with (
        fake_rank(ranks - 1, ranks, local_world_size=8),
        FSDP(Sharding(strategy=form, **BY_LAYER), use_cpu=True) as strategy,
    ):
        model = strategy.prepare(Network())
        exchanged = one_step(strategy, model)
        assert exchanged.counts() == COUNTS[form]
        # Every rank sends as much as the one with most rows.
        shards = 8 if form.startswith("hybrid") else ranks
        padded = sum(math.ceil(len(p) / shards) * shards * p[:1].numel() for p in Network().parameters())
        assert sum(exchanged.gathered) == padded * COUNTS[form][0] // UNITS


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("sync", [False, True])
def test_micro_batches_before_the_last_exchange_no_gradients(sync):
    with fake_rank(5, 8), FSDP(Sharding(**BY_LAYER), use_cpu=True) as strategy:
        model = strategy.prepare(Network())
        with Exchanged() as exchanged:
            micro_batch(strategy, model, sync=sync)
        assert exchanged.counts() == (2 * UNITS, UNITS * sync, 0)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_1024_ranks_are_wired(strategy):
    shards = 8 if strategy == "hybrid_shard" else 1024
    for rank in (0, 512, 1023):
        with (
            fake_rank(rank, 1024, local_world_size=8),
            FSDP(Sharding(strategy=strategy, **BY_LAYER), use_cpu=True) as made,
        ):
            model = made.prepare(Network())
            assert made.mesh.shape == ((128, 8) if strategy == "hybrid_shard" else (1024,))
            expected = [rows_of(p, shards, rank % shards) * p[:1].numel() for p in Network().parameters()]
            assert [p.to_local().numel() for p in model.parameters()] == expected
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            assert one_step(made, model).counts()[1] == UNITS
            optimizer.step()
            moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            assert local_numel(moments) == 2 * sum(expected)


def test_what_a_strategy_asks_is_answered_as_by_ranks_alike():
    with fake_rank(3, 64), FSDP(use_cpu=True) as strategy:
        assert strategy.sum(torch.tensor(2)) == 128
        assert strategy.gather_objects("a") == ["a"] * 64
        assert strategy.all_reduce_max([3])() == [3]


def test_nothing_is_left_of_a_rank_that_was_played():
    before = dict(os.environ)
    with fake_rank(3, 64):
        assert os.environ["RANK"] == "3"
    assert dict(os.environ) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "ranks", "local"), [(8, 8, None), (-1, 8, None), (0, 9, 8)])
def test_a_rank_that_cannot_be_is_refused(rank, ranks, local):
    with pytest.raises(ValueError, match=f"no rank {rank} of {ranks}"), fake_rank(rank, ranks, local_world_size=local):
        pass


def test_a_process_that_has_a_group_cannot_play_another():
    with fake_rank(0, 2), pytest.raises(RuntimeError, match="has a process group already"), fake_rank(0, 2):
        pass


@pytest.mark.parametrize("parameters", [1, 300])
def test_the_check_that_replicas_are_equal_exchanges_eight_bytes_a_rank(parameters, monkeypatch):
    model, gathered, gather = nn.Sequential(*[nn.Linear(2, 2) for _ in range(parameters)]), [], ProcessGroup.gather
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, mine: gathered.append(mine.nbytes) or gather(self, mine))
    with (
        fake_rank(1023, 1024, local_world_size=8),
        DDP(use_cpu=True) as strategy,
        strategy.accumulate(strategy.prepare(model), sync=False),
    ):
        assert gathered == [8]
