import pytest
import torch

from tr_dist import DDP
from tr_dist.testing import run_ranks


def _exchange():
    with DDP(use_cpu=True) as strategy:
        rank = strategy.rank
        mine = torch.arange(6, dtype=torch.int64).reshape(2, 3) + 10 * rank
        kept = mine.clone()
        found = {
            "gathered": strategy.gather(mine),
            "transposed": strategy.gather(mine.t()),
            "flags": strategy.gather(torch.tensor([rank == 1])),
            "low": strategy.gather(torch.tensor([rank + 0.5], dtype=torch.bfloat16)),
            "empty": strategy.gather(torch.zeros(0, 4)),
            "sum": strategy.sum(mine),
            "sum_of_gradient": strategy.sum(torch.ones((), requires_grad=True) * 2),
            "objects": strategy.gather_objects({"rank": rank, "text": "x" * rank}),
        }
        assert torch.equal(mine, kept), "the argument must stay as it is"
        assert not found["sum_of_gradient"].requires_grad
        strategy.barrier()
        return found


def test_values_travel_between_ranks():
    results = run_ranks(_exchange, 3)
    base = torch.arange(6).reshape(2, 3)
    for found in results:
        assert torch.equal(found["gathered"], torch.cat([base, base + 10, base + 20]))
        assert torch.equal(found["transposed"], torch.cat([base.t(), base.t() + 10, base.t() + 20]))
        assert found["flags"].tolist() == [False, True, False]
        assert found["low"].tolist() == [0.5, 1.5, 2.5]
        assert found["empty"].shape == (0, 4)
        assert torch.equal(found["sum"], 3 * base + 30)
        assert found["sum_of_gradient"].item() == 6.0
        assert found["objects"] == [{"rank": rank, "text": "x" * rank} for rank in range(3)]


def _gather_unequal(shapes, dtypes):
    with DDP(use_cpu=True) as strategy:
        strategy.gather(torch.zeros(shapes[strategy.rank], dtype=dtypes[strategy.rank]))


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (
            ((2, 3), (3, 3)),
            (torch.float32, torch.float32),
            r"rank 0 torch.float32 \(2, 3\), rank 1 torch.float32 \(3, 3\)",
        ),
        (((2,), (2, 1)), (torch.float32, torch.float32), r"rank 0 torch.float32 \(2,\), rank 1 torch.float32 \(2, 1\)"),
        (((2,), (2,)), (torch.int64, torch.float32), r"rank 0 torch.int64 \(2,\), rank 1 torch.float32 \(2,\)"),
    ],
)
def test_unequal_tensors_are_refused_on_all_ranks(shapes, dtypes, message):
    with pytest.raises(ValueError, match=f"gather needs one shape and dtype on all ranks, not {message}"):
        run_ranks(_gather_unequal, 2, shapes, dtypes)


def test_a_single_number_cannot_be_concatenated():
    with DDP(use_cpu=True) as strategy:
        with pytest.raises(ValueError, match=r"not shape \(\); give a number as tensor.reshape\(1\)"):
            strategy.gather(torch.tensor(1.0))
        assert strategy.gather(torch.tensor([1.0])).tolist() == [1.0]


def _agree():
    with DDP(use_cpu=True) as strategy:
        rank = strategy.rank
        first = strategy.all_reduce_max([10 * (rank + 1), -rank])
        second = strategy.all_reduce_max([0])
        between = strategy.sum(torch.ones(()))  # other exchanges may come in between
        third = strategy.all_reduce_max([5 if rank == 1 else 0])
        return [third(), first(), second(), first()], between.item()


def test_ranks_agree_on_the_largest_of_each_value_in_any_order_of_reading():
    assert run_ranks(_agree, 3) == [([[5], [30, 0], [0], [30, 0]], 3.0)] * 3


def _begin_before_the_other():
    with DDP(use_cpu=True) as strategy:
        if strategy.rank == 1:
            strategy.gather_objects(None)  # the first rank comes here after it has begun to agree
            return strategy.all_reduce_max([1])()
        read = strategy.all_reduce_max([7])
        strategy.gather_objects(None)
        return read()


def test_beginning_to_agree_waits_for_nobody_the_first_time_too():
    assert run_ranks(_begin_before_the_other, 2) == [[7], [7]]


def test_one_process_agrees_with_itself():
    with DDP(use_cpu=True) as strategy:
        assert strategy.all_reduce_max([3, 1])() == [3, 1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_that_have_nothing_but_nccl_agree_on_the_host():
    with DDP(backend="nccl") as strategy:
        torch.cuda.set_sync_debug_mode("error")
        try:
            reads = [strategy.all_reduce_max([value]) for value in (3, 4)]
            assert [read() for read in reads] == [[3], [4]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
