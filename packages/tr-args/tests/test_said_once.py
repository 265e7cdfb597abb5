"""A command line that is wrong is wrong on all ranks: rank 0 says so first."""

import sys

import pytest

from tr_args import HfArgumentParser, TrainingArguments, alike


@pytest.fixture
def waits(monkeypatch):
    waited = []
    monkeypatch.setattr(alike.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize(("rank", "patience_s"), [("", []), ("0", []), ("1", [5.0])])
def test_a_wrong_command_line_is_said_by_rank_0_first(monkeypatch, capsys, tmp_path, waits, rank, patience_s):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", str(tmp_path), "--lerning_rate", "1"])
    with pytest.raises(SystemExit) as end:
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    assert end.value.code == 2
    assert waits == patience_s
    assert "did you mean --learning_rate?" in capsys.readouterr().err


def test_wrong_arguments_of_a_script_are_shown_by_rank_0_first(monkeypatch, tmp_path, waits):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append((len(waits), error)))
    monkeypatch.delenv("TR_LAUNCH_ERROR_FILE", raising=False)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match="lerning_rate") as caught:
            TrainingArguments(output_dir=str(tmp_path), lerning_rate=1)
        sys.excepthook(type(caught.value), caught.value, None)
    assert [waited for waited, _ in shown] == [0, 1]
