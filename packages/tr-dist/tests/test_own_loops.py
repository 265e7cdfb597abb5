"""A loop written by hand, with four lines changed: the numbers of one process, every row once, refusals."""

import itertools
import tracemalloc

import pytest
import torch
from loop_runs import Rows, Stream, Uneven, distributed, network, plain, strategy_named
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tr_dist import DDP, Loop
from tr_dist.elastic import ElasticDDP
from tr_dist.mesh import Mesh
from tr_dist.own_loops.loader import RankBatches, rows_of, share_of
from tr_dist.testing import run_ranks

TOLERANCE = 1e-5  # sums of 32 bits in another order, over two epochs of Adam


@pytest.mark.parametrize(
    ("strategy", "number", "accumulation"),
    [
        ("ddp", 23, 1),
        ("ddp", 29, 3),
        ("fsdp", 29, 3),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("ddp", 24, 1), ("fsdp", 24, 1), ("fsdp", 23, 1))),
    ],
)
def test_two_ranks_train_as_the_plain_loop_does_in_one_process(strategy, number, accumulation):
    weights, predictions = plain(number, 6, accumulation=accumulation)
    options = {"accumulation": accumulation, "shuffle": True}
    ranks = run_ranks(distributed, 2, strategy, number, 3, options, timeout_s=120)
    torch.testing.assert_close(ranks[0][0], weights, rtol=TOLERANCE, atol=TOLERANCE)
    for rank in ranks:
        torch.testing.assert_close(rank[1], predictions, rtol=TOLERANCE, atol=TOLERANCE)
    assert sorted(ranks[0][2] + ranks[1][2]) == sorted([*range(number)] * 2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in order"),
        pytest.param({"workers": 2, "shuffle": True, "epochs": 1}, id="workers", marks=pytest.mark.slow),
        pytest.param({"stream": True}, id="stream", marks=pytest.mark.slow),
        pytest.param({"stream": True, "accumulation": 2}, id="stream with accumulation"),
    ],
)
def test_three_ranks_see_every_row_once_in_the_plain_loops_batches(options):
    """Rows 24 and 25 are the last micro-batch: one rank has none of them, and computes without counting."""
    accumulation, shuffle = options.get("accumulation", 1), options.get("shuffle", False)
    epochs = options.get("epochs", 2)
    weights, predictions = plain(26, 12, accumulation=accumulation, shuffle=shuffle, epochs=epochs)
    ranks = run_ranks(distributed, 3, "ddp", 26, 4, options, timeout_s=180)
    for rank in ranks:
        torch.testing.assert_close(rank[0], weights, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(rank[1], predictions, rtol=TOLERANCE, atol=TOLERANCE)
    last = [rank[2][9 * epoch + 8] for epoch in range(epochs) for rank in ranks]
    assert last[1::3] == last[2::3]  # the row that does not count
    seen = [row for rank in ranks[:2] for row in rank[2]] + [
        row for place, row in enumerate(ranks[2][2]) if place % 9 < 8
    ]
    assert sorted(seen) == sorted([*range(26)] * epochs)


def test_one_process_needs_no_launcher():
    weights, predictions = plain(23, 6, accumulation=2)
    alone = distributed("ddp", 23, 6, {"accumulation": 2, "shuffle": True})
    torch.testing.assert_close(alone[0], weights)
    torch.testing.assert_close(alone[1], predictions)


def lengths(drop_last):
    with Loop(DDP(use_cpu=True)) as loop:
        loader = loop.prepare(DataLoader(Rows(26), batch_size=4, drop_last=drop_last))
        return len(loader), [len(batch["x"]) for batch in loader]


def test_batches_that_are_not_full_are_dropped_on_request():
    assert run_ranks(lengths, 3, True, timeout_s=60) == [(2, [4, 4])] * 3
    assert run_ranks(lengths, 3, False, timeout_s=60) == [(3, [4, 4, 1]), (3, [4, 4, 1]), (3, [4, 4, 1])]


def groups_of_unequal_batches():
    with Loop(DDP(use_cpu=True)) as loop:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
        loader = loop.prepare(DataLoader(Rows(13), batch_sampler=batches))
        return [batch["number"].tolist() for batch in loader], [loop.gather(b["number"]).tolist() for b in loader]


def test_batches_of_a_sampler_stay_together():
    ranks = run_ranks(groups_of_unequal_batches, 2, timeout_s=60)
    assert ranks[0][0] == [[0, 1, 2], [4, 5], [10, 11]]
    assert ranks[1][0] == [[3], [6, 7, 8, 9], [12]]
    assert ranks[0][1] == ranks[1][1] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11, 12]]


