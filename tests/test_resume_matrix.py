"""A run that is stopped at any step and gone on with ends as the one left alone, to the last bit, however it trains."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from resume_runs import (
    VALUES,
    Setting,
    all_settings,
    are_same,
    build,
    fingerprint,
    optimizer_settings,
    pairwise_settings,
    steps_that_end_otherwise,
)


def test_the_chosen_settings_have_every_pair_of_values():
    chosen = pairwise_settings()
    assert len(chosen) < len(all_settings()) / 3
    for one, values in VALUES.items():
        for other, others in VALUES.items():
            if one < other:
                found = {(getattr(setting, one), getattr(setting, other)) for setting in chosen}
                assert found == {(value, second) for value in values for second in others}


SETTINGS = [pytest.param(s, marks=[pytest.mark.slow] * (s.workers > 0), id=str(s)) for s in pairwise_settings()]
FEW = ("adamw_torch_fused", "adafactor", "lomo", "adalomo", "galore_adamw_8bit_layerwise lazy", "fira_adamw_layerwise")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_gone_on_with_at_any_step_ends_bit_equal(setting, tmp_path):
    different, count = steps_that_end_otherwise(setting, tmp_path / "run", every=5)  # the session takes every step
    assert different == []
    assert count >= 3


@pytest.mark.parametrize("optim", FEW)  # the session takes every one
def test_an_optimizer_goes_on_bit_equal(optim, tmp_path):
    settings = {str(setting.optim): setting for setting in optimizer_settings(order="random", asynchronous=True)}
    assert steps_that_end_otherwise(settings[optim], tmp_path / "run", 4)[0] == []


def test_zero_and_two_workers_give_the_same_bits(tmp_path):
    ends = []
    for workers in (0, 2):
        run = build(Setting(workers=workers), tmp_path, save_strategy="no")
        run.train()
        ends.append(fingerprint(run))
    assert are_same(*ends)
