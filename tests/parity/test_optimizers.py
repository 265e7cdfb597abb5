"""Optimizers, decay, clipping, schedules and precision."""

import parity_data as data
import parity_models as models
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, build, make_model, warnings_of


def test_an_optimizer_and_a_schedule_that_are_given_are_used_in_the_same_way(tmp_path):
    outcomes = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(models.Mlp, data.classes())
        model = make_model(scenario)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
        scenario.options = {"optimizers": (optimizer, schedule)}
        outcome = build(side, scenario, tmp_path / side.name, model)
        with warnings_of(side):
            outcome.output = outcome.trainer.train()
        outcomes.append(outcome)
    assert_same(*outcomes)
