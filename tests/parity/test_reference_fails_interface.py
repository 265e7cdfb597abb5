"""What the documentation of the Trainer shows and the reference refuses, and what it accepts and should not."""

import parity_data as data
import parity_models as models
import pytest
import transformers
from parity_harness import OURS, REFERENCE, Scenario, build, run, run_both, warnings_of
from parity_recorder import Recorder
from torch.nn import functional as F

pytestmark = pytest.mark.reference_fails


def test_a_callback_may_return_a_dict_of_flags(tmp_path):
    outcomes = {}
    for side in (REFERENCE, OURS):

        class Stops(side.callback):
            def on_step_end(self, args, state, control, **kwargs):
                return {"should_training_stop": True} if state.global_step == 3 else {}

        scenario = Scenario(models.Mlp, data.classes(), callbacks=lambda stops=Stops: [stops()])
        outcomes[side.name] = build(side, scenario, tmp_path / side.name)
        outcomes[side.name].trainer.remove_callback(Recorder)  # the reference gives the dict to the next callback
    with warnings_of(REFERENCE), pytest.raises(AttributeError, match="'dict' object has no attribute"):
        outcomes["reference"].trainer.train()
    assert outcomes["ours"].trainer.train().global_step == 3


def test_a_compute_loss_of_before_the_count_of_items_works(tmp_path):
    def subclass(trainer):
        class Weighted(trainer):
            def compute_loss(self, model, inputs, return_outputs=False):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = F.cross_entropy(outputs["logits"], labels)
                return (loss, outputs) if return_outputs else loss

        return Weighted

    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"},
        subclass=subclass,
    )
    with pytest.raises(TypeError, match="num_items_in_batch"):
        run(REFERENCE, scenario, tmp_path / "reference")
    plain = Scenario(models.Mlp, scenario.train, scenario.evaluation, scenario.arguments)
    assert run(OURS, scenario, tmp_path / "ours").history == run(OURS, plain, tmp_path / "plain").history


@pytest.mark.parametrize("name", ["tokenizer", "callback"])
def test_documented_names_of_arguments_of_the_trainer_are_accepted(tmp_path, name):
    value = object() if name == "tokenizer" else [transformers.TrainerCallback()]
    scenario = Scenario(models.Mlp, options={name: value})
    with pytest.raises(TypeError, match=name):
        build(REFERENCE, scenario, tmp_path / "reference")
    if name == "tokenizer":
        assert build(OURS, scenario, tmp_path / "ours").trainer.processing_class is value
    else:
        model, args = models.Mlp(), OURS.arguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        assert value[0] in OURS.trainer(model, args, callback=value).callback_handler.callbacks


@pytest.mark.parametrize(
    ("old", "value", "new", "meaning"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("no_cuda", True, "use_cpu", True),
        ("overwrite_output_dir", True, "overwrite_output_dir", True),
        ("logging_dir", "logs", "logging_dir", "logs"),
    ],
)
def test_documented_names_of_training_arguments_are_accepted(tmp_path, old, value, new, meaning):
    with pytest.raises(TypeError, match=old):
        REFERENCE.arguments(output_dir=str(tmp_path), **{old: value})
    assert getattr(OURS.arguments(output_dir=str(tmp_path), **{old: value}), new) == meaning


def test_numbers_written_as_text_are_numbers(tmp_path):
    values = {"learning_rate": "1e-4", "num_train_epochs": "3"}
    assert REFERENCE.arguments(output_dir=str(tmp_path), **values).learning_rate == "1e-4"
    assert OURS.arguments(output_dir=str(tmp_path), **values).learning_rate == 1e-4


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_count_of_zero_is_refused(tmp_path, name):
    REFERENCE.arguments(output_dir=str(tmp_path), **{name: 0})
    with pytest.raises(ValueError, match=name):
        OURS.arguments(output_dir=str(tmp_path), **{name: 0})


def test_the_result_holds_the_operations_whatever_displays_the_run(tmp_path):
    for side in (REFERENCE, OURS):
        outcome = build(side, Scenario(models.llama, data.tokens()), tmp_path / side.name)
        if side is REFERENCE:
            outcome.trainer.add_callback(transformers.PrinterCallback)  # as disable_tqdm has it
        with warnings_of(side):
            output = outcome.trainer.train()
        assert ("total_flos" in output.metrics) == (side is OURS)
        assert outcome.trainer.state.total_flos > 0


def test_a_grouped_setter_leaves_arguments_that_can_be_trained_with(tmp_path):
    for side in (REFERENCE, OURS):
        scenario = Scenario(models.Mlp, data.classes(), data.classes(9, seed=8))
        outcome = build(side, scenario, tmp_path / side.name)
        outcome.trainer.args.set_evaluate(strategy="steps", steps=5, batch_size=4)
        with warnings_of(side):
            if side is REFERENCE:
                with pytest.raises(TypeError, match="NoneType"):
                    outcome.trainer.train()
            else:
                assert outcome.trainer.train().global_step == 10


def test_a_collator_gets_a_column_that_the_model_does_not_take(tmp_path):
    samples = data.classes()
    for sample in samples.samples:
        sample["weight"] = 1.0

    def collate(batch):
        assert all(sample["weight"] == 1.0 for sample in batch)
        return transformers.default_data_collator([{k: s[k] for k in ("x", "labels")} for s in batch])

    scenario = Scenario(models.Mlp, samples, options={"data_collator": collate})
    with pytest.raises(KeyError, match="weight"):
        run(REFERENCE, scenario, tmp_path / "reference")
    ours = run(OURS, scenario, tmp_path / "ours")
    scenario.arguments = {"remove_unused_columns": False}
    reference, kept = run_both(scenario, tmp_path / "kept")
    assert ours.losses == kept.losses == reference.losses


def test_a_whole_number_as_label_ids_is_a_label(tmp_path):
    samples = data.classes()
    for sample in samples.samples:
        sample["label_ids"] = sample.pop("labels")
    with pytest.raises(TypeError, match="not subscriptable"):
        run(REFERENCE, Scenario(models.Mlp, samples), tmp_path / "reference")
    ours, plain = (run(OURS, Scenario(models.Mlp, s), tmp_path / "ours") for s in (samples, data.classes()))
    assert ours.losses == plain.losses
