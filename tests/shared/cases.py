"""Choose which cases of a test every change runs."""

import pytest


def every_second(cases):
    """Mark every second case slow: a night has all."""
    return [pytest.param(case, marks=[pytest.mark.slow][: place % 2]) for place, case in enumerate(cases)]
