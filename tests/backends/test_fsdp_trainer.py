"""FSDP keeps the promises of a strategy, and a run resumes in other shards, in replicas and in one process."""

import shutil

import pytest
from test_numbers import ALONE, assert_close, train
from variants import VARIANTS

from tr_core import TrainingArguments
from tr_dist.fsdp import FSDP
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("fsdp")
UNITS = {"transformer_layer_cls_to_wrap": ["Sequential"]}
SHARDS = {"fsdp": "full_shard auto_wrap", "fsdp_config": UNITS}
WHOLE = {**SHARDS, "fsdp_config": {**UNITS, "state_dict_type": "FULL_STATE_DICT"}}
REPLICAS = {"fsdp": "no_shard"}
DDP = {"strategy": "ddp"}
PARTS = VARIANTS["tp"]
ADAM = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}


def data_ranks(form, processes):
    return processes // 2 if "tp_plan" in form else processes


@pytest.mark.row("other strategy")
@pytest.mark.parametrize(
    ("first", "seconds"),
    [
        (SHARDS, [(2, DDP), (1, ALONE), (2, REPLICAS), (2, WHOLE)]),
        pytest.param(WHOLE, [(3, SHARDS), (2, DDP)], marks=pytest.mark.slow),
        pytest.param(REPLICAS, [(2, SHARDS)], marks=pytest.mark.slow),
        pytest.param(DDP, [(2, SHARDS), (2, REPLICAS)], marks=[pytest.mark.column("ddp", "fsdp"), pytest.mark.slow]),
        pytest.param(PARTS, [(2, DDP), (1, ALONE), (2, SHARDS)], marks=[pytest.mark.column("mesh"), pytest.mark.slow]),
        pytest.param(DDP, [(2, PARTS), (4, PARTS)], marks=[pytest.mark.column("mesh"), pytest.mark.slow]),
        pytest.param(SHARDS, [(4, VARIANTS["tp_shards"])], marks=[pytest.mark.column("mesh"), pytest.mark.slow]),
    ],
    ids=["shards", "shards saved whole", "replicas", "DDP", "parts", "DDP to parts", "shards to parts"],
)
def test_a_run_resumes_with_another_strategy(tmp_path, first, seconds):
    alone = train(str(tmp_path / "1"), "Network", 72, {**ADAM, **ALONE, "per_device_train_batch_size": 12})
    two = {**ADAM, **first, "per_device_train_batch_size": 12 // data_ranks(first, 2)}
    run_ranks(train, 2, str(tmp_path / "2"), "Network", 72, two, 4, timeout_s=180)
    for number, (world_size, second) in enumerate(seconds):
        shutil.copytree(tmp_path / "2", folder := tmp_path / f"to-{number}")
        options = {**ADAM, **second, "per_device_train_batch_size": 12 // data_ranks(second, world_size)}
        ranks = run_ranks(train, world_size, str(folder), "Network", 72, options, None, True, timeout_s=180)
        # Adam divides by the root of what it has seen of a gradient, which makes more of small ones' roundings.
        assert_close(ranks[0], alone, 1e-5)


@pytest.mark.row("refused")
@pytest.mark.parametrize("name", ["version", "fsdp_version"])
@pytest.mark.parametrize("version", [1, "1"])
def test_the_former_fsdp_is_refused_with_what_to_use(tmp_path, name, version):
    args = TrainingArguments(output_dir=tmp_path, fsdp="no_shard", fsdp_config={name: version}, use_cpu=True)
    with pytest.raises(ValueError, match=r"version=1 is torch's former FSDP, .* set version=2: FSDP2 trains"):
        FSDP.from_arguments(args)
