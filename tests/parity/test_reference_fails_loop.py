"""Faults of the reference's loop: gradients that survive, runs that are not closed, requests that are ignored."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_callbacks import At
from parity_harness import OURS, REFERENCE, Scenario, build, run, run_both, same_tensors, warnings_of

pytestmark = pytest.mark.reference_fails


class GradientsAt:
    """Note whether any gradient is there at an event."""

    def __init__(self, event):
        self.found = []
        setattr(self, event, self._note)

    def _note(self, args, state, control, model, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.found.append(any(bool(gradient.any()) for gradient in gradients))

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def test_no_gradient_survives_a_pass_over_a_stream(tmp_path):
    """Three micro-batches a pass, two to an update: the third is neither lost nor added to the next pass."""
    found, used = {}, {}
    for side in (REFERENCE, OURS):
        callback = GradientsAt("on_epoch_begin")
        scenario = Scenario(
            models.Mlp,
            data.Stream(data.classes(12)),
            arguments={"max_steps": 4, "gradient_accumulation_steps": 2},
            callbacks=lambda callback=callback: [callback],
        )
        outcome = run(side, scenario, tmp_path / side.name)
        found[side.name], used[side.name] = callback.found, len(outcome.batches.train)
    assert found["ours"] == [False] * len(found["ours"])
    assert any(found["reference"])
    assert used["ours"] == 6  # two passes of an update of 2 and one of 1
    assert used["reference"] > 4 * 2  # more than 4 updates of 2


@pytest.mark.parametrize("flag", ["should_epoch_stop", "should_training_stop"])
def test_an_update_that_was_begun_is_finished_before_a_stop(tmp_path, flag):
    """Asked to stop between two micro-batches, the reference drops the update and keeps its gradient."""
    found = {}
    for side in (REFERENCE, OURS):
        callback = GradientsAt("on_epoch_end")
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            arguments={"gradient_accumulation_steps": 2},
            callbacks=lambda callback=callback: [At("on_substep_end", 1, **{flag: True}), callback],
        )
        outcome = run(side, scenario, tmp_path / side.name)
        found[side.name] = callback.found[0], outcome.trainer.state.log_history[1]["step"]
    assert found["reference"][0]
    assert found["ours"] == (False, 2)


def test_a_stop_asked_for_before_the_first_step_is_heeded(tmp_path):
    callbacks = lambda: [At("on_train_begin", 0, should_training_stop=True)]  # noqa: E731
    scenario = Scenario(models.Mlp, data.classes(), callbacks=callbacks)
    reference, ours = run_both(scenario, tmp_path)
    assert reference.trainer.state.global_step == 1
    assert ours.trainer.state.global_step == 0
    assert ours.recorder.names() == ["train_begin", "log", "train_end"]


def test_dropping_the_last_batch_of_a_stream_drops_it(tmp_path):
    scenario = Scenario(
        models.Mlp, data.Stream(data.classes()), arguments={"max_steps": 6, "dataloader_drop_last": True}
    )
    sizes = [[len(batch["x"]) for batch in outcome.batches.train] for outcome in run_both(scenario, tmp_path)]
    assert sizes == [[4, 4, 4, 4, 2, 4], [4, 4, 4, 4, 4, 4]]


def test_samples_a_second_are_those_that_were_used(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments={"dataloader_drop_last": True})
    for outcome, per_step in zip(run_both(scenario, tmp_path), (18 / 4, 4), strict=True):
        metrics = outcome.output.metrics
        rate = metrics["train_samples_per_second"] / metrics["train_steps_per_second"]
        assert rate == pytest.approx(per_step, rel=0.01)


def test_a_run_that_fails_is_closed(tmp_path):
    class Fault(Exception):
        pass

    class Breaks(At):
        def on_step_end(self, args, state, control, **kwargs):
            raise Fault

    outcomes = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(models.Mlp, data.classes(), callbacks=lambda: [Breaks("on_step_end", 1)])
        outcome = build(side, scenario, tmp_path / side.name)
        with warnings_of(side), pytest.raises(Fault):
            outcome.trainer.train()
        outcomes.append(outcome)
    reference, ours = outcomes
    assert "train_end" not in reference.recorder.names()
    assert reference.trainer.is_in_train
    assert ours.recorder.names()[-1] == "train_end"
    assert not ours.trainer.is_in_train


@pytest.mark.parametrize("what", ["generators", "model"])
def test_building_a_trainer_changes_nothing_outside_it(tmp_path, what):
    changed = []
    for side in (REFERENCE, OURS):
        model = models.bert_classifier()
        model.config.use_cache = True
        torch.manual_seed(123)
        before = torch.get_rng_state()
        build(side, Scenario(models.bert_classifier), tmp_path / side.name, model)
        is_other = not torch.equal(torch.get_rng_state(), before)
        changed.append(is_other if what == "generators" else not model.config.use_cache)
    assert changed == [True, False]


def test_the_best_model_is_loaded_even_from_between_two_checkpoints(tmp_path):
    """Evaluated every 2 steps and saved every 4: ours also saves the best, the reference has nothing to load."""
    scores = iter([1.0, 0.5, 0.9, 0.4, 0.3] * 2)  # the best one is that of step 2
    weights = {}

    def keep(side):
        def on_evaluate(args, state, control, model, **kwargs):
            weights[side.name, state.global_step] = {k: v.clone() for k, v in model.state_dict().items()}

        callback = At("on_evaluate", -1)
        callback.on_evaluate = on_evaluate
        return callback

    outcomes = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            data.classes(9, seed=8),
            {
                "eval_strategy": "steps",
                "eval_steps": 2,
                "save_strategy": "steps",
                "save_steps": 4,
                "load_best_model_at_end": True,
                "metric_for_best_model": "score",
                "greater_is_better": True,
            },
            {"compute_metrics": lambda prediction: {"score": next(scores)}},
            lambda side=side: [keep(side)],
        )
        outcomes.append(run(side, scenario, tmp_path / side.name))
    reference, ours = outcomes
    assert reference.trainer.state.best_global_step == ours.trainer.state.best_global_step == 2
    assert same_tensors(weights["reference", 10], reference.weights)
    assert same_tensors(weights["ours", 2], ours.weights)


def test_dropout_differs_only_by_what_the_reference_draws_for_its_loader(tmp_path):
    """Every pass of the reference's loader takes one number from the stream that dropout uses; ours takes none."""

    class Draws(At):
        def on_epoch_begin(self, args, state, control, **kwargs):
            torch.empty((), dtype=torch.int64).random_()

    scenario = Scenario(models.dropping_mlp, data.classes())
    reference, ours = run_both(scenario, tmp_path)
    assert reference.losses != ours.losses
    scenario.callbacks = lambda: [Draws("", 0)]
    drawing = run(OURS, scenario, tmp_path / "drawing")
    assert drawing.losses == reference.losses
    assert same_tensors(drawing.weights, reference.weights)
