import json

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tr_log import TensorBoardTracker


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def curve(folder, name):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_curves_and_settings_are_what_was_logged(tmp_path, make_loop):
    make_loop([TensorBoardTracker.from_arguments(None)], tmp_path, max_steps=4, learning_rate=0.5).train()
    (folder,) = (tmp_path / "runs").iterdir()
    assert curve(folder, "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert curve(folder, "eval/loss") == [(2, pytest.approx(1 / 3)), (4, pytest.approx(0.2))]
    text = read(folder).Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text.removeprefix("```json\n").removesuffix("\n```"))["learning_rate"] == 0.5


def test_the_folder_is_that_of_the_arguments_then_of_the_environment(tmp_path, make_loop, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "environment"))
    make_loop([TensorBoardTracker()], tmp_path, logging_dir=str(tmp_path / "arguments")).train()
    make_loop([TensorBoardTracker()], tmp_path, logging_dir=None).train()
    make_loop([TensorBoardTracker(tmp_path / "own")], tmp_path, logging_dir=str(tmp_path / "arguments")).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arguments", "environment", "own"]


def test_a_training_with_another_output_folder_has_another_folder_of_events(tmp_path, make_loop):
    loop = make_loop([TensorBoardTracker()], tmp_path / "first", max_steps=2)
    loop.train(eval_steps=0)
    loop.evaluate()
    loop.args.output_dir = str(tmp_path / "second")
    loop.train(stop_at=1, eval_steps=0)
    loop.evaluate()
    for name, steps, evaluated in (("first", [1, 2], [2]), ("second", [1], [1])):
        (folder,) = (tmp_path / name / "runs").iterdir()
        assert [step for step, _ in curve(folder, "train/loss")] == steps
        assert [step for step, _ in curve(folder, "eval/loss")] == evaluated


def test_trials_have_folders_of_their_own_also_in_a_folder_that_was_chosen(tmp_path, make_loop):
    of_arguments = make_loop([TensorBoardTracker()], tmp_path, max_steps=1, logging_dir=str(tmp_path / "chosen"))
    given = make_loop([TensorBoardTracker(tmp_path / "given")], tmp_path, max_steps=1)
    for loop in (of_arguments, given):
        for number, name in enumerate((None, "lr=0.1/wd=0")):
            loop.args.output_dir = str(tmp_path / f"run-{number}")
            vars(loop.state).update(is_hyper_param_search=True, trial_name=name)
            loop.train(eval_steps=0)
    for chosen in ("chosen", "given"):
        assert sorted(path.name for path in (tmp_path / chosen).iterdir()) == ["lr=0.1_wd=0", "run-0"]
        for folder in (tmp_path / chosen).iterdir():
            assert [step for step, _ in curve(folder, "train/loss")] == [1]


def test_a_resumed_run_in_the_same_folder_replaces_what_came_after_its_step(tmp_path, make_loop):
    place = {"logging_dir": str(tmp_path / "curves")}
    make_loop([TensorBoardTracker()], tmp_path, **place).train(stop_at=4, eval_steps=0)
    make_loop([TensorBoardTracker()], tmp_path, **place).train(resume=(2, []), stop_at=3, eval_steps=0)
    assert [step for step, _ in curve(tmp_path / "curves", "train/loss")] == [1, 2, 3]


def test_an_evaluation_after_the_training_is_added(tmp_path, make_loop):
    loop = make_loop([TensorBoardTracker(tmp_path / "curves")], tmp_path, max_steps=2)
    loop.train(eval_steps=0)
    loop.evaluate()
    assert curve(tmp_path / "curves", "eval/loss") == [(2, pytest.approx(1 / 3))]
