"""What training arguments accept, convert, derive and remember."""

import copy
import dataclasses
import pickle
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from tr_args import (
    AcceleratorConfig,
    ArgumentsError,
    IntervalStrategy,
    SaveStrategy,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

# The names and defaults that the documentation promises.
DOCUMENTED_DEFAULTS = {
    "output_dir": "trainer_output",
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "optim_target_modules": None,
    "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "logging_strategy": "steps",
    "logging_steps": 500,
    "logging_nan_inf_filter": False,
    "log_level": "passive",
    "log_level_replica": "warning",
    "log_on_each_node": True,
    "report_to": [],
    "eval_strategy": "no",
    "eval_steps": 500,
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "include_for_metrics": [],
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "hub_strategy": "every_save",
    "seed": 42,
    "data_seed": None,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "remove_unused_columns": True,
    "label_names": None,
    "train_sampling_strategy": "random",
    "ddp_timeout": 1800,
    "fsdp": [],
    "fsdp_config": {},
    "deepspeed": None,
    "local_rank": -1,
    "strategy": "auto",
    "checkpointer": "local",
}


@pytest.mark.parametrize("name", DOCUMENTED_DEFAULTS)
def test_a_default_is_the_documented_one(name):
    assert getattr(TrainingArguments(), name) == DOCUMENTED_DEFAULTS[name]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.5), 0.5),
        ("num_train_epochs", "2", 2.0),
        ("per_device_train_batch_size", "16", 16),
        ("per_device_train_batch_size", 16.0, 16),
        ("per_device_train_batch_size", "1e3", 1000),
        ("per_device_train_batch_size", np.int64(4), 4),
        ("seed", np.array(7), 7),
        ("bf16", "false", False),
        ("bf16", "no", False),
        ("bf16", 1, True),
        ("bf16", np.bool_(True), True),
        ("tf32", "null", None),
        ("tf32", "true", True),
        ("logging_steps", 10.0, 10),
        ("logging_steps", "0.25", 0.25),
        ("warmup_steps", "0.1", 0.1),
        ("output_dir", Path("some") / "where", "some/where"),
        ("output_dir", "~", str(Path.home())),
        ("run_name", 2024, "2024"),
        ("eval_strategy", "EPOCH", IntervalStrategy.EPOCH),
        ("save_strategy", False, SaveStrategy.NO),
        ("lr_scheduler_kwargs", '{"num_cycles": 2}', {"num_cycles": 2}),
        ("label_names", "start, end", ["start", "end"]),
        ("label_names", '["a,b"]', ["a,b"]),
        ("report_to", "none", []),
        ("report_to", None, []),
        ("report_to", "tensorboard,wandb", ["tensorboard", "wandb"]),
        ("report_to", ("tensorboard",), ["tensorboard"]),
        ("debug", "", []),
        ("optim_target_modules", "all-linear", "all-linear"),
        ("optim_target_modules", [r".*.attn.*", "mlp"], [r".*.attn.*", "mlp"]),
        ("optim_target_modules", '["attn", "mlp"]', ["attn", "mlp"]),
        ("include_num_input_tokens_seen", True, "all"),
        ("include_num_input_tokens_seen", "false", "no"),
        ("include_num_input_tokens_seen", "non_padding", "non_padding"),
        ("resume_from_checkpoint", "true", True),
        ("resume_from_checkpoint", "auto", "auto"),
        ("resume_from_checkpoint", "out/checkpoint-1000", "out/checkpoint-1000"),
        ("optim_args", "rank=64, update_proj_gap=100, scale=0.10", "rank=64, update_proj_gap=100, scale=0.10"),
        ("deepspeed", "ds.json", "ds.json"),
        ("deepspeed", '{"stage": 2}', {"stage": 2}),
        ("deepspeed", Path("~") / "ds.json", str(Path.home() / "ds.json")),
        ("resume_from_checkpoint", "~/out", str(Path.home() / "out")),
        ("max_grad_norm", None, None),
        ("accelerator_config", None, AcceleratorConfig()),
        ("accelerator_config", '{"even_batches": "false"}', AcceleratorConfig(even_batches=False)),
    ],
)
def test_a_value_becomes_what_its_field_promises(name, given, expected):
    value = getattr(TrainingArguments(**{name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


def test_an_assigned_value_is_converted_and_checked_too():
    args = TrainingArguments()
    args.learning_rate = "3e-4"
    assert args.learning_rate == 3e-4
    with pytest.raises(ArgumentsError, match=r"learning_rate = 'fast' \(assignment\): needs a number"):
        args.learning_rate = "fast"
    assert args.learning_rate == 3e-4


def test_a_slip_in_an_assigned_name_is_refused_and_a_name_of_ones_own_is_not():
    args = TrainingArguments()
    with pytest.raises(ArgumentsError, match="unknown argument lerning_rate; did you mean learning_rate"):
        args.lerning_rate = 1
    args.my_own_note = "kept"
    assert args.my_own_note == "kept"


def test_choices_compare_equal_to_plain_text():
    args = TrainingArguments(eval_strategy="epoch", hub_strategy="end")
    assert args.eval_strategy == "epoch"
    assert f"{args.eval_strategy}" == "epoch"
    assert args.eval_strategy is IntervalStrategy.EPOCH


def test_choices_of_other_libraries_are_read_by_their_values():
    class Schedule(str, Enum):  # noqa: UP042 - as other libraries write it
        COSINE = "cosine"
        EPOCH = "epoch"
        RANDOM = "random"

    args = TrainingArguments(
        lr_scheduler_type=Schedule.COSINE, eval_strategy=Schedule.EPOCH, train_sampling_strategy=Schedule.RANDOM
    )
    assert type(args.lr_scheduler_type.value) is str
    assert args.eval_strategy is IntervalStrategy.EPOCH


def test_output_dir_is_the_only_positional_argument():
    assert TrainingArguments("out").output_dir == "out"
    with pytest.raises(ArgumentsError, match=r"takes 1 positional argument.*; name the others: NAME=8"):
        TrainingArguments("out", 8)
    with pytest.raises(ArgumentsError, match="output_dir is given twice"):
        TrainingArguments("out", output_dir="other")


def test_no_variable_of_a_cluster_adds_a_tracker(monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://status.example")
    assert TrainingArguments().report_to == []
    assert TrainingArguments(report_to="kubeflow").report_to == ["kubeflow"]


def test_evaluation_that_is_planned_turns_do_eval_on():
    assert TrainingArguments(eval_strategy="steps").do_eval
    assert not TrainingArguments().do_eval


def test_unset_values_follow_from_others():
    assert TrainingArguments(logging_steps=7).eval_steps == 7
    assert TrainingArguments(torch_compile_mode="max-autotune").torch_compile
    assert TrainingArguments(torch_compile=True).torch_compile_backend == "inductor"
    assert TrainingArguments(log_level="error").disable_tqdm is True
    assert TrainingArguments(use_cpu=True).dataloader_pin_memory is False
    assert TrainingArguments().disable_tqdm is False


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("loss", False), ("eval_loss", False), ("eval_perplexity", False), ("accuracy", True), ("eval_f1", True)],
)
def test_whether_greater_is_better_follows_from_the_metric(metric, greater):
    assert TrainingArguments(metric_for_best_model=metric).greater_is_better is greater


@pytest.mark.parametrize(
    "needing",
    [
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
        {"save_strategy": "best"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
    ],
)
def test_the_watched_metric_is_the_loss_where_one_is_needed(needing):
    args = TrainingArguments(eval_strategy="epoch", **needing)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)


@pytest.mark.parametrize(
    "steps",
    [
        {"eval_steps": 50, "save_steps": 100},
        {"eval_steps": 200, "save_steps": 500},
        {"eval_steps": 0.1, "save_steps": 500},
        {"eval_steps": 7, "save_strategy": "best"},
        {"eval_steps": 7, "save_strategy": "epoch"},
        {"eval_strategy": "10min", "save_strategy": "1h"},
        {"eval_strategy": "epoch", "save_strategy": "10min"},
    ],
)
def test_the_best_model_can_be_loaded_whenever_it_evaluates_and_saves(steps):
    assert TrainingArguments(load_best_model_at_end=True, **{"eval_strategy": "steps", **steps})


def test_intervals_may_be_zero_where_they_are_not_used():
    assert TrainingArguments(logging_strategy="no", logging_steps=0, save_strategy="epoch", save_steps=0)


@pytest.mark.parametrize(("warmup", "total", "steps"), [(0, 100, 0), (10, 100, 10), (0.1, 100, 10), (0.25, 10, 3)])
def test_warmup_is_a_number_of_steps_or_a_ratio_rounded_up(warmup, total, steps):
    assert TrainingArguments(warmup_steps=warmup).get_warmup_steps(total) == steps


def test_batch_sizes_are_those_of_one_process():
    args = TrainingArguments(per_device_train_batch_size=3, per_device_eval_batch_size=5)
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)


def test_check_completes_and_checks_after_assignments():
    args = TrainingArguments()
    args.eval_strategy = "epoch"
    args.load_best_model_at_end = True
    args.save_strategy = "no"
    with pytest.raises(ArgumentsError, match=r"save_strategy = 'no' \(assignment\)"):
        args.check()
    args.save_strategy = "epoch"
    assert args.check() is args
    assert args.do_eval
    assert args.metric_for_best_model == "loss"


def test_where_a_value_came_from_is_remembered():
    args = TrainingArguments("out", seed=1)
    args.max_steps = 5
    assert [args.origin(name) for name in ("output_dir", "seed", "max_steps", "bf16")] == [
        "call",
        "call",
        "assignment",
        "default",
    ]


def test_what_follows_from_other_values_was_assigned_by_nobody():
    args = TrainingArguments("out", eval_strategy="steps")
    args.logging_steps = 7
    args.check()
    origins = {name: args.origin(name) for name in ("do_eval", "eval_steps", "logging_steps")}
    assert origins == {"do_eval": "default", "eval_steps": "default", "logging_steps": "assignment"}


def test_copies_pickles_and_replacements_are_equal_arguments():
    args = TrainingArguments("out", fsdp="full_shard", seed=3, hub_token="secret")
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)):
        assert other == args
        assert other.hub_token == "secret"
    assert dataclasses.replace(args, seed="4").seed == 4
    assert TrainingArguments("out").bind(rank=1, world_size=2) == TrainingArguments("out")


