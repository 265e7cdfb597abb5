"""Resume: a run that was cut off and goes on ends as the reference's uninterrupted run, and as its resumed one."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE, Scenario, assert_same, run, same_tensors, without_times

EVALUATION = data.classes(9, seed=8)
SAVING = {"save_strategy": "steps", "save_steps": 1}


def resumed(side, scenario, folder, step):
    """Train from the checkpoint of `step` of an earlier run in `folder`, writing to another one."""
    again = Scenario(
        scenario.model,
        scenario.train,
        scenario.evaluation,
        {**scenario.arguments, "save_strategy": "no"},
        scenario.options,
        scenario.callbacks,
    )
    checkpoint = folder / side.name / f"checkpoint-{step}"
    return run(side, again, folder / f"{side.name}-resumed-{step}", resume_from_checkpoint=str(checkpoint))


def entries(outcome, steps_after):
    """Return the log entries of later steps but the last, whose mean loss is that of one call of train."""
    return [without_times(e) for e in outcome.trainer.state.log_history[:-1] if e["step"] > steps_after]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_ends_like_the_uninterrupted_one(tmp_path, accumulation):
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        EVALUATION,
        {**SAVING, "gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2},
    )
    reference = run(REFERENCE, scenario, tmp_path / "reference")
    ours = run(OURS, scenario, tmp_path / "ours")
    assert_same(reference, ours)
    for step in range(1, reference.trainer.state.max_steps):
        outcome = resumed(OURS, scenario, tmp_path, step)
        assert same_tensors(reference.weights, outcome.weights), step
        assert outcome.losses == reference.losses
        assert entries(outcome, 0) == entries(ours, 0)


@pytest.mark.parametrize("step", [3, 5, 7])
def test_both_resume_alike(tmp_path, step):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    outcomes = []
    for side in (REFERENCE, OURS):
        run(side, scenario, tmp_path / side.name)
        outcomes.append(resumed(side, scenario, tmp_path, step))
    # At the end of an epoch ours also makes up its closing event, which came after the checkpoint.
    assert_same(*outcomes, but=["events"] if step == 5 else [])


def test_both_resume_a_model_that_draws_random_numbers_like_their_uninterrupted_runs(tmp_path):
    """Their numbers differ, as the reference's loader draws from the stream that dropout uses."""
    scenario = Scenario(models.dropping_mlp, data.classes(), arguments=SAVING)
    for side in (REFERENCE, OURS):
        whole = run(side, scenario, tmp_path / side.name)
        for step in (3, 5, 7):
            outcome = resumed(side, scenario, tmp_path, step)
            assert same_tensors(whole.weights, outcome.weights), (side.name, step)
            assert outcome.losses == whole.losses


def test_a_log_window_that_was_open_is_complete_after_a_resume(tmp_path):
    """Ours goes on with the window; the reference's first log after a resume is of the steps since then alone."""
    scenario = Scenario(models.Mlp, data.classes(), arguments={**SAVING, "logging_steps": 3})
    whole, outcomes = {}, {}
    for side in (REFERENCE, OURS):
        whole[side.name] = run(side, scenario, tmp_path / side.name)
        outcomes[side.name] = resumed(side, scenario, tmp_path, 4)
    assert_same(whole["reference"], whole["ours"])
    reference, ours = outcomes["reference"], outcomes["ours"]
    assert ours.losses == whole["ours"].losses
    assert reference.losses != whole["reference"].losses
    # The mean loss of a call is that of its own steps in both.
    assert ours.output.training_loss == pytest.approx(reference.output.training_loss, rel=1e-6)


def test_resume_with_true_takes_the_newest_checkpoint_in_both(tmp_path):
    # A constant rate: under any other the reference makes the first further step with the old schedule's last one.
    arguments = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments)
    longer = Scenario(models.Mlp, data.classes(), arguments={**scenario.arguments, "num_train_epochs": 3})
    outcomes = []
    for side in (REFERENCE, OURS):
        run(side, scenario, tmp_path / side.name)
        outcomes.append(run(side, longer, tmp_path / side.name, resume_from_checkpoint=True))
    assert_same(*outcomes, but=["events"])  # the checkpoint is of the end of an epoch: see above


def test_ignoring_the_data_already_used_is_the_same(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={**SAVING, "ignore_data_skip": True})
    outcomes = []
    for side in (REFERENCE, OURS):
        run(side, scenario, tmp_path / side.name)
        outcomes.append(resumed(side, scenario, tmp_path, 3))
    assert_same(*outcomes)


def test_no_checkpoint_to_resume_from_is_an_error_in_both(tmp_path):
    for side in (REFERENCE, OURS):
        with pytest.raises(ValueError, match="No valid checkpoint|no valid checkpoint"):
            run(side, Scenario(models.Mlp, data.classes()), tmp_path / side.name, resume_from_checkpoint=True)


def test_the_log_of_an_epoch_is_complete_after_a_resume_at_its_last_step(tmp_path):
    """The checkpoint of step 5 is written before the log of the epoch that it ends."""
    scenario = Scenario(models.Mlp, data.classes(), arguments={**SAVING, "logging_strategy": "epoch"})
    reference = run(REFERENCE, scenario, tmp_path / "reference")
    run(OURS, scenario, tmp_path / "ours")
    again = resumed(OURS, scenario, tmp_path, 5)
    assert again.history[:-1] == reference.history[:-1]


def test_the_best_model_of_a_run_that_goes_on_in_another_folder_is_loaded_the_same(tmp_path):
    outcomes, best = [], {}
    for side in (REFERENCE, OURS):
        scores = iter([0.1, 0.9, 0.3, 0.2, 0.4, 0.3, 0.2, 0.4])  # five of the first run, three after step 4 again
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            EVALUATION,
            {
                "save_strategy": "steps",
                "save_steps": 2,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "load_best_model_at_end": True,
                "metric_for_best_model": "score",
                "greater_is_better": True,
            },
            {"compute_metrics": lambda prediction, scores=scores: {"score": next(scores)}},
        )
        first = run(side, scenario, tmp_path / side.name)
        best[side.name] = first.weights
        checkpoint = tmp_path / side.name / "checkpoint-4"
        again = run(side, scenario, tmp_path / f"{side.name}-again", resume_from_checkpoint=str(checkpoint))
        outcomes.append(again)
    assert_same(*outcomes)
    assert same_tensors(best["ours"], outcomes[1].weights)
