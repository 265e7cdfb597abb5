"""What cannot work is refused before anything is trained, in words."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from support.data import Stream, samples
from support.models import Base, Classifier
from torch import nn

import tr_core
from tr_args.testing import Only, facts_of_kind
from tr_core import SingleDevice, Trainer, TrainerCallback, TrainingArguments, get_scheduler, plugins
from tr_core.validation import why_not_writable

CASES = {
    "no model": ({"model": None}, ValueError, "Trainer needs a model or a model_init; both are None"),
    "two models": ({"model_init": Classifier, "model": Classifier()}, ValueError, "given a model and a model_init"),
    "model of another kind": ({"model": "bert"}, TypeError, "model is a str; Trainer trains a torch.nn.Module"),
    "arguments as a dict": (
        {"args": {"learning_rate": 1e-3}},
        TypeError,
        r"args is a dict; .* pass TrainingArguments\(\*\*args\)",
    ),
    "arguments of another library": (
        {"args": Base()},
        TypeError,
        r"args is a support\.models\.Base; Trainer takes the TrainingArguments of tr_args.*import them from there",
    ),
    "an optimizer alone": (
        {"optimizers": torch.optim.SGD([torch.zeros(1)])},
        TypeError,
        r"optimizers is SGD; it must be a pair .* optimizers=\(optimizer, None\)",
    ),
    "the class of a model": ({"model": Classifier}, TypeError, r"model is the class Classifier: pass an instance"),
    "columns to evaluate on": (
        {"eval_dataset": {"x": [[0.5] * 8], "labels": [1, 0]}},
        TypeError,
        r"eval_dataset is a dict of \['labels', 'x'\], which the model takes as columns.* turn columns into rows",
    ),
    "several data sets to train on": (
        {"train_dataset": {"train": samples(4), "test": samples(4)}},
        TypeError,
        r"train_dataset is a dict of \['test', 'train'\]; .*train_dataset=data\['train'\]",
    ),
    "model_init returns none": (
        {"model": None, "model_init": lambda: None},
        TypeError,
        "model_init returned None; it must return a torch.nn.Module",
    ),
    "evaluation without data": (
        {"eval_strategy": "epoch"},
        ValueError,
        "eval_strategy='epoch' evaluates during training, but eval_dataset is None",
    ),
    "stream without an end": (
        {"train_dataset": Stream(samples(4))},
        ValueError,
        r"train_dataset \(Stream\) has no length and max_steps=-1; set max_steps",
    ),
    "metrics by batch without a flag": (
        {"batch_eval_metrics": True, "compute_metrics": lambda p: {}},
        ValueError,
        "compute_metrics takes no compute_result",
    ),
    "two tokenizers": (
        {"tokenizer": object(), "processing_class": object()},
        ValueError,
        "processing_class and tokenizer are two names for one thing",
    ),
    "unknown tracker": (
        {"report_to": ["tensorbord"]},
        plugins.PluginError,
        "no tracker named 'tensorbord'; did you mean tensorboard[?] installed:",
    ),
    "unknown strategy": ({"strategy": "horovod"}, plugins.PluginError, "no strategy named 'horovod'; installed:"),
    "other processes than were started": (
        {"parallelism_config": {"dp_replicate_size": 2}},
        ValueError,
        "spreads the work over dp_replicate_size=2 processes, and 1 were started",
    ),
    "option that cannot be": (
        {"dataloader_in_order": False},
        ValueError,
        "dataloader_in_order=False: batches would come .* the position in the data could not be known",
    ),
}
PARTS = (
    "args",
    "model",
    "model_init",
    "train_dataset",
    "eval_dataset",
    "compute_metrics",
    "tokenizer",
    "processing_class",
    "optimizers",
)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_at_construction(make_args, case):
    changes, error, message = CASES[case]
    parts = {"model": Classifier(), "train_dataset": samples(4)}
    for name in list(changes):
        if name in PARTS:
            parts[name] = changes[name]
    options = {name: value for name, value in changes.items() if name not in parts}
    with pytest.raises(error, match=message):
        Trainer(**{"args": make_args(**options), **parts})


LATER = {
    "unknown optimizer": ({"optim": "adamx"}, "no optimizer named 'adamx'; .*installed:"),
    "misspelt optimizer": (
        {"optim": "adamw_torhc"},
        "no optimizer named 'adamw_torhc'; did you mean adamw_torch[?] installed: .*adagrad, .*adamw_torch,",
    ),
    "unknown schedule": (
        {"lr_scheduler_type": "linea"},
        r"unknown lr_scheduler_type='linea'; known are .*; did you mean linear\?",
    ),
    "unknown schedule argument": (
        {"lr_scheduler_kwargs": {"cycles": 2}},
        r"lr_scheduler_kwargs has \['cycles'\], which the schedule 'linear' does not take; it takes none",
    ),
    "unknown optimizer argument": (
        {"optim": "sgd", "optim_args": "momentun=0.9"},
        r"optim_args has \['momentun'\], which optim='sgd' does not take; it takes",
    ),
    "nothing left of the data": (
        {"dataloader_drop_last": True, "per_device_train_batch_size": 64},
        "the training data gives no batch: 0 samples used at 64 a micro-batch",
    ),
    "nothing to train": ({"freeze": True}, "none of the 4 parameters of Classifier is trainable"),
    "no training data": ({"train_dataset": None}, "training needs a train_dataset; it is None"),
}


@pytest.mark.parametrize("case", LATER)
def test_what_cannot_be_trained_is_refused_when_training_begins(make_trainer, case):
    changes, message = LATER[case]
    changes = dict(changes)
    model = Classifier()
    if changes.pop("freeze", False):
        model.requires_grad_(False)
    trainer = make_trainer(changes.pop("number", 8), model=model, **changes)
    with pytest.raises((ValueError, plugins.PluginError), match=message):
        trainer.train()


def test_saving_without_a_checkpointer_says_what_to_install_or_set(make_trainer, installed, monkeypatch):
    installed()
    with pytest.raises(plugins.PluginError, match="no strategy named 'single'; installed: none"):
        make_trainer(save_strategy="steps")
    monkeypatch.setattr("tr_core.choose_strategy.choose_strategy", lambda args: SingleDevice("cpu"))
    with pytest.raises(ValueError, match="more come with pip install tr-ckpt. .* set save_strategy='no'"):
        make_trainer(save_strategy="steps")


def test_an_optimizer_that_is_not_installed_names_the_package_that_brings_it(make_trainer, installed):
    trainer = make_trainer(optim="adafactor")
    installed()
    with pytest.raises(plugins.PluginError, match="no optimizer named 'adafactor'; .* pip install tr-optim"):
        trainer.train()


def test_float16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="fp16=True cannot train on a CPU"):
        SingleDevice("cpu", precision="fp16")
    with pytest.raises(ValueError, match="precision='int8' is not known"):
        SingleDevice("cpu", precision="int8")


def test_a_schedule_that_needs_the_length_of_the_run_says_so():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="the schedule 'linear' needs num_training_steps"):
        get_scheduler("linear", optimizer)


# Fields that are not the Trainer's affair: scripts, launchers and other packages read them.
READ_ELSEWHERE = {
    "do_train", "do_eval", "do_predict", "local_rank", "overwrite_output_dir",  # scripts and launchers
    "log_level", "log_level_replica", "log_on_each_node", "per_device_train_batch_size", "per_device_eval_batch_size",
    "warmup_steps",  # tr-args: derived values
    "logging_dir", "run_name",  # tr-log: trackers
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",  # transformers' callback for Trackio
    "save_total_limit", "save_keep_every", "save_on_each_node",  # tr-ckpt
    "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",  # tr-ckpt
    "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "hang_timeout",  # tr-dist
    "fsdp_config", "tp_plan", "ep_plan", "pp_split", "pp_schedule",  # tr-dist
    "neftune_length",  # tr-optim
}  # fmt: skip


def test_every_option_acts_or_is_refused_or_belongs_to_another_package():
    source = "\n".join(path.read_text() for path in Path(tr_core.__file__).parent.rglob("*.py"))
    read = set(re.findall(r"\b_?args\.(\w+)", source))
    refused = set(facts_of_kind(TrainingArguments, Only))
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names - read - refused - READ_ELSEWHERE == set()


def test_a_tracker_that_is_gone_is_refused_with_what_to_do_instead(make_trainer, monkeypatch):
    entries = plugins._entries
    monkeypatch.setattr(plugins, "_entries", lambda group: () if group == "tr.trackers" else entries(group))
    with pytest.raises(plugins.PluginError, match=r"report_to='csv': there is no tracker 'csv' any more: .*read_json"):
        make_trainer(report_to="csv")


def test_report_to_all_leaves_out_trackers_whose_library_is_missing(make_trainer, monkeypatch):
    def missing(args):
        raise ImportError("pip install 'tr-log[wandb]'")

    class Tracker:
        def on_log(self, args, state, control, **kwargs): ...

    def of_one_kind_of_job(args):
        raise AssertionError("not asked for")

    of_one_kind_of_job.by_name_only = True
    offered = {"tr.trackers": {"wandb": missing, "own": lambda args: Tracker(), "flyte": of_one_kind_of_job}}
    # A package may have its tracker in the group of all callbacks, where two are asked for by other arguments.
    offered["tr.callbacks"] = {"former": lambda args: Tracker(), "hub": missing, "neftune": missing}
    monkeypatch.setattr(plugins, "available", lambda group: dict.fromkeys(offered.get(group, ()), "x 1"))
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda group, name: offered.get(group, {}).get(name) or load(group, name))
    callbacks = make_trainer(report_to="all").callback_handler.callbacks
    assert [type(callback) for callback in callbacks].count(Tracker) == 2
    assert Tracker in [type(callback) for callback in make_trainer(report_to="former").callback_handler.callbacks]
    with pytest.raises(ImportError, match=r"tr-log\[wandb\]"):
        make_trainer(report_to="wandb")


@pytest.mark.parametrize("name", ["hub", "neftune", "hup"])
def test_what_other_arguments_ask_for_is_no_tracker_and_is_not_suggested(make_trainer, name):
    with pytest.raises(plugins.PluginError, match=f"report_to='{name}': no tracker named '{name}'") as raised:
        make_trainer(report_to=name)
    message = str(raised.value).partition("installed: ")[2]
    assert not {"hub", "neftune"} & {part.strip().partition(" ")[0] for part in message.split(",")}
    assert "did you mean hub" not in message


def test_an_unknown_part_is_an_error_of_the_trainer(make_args):
    with pytest.raises(TypeError, match=r"Trainer\.__init__\(\) got an unexpected keyword argument 'train_datset'"):
        Trainer(Classifier(), make_args(), train_datset=[])


@pytest.mark.parametrize("name", ["single", "mine"])
def test_a_strategy_of_one_process_is_refused_whatever_its_name(make_trainer, monkeypatch, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("tr_core.choose_strategy.plugins.load", lambda group, name: lambda args: SingleDevice("cpu"))
    with pytest.raises(ValueError, match=f"strategy='{name}' in one of 2 processes .* would train 2 unrelated"):
        make_trainer(strategy=name)


def test_a_strategy_object_of_one_process_is_refused_under_several(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="strategy='SingleDevice' in one of 2 processes"):
        Trainer(Classifier(), make_args(), strategy=SingleDevice("cpu"))


def test_sharding_that_a_strategy_of_ones_own_does_not_apply_is_refused(make_args):
    class Mine(SingleDevice):
        acts_on = frozenset({"deepspeed"})

    with pytest.raises(ValueError, match=r"fsdp is set, and strategy='SingleDevice' does not act on it .*\[\]"):
        Trainer(Classifier(), make_args(fsdp="full_shard"), strategy=SingleDevice("cpu"))
    with pytest.raises(ValueError, match=r"fsdp is set, and strategy='Mine' .*\['deepspeed'\]"):
        Trainer(Classifier(), make_args(fsdp="full_shard"), strategy=Mine("cpu"))


def test_a_strategy_assigned_between_runs_trains_the_next_one(make_trained):
    class Counting(SingleDevice):
        prepared = backwards = autocasts = 0

        def prepare(self, model):
            self.prepared += 1
            return super().prepare(model)

        def autocast(self):
            self.autocasts += 1
            return super().autocast()

        def backward(self, loss):
            self.backwards += 1
            super().backward(loss)

    trainer = make_trained(max_steps=2)
    trainer.strategy = strategy = Counting("cpu")
    trainer.train()
    assert (strategy.prepared, strategy.autocasts, strategy.backwards) == (1, 2, 2)


def test_a_strategy_assigned_during_a_run_is_refused(make_trainer):
    class Assign(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.strategy = SingleDevice("cpu")

    trainer = make_trainer(max_steps=2, callbacks=[Assign()])
    with pytest.raises(RuntimeError, match="trainer.strategy was assigned while training"):
        trainer.train()


def test_a_strategy_for_other_processes_needs_a_new_trainer(make_trainer):
    class Two(SingleDevice):
        world_size = 2

    with pytest.raises(ValueError, match="of rank 0 of 2 on cpu, and this Trainer was built for rank 0 of 1 on cpu"):
        make_trainer().strategy = Two("cpu")


def test_an_object_that_takes_no_more_methods_is_told_which_it_lacks(make_args):
    class Fixed:
        __slots__ = ()
        device, rank, local_rank, world_size = torch.device("cpu"), 0, 0, 1

    words = "Fixed lacks acts_on, accelerator, sizes, coordinates, members, schedules_micro_batches, data, binds_"
    with pytest.raises(TypeError, match=words):
        Trainer(Classifier(), make_args(), strategy=Fixed())


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert f"this user may not write to {tmp_path}; give another folder" in why_not_writable(tmp_path / "run" / "one")
    assert why_not_writable(tmp_path.parent) == ""
