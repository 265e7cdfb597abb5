"""The newest checkpoint is the one saved last, whatever its step."""

import logging

import pytest
from ckpt_parts import foreign, number_of, parts, restored, rewritten, save_steps

from tr_ckpt import Checkpointer, CheckpointError, discovery, manifest, restoring


def steps_by_age(directory):
    return [found.step for found in discovery.by_age(directory, "checkpoint")]


def sequences(checkpointer):
    return {step: manifest.read(checkpointer.path(step)).sequence for step in checkpointer.steps()}


@pytest.fixture
def rewound(tmp_path):
    """A run of steps 10, 20 and 30 that went back to 10 and saved 12."""
    checkpointer = save_steps(tmp_path)
    assert checkpointer.restore(parts(), checkpointer.path(10)) == 10
    checkpointer.save(12, parts(12))
    return checkpointer


def test_a_run_that_went_back_goes_on_from_what_it_saved_since(rewound):
    into = parts()
    assert rewound.restore(into) == 12
    assert number_of(into) == 12
    assert rewound.restore(into, rewound.directory) == 12
    assert rewound.steps() == [10, 12, 20, 30]


def test_a_run_that_went_back_and_saved_nothing_since_has_not_left_anything(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (10, 20):
        checkpointer.save(step, parts(step))
    checkpointer.restore(parts(), checkpointer.path(10))
    assert checkpointer.restore(parts()) == 20


def test_a_step_that_is_saved_again_is_the_newest(rewound):
    rewound.save(20, parts(21))
    assert sequences(rewound) == {10: 1, 20: 5, 30: 3, 12: 4}
    assert restored(rewound) == (20, 21)


def test_what_was_left_behind_is_fallen_back_to_in_order_of_its_age(rewound, caplog):
    for step in (12, 30):
        (rewound.path(step) / "model.json").unlink()
    assert rewound.restore(parts()) == 20
    named = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in named] == ["skipped checkpoint-12", "skipped checkpoint-30"]
    assert [f"skipped {text}" for text in rewound.restored.skipped] == named


def test_a_fresh_run_in_the_folder_of_an_earlier_one_has_the_newest(tmp_path):
    for step in (100, 200):
        Checkpointer(tmp_path).save(step, parts(step))
    Checkpointer(tmp_path).save(5, parts(5))
    assert Checkpointer(tmp_path).restore(parts()) == 5


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{")])
def test_one_whose_manifest_cannot_be_read_may_be_the_newest_and_is_named(damage, rewound, caplog):
    damage(rewound.path(12) / "manifest.json")
    assert rewound.restore(parts()) == 30
    assert caplog.text.count("skipped") == 1
    assert "skipped checkpoint-12: manifest.json " in caplog.text


def test_one_that_is_known_to_be_older_is_not_looked_at(rewound, caplog):
    (rewound.path(20) / "model.json").unlink()
    (rewound.path(30) / "model.json").unlink()
    assert rewound.restore(parts()) == 12
    assert caplog.text == ""


def test_what_another_program_left_is_older_than_all_that_was_saved_here_and_later_steps_are_named(tmp_path, caplog):
    for step in (1, 2, 9):
        foreign(tmp_path, step)
    Checkpointer(tmp_path).save(5, parts(5))
    assert steps_by_age(tmp_path) == [1, 2, 9, 5]
    checkpointer = Checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert checkpointer.restore(parts()) == 5
    assert len(caplog.records) == 1
    assert "checkpoint-9 is of another program and counts as older than checkpoint-5" in caplog.text
    assert list(checkpointer.restored.skipped) == caplog.messages


def test_one_of_a_newer_version_has_its_place_in_the_order(rewound):
    rewritten(rewound.path(20), format=2)
    assert rewound.restore(parts()) == 12
    rewritten(rewound.path(12), format=2)
    with pytest.raises(CheckpointError, match="its format is 2; this version reads 1"):
        rewound.restore(parts())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_one_that_followed(
    when, tmp_path, caplog, monkeypatch
):
    running, damages = Checkpointer(tmp_path, keep_last=1), discovery.damages
    running.save(1, parts(10))

    def meanwhile(*given):
        monkeypatch.setattr(discovery, "damages", damages)
        found = damages(*given) if when == "after" else None
        running.save(2, parts(20))  # which removes the first
        return damages(*given) if found is None else found

    monkeypatch.setattr(discovery, "damages", meanwhile)
    assert restored(tmp_path) == (2, 20)
    assert caplog.messages == ["skipped checkpoint-1: it was removed while it was being read"]


def test_a_read_that_takes_long_is_told_before_it_begins(tmp_path, caplog, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, parts(3))
    caplog.set_level(logging.INFO, "tr_ckpt.restoring")
    assert checkpointer.restore(parts()) == 3
    assert not caplog.records
    monkeypatch.setattr(restoring, "LONG_READ_BYTES", 1)
    assert checkpointer.restore(parts()) == 3
    assert caplog.messages == [f"reading and verifying {tmp_path / 'checkpoint-3'}, 0.0 GB"]
