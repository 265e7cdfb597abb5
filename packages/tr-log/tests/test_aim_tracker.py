"""Aim is recorded by accelerate's tracker; what is missing is named. `nox -s trackers` records with the real one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import tr_log.aim_tracker as aim
from tr_log.aim_tracker import AimTracker


@pytest.mark.parametrize("missing", ["accelerate", "its library"])
def test_a_missing_library_is_an_error_that_names_the_extra(missing, monkeypatch):
    monkeypatch.setattr(aim, "find_spec", lambda package: None if missing == "accelerate" else object())
    monkeypatch.setitem(sys.modules, "aim", None)
    message = r"report_to names 'aim', .* run `pip install 'tr-log\[aim\]'`, or take aim out of report_to"
    with pytest.raises(ImportError, match=message):
        AimTracker.from_arguments(None)


def test_a_run_stays_open_until_the_next_training_and_ends_with_one_that_fails(tmp_path, monkeypatch):
    said = []

    def built(name, **kwargs):
        said.append(("built", name, kwargs["experiment"], kwargs["logging_dir"]))
        return SimpleNamespace(
            start=lambda: said.append("start"),
            store_init_configuration=lambda values: said.append(sorted(values)),
            log=lambda numbers, step: said.append((step, numbers)),
            finish=lambda: said.append("finish"),
        )

    monkeypatch.delenv("AIM_REPO", raising=False)
    monkeypatch.setattr(aim, "find_spec", lambda package: object())
    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "accelerate.tracking", SimpleNamespace(AimTracker=built))
    args = SimpleNamespace(output_dir=str(tmp_path / "mine"), run_name="first")
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    tracker = AimTracker.from_arguments(args)
    for error in (None, ValueError("lost")):
        tracker.on_train_begin(args, state, None)
        tracker.on_log(args, state, None, logs={"eval_loss": 0.5})
        tracker.on_train_end(args, state, None, error=error)
    opened = [("built", "first", "mine", str(tmp_path / "mine")), "start", ["output_dir", "run_name"]]
    once = [*opened, (1, {"eval/loss": 0.5})]
    assert said == [*once, "finish", *once, "finish"]


def test_the_adapter_imports_neither_accelerate_nor_aim():
    script = "import sys, tr_log.aim_tracker; print([name for name in sys.argv[1:] if name in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", script, "accelerate", "torch", "aim"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
