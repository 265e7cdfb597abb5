"""Methods that subclasses override are called as the reference calls them, and act."""

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from support.checkpointer import MemoryCheckpointer
from support.data import Stream, samples
from support.models import Classifier, CountedSum
from torch import nn
from torch.utils.data import DataLoader

from tr_core import Trainer, TrainerCallback
from tr_core.preflight import check


def test_a_context_may_add_to_that_of_mixed_precision(make_trainer):
    dtypes = []

    class Watching(Classifier):
        def forward(self, x, labels=None):
            dtypes.append(nn.functional.linear(x, self.layers[0].weight).dtype)
            return super().forward(x, labels)

    class Own(Trainer):
        @contextmanager
        def compute_loss_context_manager(self):
            with super().compute_loss_context_manager():
                yield

    make_trainer(4, trainer_class=Own, model=Watching(), bf16=True).train()
    assert dtypes == [torch.bfloat16]


def test_samples_of_a_step_are_those_of_all_micro_batches(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=3)
    assert trainer.get_total_train_batch_size(trainer.args) == 12
    trainer.strategy.world_size = 2
    assert trainer.get_total_train_batch_size(trainer.args) == 24


def test_a_schedule_of_a_subclass_is_given_the_optimizer_and_the_length(make_trained):
    given = []

    class Own(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            given.append((num_training_steps, optimizer or self.optimizer))
            return super().create_scheduler(num_training_steps, optimizer)

    trainer = make_trained(20, trainer_class=Own)
    assert given == [(5, trainer.optimizer)]


def test_an_optimizer_can_be_made_for_a_part_of_the_model(make_trainer):
    class Own(Trainer):
        def create_optimizer(self):
            return super().create_optimizer(self.model.layers[3])

    trainer = make_trainer(trainer_class=Own)
    before = trainer.model.layers[0].weight.clone()
    trainer.train()
    assert torch.equal(trainer.model.layers[0].weight, before)
    assert sum(len(members) for members in trainer.get_optimizer_group()) == 2


def test_gradients_that_an_override_leaves_are_in_no_step(make_trainer, model):
    class Own(Trainer):
        def create_optimizer(self):
            self.model.layers[0].weight.sum().backward()  # as one that looks at gradients to begin with does
            return super().create_optimizer()

    ends = []
    for kind in (Own, Trainer):
        trainer = make_trainer(trainer_class=kind, model=deepcopy(model))
        trainer.train()
        ends.append(trainer.model.layers[0].weight)
    assert torch.equal(*ends)


# The order of the samples


class Backwards:
    """Indices from the last to the first."""

    def __init__(self, data):
        self.data = data
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return reversed(range(len(self.data)))


BAD_SAMPLERS = [
    (iter([1]), {}, "list_iterator, which a sampler method of the Trainer returned, has no length"),
    (
        Backwards([1]),
        {"train_dataset": Stream(samples(4)), "max_steps": 1},
        "Backwards, .* but Stream is iterable data",
    ),
    (
        type("Short", (list,), {"__len__": lambda self: 3})([0]),
        {},
        "Short gave 1 samples in epoch 0 and has",
    ),
]


@pytest.mark.parametrize(("sampler", "parts", "message"), BAD_SAMPLERS)
def test_a_sampler_that_cannot_be_used_is_refused(make_trainer, sampler, parts, message):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return sampler

    with pytest.raises(ValueError, match=message):
        make_trainer(trainer_class=Own, **parts).train()


@pytest.mark.parametrize(
    "form", ["def step(self, model, inputs, items=None)", "def step(self, model, inputs, *rest)",
             "def step(self, model, inputs, **options)", "def step(self, model, inputs, *, num_items_in_batch=None)"],
)  # fmt: skip
def test_an_override_of_training_step_gets_the_count_whatever_it_calls_it(make_trainer, model, form):
    found = []
    values = {"items=None": "items", "*rest": "rest[0]", "**options": "options['num_items_in_batch']"}
    value = next((text for end, text in values.items() if form.endswith(f"{end})")), "num_items_in_batch")
    space = {"found": found, "Trainer": Trainer}
    body = f"found.append(int({value})); return Trainer.training_step(self, model, inputs, {value})"
    exec(f"{form}: {body}", space)
    kind = type("Own", (Trainer,), {"training_step": space["step"]})
    make_trainer(8, trainer_class=kind, model=CountedSum()).train()
    assert found == [4, 4]


# How they are called


EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "rewards"}


class Adding(Trainer):
    """Adds to the entry that it is given, a better one with every step."""

    def log(self, logs, start_time=None):
        if "eval_loss" in logs:
            logs["eval_rewards"] = -float(self.state.global_step)
        super().log(logs, start_time)


class HandingOn(Trainer):
    """Hands on an entry of its own."""

    def log(self, logs, start_time=None):
        more = {"eval_rewards": -float(self.state.global_step)} if "eval_loss" in logs else {"more": 1}
        super().log({**logs, **more}, start_time)