@pytest.mark.parametrize("name", ["optim", "report_to", "strategy", "checkpointer"])
def test_names_of_other_packages_are_free_text(name):
    args = TrainingArguments(**{name: "of_a_package_that_is_not_installed"})
    assert getattr(args, name) in ("of_a_package_that_is_not_installed", ["of_a_package_that_is_not_installed"])


def test_sequence_to_sequence_arguments_add_generation():
    args = Seq2SeqTrainingArguments("out", predict_with_generate="true", generation_num_beams="4")
    assert (args.predict_with_generate, args.generation_num_beams, args.generation_max_length) == (True, 4, None)
    with pytest.raises(ArgumentsError, match="generation_max_length = 0"):
        Seq2SeqTrainingArguments(generation_max_length=0)
    with pytest.raises(ArgumentsError, match="sortish_sampler no longer exists; set train_sampling_strategy"):
        Seq2SeqTrainingArguments(sortish_sampler=True)


DOCUMENTED_CALLS = [
    {
        "output_dir": "your-model",
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "num_train_epochs": 2,
        "weight_decay": 0.01,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "push_to_hub": True,
    },
    {
        "output_dir": "./test-galore",
        "max_steps": 100,
        "per_device_train_batch_size": 2,
        "optim": "galore_adamw_layerwise",
        "optim_target_modules": [r".*.attn.*", r".*.mlp.*"],
        "optim_args": "rank=64, update_proj_gap=100, scale=0.10",
    },
    {
        "output_dir": "./test-lomo",
        "max_steps": 1000,
        "per_device_train_batch_size": 4,
        "optim": "adalomo",
        "gradient_checkpointing": True,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": 2e-6,
        "save_strategy": "no",
        "run_name": "lomo-imdb",
    },
    {"output_dir": "out", "neftune_noise_alpha": 0.1},
]


@pytest.mark.parametrize("values", DOCUMENTED_CALLS, ids=lambda values: values["output_dir"])
def test_the_documented_calls_work(values):
    args = TrainingArguments(**values)
    assert {name: getattr(args, name) for name in values} == values


def test_names_and_choices_have_the_attributes_of_an_enum_s_members():
    args = TrainingArguments("out", optim="sgd", lr_scheduler_type="cosine", eval_strategy="epoch")
    for name in ("optim", "lr_scheduler_type", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy"):
        value = getattr(args, name)
        assert (type(value.value), value.value, value.name) == (str, value, value.upper())
    args.optim = "lomo"
    assert (args.optim.value, args.to_dict()["optim"], TrainingArguments().lr_scheduler_type.value) == (
        "lomo", "lomo", "linear"
    )  # fmt: skip
    assert type(args.to_dict()["optim"]) is type(args.to_sanitized_dict()["optim"]) is str
