"""What is wrong on all ranks is shown by rank 0; the others wait before they show it too."""

import pathlib
import sys

import pytest

from tr_dist import alike
from tr_dist.alike import alike_on_all_ranks


@pytest.fixture
def hook(monkeypatch):
    shown = []
    monkeypatch.delenv("TR_LAUNCH_ERROR_FILE", raising=False)
    monkeypatch.setattr(alike.time, "sleep", shown.append)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    return shown


def refuse(words="bad"):
    with pytest.raises(ValueError, match=words) as caught, alike_on_all_ranks():
        raise ValueError(words)
    return caught.value


def end_with(error):
    sys.excepthook(type(error), error, error.__traceback__)


def test_another_rank_waits_for_its_end_before_it_shows_the_same(monkeypatch, hook):
    monkeypatch.setenv("RANK", "3")
    end_with(refuse())
    assert hook == [5.0, "bad"]


def test_what_becomes_of_another_error_is_as_before(monkeypatch, hook):
    monkeypatch.setenv("RANK", "3")
    refuse()  # and handled
    end_with(ArithmeticError("mine"))
    assert hook == ["mine"]


@pytest.mark.parametrize("variables", [{}, {"RANK": "0"}, {"RANK": "1", "TR_LAUNCH_ERROR_FILE": "x"}])
def test_rank_0_and_ranks_whose_launcher_says_it_once_are_as_before(monkeypatch, hook, variables):
    for name in ("RANK", "TR_LAUNCH_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    end_with(refuse("all of it"))
    assert hook == ["all of it"]


def test_only_refusals_are_alike(monkeypatch, hook):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConnectionError) as caught, alike_on_all_ranks():
        raise ConnectionError("lost")
    end_with(caught.value)
    assert hook == ["lost"]


def test_it_is_a_decorator_too(monkeypatch, hook):
    monkeypatch.setenv("RANK", "1")

    @alike_on_all_ranks()
    def check(value):
        """Check it."""
        if value:
            raise ValueError("bad")
        return value

    assert (check(0), check.__doc__) == (0, "Check it.")
    with pytest.raises(ValueError) as caught:
        check(1)
    end_with(caught.value)
    assert hook == [5.0, "bad"]
    assert pathlib.Path(check.__wrapped__.__code__.co_filename).name == "test_alike.py"
