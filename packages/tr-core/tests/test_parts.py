"""Optimizers, schedules, plugins, state, random numbers, collators and files: the parts the loop is made of."""

import json
import math
import random
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier, samples
from torch import nn

from tr_args import TrainingArguments
from tr_core import DataCollatorWithPadding, TrainerState, default_data_collator, get_scheduler, plugins, set_seed
from tr_core.checkpoint.saving import format_metrics, metric_lines
from tr_core.model_io import find_label_names, kept_columns, to_device
from tr_core.optim.optimizers import decay_parameter_names, optimizer_factory, optimizer_names, parameter_groups
from tr_core.random_state import RandomState, derive_seed, separate_randomness

# Optimizers and groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.LayerNorm = nn.LayerNorm(4)
        self.q_norm = nn.Linear(2, 2, bias=False)
        self.normal = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_biases_and_scales_of_norms_do_not_decay_and_frozen_parameters_are_left_out():
    block = Block()
    assert decay_parameter_names(block) == ["linear.weight", "normal.weight", "frozen.weight"]
    decayed, rest = parameter_groups(block, 0.1)
    assert ([len(group["params"]) for group in (decayed, rest)], decayed["weight_decay"]) == ([2, 4], 0.1)
    assert rest["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw_torch", torch.optim.AdamW, None),
        ("adamw_torch_fused", torch.optim.AdamW, None),
        ("sgd", torch.optim.SGD, "momentum=0.9, nesterov=true"),
        ("adagrad", torch.optim.Adagrad, "lr_decay=0.1"),
        ("rmsprop", torch.optim.RMSprop, "alpha=0.9"),
    ],
)
def test_torch_optimizers_are_built_by_name_with_their_options(make_trainer, name, kind, options):
    trainer = make_trainer(8, optim=name, optim_args=options, weight_decay=0.1, adam_beta1=0.8, learning_rate=0.25)
    trainer.train()
    assert type(trainer.optimizer) is kind
    group = trainer.optimizer.param_groups[0]
    assert (group["initial_lr"], group["weight_decay"]) == (0.25, 0.1)
    if kind is torch.optim.AdamW:
        assert (group["betas"], group["fused"]) == ((0.8, 0.999), True if name.endswith("fused") else None)
    if options:
        key, value = options.split(",")[0].split("=")
        assert group[key] == float(value)


def test_a_device_that_torch_has_no_fused_optimizers_for_gets_plain_ones(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), optim="adamw_torch_fused")
    for device, has_fused in (("cpu", True), ("meta", False)):
        _, options = optimizer_factory(args, nn.Linear(2, 1, device=device))
        assert options.get("fused", False) is has_fused


def test_the_names_of_optimizers_are_listed():
    assert {"adamw_torch", "sgd"} <= set(optimizer_names())


# Schedules


