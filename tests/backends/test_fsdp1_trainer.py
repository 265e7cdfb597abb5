"""FSDP1 keeps the seam's promises, and its checkpoints are those of the others: either goes on where one stopped."""

import contextlib
import shutil

import pytest
from test_numbers import ALONE, assert_close, train

from tr_core.testing import check_strategy
from tr_dist.fsdp import Sharding
from tr_dist.fsdp1 import FSDP1
from tr_dist.testing import run_ranks

OLDER = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1, "transformer_layer_cls_to_wrap": ["Sequential"]}}
NEWER = {**OLDER, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Sequential"]}}
WHOLE = {**OLDER, "fsdp_config": {**OLDER["fsdp_config"], "state_dict_type": "FULL_STATE_DICT"}}
REPLICAS = {"fsdp": "no_shard", "fsdp_config": {"version": 1}}
DDP = {"strategy": "ddp"}
ADAM = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("first", "seconds"),
    [
        (OLDER, [(2, NEWER), (3, OLDER), (2, DDP), (1, ALONE), (2, REPLICAS)]),
        (WHOLE, [(2, NEWER), (2, OLDER)]),
        (REPLICAS, [(2, OLDER)]),
        (NEWER, [(3, OLDER), (2, REPLICAS)]),
        (DDP, [(2, OLDER)]),
    ],
    ids=["FSDP1", "FSDP1 whole", "FSDP1 no_shard", "FSDP2", "DDP"],
)
def test_a_run_goes_on_with_another_strategy(tmp_path, first, seconds):
    alone = train(str(tmp_path / "1"), "Network", 72, {**ADAM, **ALONE, "per_device_train_batch_size": 12})
    two = {**ADAM, **first, "per_device_train_batch_size": 6}
    run_ranks(train, 2, str(tmp_path / "2"), "Network", 72, two, 4, timeout_s=180)
    for number, (world_size, second) in enumerate(seconds):
        shutil.copytree(tmp_path / "2", folder := tmp_path / f"to-{number}")
        options = {**ADAM, **second, "per_device_train_batch_size": 12 // world_size}
        ranks = run_ranks(train, world_size, str(folder), "Network", 72, options, None, True, timeout_s=180)
        # Adam divides by the root of what it has seen of a gradient, which makes more of small ones' roundings.
        assert_close(ranks[0], alone, 1e-5)


def keep_promises(strategy):
    with contextlib.closing(FSDP1(Sharding(strategy, "SIZE_BASED_WRAP", min_num_params=10), use_cpu=True)) as fsdp1:
        check_strategy(fsdp1)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_the_strategy_keeps_the_promises_of_the_seam(strategy):
    run_ranks(keep_promises, 2, strategy, timeout_s=120)


@pytest.mark.parametrize("form", [OLDER, REPLICAS], ids=["FSDP1", "FSDP1 no_shard"])
def test_an_optimizer_of_the_backward_pass_is_refused_before_anything_is_trained(tmp_path, form):
    options = {**form, "optim": "lomo", "per_device_train_batch_size": 4}
    with pytest.raises(ValueError, match=r"Lomo needs whole parameters, or may, and FSDP1 flattens them"):
        run_ranks(train, 2, str(tmp_path), "Network", 24, options, timeout_s=120)


def test_an_optimizer_of_matrices_is_refused_where_they_are_flattened(tmp_path):
    options = {**OLDER, "optim": "adafactor", "per_device_train_batch_size": 4}
    with pytest.raises(ValueError, match=r"Adafactor needs whole parameters, or may, and FSDP1 flattens them"):
        run_ranks(train, 2, str(tmp_path), "Network", 24, options, timeout_s=120)


def test_an_average_of_weights_is_refused(tmp_path):
    options = {**OLDER, "ema_decay": 0.9, "per_device_train_batch_size": 4}
    with pytest.raises(ValueError, match="version=1 and ema_decay, which averages whole parameters"):
        run_ranks(train, 2, str(tmp_path), "Network", 24, options, timeout_s=120)
