"""Backends are within rounding of one process: a part of what `equality.py` measures of all of them."""

import equality
import pytest

CHECKED = ("1", "1 clip mask short", "3 mask short", "3 clip mask")


@pytest.fixture(scope="module")
def references():
    return {case: equality.train(case, {}) for case in CHECKED}


ROWS = [("DDP", 3, "ddp"), ("FSDP2 full_shard", 2, "fsdp")]


@pytest.mark.row("numbers")
@pytest.mark.parametrize(("row", "world_size"), [pytest.param(*r, marks=pytest.mark.column(name)) for *r, name in ROWS])
def test_losses_and_weights_differ_by_roundings_at_most(references, row, world_size):
    measured = equality.measure(row, world_size, references, CHECKED)
    of_losses, of_weights = equality.bounds(equality.gradient_sizes())
    assert of_losses < 1e-4
    assert of_weights < 1e-5
    for case, (losses, weights) in measured.items():
        assert losses < of_losses, case
        assert weights < of_weights, case


@pytest.mark.column("ddp")
def test_the_conditions_change_what_is_trained(references):
    """Or nothing would be shown by columns that are alike."""
    for one, other in ((0, 1), (1, 2), (2, 3)):
        losses, weights = equality.difference(references[CHECKED[one]], references[CHECKED[other]])
        assert min(losses, weights) > 1e-4