def rates(name, steps, **options):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    schedule = get_scheduler(name, optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_follow_their_formulas():
    run = {"num_warmup_steps": 2, "num_training_steps": 6}
    assert rates("linear", 8, **run) == [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    half = [2.0 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates("cosine", 6, **run) == pytest.approx([0.0, 1.0, *half])
    assert rates("constant", 3) == [2.0] * 3
    assert rates("constant_with_warmup", 4, num_warmup_steps=2) == [0.0, 1.0, 2.0, 2.0]


def test_a_cosine_can_have_more_waves():
    waves = rates("cosine", 5, num_training_steps=4, scheduler_specific_kwargs={"num_cycles": 1.0})
    assert waves == pytest.approx([2.0, 1.0, 0.0, 1.0, 2.0])


def test_a_function_can_be_a_schedule():
    assert rates(lambda step, *, warmup_steps, total_steps: 1 / (1 + step), 2, num_training_steps=2) == [2.0, 1.0]


# Plugins


def entry(name, value, origin="other"):
    loaded = SimpleNamespace(name=name, value=value, dist=SimpleNamespace(name=origin, version="1.0"))
    loaded.load = lambda: value
    return loaded


def test_listing_plugins_imports_nothing(monkeypatch):
    listed = entry("fast", "missing_module:Fast")
    listed.load = lambda: pytest.fail("imported")
    monkeypatch.setattr(plugins, "_entries", lambda group: (listed,))
    assert plugins.available("tr.optimizers") == {"fast": "other 1.0"}


def test_one_name_from_two_packages_is_an_error_that_names_both(monkeypatch):
    monkeypatch.setattr(plugins, "_entries", lambda group: (entry("x", "a:A", "one"), entry("x", "b:B", "two")))
    with pytest.raises(plugins.PluginError, match=r"optimizer 'x' is offered by one 1.0 \(a:A\) and two 1.0 \(b:B\)"):
        plugins.load("tr.optimizers", "x")


def test_a_name_whose_module_lacks_the_object_is_an_error_that_names_its_package(monkeypatch):
    wrong = EntryPoint("x", "tr_core.plugins:Missing", "tr.optimizers")
    monkeypatch.setattr(plugins, "_entries", lambda group: (wrong,))
    with pytest.raises(plugins.PluginError, match="optimizer 'x' is tr_core.plugins:Missing of .*no attribute 'Miss"):
        plugins.load("tr.optimizers", "x")


# State


def test_the_state_is_written_as_strict_json_and_read_back(tmp_path):
    state = TrainerState(global_step=3, epoch=0.5, log_history=[{"loss": float("nan"), "step": 1}], best_metric=0.25)
    state.save_to_json(tmp_path / "state.json")
    text = (tmp_path / "state.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = TrainerState.load_from_json(tmp_path / "state.json")
    assert (again.global_step, again.epoch, again.best_metric) == (3, 0.5, 0.25)


def test_unknown_keys_of_a_state_are_passed_over_with_a_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "tr_core.state.logger", SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    )
    state = TrainerState()
    state.load_state_dict({"global_step": 5, "of_the_future": 1})
    assert state.global_step == 5
    assert warnings == ["trainer state: skipped unknown keys ['of_the_future'], written by another version"]


def test_who_a_process_is_does_not_come_from_a_checkpoint():
    state = TrainerState(is_world_process_zero=False)
    state.load_state_dict(TrainerState(is_world_process_zero=True).state_dict())
    assert state.is_world_process_zero is False


# Random numbers


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeding_makes_every_generator_repeat():
    set_seed(11)
    first = draw()
    set_seed(11)
    assert draw() == first


def test_seeding_reaches_a_device_that_torch_does_not_seed_itself(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(manual_seed=seeds.append))
    set_seed(11, device=torch.device("xla"))
    set_seed(12, device=torch.device("cpu"))
    assert seeds == [11]


def test_separate_randomness_leaves_no_trace():
    set_seed(1)
    expected = draw()
    set_seed(1)
    with separate_randomness(99):
        inner = draw()
    assert draw() == expected
    with separate_randomness(99):
        assert draw() == inner


def test_the_state_of_all_generators_can_be_taken_and_put_back():
    state = RandomState(torch.device("cpu"))
    saved = state.state_dict()
    expected = draw()
    state.load_state_dict(saved)
    assert draw() == expected
    state.reapply()
    assert draw() == expected
    state.reapply()
    assert draw() != expected


def test_mixed_seeds_differ_and_fit_a_generator():
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**62


# Collators and inputs


def test_labels_become_int64_or_float32_and_strings_are_left_out():
    batch = default_data_collator(
        [{"label": 1, "x": [1.0, 2.0], "name": "a"}, {"label": 2, "x": [3.0, 4.0], "name": "b"}]
    )
    assert batch["labels"].dtype == torch.int64
    assert batch["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert "name" not in batch
    assert default_data_collator([{"label": 0.5}, {"label": 1.0}])["labels"].dtype == torch.float32
    assert default_data_collator([{"label_ids": [1, 2]}, {"label_ids": [3, 4]}])["labels"].tolist() == [[1, 2], [3, 4]]
    both = [{"label": 3, "label_ids": [1, 2]}, {"label": 4, "label_ids": [3, 4]}]
    assert default_data_collator(both)["labels"].tolist() == [3, 4]
    neither = [{"label": None, "label_ids": 1}, {"label": None, "label_ids": 2}]
    assert default_data_collator(neither)["labels"].tolist() == [1, 2]
    alone = default_data_collator([SimpleNamespace(x=[1.0, 2.0], label=1, note="text")])
    assert {name: value.tolist() for name, value in alone.items()} == {"x": [[1.0, 2.0]], "labels": [1]}
    arrays = default_data_collator([{"x": np.ones(2), "label": None}] * 2)
    assert arrays["x"].shape == (2, 2)


def test_a_tokenizer_pads_and_labels_get_their_name():
    class Tokenizer:
        def pad(self, features, padding, max_length, pad_to_multiple_of, return_tensors):
            width = max(len(feature["input_ids"]) for feature in features)
            rows = [feature["input_ids"] + [0] * (width - len(feature["input_ids"])) for feature in features]
            return {"input_ids": torch.tensor(rows), "label": torch.tensor([feature["label"] for feature in features])}

    batch = DataCollatorWithPadding(Tokenizer())([{"input_ids": [1], "label": 0}, {"input_ids": [1, 2], "label": 1}])
    assert batch["input_ids"].tolist() == [[1, 0], [1, 2]]
    assert batch["labels"].tolist() == [0, 1]


def test_the_forward_of_a_model_tells_its_columns_and_labels():
    assert find_label_names(Classifier()) == ["labels"]
    assert kept_columns(Classifier(), ["labels"]) == ["x", "labels", "label", "label_ids", "labels"]

    class ForQuestionAnswering(nn.Module):
        def forward(self, input_ids, start_positions, end_positions): ...

    assert find_label_names(ForQuestionAnswering()) == ["start_positions", "end_positions"]


def test_tensors_are_moved_wherever_they_are():
    batch = {"a": torch.ones(1), "b": [torch.ones(1), "text"], "c": (torch.ones(1), {"d": torch.ones(1)})}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["c"][0].is_meta
    assert moved["c"][1]["d"].is_meta
    assert moved["b"][1] == "text"


# Files


def test_a_saved_model_is_safetensors_with_the_arguments_beside_it(make_trainer, tmp_path, model):
    trainer = make_trainer()
    trainer.save_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(weights["layers.0.weight"], model.layers[0].weight)
    assert json.loads((tmp_path / "model" / "training_args.json").read_text())["num_train_epochs"] == 1


def test_tied_weights_are_saved_once_and_load_again(make_trainer, tmp_path):
    class Tied(Classifier):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(16, 3)
            self.again.weight = self.layers[3].weight

    model = Tied()
    make_trainer(model=model).save_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "again.weight" not in weights
    other = Tied()
    other.load_state_dict(weights, strict=False)
    assert torch.equal(other.again.weight, model.again.weight)


def test_metrics_and_state_are_written_and_merged(make_trainer):
    trainer = make_trainer(eval_dataset=samples(4))
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 2.0})
    trainer.save_metrics("test", {"test_loss": 3.0}, combined=False)
    trainer.save_state()
    folder = trainer.args.output_dir
    with open(f"{folder}/all_results.json") as file:
        assert json.load(file) == {"train_loss": 1.0, "eval_loss": 2.0}
    with open(f"{folder}/test_results.json") as file:
        assert json.load(file) == {"test_loss": 3.0}
    assert TrainerState.load_from_json(f"{folder}/trainer_state.json").global_step == 0


def test_metrics_are_printed_readably(make_trainer, capsys):
    assert format_metrics({"eval_runtime": 3725.5, "total_flos": 2.0**31, "loss": 1.23456, "n": 3}) == {
        "eval_runtime": "1:02:05.50",
        "total_flos": "2GF",
        "loss": 1.2346,
        "n": 3,
    }
    assert metric_lines({"b": 1, "long": 2.5}) == ["  b    =   1", "  long = 2.5"]
    assert metric_lines({"a\nb": "c\u2028d"}) == ["  a\\nb = c\\u2028d"]  # a name cannot begin a line of its own
    make_trainer().log_metrics("train", {"loss": 1.0})
    assert capsys.readouterr().out == "***** train metrics *****\n  loss = 1.0\n"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"lr_end": 3.0}, "lr_end=3 must be below learning_rate=2"),
        ("cosine_with_min_lr", {}, r"give one of min_lr \(=None\) and min_lr_rate \(=None\)"),
        ("cosine_with_min_lr", {"min_lr": 1.0, "min_lr_rate": 0.5}, "not both or neither"),
        ("warmup_stable_decay", {}, "needs num_decay_steps in lr_scheduler_kwargs"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "exp"}, "decay_type='exp' is not known"),
        ("linear", {"base_lr": 1.0}, r"lr_scheduler_kwargs has \['base_lr'\]"),
    ],
)
def test_a_schedule_says_what_is_wrong_with_its_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        rates(name, 2, num_training_steps=4, scheduler_specific_kwargs=options)


@pytest.mark.parametrize(("greater", "mode"), [(True, "max"), (False, "min")])
def test_the_plateau_schedule_follows_the_direction_of_the_metric(make_trainer, greater, mode):
    values = iter([0.5, 0.4, 0.3, 0.2])
    trainer = make_trainer(
        16,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=samples(4),
        compute_metrics=lambda p: {"score": next(values)},
        metric_for_best_model="score",
        greater_is_better=greater,
        learning_rate=1.0,
        optim="sgd",
    )
    trainer.train()
    assert trainer.lr_scheduler.mode == mode
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == ([1.0, 1.0, 0.5, 0.25] if greater else [1.0] * 4)
