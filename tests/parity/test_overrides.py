"""Subclasses: the documented methods can be overridden, and are called in the same way."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, assert_same_metrics, build, run, warnings_of

EVALUATION = data.classes(9, seed=8)


def own_log(trainer):
    class OwnLog(trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "extra": 1.0}, start_time)

    return OwnLog


def test_an_override_of_log_acts_the_same(parity):
    # The reference puts the epoch into the dict that it gives to `log`, and so loses it where that makes a copy.
    reference, ours = parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        subclass=own_log,
        eval_strategy="epoch",
        but=["events", "history"],
    )
    assert "epoch" not in reference.output.metrics
    assert ours.output.metrics["epoch"] == 2.0
    for expected, entry in zip(reference.history, ours.history, strict=True):
        assert_same_metrics(expected, entry)
        assert entry["extra"] == 1.0


@pytest.mark.parametrize("model", [models.Mlp, models.llama, models.gpt2, models.bert_classifier, models.t5])
def test_the_parameters_with_decay_have_the_same_names(tmp_path, model):
    names = []
    for side in (REFERENCE, OURS):
        trainer = build(side, Scenario(model), tmp_path / side.name).trainer
        names.append(set(trainer.get_decay_parameter_names(trainer.model)))
    # The reference also lists the other names of tied weights, which no optimizer asks for.
    assert names[1] == names[0] & set(dict(trainer.model.named_parameters()))
    assert (names[1] != names[0]) == (model in (models.gpt2, models.t5))


def test_callbacks_are_added_and_removed_in_the_same_way(tmp_path):
    found = []
    for side in (REFERENCE, OURS):

        class First(side.callback):
            pass

        class Second(side.callback):
            pass

        trainer = build(side, Scenario(models.Mlp), tmp_path / side.name).trainer
        mine = [First(), Second()]
        for callback in (mine[0], Second, mine[1]):
            with warnings_of(side):
                trainer.add_callback(callback)
        popped = trainer.pop_callback(Second)
        trainer.remove_callback(mine[0])
        left = [type(c).__name__ for c in trainer.callback_handler.callbacks if isinstance(c, First | Second)]
        found.append((type(popped).__name__, popped is mine[1], left, trainer.pop_callback(First)))
    assert found[1] == found[0] == ("Second", False, ["Second"], None)


def test_a_second_run_of_one_trainer_starts_from_the_trained_model_in_both(tmp_path):
    """With an optimizer that has no state; see the next test for one that has."""
    outcomes = []
    for side in (REFERENCE, OURS):
        outcome = run(side, Scenario(models.Mlp, data.classes(), arguments={"optim": "sgd"}), tmp_path / side.name)
        with warnings_of(side):
            outcome.output = outcome.trainer.train()
        outcomes.append(outcome)
    assert_same(*outcomes)


def test_a_model_that_model_init_makes_is_trained_the_same(tmp_path):
    outcomes = []
    for side in (REFERENCE, OURS):

        def make():
            # Apart, as the reference's order of the data follows the last seed that torch was given.
            with torch.random.fork_rng():
                torch.manual_seed(5)
                return models.Mlp()

        with warnings_of(side):
            trainer = side.trainer(
                args=side.arguments(
                    output_dir=str(tmp_path / side.name), use_cpu=True, save_strategy="no", report_to="none"
                ),
                model_init=make,
                train_dataset=data.classes(),
            )
            trainer.train()
        outcomes.append(trainer)
    weights = [trainer.model.state_dict() for trainer in outcomes]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
