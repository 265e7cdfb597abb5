"""Faults of the reference in when things happen: couplings that need not be, and warnings about nothing."""

import logging

import parity_data as data
import parity_models as models
import pytest
from parity_callbacks import At
from parity_harness import OURS, REFERENCE, Scenario, build, run, same_tensors

pytestmark = pytest.mark.reference_fails


@pytest.mark.parametrize(
    "changes",
    [
        {"save_strategy": "epoch", "eval_steps": 2},
        {"save_strategy": "steps", "save_steps": 5, "eval_steps": 2},
        {"save_strategy": "steps", "save_steps": 100, "eval_steps": 3},
    ],
)
def test_the_best_model_is_loaded_whenever_evaluations_and_checkpoints_are_made(tmp_path, changes):
    """The reference refuses to save and to evaluate at different times; here the best model is saved when found."""
    seen = {}

    def keep():
        callback = At("on_evaluate", -1)
        callback.on_evaluate = lambda args, state, control, model, **kwargs: seen.update(
            {state.global_step: {name: tensor.clone() for name, tensor in model.state_dict().items()}}
        )
        return [callback]

    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3])
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        {
            "eval_strategy": "steps",
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            **changes,
        },
        {"compute_metrics": lambda prediction: {"score": next(scores)}},
        keep,
    )
    with pytest.raises(ValueError, match="load_best_model_at_end requires"):
        build(REFERENCE, scenario, tmp_path / "reference")
    ours = run(OURS, scenario, tmp_path / "ours")
    best = 2 * changes["eval_steps"]
    assert ours.trainer.state.best_global_step == best
    assert same_tensors(seen[best], ours.weights)


def test_early_stopping_says_nothing_of_data_sets_that_have_not_its_metric(tmp_path, monkeypatch):
    """Both stop at the same step; the reference warns, after every other data set, that it will not."""
    lines = {"reference": [], "ours": []}
    collect = logging.Handler()
    ends = []
    for side in (REFERENCE, OURS):
        collect.emit = lambda record, side=side: lines[side.name].append(record.getMessage())
        scores = iter([1.0, 5.0, 2.0, 4.0, 3.0, 3.0, 4.0, 2.0])  # of a and b in turn
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            {"a": data.classes(4, seed=8), "b": data.classes(5, seed=9)},
            {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "b_score", "greater_is_better": True},
            {"compute_metrics": lambda prediction, scores=scores: {"score": next(scores)}},
            lambda side=side: [side.early_stopping(early_stopping_patience=2)],
        )
        outcome = build(side, scenario, tmp_path / side.name)
        loggers = [logging.getLogger(name) for name in ("transformers", "tr_core", "tr_log", "tr")]
        for logger in loggers:
            monkeypatch.setattr(logger, "level", logging.WARNING)
            logger.addHandler(collect)
        try:
            outcome.trainer.train()
        finally:
            for logger in loggers:
                logger.removeHandler(collect)
        ends.append(outcome.trainer.state.global_step)
    assert ends == [3, 3]
    assert len([line for line in lines["reference"] if "early stopping is disabled" in line]) == 3
    assert [line for line in lines["ours"] if "stop" in line] == []
