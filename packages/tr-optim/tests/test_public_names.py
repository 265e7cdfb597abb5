from pathlib import Path

import tr_optim


def test_public_names_are_the_frozen_ones():
    frozen = Path(__file__).parents[1].joinpath("api.txt").read_text().split()
    assert sorted(tr_optim.__all__) == frozen
    assert all(hasattr(tr_optim, name) for name in frozen)