def evaluate_within_a_step():
    with Loop(DDP(use_cpu=True), gradient_accumulation_steps=2) as loop:
        loader, held_out = loop.prepare(DataLoader(Rows(8), batch_size=2), DataLoader(Rows(2), batch_size=1))
        due = []
        for _ in loader:
            list(held_out)
            due.append((loop.is_step_due, len(loop.gather(torch.zeros(2)))))
        return due


def test_a_loader_within_another_leaves_the_outer_batch_as_it_was():
    assert run_ranks(evaluate_within_a_step, 2, timeout_s=60) == [[(False, 4), (True, 4)]] * 2


def precision_of_a_step():
    with Loop(DDP(use_cpu=True, precision="bf16")) as loop:
        model = network()
        model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(2, 6))
        between = torch.is_autocast_enabled("cpu")
        loop.backward(nn.functional.mse_loss(output.float(), torch.ones(2, 2)))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            evaluated = model(torch.ones(2, 6)).dtype
        return output.dtype, between, torch.is_autocast_enabled("cpu"), evaluated, model.module[0].weight.dtype


def test_precision_is_the_strategys_from_the_forward_to_backward():
    assert precision_of_a_step() == (torch.bfloat16, True, False, torch.bfloat16, torch.float32)


def parts_of_a_checkpoint():
    with Loop(strategy_named("fsdp")) as loop:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = loop.prepare(model, optimizer)
        return sorted(loop.stateful()), optimizer.state_dict().keys() == {"state", "param_groups"}


def test_the_parts_of_a_checkpoint_are_the_strategys():
    assert run_ranks(parts_of_a_checkpoint, 2, timeout_s=60) == [(["model", "optimizer"], True)] * 2