class AddingCallback(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "eval_loss" in logs:
            logs["eval_rewards"] = -float(state.global_step)


@pytest.mark.parametrize(
    ("kind", "callbacks"), [(Adding, []), (HandingOn, []), (Trainer, [AddingCallback]), (Trainer, [])]
)
def test_what_an_override_of_log_adds_is_in_the_result_and_chooses_the_best(make_trainer, kind, callbacks):
    options = {**EVALUATION, "greater_is_better": False, "checkpointer": MemoryCheckpointer()}
    trainer = make_trainer(20, trainer_class=kind, callbacks=callbacks, eval_dataset=samples(8, 1), **options)
    if kind is Trainer and not callbacks:  # the control: nothing adds it
        with pytest.raises(ValueError, match="metric_for_best_model='rewards' will not be among the results"):
            trainer.train()
        return
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (-5.0, 5)
    assert trainer.evaluate()["eval_rewards"] == -5.0


def test_what_an_override_adds_at_the_end_is_in_the_result_of_the_training(make_trainer):
    assert make_trainer(8, trainer_class=HandingOn).train().metrics["more"] == 1


def test_a_value_that_an_override_rounds_for_the_log_is_whole_in_the_result(make_trainer):
    class Rounding(Trainer):
        def log(self, logs, start_time=None):
            super().log({name: round(value, 1) for name, value in logs.items()}, start_time)

    trainer = make_trainer(8, trainer_class=Rounding, eval_dataset=samples(8, 1))
    result = trainer.evaluate()["eval_loss"]
    assert round(result, 1) == trainer.state.log_history[-1]["eval_loss"] != result


def test_the_check_does_not_miss_a_metric_that_an_override_of_log_adds(make_trainer):
    options = {**EVALUATION, "greater_is_better": False, "checkpointer": MemoryCheckpointer()}
    trainer = make_trainer(20, trainer_class=Adding, eval_dataset=samples(8, 1), **options)
    assert "T601" not in [problem.code for problem in check(trainer).problems]


def test_overrides_may_have_their_parameters_in_any_order_or_by_name_alone(make_trained):
    called = []

    class Own(Trainer):
        def evaluation_loop(self, dataloader, *, metric_key_prefix="eval", ignore_keys=None, description, **options):
            called.append((description, metric_key_prefix, dict(options)))
            return super().evaluation_loop(
                dataloader, description, metric_key_prefix=metric_key_prefix, ignore_keys=ignore_keys, **options
            )

        def evaluate(self, metric_key_prefix="eval", ignore_keys=None, eval_dataset=None):
            called.append(("evaluate", metric_key_prefix))
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

        def create_scheduler(self, *, num_training_steps, optimizer=None):
            called.append(("create_scheduler", num_training_steps))
            return super().create_scheduler(num_training_steps, optimizer)

        def create_optimizer_and_scheduler(self, *, num_training_steps):
            called.append(("create_optimizer_and_scheduler", num_training_steps))
            super().create_optimizer_and_scheduler(num_training_steps)

        def prediction_step(self, model, inputs, prediction_loss_only, *, ignore_keys=None):
            called.append("prediction_step")
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def training_step(self, model, inputs, num_items_in_batch=None):
            called.append("training_step")
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, model, inputs, *, num_items_in_batch=None, return_outputs=False):
            called.append("compute_loss")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    data = {"one": samples(4, 1)}
    trainer = make_trained(4, trainer_class=Own, eval_dataset=data, eval_strategy="epoch")
    assert called == [
        ("create_optimizer_and_scheduler", 1),
        ("create_scheduler", 1),
        "training_step",
        "compute_loss",
        ("evaluate", "eval"),
        ("evaluate", "eval_one"),
        ("Evaluation", "eval_one", {"prediction_loss_only": True}),
        "prediction_step",
        "compute_loss",
    ]
    called.clear()
    trainer.predict(samples(4, 1))
    assert called == [("Prediction", "test", {}), "prediction_step", "compute_loss"]
    assert [problem.message for problem in check(trainer).problems if problem.code in ("T304", "T604")] == []


def test_a_dict_of_training_data_is_for_the_subclass_that_makes_the_loader(make_trainer):
    class Mixing(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset["a"] + self.train_dataset["b"], batch_size=4)

    data = {"a": samples(8, 1), "b": samples(12, 2)}
    trainer = make_trainer(trainer_class=Mixing, train_dataset=data)
    assert trainer.train().global_step == 5
    assert check(make_trainer(trainer_class=Mixing, train_dataset=data)).problems == []
    with pytest.raises(TypeError, match="train_dataset is a dict of"):
        make_trainer(train_dataset=data)


class SavesAlone(Classifier):
    """Its method takes a folder and nothing else, as those of libraries that are not transformers."""

    def save_pretrained(self, folder, create_card=False):
        torch.save(nn.Module.state_dict(self), f"{folder}/own.pt")


def test_a_model_whose_save_pretrained_takes_a_folder_alone_writes_itself(make_trained, tmp_path):
    trainer = make_trained(8, model=SavesAlone())
    trainer.save_model(tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / "own.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())


def test_it_is_not_asked_where_its_own_weights_are_not_whole(make_trainer, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    trainer = make_trainer(8, model=SavesAlone())
    whole = {name: torch.ones(3, 5) for name in trainer.model.state_dict()}
    monkeypatch.setattr(trainer.strategy, "full_state_dict", lambda model: whole)
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "own.pt").exists()
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(whole)


def test_a_model_whose_save_pretrained_takes_the_state_is_given_it(make_trainer, tmp_path):
    given = []

    class Takes(Classifier):
        def save_pretrained(self, folder, **options):
            given.append(options)

    trainer = make_trainer(8, model=Takes())
    trainer.save_model(tmp_path / "saved")
    assert set(given[0]["state_dict"]) == set(trainer.model.state_dict())
