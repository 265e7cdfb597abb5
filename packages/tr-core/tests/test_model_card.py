"""A model card says what was trained and what it reached, and writes over nobody's words."""

import sys
from importlib.metadata import version

import numpy
import pytest
import yaml
from support.data import samples
from support.models import Classifier
from support.runs import accuracy

from tr_core import TrainerState
from tr_core.model_card import MARKER, evaluations, front_matter, of_the_model


def card(trainer):
    with open(trainer.args.output_dir + "/README.md", encoding="utf-8") as file:
        return file.read()


@pytest.fixture
def trained(make_trainer):
    trainer = make_trainer(
        eval_dataset=samples(12, 1), eval_strategy="epoch", num_train_epochs=2, compute_metrics=accuracy
    )
    trainer.train()
    return trainer


def test_the_card_has_the_runs_own_figures(trained):
    trained.create_model_card(dataset="My data", tasks="text-classification")
    text = card(trained)
    last = [entry for entry in trained.state.log_history if "eval_loss" in entry][-1]
    assert f"- Loss: {last['eval_loss']:.4f}" in text
    assert f"- Accuracy: {last['eval_accuracy']:.4f}" in text
    assert f"value: {last['eval_accuracy']!r}" in text
    assert f"value: {last['eval_loss']!r}" in text
    assert text.startswith("---\n")
    assert "A model trained from scratch on My data. On the evaluation data it reaches, at step 10:" in text


def test_the_table_has_a_row_for_every_evaluation(trained):
    trained.create_model_card()
    rows = [line for line in card(trained).splitlines() if line.startswith("|")]
    assert rows[0] == "| Training loss | Epoch | Step | Accuracy | Validation loss |"
    assert [row.split(" | ")[1:3] for row in rows[2:]] == [["1.0000", "5"], ["2.0000", "10"]]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_card_names_the_version_of_peft_only_for_a_model_with_adapters(trained, monkeypatch, adapted):
    monkeypatch.setitem(sys.modules, "peft", sys)
    monkeypatch.setattr("tr_core.model_card.version", lambda name: "1.2.3")
    if adapted:
        trained.model.peft_config = {"default": object()}
    trained.create_model_card()
    assert ("- peft: 1.2.3" in card(trained)) is adapted


def test_the_hyperparameters_are_those_of_the_run(make_trained):
    trainer = make_trained(
        learning_rate=0.02,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        warmup_steps=1,
        optim="sgd",
        optim_args="momentum=0.9",
        bf16=True,
        max_steps=2,
        hub_token="hf_secret",
    )
    trainer.create_model_card()
    lines = card(trainer).splitlines()
    for line in (
        "- learning_rate: 0.02",
        "- train_batch_size: 4",
        "- gradient_accumulation_steps: 2",
        "- total_train_batch_size: 8",
        "- optimizer: SGD (momentum=0.9, dampening=0)",
        "- weight_decay: 0.1",
        "- lr_scheduler_type: linear",
        "- lr_scheduler_warmup_steps: 1",
        "- training_steps: 2",
        "- mixed_precision_training: bf16",
        f"- torch: {version('torch')}",
    ):
        assert line in lines
    assert "num_epochs" not in "\n".join(lines)
    assert "hf_secret" not in "\n".join(lines)


def test_what_was_given_once_holds_for_later_cards(trained):
    trained.create_model_card(language=["en", "ko"], license="apache-2.0", tags="mine")
    trained.create_model_card(model_name="Name")
    text = card(trained)
    for line in ('- "en"', '- "ko"', 'license: "apache-2.0"', '- "mine"', '- "generated_from_trainer"', "# Name"):
        assert line in text.splitlines()


def test_a_card_of_the_trainer_is_replaced_and_one_of_a_person_stays(trained, tmp_path, heard):
    warnings = heard("warning")
    trained.create_model_card(license="mit")
    trained.create_model_card(license="apache-2.0")
    assert "apache-2.0" in card(trained)
    path = tmp_path / "out" / "README.md"
    path.write_text("# My own words\n", encoding="utf-8")
    trained.create_model_card()
    assert path.read_text(encoding="utf-8") == "# My own words\n"
    assert len(warnings) == 1
    assert "README.md was not written by create_model_card and stays as it is" in warnings[0]
    path.write_text(f"# My own words\n{MARKER}\n", encoding="utf-8")
    trained.create_model_card()
    assert "My own words" not in card(trained)


@pytest.mark.parametrize(
    "text", ["# Model Card for Model ID", "<!-- This model card has been generated automatically -->"]
)
def test_a_card_that_no_person_wrote_is_replaced(trained, tmp_path, text):
    (tmp_path / "out" / "README.md").write_text(text, encoding="utf-8")
    trained.create_model_card()
    assert text not in card(trained)


