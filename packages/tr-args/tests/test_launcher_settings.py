"""What `accelerate launch` puts into the environment fills the arguments that nobody set."""

import pytest

from tr_args import ArgumentsError, TrainingArguments
from tr_args.launcher_settings import filled_by_launcher

# As accelerate launch sets them when sharding is asked for with nothing else.
FSDP = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
DEEPSPEED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.fixture
def launched(monkeypatch):
    """Build arguments in a process with some variables."""

    def build(variables, **arguments):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return TrainingArguments("out", **arguments)

    return build


@pytest.mark.parametrize(("value", "found"), [("no", (False, False)), ("bf16", (True, False)), ("fp16", (False, True))])
def test_precision_fills_arguments_that_are_silent(value, found, launched):
    args = launched({"ACCELERATE_MIXED_PRECISION": value})
    assert (args.bf16, args.fp16) == found
    assert filled_by_launcher(args) == (
        {} if value == "no" else dict.fromkeys(("bf16", "fp16"), "ACCELERATE_MIXED_PRECISION")
    )


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": False}])
def test_arguments_that_speak_go_before_the_launcher(given, launched):
    args = launched({"ACCELERATE_MIXED_PRECISION": "fp16"}, **given)
    assert (args.bf16, args.fp16) == (given.get("bf16", False), False)
    assert filled_by_launcher(args) == {}


# As accelerate launch sets them for two sizes; it sets the others too.
SPREAD = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}


def test_replicas_and_shards_fill_the_argument_that_is_silent(launched):
    args = launched(FSDP | SPREAD)
    assert args.parallelism_config == {"dp_replicate_size": 2, "dp_shard_size": 4}
    assert filled_by_launcher(args)["parallelism_config"] == "ACCELERATE_USE_PARALLELISM_CONFIG"
    given = {"dp_shard_size": 8}
    assert launched(FSDP | SPREAD, parallelism_config=given).parallelism_config == given
    assert launched(FSDP | SPREAD | {"ACCELERATE_USE_PARALLELISM_CONFIG": "false"}).parallelism_config is None


def test_without_the_launchers_variables_nothing_is_looked_at(launched):
    args = launched({"FSDP_SHARDING_STRATEGY": "nonsense"})
    assert (args.fsdp, filled_by_launcher(args)) == ([], {})


def test_checking_again_keeps_what_was_assigned_since(launched):
    args = launched({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"})
    assert args.use_cpu
    args.bf16, args.use_cpu = False, False
    args.check()
    assert (args.bf16, args.use_cpu) == (False, False)


def test_sharding_has_what_was_asked_for_and_not_what_is_always_set(launched):
    asked = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, GPT2Block"}
    args = launched(FSDP | asked | {"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"})
    assert args.fsdp == ["full_shard"]
    assert args.fsdp_config == {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "backward_prefetch": "backward_pre",
        "cpu_offload": False,
        "cpu_ram_efficient_loading": True,
        "forward_prefetch": False,
        "sync_module_states": True,
        "transformer_layer_cls_to_wrap": ["BertLayer", "GPT2Block"],
        "use_orig_params": True,
    }


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"FSDP_SHARDING_STRATEGY": "2"}, "shard_grad_op"), ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "no_shard")],
)
def test_sharding_is_named_by_number_or_word(variables, words, launched):
    assert launched(FSDP | variables).fsdp == [words]


def test_keys_that_act_only_with_others(launched):
    by_size = launched(FSDP | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2000"})
    assert by_size.fsdp_config["min_num_params"] == 2000
    second = launched({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"})
    assert second.fsdp_config["reshard_after_forward"] is False
    assert launched({"FSDP_ACTIVATION_CHECKPOINTING": "true"}).activation_checkpointing is True


@pytest.mark.parametrize("given", [{"fsdp": "no_shard"}, {"fsdp": ""}])
def test_a_script_that_says_how_to_shard_is_heard(given, launched):
    args = launched(FSDP, **given)
    assert args.fsdp == ([given["fsdp"]] if given["fsdp"] else [])
    assert args.fsdp_config == {}


def test_a_deepspeed_file_is_named(launched):
    args = launched(DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "/x/zero3.json"})
    assert args.deepspeed == "/x/zero3.json"


def test_deepspeed_settings_become_a_configuration_that_follows_the_arguments(launched):
    prefix = "ACCELERATE_DEEPSPEED_"
    more = {
        f"{prefix}ZERO_STAGE": "3",
        f"{prefix}OFFLOAD_PARAM_DEVICE": "nvme",
        f"{prefix}OFFLOAD_PARAM_NVME_PATH": "/n",
    }
    steps = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_GRADIENT_CLIPPING": "0.7"}
    args = launched(DEEPSPEED | more | steps | {f"{prefix}ZERO3_SAVE_16BIT_MODEL": "true"}, max_grad_norm=2.0)
    assert args.deepspeed["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/n"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert args.deepspeed["gradient_clipping"] == args.deepspeed["train_batch_size"] == "auto"
    assert (args.gradient_accumulation_steps, args.max_grad_norm) == (4, 2.0)


def test_parameters_are_not_offloaded_where_each_rank_has_them_whole(launched):
    devices = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE": "cpu" for part in ("PARAM", "OPTIMIZER")}
    args = launched(DEEPSPEED | devices | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"})
    assert args.deepspeed["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def test_compilation_is_turned_on(launched):
    args = launched({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "max-autotune"})
    assert (args.torch_compile, args.torch_compile_backend, args.torch_compile_mode) == (
        True,
        "inductor",
        "max-autotune",
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "fp8"},
            "ACCELERATE_MIXED_PRECISION = 'fp8' (environment): needs no, bf16 or fp16",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "a training loop of its own"),
        (FSDP | {"FSDP_IGNORED_MODULES": "head"}, "all parameters are sharded"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "set activation_checkpointing"),
        ({"ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"}, "graph breaks"),
        (
            FSDP | SPREAD | {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "ring"},
            "has cp_comm_strategy='ring'; keys and",
        ),
        (FSDP | SPREAD | {"PARALLELISM_CONFIG_CP_SIZE": "many"}, "at cp_size='many': needs a number of processes"),
        (SPREAD, "divides a model by dp_shard_size; set fsdp="),
        (DEEPSPEED | SPREAD, "is not read with ZeRO, whose configuration says how it divides"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_variable(variables, message, launched):
    with pytest.raises(ArgumentsError) as caught:
        launched(variables)
    assert message in str(caught.value)