def test_a_batch_without_a_backward_is_given_up():
    with Loop(DDP(use_cpu=True)) as loop:
        model = network()
        loader, model, optimizer = loop.prepare(
            DataLoader(Rows(4), batch_size=2), model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        model.train()
        for number, batch in enumerate(loader):
            loss = model(batch["x"]).square().mean()
            if number:
                loop.backward(loss)
                optimizer.step()
        assert not torch.is_autocast_enabled("cpu")


def refused(part):
    with Loop(DDP(use_cpu=True)) as loop, pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        part(loop)
    return str(error.value)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_two_models(loop):
    loop.prepare(network(), network())


def backward_alone(loop):
    loop.backward(torch.zeros((), requires_grad=True))


def gather_other_rows(loop):
    for _ in loop.prepare(DataLoader(Rows(4), batch_size=2)):
        loop.gather(torch.zeros(3))


def step_with_closure(loop):
    model = network()
    loop.prepare(model, optimizer_of(model))[1].step(lambda: None)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (prepare_two_models, "prepare got a second model; one Loop trains one"),
        (lambda loop: loop.prepare(optimizer_of(network())), "an optimizer without its model; give both in one call"),
        (lambda loop: loop.prepare(network(), optimizer_of(network())), "4 parameters of SGD are not the model's"),
        (lambda loop: loop.prepare([1]), "prepare takes modules, optimizers, schedules and DataLoaders, not list"),
        (lambda loop: loop.prepare(DataLoader(Rows(4), batch_size=None)), "makes no batches (batch_size=None)"),
        (
            lambda loop: loop.prepare(DataLoader(Rows(4), sampler=DistributedSampler(Rows(4), 2, 0))),
            "has a DistributedSampler, which divides the data already",
        ),
        (backward_alone, "backward(loss) without a forward before it"),
        (gather_other_rows, "gather got 3 rows, and this rank's batch has 2"),
        (step_with_closure, "step(closure) is not possible"),
        (lambda loop: loop.clip_grad_norm(1.0), "clip_grad_norm needs a prepared model and optimizer"),
        (lambda loop: loop.stateful(), "nothing is prepared"),
        (lambda loop: loop.accumulate(network()).__enter__(), "accumulate needs the module that prepare() returned"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_words(part, words):
    assert words in refused(part)


def test_accumulation_without_a_prepared_loader_is_refused():
    with Loop(DDP(use_cpu=True), gradient_accumulation_steps=2) as loop:
        model = loop.prepare(network())
        with pytest.raises(RuntimeError, match="needs the loader prepared too, which knows where a step ends"):
            model(torch.ones(1, 6))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0 must be at least 1"):
        Loop(gradient_accumulation_steps=0)


def test_strategies_of_other_steps_are_refused():
    """Ranks of a mesh would be given other samples, and elastic's gradients would not be exchanged."""
    for kind in (Mesh, ElasticDDP):
        strategy = object.__new__(kind)
        strategy._data = None
        with pytest.raises(ValueError, match=f"a {kind.__name__} needs steps of another kind: use the Trainer"):
            Loop(strategy)


def order_of_words():
    with Loop(DDP(use_cpu=True)) as loop:
        list(loop.prepare(DataLoader({"a": 1, "b": 2}, sampler=["a", "b"], batch_size=1)))


def test_a_sampler_of_keys_is_refused_by_all_ranks():
    with pytest.raises(Exception, match="gives something else than whole numbers, which the ranks cannot exchange"):
        run_ranks(order_of_words, 2, timeout_s=60)


def optimizer_with_state():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with Loop(strategy_named("fsdp")) as loop:
        loop.prepare(model, optimizer)


def test_sharding_under_an_optimizer_with_state_is_refused():
    with pytest.raises(Exception, match="SGD has state already, and dividing the model gives it other parameters"):
        run_ranks(optimizer_with_state, 2, timeout_s=60)


def test_shares_are_even_where_batches_are_missing():
    assert share_of([4, 4, 4], 3).counts == (4, 4, 4)
    assert share_of([4, 2], 3).counts == (2, 2, 2)
    assert share_of([2], 3).counts == (1, 1, 0)
    assert [rows_of(share_of([2], 3), rank) for rank in range(3)] == [slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [share_of([2], 3).weight(rank) for rank in range(3)] == [1.5, 1.5, 0.0]
    assert list(BatchSampler(SequentialSampler(range(3)), 2, drop_last=False)) == [[0, 1], [2]]


class Played:
    """The exchange of rank 0 with ranks that have nothing to give."""

    device, rank, world_size = torch.device("cpu"), 0, 1024

    def sum(self, tensor):
        return tensor.clone()


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_of_many_rows_takes_8_bytes_each_and_the_shares_of_many_ranks_none(drop_last):
    number = 2**18 + 5000
    batches = RankBatches(BatchSampler(SequentialSampler(range(number)), 8, False), Played(), drop_last=drop_last)
    tracemalloc.start()
    taken = list(itertools.islice(batches, 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken == [list(range(8192 * step, 8192 * step + 8)) for step in range(3)]
    assert peak < 4 * 8 * number  # copies for the exchange included; a list of lists took 44 bytes a row
    assert len(list(batches)) == len(list(batches.shares())) == len(batches) == (32 if drop_last else 33)
    assert next(batches.shares()).counts == (8,) * 1024


def read_a_stream(number, fewer, workers, accumulation):
    seen = []
    with Loop(DDP(use_cpu=True), gradient_accumulation_steps=accumulation) as loop:
        model = loop.prepare(network())
        loader = loop.prepare(DataLoader(Uneven(number, fewer), batch_size=2, num_workers=workers))
        for batch in loader:
            seen += batch["number"].tolist()
            loop.backward(model(batch["x"]).sum())
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_streams_are_shared_out_in_order_with_every_row_once(accumulation):
    ranks = run_ranks(read_a_stream, 2, 11, 0, 0, accumulation, timeout_s=60)
    assert ranks == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10]]


@pytest.mark.parametrize(
    ("fewer", "accumulation", "words"),
    [
        (1, 1, "read 3 rows of the data set in 1 micro-batches, and another 4 in 1"),
        (8, 1, "read 0 rows of the data set in 0 micro-batches, and another 4 in 1"),
        (5, 2, "read 7 rows of the data set in 2 micro-batches, and another 8 in 2"),
    ],
)
def test_a_stream_that_is_shorter_on_a_rank_is_an_error_of_all_and_no_hang(fewer, accumulation, words):
    with pytest.raises(ValueError, match=f"{words}.*do not divide it by rank or cut it") as caught:
        run_ranks(read_a_stream, 2, 12, fewer, 0, accumulation, timeout_s=60)
    assert caught.value.__notes__[0].count("ValueError: for one step a rank read") == 2


def test_a_stream_that_workers_end_at_different_times_keeps_its_shares():
    """Two workers that each read all of it: every row twice, with short batches where one of them has ended."""
    ranks = run_ranks(read_a_stream, 2, 7, 0, 2, 1, timeout_s=180)  # two workers of each rank are started
    assert sorted(ranks[0] + ranks[1]) == sorted([*range(7)] * 2)


def test_a_stream_that_is_divided_by_rank_already_is_refused():
    data = Stream(4)
    data._distributed = "by node"
    with Loop(DDP(use_cpu=True)) as loop, pytest.raises(ValueError, match="divided over ranks already .split_dataset"):
        loop.prepare(DataLoader(data, batch_size=2))


def test_a_strategy_that_lacks_methods_is_named_with_them():
    class Bare:
        device, rank, world_size = torch.device("cpu"), 0, 1

    with pytest.raises(TypeError, match="the strategy Bare lacks accumulate, .*check_accumulation.*, which Loop calls"):
        Loop(Bare())