def test_only_the_main_process_writes(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.strategy.rank = 1
    trainer.create_model_card()
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_run_that_was_never_evaluated_has_a_card_without_figures(make_trained):
    trainer = make_trained()
    trainer.create_model_card()
    text = card(trainer)
    assert "model-index" not in text
    assert "Training results" not in text
    assert "on an unknown data set." in text


def test_a_trainer_that_only_evaluated_has_its_figures(make_trainer):
    trainer = make_trainer(eval_dataset=samples(8, 1))
    loss = trainer.evaluate()["eval_loss"]
    trainer.create_model_card()
    assert f"value: {loss!r}" in card(trainer)


def entry(step, loss, **more):
    return {
        "eval_loss": loss,
        "eval_runtime": 1.0,
        "eval_steps_per_second": 2.0,
        "epoch": step / 10,
        "step": step,
        **more,
    }


HISTORY = [
    {"loss": 2.0, "step": 5},
    entry(10, 1.0),
    {"loss": 1.5, "step": 15},
    entry(20, 3.0),
    {"train_runtime": 9.0, "train_loss": 1.7, "step": 20},
]


def test_the_figures_are_of_the_weights_that_the_run_ends_with():
    state = TrainerState(log_history=HISTORY, best_global_step=10)
    assert of_the_model(state, has_best_weights=False).metrics == {"loss": 3.0}
    assert of_the_model(state, has_best_weights=True).metrics == {"loss": 1.0}
    later = TrainerState(log_history=[*HISTORY, entry(20, 1.25)], best_global_step=10)
    assert of_the_model(later, has_best_weights=True).metrics == {"loss": 1.25}
    assert of_the_model(TrainerState(), has_best_weights=True) is None


def test_evaluations_of_several_data_sets_at_one_step_are_one_row():
    rows = evaluations([{"loss": 2.0, "step": 5}, {"eval_a_loss": 1.0, "step": 5}, {"eval_b_loss": 3.0, "step": 5}])
    assert [(row.step, row.training_loss, row.metrics) for row in rows] == [(5, 2.0, {"a_loss": 1.0, "b_loss": 3.0})]


def test_figures_that_are_no_numbers_are_shown_and_not_published(make_trainer):
    trainer = make_trainer()
    trainer.state.log_history = [entry(10, float("nan"), eval_f1=0.5, eval_note="good")]
    trainer.create_model_card()
    text = card(trainer)
    assert "- Loss: nan" in text
    assert "- Note: good" in text
    head = text.split("---\n")[1]
    assert "f1" in head
    assert "nan" not in head
    assert "good" not in head


def test_data_of_the_hub_say_what_they_are(make_trainer):
    class Data(list):
        builder_name, config_name = "glue", "mrpc"

    trainer = make_trainer(eval_dataset=Data(samples(8, 1)))
    trainer.evaluate()
    trainer.create_model_card()
    text = card(trainer)
    assert 'datasets:\n- "glue"' in text
    assert 'type: "glue"' in text
    assert 'args: "mrpc"' in text
    Data.builder_name = "csv"
    trainer.create_model_card()
    assert "\ndatasets:" not in card(trainer)


def test_the_model_it_was_made_of_is_named(make_trainer, tmp_path):
    class Config:
        _name_or_path = "someone/encoder"

    model = Classifier()
    model.config = Config()
    trainer = make_trainer(model=model)
    trainer.create_model_card()
    assert 'base_model: "someone/encoder"' in card(trainer)
    assert "`someone/encoder`, fine-tuned on" in card(trainer)
    Config._name_or_path = str(tmp_path)  # a folder of this machine says nothing to others
    trainer.create_model_card()
    assert "base_model" not in card(trainer)


def test_the_task_follows_from_the_models_class(make_trainer):
    class SmallForSequenceClassification(Classifier):
        pass

    trainer = make_trainer(model=SmallForSequenceClassification(), eval_dataset=samples(8, 1))
    trainer.evaluate()
    trainer.create_model_card()
    assert '  - task:\n      type: "text-classification"\n      name: "Text classification"' in card(trainer)


def test_front_matter_quotes_what_yaml_would_take_for_something_else():
    text = front_matter({"a": "no", "b": ["1.0", "x: y", 'say "hi"', "# no"], "c": {"d": 0.5, "e": None}, "f": []})
    assert text == ('---\na: "no"\nb:\n- "1.0"\n- "x: y"\n- "say \\"hi\\""\n- "# no"\nc:\n  d: 0.5\n---\n')


def test_front_matter_is_read_as_what_it_was():
    words = ["plain: no", "tab\tand\nline", "'\u200b\"", "日本語", "\U0001f600", "\\", "\x7f", "--- ", "08", "1e5"]
    numbers = [1, True, 0.1, 1e-17, 1e22, numpy.float64(0.5), numpy.float32(0.5), numpy.int64(3)]
    given = {"words": words, "numbers": numbers, "again": words, "long": "a " * 200}
    text = front_matter(given)
    assert list(yaml.safe_load_all(text)) == [given, None]
    assert not any(word in text for word in ("float", "int64", '"0.5"'))
    for word in ("08", "1e5"):  # plain, these are text in YAML 1.1 and numbers in 1.2
        assert f'- "{word}"\n' in text


def test_publishing_needs_its_package(make_trainer, installed):
    from tr_core import plugins

    trainer = make_trainer()
    installed()
    for call in (trainer.init_hf_repo, lambda: trainer.init_hf_repo(token="x"), trainer.push_to_hub):
        with pytest.raises(plugins.PluginError, match="no callback named 'hub'.* pip install tr-ckpt tr-optim"):
            call()


def test_a_push_includes_the_card_with_what_it_is_given(make_trainer, monkeypatch):
    pushed = []

    class Hub:
        def on_push_begin(self, args, state, control, **kwargs): ...

        def push_to_hub(self, folder, commit_message, blocking):
            with open(f"{folder}/README.md", encoding="utf-8") as file:
                pushed.append((file.read(), commit_message, blocking))
            return "address"

    trainer = make_trainer(callbacks=[Hub()])
    assert trainer.push_to_hub("Done", blocking=False, license="mit") == "address"
    ((text, message, blocking),) = pushed
    assert 'license: "mit"' in text
    assert (message, blocking) == ("Done", False)


def test_metrics_are_formatted_by_a_method_that_log_metrics_calls(make_trainer, capsys):
    trainer = make_trainer()
    assert trainer.metrics_format({"eval_runtime": 61.0, "a": 0.123456}) == {"eval_runtime": "0:01:01.00", "a": 0.1235}
    trainer.metrics_format = lambda metrics: {"changed": 1}
    trainer.log_metrics("eval", {"a": 1.0})
    assert "changed = 1" in capsys.readouterr().out
