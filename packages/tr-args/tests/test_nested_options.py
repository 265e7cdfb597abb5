"""Options within an argument: of optimizers, of sharding, of the sharing of data."""

import copy
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tr_args import AcceleratorConfig, ArgumentsError, TrainingArguments, parse_optim_args


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ("rank=64, update_proj_gap=100, scale=0.10", {"rank": 64, "update_proj_gap": 100, "scale": 0.1}),
        ("a=1e-3,b=False,c=none,d=text", {"a": 1e-3, "b": False, "c": None, "d": "text"}),
        ("betas=(0.9, 0.99), eps=1", {"betas": [0.9, 0.99], "eps": 1}),
        ("a='x, y=1', b=\"2\"", {"a": "x, y=1", "b": "2"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=[[1, 2], [3]]", {"a": [[1, 2], [3]]}),
        ('{"rank": 64, "names": ["a"]}', {"rank": 64, "names": ["a"]}),
        ({"rank": 64}, {"rank": 64}),
    ],
)
def test_options_of_an_optimizer_are_read(given, expected):
    assert parse_optim_args(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rank", "needs name=value parts"),
        ("1a=2", "needs name=value parts separated by commas, not '1a=2'"),
        ("a='x", "needs the closing ' of a value"),
        ("a=[1", r"needs the closing \] of a value"),
        ("{", "as JSON it breaks off at character 2"),
    ],
)
def test_options_of_an_optimizer_that_cannot_be_read_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        parse_optim_args(given)


def test_sharding_options_lose_their_prefix_and_get_their_types(tmp_path):
    config = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": "true",
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_use_orig_params": True,
        "limit_all_gathers": "True",
        "xla": True,
        "xla_fsdp_settings": {"compute_dtype": "bfloat16"},
        "xla_fsdp_grad_ckpt": True,
    }
    plain = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "backward_prefetch": "backward_pre",
        "forward_prefetch": True,
        "cpu_offload": False,
        "sharding_strategy": "full_shard",
        "state_dict_type": "FULL_STATE_DICT",
        "sync_module_states": True,
        "transformer_layer_cls_to_wrap": ["BertLayer"],
        "use_orig_params": True,
        "limit_all_gathers": True,
        "xla": True,
        "xla_fsdp_settings": {"compute_dtype": "bfloat16"},
        "xla_fsdp_grad_ckpt": True,
    }
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(config))
    for given in (config, json.dumps(config), str(path), plain):
        assert TrainingArguments(fsdp="full_shard auto_wrap", fsdp_config=given).fsdp_config == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": 3}, "at version=3: needs one of 1, 2"),
        ({"min_num_params": -1}, "at min_num_params=-1: needs at least 0"),
        ({"fsdp_xla": 1, "xla": 1}, "has the key xla twice"),
        ({"backward_prefetch": "sideways"}, "needs one of backward_pre, backward_post, no_prefetch"),
    ],
)
def test_sharding_options_of_the_wrong_kind_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(fsdp="full_shard", fsdp_config=config)


class Sizes:
    """As Accelerate's `ParallelismConfig` has them."""

    dp_replicate_size, dp_shard_size, tp_size, cp_size, sp_size, cp_backend = 2, 4, 1, 1, None, "torch"


