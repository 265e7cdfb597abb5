"""A preflight of a Trainer: what it computes, and that the Trainer is not used afterwards."""

import json
import math
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.data import samples
from support.models import Classifier, CountedSum
from torch import nn
from torch.utils.data import IterableDataset

from tr_core import TrainerCallback
from tr_core.preflight import CODES, Problem, Report, check
from tr_core.preflight.context import CheckContext
from tr_core.preflight.resource_checks import check_memory, checkpoints_at_once, state_bytes, times


class Normalised(Classifier):
    """Has buffers, dropout, a counter and a cache that a forward changes."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.layers.insert(1, nn.BatchNorm1d(16))
        self.calls, self.seen = 0, {}

    def forward(self, x, labels=None):
        self.calls += 1
        self.seen[len(x)] = self.calls
        return super().forward(x, labels)


def noisy(rows):
    """A collator that draws from every generator and changes the samples it is given."""
    for row in rows:
        row["x"] = row["x"] + 0.01 * torch.randn(8) + random.random() + np.random.rand()
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("x", "labels")}


def codes(report, severity=None):
    return [problem.code for problem in report.problems if severity in (None, problem.severity)]


@pytest.mark.parametrize(
    "use",
    [
        lambda trainer: trainer.train(),
        lambda trainer: trainer.evaluate(),
        lambda trainer: trainer.predict(samples(4)),
        lambda trainer: trainer.save_model(),
    ],
    ids=["train", "evaluate", "predict", "save_model"],
)
def test_a_trainer_that_was_checked_is_refused_in_one_sentence(make_trainer, use):
    trainer = make_trainer(eval_dataset=samples(6))
    check(trainer)
    with pytest.raises(RuntimeError, match="this Trainer was checked by tr_core.preflight.check.*; build a new one$"):
        use(trainer)
    assert trainer.state.global_step == 0


def test_a_trainer_that_is_training_is_not_checked(make_trainer):
    class Checking(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(RuntimeError, match="called while this Trainer is training; check another Trainer"):
                check(trainer)

    trainer = make_trainer(callbacks=[Checking()])
    assert trainer.train().global_step == trainer.state.max_steps


def test_a_gradient_of_before_does_not_count(make_trainer, model):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert "T507" not in codes(check(make_trainer()))


def test_no_callback_is_called_and_nothing_is_written(make_trainer, tmp_path):
    class Listener(TrainerCallback):
        events = []

        def __getattribute__(self, name):
            if name.startswith("on_"):
                Listener.events.append(name)
            return super().__getattribute__(name)

    listener = Listener()
    trainer = make_trainer(callbacks=[listener], eval_dataset=samples(6))
    Listener.events.clear()
    before = sorted(tmp_path.rglob("*"))
    check(trainer)
    assert Listener.events == []
    assert listener in trainer.callback_handler.callbacks
    assert sorted(tmp_path.rglob("*")) == before


def test_the_figures_are_those_of_the_run(make_trainer):
    options = {"number": 22, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    figures = check(make_trainer(**options)).figures
    trainer = make_trainer(**options)
    output = trainer.train()
    assert figures["steps"] == output.global_step == 9
    assert (figures["samples"], figures["samples_per_step"], figures["epochs"]) == (22, 8, 3)
    parameters = list(trainer.model.parameters())
    assert figures["parameters"] == sum(p.numel() for p in parameters) == 195
    assert figures["parameter_bytes"] == figures["gradient_bytes"] == 4 * 195
    held = sum(t.numel() * t.element_size() for state in trainer.optimizer.state.values() for t in state.values())
    assert figures["optimizer_bytes"] == held
    watched = check(make_trainer(**options, on_spike="rewind")).figures
    assert "snapshot_bytes" not in figures
    assert watched["snapshot_bytes"] == 4 * 195 + held


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_the_size_of_an_optimizers_state_is_known_before_its_first_step(kind, options, model):
    optimizer = kind(model.parameters(), lr=0.1, **options)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = state_bytes(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    model(samples(2)[0]["x"][None], torch.tensor([0]))["loss"].backward()
    optimizer.step()
    assert expected == state_bytes(optimizer)
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert expected == sum(t.numel() * t.element_size() for t in tensors)


def test_an_optimizer_that_looks_at_numbers_has_an_assumed_size_and_says_so(make_trainer):
    class Curious(torch.optim.SGD):
        def step(self, closure=None):
            return [float(p.grad.sum()) for p in self.param_groups[0]["params"]]

    report = check(make_trainer(optimizer_cls_and_kwargs=(Curious, {"lr": 0.1})))
    assert report.figures["optimizer_bytes"] == 8 * 195
    assert report.figures["optimizer_is_assumed"] is True


def test_a_mean_loss_passes_the_self_test_with_dropout_and_batch_norm(make_trainer):
    report = check(make_trainer(model=Normalised(), gradient_accumulation_steps=2))
    assert codes(report, "error") == codes(report, "warning") == []
    assert "T012" not in codes(report)


def test_a_loss_that_divides_by_the_count_passes_the_self_test(make_trainer):
    assert not {"T509", "T510", "T012"} & set(codes(check(make_trainer(model=CountedSum()))))


def test_a_loss_that_draws_random_numbers_is_not_compared(make_trainer):
    class Diffusing(Classifier):
        def forward(self, x, labels=None):
            return super().forward(x + torch.randn_like(x), labels)

    report = check(make_trainer(model=Diffusing(), gradient_accumulation_steps=2))
    assert [p.message for p in report.problems if p.code == "T012"] == [
        "the loss depends on random numbers: dividing it into micro-batches was not compared"
    ]


class Contrastive(Classifier):
    """Compares the samples of a batch: dividing it makes another loss."""

    def forward(self, x, labels=None):
        z = self.layers(x)
        return {
            "loss": nn.functional.cross_entropy(z @ z.T, torch.arange(len(x))) + 0.01 * z.square().mean(),
            "logits": z,
        }


def test_a_loss_that_compares_samples_is_an_error_only_where_micro_batches_are_accumulated(make_trainer):
    assert codes(check(make_trainer(model=Contrastive())), "error") == []
    [problem] = [
        p for p in check(make_trainer(model=Contrastive(), gradient_accumulation_steps=2)).problems if p.code == "T510"
    ]
    assert "for 1 micro-batch of 2 samples" in problem.message


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_a_difference_of_a_thousandth_is_found(make_trainer, factor):
    class Leaning(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"] * (factor if len(x) == 1 else 1.0)}

    assert "T510" in codes(check(make_trainer(model=Leaning(), gradient_accumulation_steps=2)))


def test_a_loss_given_as_a_dict_and_metrics_logged_in_it_are_no_problem(make_trainer):
    from tr_core import Trainer

    class Parts(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self.log_metric("progress", self.state.global_step / self.state.max_steps)
            loss = {"loss": loss, "ce": loss.detach()}
            return (loss, outputs) if return_outputs else loss

    assert codes(check(make_trainer(trainer_class=Parts)), "error") == []
    make_trainer(trainer_class=Parts).train()


class ReadOnce(IterableDataset):
    def __init__(self, number):
        self.rows = iter(samples(number))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rows)


def test_data_that_can_be_read_only_once_is_left_alone_unless_the_process_ends(make_trainer):
    data = ReadOnce(8)
    assert "T406" in codes(check(make_trainer(train_dataset=data, max_steps=2)), "info")
    assert make_trainer(train_dataset=data, max_steps=2).train().global_step == 2
    trainer = make_trainer(train_dataset=ReadOnce(8), max_steps=2)
    report = check(trainer, ends_here=True)
    assert "T406" not in codes(report)
    assert "loss" in report.figures


def test_a_loader_of_the_users_own_gives_the_two_samples(make_trainer):
    from tr_core import Trainer

    class Own(Trainer):
        def get_train_dataloader(self):
            rows = samples(12)
            return [noisy(rows[i : i + 4]) for i in (0, 4, 8)]

    report = check(make_trainer(trainer_class=Own, train_dataset=None))
    assert codes(report, "error") == []
    assert report.figures["trial_samples"] == 2
    assert report.figures["steps"] == 3


def test_metrics_of_several_evaluation_sets_are_listed_and_watched(make_trainer):
    sets = {"easy": samples(6), "hard": samples(6)}
    options = {"eval_dataset": sets, "eval_strategy": "epoch", "compute_metrics": lambda p: {"f1": 0.5}}
    report = check(make_trainer(**options, metric_for_best_model="easy_f1"))
    assert report.figures["metrics"] == ["eval_easy_f1", "eval_easy_loss", "eval_hard_f1", "eval_hard_loss"]
    assert codes(report, "error") == []
    [problem] = [p for p in check(make_trainer(**options, metric_for_best_model="f1")).problems if p.code == "T601"]
    assert "'f1' is not among the results of the evaluation; they are ['eval_easy_f1'," in problem.message
    assert codes(check(make_trainer(**options, metric_for_best_model="hard_runtime")), "error") == []


def test_a_metric_that_needs_more_than_two_samples_is_tried_on_more(make_trainer):
    def needs_ten(prediction):
        if len(prediction.label_ids) < 10:
            raise ValueError("too few")
        return {"spread": 1.0}

    report = check(make_trainer(eval_dataset=samples(12), compute_metrics=needs_ten))
    assert report.figures["metrics"] == ["eval_loss", "eval_spread"]
    assert codes(report, "error") == []


def test_a_streaming_metric_that_fails_is_named(make_trainer):
    class Broken:
        def update(self, preds, target):
            raise KeyError("threshold")

        def compute(self):
            return 0.0

        def reset(self):
            pass

    [problem] = [
        p for p in check(make_trainer(eval_dataset=samples(6), compute_metrics=Broken())).problems if p.code == "T604"
    ]
    assert problem.message == "evaluating 64 samples (eval) fails: KeyError: 'threshold'"


def test_arguments_changed_after_they_were_built_are_checked_again(make_trainer):
    trainer = make_trainer()
    trainer.args.bf16, trainer.args.fp16 = True, True
    assert "T003" in codes(check(trainer))


def test_a_model_that_its_strategy_cannot_prepare_is_reported(make_trainer):
    trainer = make_trainer()

    def refuse(model):
        raise ValueError("no room")

    trainer.strategy.prepare = refuse
    [problem] = check(trainer).problems
    assert (problem.code, problem.message) == ("T303", "the strategy cannot prepare the model: no room")


def test_a_check_that_fails_itself_is_reported_and_the_others_are_made(make_trainer, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: 1 / 0)
    report = check(make_trainer())
    [problem] = [p for p in report.problems if p.code == "T012"]
    assert problem.message == "check disk space (the other checks were made): ZeroDivisionError: division by zero"
    assert "loss" in report.figures


def test_what_takes_time_is_logged_before_it_begins(make_trainer, caplog):
    with caplog.at_level("INFO", "tr_core.preflight"):
        check(make_trainer(eval_dataset=samples(6)))
    assert [record.getMessage() for record in caplog.records if record.name == "tr_core.preflight"] == [
        "check: preparing the model",
        "check: loading two samples",
        "check: one forward and backward of two samples",
        "check: testing what the loss is divided by",
        "check: evaluating two samples (eval)",
    ]


def retention(**options):
    defaults = {
        "save_strategy": "steps",
        "save_steps": 10,
        "save_total_limit": None,
        "metric_for_best_model": None,
        "load_best_model_at_end": False,
        "eval_strategy": "no",
        "eval_steps": 10,
        "eval_delay": 0,
    }
    steps = options.pop("steps", 100)
    epochs = options.pop("epochs", 4)
    return CheckContext(SimpleNamespace(**{**defaults, **options}), steps=steps, epochs=epochs)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 10),
        ({"save_steps": 30}, 4),
        ({"save_steps": 0.25}, 4),
        ({"save_steps": 1000}, 1),
        ({"save_strategy": "epoch"}, 4),
        ({"save_strategy": "10min"}, math.inf),
        ({"steps": None}, math.inf),
        ({"save_total_limit": 2}, 3),
        ({"save_total_limit": 2, "steps": None}, 3),
        ({"save_total_limit": 2, "save_strategy": "10min"}, 3),
        ({"save_total_limit": 20}, 10),
        ({"save_total_limit": 1}, 2),
        ({"save_total_limit": 1, "eval_strategy": "steps", "metric_for_best_model": "loss"}, 3),
        ({"save_total_limit": 2, "eval_strategy": "steps", "metric_for_best_model": "loss"}, 3),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 20, "metric_for_best_model": "loss"}, 5),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "metric_for_best_model": "loss"}, 10),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 5,
                "metric_for_best_model": "loss",
            },
            20,
        ),
    ],
)
def test_the_checkpoints_on_the_disk_at_once_are_those_kept_the_best_and_the_one_being_written(options, expected):
    assert checkpoints_at_once(retention(**options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eval_strategy": "steps"}, 10),
        ({"eval_strategy": "steps", "eval_steps": 30}, 4),
        ({"eval_strategy": "epoch"}, 4),
        ({"eval_strategy": "10min"}, math.inf),
        ({}, 0),
    ],
)
def test_evaluations_are_counted_as_the_run_makes_them(options, expected):
    assert times(retention(**options), "eval") == expected


def test_evaluations_of_a_real_run_are_as_many_as_counted(make_trained):
    trainer = make_trained(number=40, eval_dataset=samples(4), eval_strategy="steps", eval_steps=3)
    made = sum("eval_loss" in entry for entry in trainer.state.log_history)
    assert made == times(CheckContext(trainer.args, steps=10), "eval") == 4


@pytest.mark.parametrize(("there", "found"), [(17, []), (15, ["T306"])])
def test_weights_and_states_that_exceed_the_devices_memory_are_an_error(monkeypatch, there, found):
    device = SimpleNamespace(type="cuda")
    module = SimpleNamespace(mem_get_info=lambda device: (0, there * 10**9))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    figures = {"parameter_bytes": 4 * 10**9, "gradient_bytes": 4 * 10**9, "optimizer_bytes": 8 * 10**9}
    trainer = SimpleNamespace(strategy=SimpleNamespace(device=device))
    subject = CheckContext(None, trainer, figures=figures)
    check_memory(subject)
    assert [problem.code for problem in subject.problems] == found
    assert all("take 16 GB, the device has 15 GB" in problem.message for problem in subject.problems)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_on_cuda_the_loss_is_tested(make_trainer, precision):
    report = check(make_trainer(model=Normalised(), use_cpu=False, gradient_accumulation_steps=2, **precision))
    assert codes(report, "error") == []
    assert report.figures["loss"] > 0


def test_an_option_is_shown_with_what_gave_it(make_trainer):
    subject = CheckContext(make_trainer(eval_delay=3).args)
    subject.say("T103", "late", "eval_delay", "eval_steps")
    assert subject.problems[0].origin == "eval_delay (call)"


def test_a_report_shows_errors_first_and_travels_as_json():
    problems = [Problem("T106", "three"), Problem("T104", "two", "run.yaml:3"), Problem("T001", "one")]
    report = Report("run.yaml", problems, {"steps": 1000})
    assert [problem.code for problem in report.problems] == ["T001", "T104", "T106"]
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert str(report).splitlines() == [
        "preflight of run.yaml",
        "  T001 error            one",
        "  T104 warning          two",
        "                        at run.yaml:3",
        "  T106 info             three",
        "  steps                 1,000",
        "1 error, 1 warning",
    ]


def test_a_report_masks_a_token_that_a_message_holds():
    token = "hf_" + "a" * 30
    report = Report("run.yaml", [Problem("T002", f"run_name={token!r} is too long")])
    assert token not in report.to_json() + str(report)
    assert "run_name='***' is too long" in str(report)


@pytest.mark.parametrize(
    ("found", "normal", "strict"), [([], 0, 0), (["T106"], 0, 0), (["T104"], 0, 1), (["T104", "T001"], 1, 1)]
)
def test_warnings_count_in_the_exit_code_only_if_strict(found, normal, strict):
    report = Report("x", [Problem(code, "") for code in found])
    assert (report.exit_code(), report.exit_code(strict=True)) == (normal, strict)


def test_the_documented_codes_are_those_there_are():
    text = (Path(__file__).parent.parent / "docs/check-codes.md").read_text("utf-8")
    rows = re.findall(r"^\| (T\d{3}) \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(code, severity, meaning) for code, (severity, meaning) in CODES.items()]


def test_every_code_is_used_and_every_used_code_is_listed():
    folder = Path(sys.modules[Report.__module__].__file__).parent
    texts = [re.sub(r'(?m)^    "T\d{3}": Code\(.*$', "", path.read_text("utf-8")) for path in folder.glob("*.py")]
    used = {code for text in texts for code in re.findall(r'"(T\d{3})"', text)}
    assert used == set(CODES)
