"""Every optimizer that is installed is in the list that other tests go through."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from optimizer_settings import INSTALLED, SETTINGS


def test_every_optimizer_that_tr_optim_offers_is_in_the_list():
    assert {setting.optim for setting in SETTINGS} == set(INSTALLED)
    assert len({str(setting) for setting in SETTINGS}) == len(SETTINGS)
