"""What an earlier run wrote and somebody changed is refused in words."""

import json

import pytest

from tr_core import TrainerState
from tr_core.search.journal import Journal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 5_000, "levels deep"),
        ('{"global_step": ' + "9" * 5_000 + "}", "5,000 characters"),
        ('{"global_step": 1, "global_step": 2}', "the key global_step twice"),
        ("[1]", "holds a list"),
        ("{", "not valid JSON"),
        ("\0", "not valid JSON"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, text, expected):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match=f"the trainer state .*{expected}"):
        TrainerState.load_from_json(tmp_path / "trainer_state.json")


@pytest.mark.parametrize(
    "entry",
    [
        '{"trial": null}',
        '{"trial": {"a": 1}}',
        '{"trial": 0, "values": 3}',
        '{"trial": 0, "values": [[]]}',
        '{"trial": 0, "values": [' + "9" * 400 + "]}",
        '{"trial": 0, "reports": [1]}',
        '{"trial": 0, "reports": {"x": 1}}',
        '{"trial": 0, "params": []}',
        '{"trial": 0, "state": null}',
        '{"trial": 0, "name": 3}',
        '{"trial": 0, "params": ' + "[" * 5_000,
    ],
)
def test_trials_that_are_none_are_refused(tmp_path, entry):
    path = tmp_path / "trials.jsonl"
    path.write_text(json.dumps({"search": {"a": 1}}) + f"\n{entry}\n")
    with pytest.raises(ValueError, match=r"trials\.jsonl.*restore it, or remove"):
        Journal(path).open({"a": 1})
