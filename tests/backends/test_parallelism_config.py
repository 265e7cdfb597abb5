"""Spread samples and shards over the ranks by sizes, as Accelerate's `ParallelismConfig` has them."""

import pytest
from accelerate.parallelism_config import ParallelismConfig
from test_numbers import ALONE, TOLERANCE, assert_close, train

from tr_core import TrainingArguments
from tr_dist.fsdp import FSDP
from tr_dist.testing import run_ranks

FORMS = {
    "fsdp": {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 60}},
    "ddp": {},
}


@pytest.mark.column("fsdp", "ddp")
@pytest.mark.parametrize(("form", "replicas", "shards"), [("fsdp", 2, 2), ("fsdp", 1, 4), ("ddp", 4, 1)])
def test_replicas_of_shards_give_the_numbers_of_one_process(tmp_path, form, replicas, shards):
    alone = train(str(tmp_path / "1"), "Counting", 43, {**ALONE, "per_device_train_batch_size": 12})
    sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    options = {**FORMS[form], "parallelism_config": sizes, "per_device_train_batch_size": 3}
    for rank in run_ranks(train, 4, str(tmp_path / "4"), "Counting", 43, options, timeout_s=180):
        assert_close(rank, alone, TOLERANCE)


def make_mesh(folder):
    sizes = {"dp_replicate_size": 3, "dp_shard_size": 2}
    args = TrainingArguments(output_dir=folder, fsdp="shard_grad_op", parallelism_config=sizes, use_cpu=True)
    with FSDP.from_arguments(args) as strategy:
        return strategy.sharding.strategy, strategy.mesh.mesh.tolist(), strategy.mesh.mesh_dim_names


@pytest.mark.column("fsdp")
def test_shards_lie_on_ranks_that_follow_each_other(tmp_path):
    expected = ("hybrid_shard_zero2", [[0, 1], [2, 3], [4, 5]], ("replicate", "shard"))
    assert run_ranks(make_mesh, 6, str(tmp_path), timeout_s=120) == [expected] * 6
