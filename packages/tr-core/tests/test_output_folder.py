"""An output folder that cannot be written to ends a run before its first step, in words."""

import os

import pytest
from memory_checkpointer import MemoryCheckpointer

from tr_core.checkpoint import saving
from tr_core.validation import why_not_writable


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_file_in_the_way_is_found_before_training(make_trainer, tmp_path, monkeypatch, below):
    (tmp_path / "taken").touch()
    monkeypatch.setattr(saving, "build_checkpointer", lambda *given: MemoryCheckpointer(tmp_path))  # installed
    trainer = make_trainer(output_dir=str(tmp_path / "taken" / below), save_strategy="steps")
    with pytest.raises(ValueError, match=r"cannot be made: \S+taken is a file; give another .*save_strategy='no'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_file_in_the_way_of_nothing_is_left_alone(make_trainer, tmp_path):
    (tmp_path / "taken").touch()
    own = MemoryCheckpointer(tmp_path / "elsewhere")
    options = {"output_dir": str(tmp_path / "taken"), "save_strategy": "epoch", "checkpointer": own}
    assert make_trainer(**options).train().global_step == 5
    assert own.saves == [5]


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert f"this user may not write to {tmp_path}; give another folder" in why_not_writable(tmp_path / "run" / "one")
    assert why_not_writable(tmp_path.parent) == ""