def test_sizes_of_parallel_groups_come_in_several_forms():
    prefixed = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    plain = {"dp_replicate_size": 2, "dp_shard_size": 4}
    for given in (plain, prefixed, {**plain, "tp_size": 1, "cp_handler": None}, json.dumps(plain), Sizes()):
        args = TrainingArguments(fsdp="full_shard", parallelism_config=given)
        assert args.parallelism_config == plain
        sizes = args.parallelism_config
        assert (sizes.dp_shard_size, sizes.tp_size, sizes.total_size, sizes.data_parallel_size) == (4, 1, 8, 8)
        assert (sizes.dp_shard_enabled, sizes.cp_enabled, sizes.sp_enabled) == (True, False, False)
        assert sizes.non_data_parallel_size == 1
        assert copy.deepcopy(args).parallelism_config.tp_enabled is False
        assert json.loads(args.to_json_string())["parallelism_config"] == plain
    with pytest.raises(AttributeError, match="parallelism_config has no gp_size; it has dp_replicate_size"):
        _ = sizes.gp_size
    assert TrainingArguments(parallelism_config={"dp_replicate_size": 2}).parallelism_config == {"dp_replicate_size": 2}
    gathered = {"cp_size": 4, "cp_handler": SimpleNamespace(cp_comm_strategy="allgather")}
    assert TrainingArguments(parallelism_config=gathered).parallelism_config == {"cp_size": 4}
    ring = {"cp_size": 4, "cp_comm_strategy": "alltoall"}
    for given in (
        ring,
        "cp=4, cp_comm_strategy=alltoall",
        {"cp_size": 4, "cp_handler": SimpleNamespace(cp_comm_strategy="alltoall")},
    ):
        args = TrainingArguments(parallelism_config=given)
        assert args.parallelism_config == json.loads(args.to_json_string())["parallelism_config"] == ring
    assert TrainingArguments(parallelism_config={"tp_size": 2, "cp_comm_strategy": "alltoall"}).parallelism_config == {
        "tp_size": 2
    }
    sizes = TrainingArguments(parallelism_config="tp=2, dp_replicate=4").parallelism_config
    assert sizes == {"tp_size": 2, "dp_replicate_size": 4}
    assert (sizes.tp_enabled, sizes.total_size, sizes.data_parallel_size, sizes.non_data_parallel_size) == (
        True,
        8,
        4,
        2,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelism_config": {"tp_size": 2}, "strategy": "ddp"}, "divides a model by tp_size with strategy='mesh'"),
        (
            {"parallelism_config": {"tp_size": 2}, "accelerator_config": {"split_batches": True}},
            "has no batches to split with tp_size",
        ),
        ({"tp_plan": {"up": "colwise"}}, "says what tp_size divides; set tp_size too"),
        ({"ep_plan": {"experts": "experts"}}, "says what ep_size shares out; set ep_size too"),
        ({"parallelism_config": "tp=2,dp=2"}, "has the unknown key dp_size; did you mean"),
        ({"parallelism_config": "tp=two"}, "at tp_size='two': needs a number of processes, from 1"),
        ({"parallelism_config": {"cp_handler": {"cp_comm_strategy": "ring"}}}, "has cp_comm_strategy='ring'; keys and"),
        ({"parallelism_config": {"dp_shards": 2}}, "has the unknown key dp_shards; did you mean dp_shard_size"),
        ({"parallelism_config": {"dp_shard_size": 0}}, "at dp_shard_size=0: needs a number of processes, from 1"),
        ({"parallelism_config": {"dp_shard_size": 2}}, "divides a model by dp_shard_size; set fsdp='full_shard"),
        (
            {"parallelism_config": {"dp_replicate_size": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}},
            "is not read with ZeRO",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**options)


@pytest.mark.parametrize("ending", ["json", "yaml", "toml"])
def test_how_data_is_shared_can_come_from_a_file(tmp_path, ending):
    texts = {"json": '{"split_batches": true}', "yaml": "split_batches: true", "toml": "split_batches = true"}
    path = tmp_path / f"sharing.{ending}"
    path.write_text(texts[ending])
    assert TrainingArguments(accelerator_config=path).accelerator_config.split_batches
    args = TrainingArguments(accelerator_config=str(path))
    assert args.accelerator_config == AcceleratorConfig(split_batches=True)
    assert TrainingArguments(accelerator_config=args.accelerator_config).accelerator_config.split_batches


def test_how_data_is_shared_can_come_from_the_class_of_another_library():
    @dataclass
    class Theirs:
        split_batches: bool = True
        even_batches: bool = False

    @dataclass
    class Longer(Theirs):
        shuffle: bool = True

    args = TrainingArguments(accelerator_config=Theirs())
    assert args.accelerator_config == AcceleratorConfig(split_batches=True, even_batches=False)
    with pytest.raises(ArgumentsError, match="accelerator_config.*has the unknown key shuffle"):
        TrainingArguments(accelerator_config=Longer())
    with pytest.raises(ArgumentsError, match="needs a mapping"):
        TrainingArguments(accelerator_config=AcceleratorConfig)


def test_arguments_do_not_share_their_defaults():
    one, other = TrainingArguments(), TrainingArguments()
    one.accelerator_config.split_batches = True
    one.report_to.append("wandb")
    one.fsdp_config["xla"] = True
    assert (other.accelerator_config.split_batches, other.report_to, other.fsdp_config) == (False, [], {})
