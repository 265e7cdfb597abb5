"""`trainer check` as a command: what it accepts, and that a script stops where it would begin."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tr_core.preflight.cli import main
from tr_core.preflight.requested import VARIABLE, PreflightDone, stop_if_requested

CORPUS = Path(__file__).parent / "broken_configs"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(CORPUS))
    return tmp_path


@pytest.fixture
def check_script(folder, capsys):
    def run(text, *words):
        Path("script.py").write_text(text)
        code = main(["--json", "script.py", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


def found(report):
    return [problem["code"] for problem in report["problems"] if problem["severity"] != "info"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("absent.yaml", "T004", "absent.yaml"),
        ("absent.py", "T005", "FileNotFoundError"),
        ("notes.txt", "T004", "has the unknown ending '.txt'; needs .yaml, .yml, .toml or .json"),
    ],
)
def test_a_file_that_is_not_there_or_of_another_kind_is_an_error(folder, capsys, name, code, message):
    (folder / "notes.txt").write_text("")
    assert main(["--json", name]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == code
    assert message in problem["message"]


@pytest.mark.parametrize("words", [[], ["--jsn", "x.yaml"]])
def test_words_that_the_command_does_not_know_are_a_usage_error(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage: trainer check" in capsys.readouterr().err


def test_a_command_without_a_file_asks_for_the_file_and_for_nothing_else(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.endswith("the following arguments are required: SCRIPT|CONFIG\n")


def test_the_help_says_what_is_done_and_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for part in (
        "SCRIPT|CONFIG",
        "without training a step",
        "exit codes: 0 no errors; 1 errors",
        "check-codes.md",
    ):
        assert part in text


def test_a_configuration_without_problems_prints_a_table_and_gives_0(folder, capsys):
    (folder / "run.yaml").write_text("save_strategy: 'no'\nuse_cpu: true\nmax_steps: 10\n")
    assert main(["run.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "preflight of run.yaml"
    assert lines[-1] == "no problems found"
    assert "  steps                 10" in lines


def test_warnings_fail_the_command_only_if_it_is_strict(folder):
    (folder / "run.yaml").write_text("save_strategy: 'no'\nmax_steps: 10\neval_strategy: steps\neval_steps: 20\n")
    assert (main(["run.yaml"]), main(["--strict", "run.yaml"])) == (0, 1)


def test_an_unknown_option_may_be_one_of_the_scripts_own(folder, capsys):
    (folder / "run.yaml").write_text("save_strategy: 'no'\nwidth: 64\npredict_with_generate: true\n")
    assert main(["--json", "run.yaml"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert found(report) == ["T001"]
    assert report["problems"][1]["message"] == "options of a script's own are known to the script only: check that"


BEGIN = """
import parts

data = {"train_dataset": parts.rows(), "eval_dataset": parts.rows(6)}
trainer = parts.Trainer(parts.Classifier(), parts.arguments(), **data)
"""


@pytest.mark.parametrize(
    "call",
    ["train()", "evaluate()", "evaluate(parts.rows(3))", "predict(parts.rows(3))", "save_model()", "push_to_hub()"],
)
def test_a_script_stops_where_it_would_train_evaluate_predict_or_save(check_script, folder, call):
    code, report, _ = check_script(f"{BEGIN}trainer.{call}\nopen('went_on', 'w')\n")
    assert (code, found(report)) == (0, [])
    assert report["target"] == "script.py"
    assert report["figures"]["steps"] == 5
    assert sorted(path.name for path in folder.iterdir()) == ["script.py"]


def test_a_script_without_training_data_that_predicts_is_checked_for_that(check_script):
    text = (
        "import parts\ntrainer = parts.Trainer(parts.Classifier(), parts.arguments())\ntrainer.predict(parts.rows(3))\n"
    )
    code, report, _ = check_script(text)
    assert (code, found(report)) == (0, [])
    assert "steps" not in report["figures"]
    assert report["figures"]["metrics"] == ["eval_loss"]


def test_a_script_that_catches_everything_and_saves_at_the_end_writes_nothing(check_script, folder):
    text = f"""{BEGIN}
for attempt in range(3):
    try:
        trainer.train()
    except BaseException:
        pass
    finally:
        try:
            trainer.save_model()
        except BaseException:
            pass
"""
    code, report, err = check_script(text)
    assert (code, found(report)) == (0, [])
    assert err.count("Traceback") == 0
    assert (folder / "script.py").exists()
    assert not (folder / "out").exists()


def test_no_callback_hears_of_a_trainer_that_is_checked(check_script):
    text = """
import parts

class Opening:
    def on_init_end(self, args, state, control, **kwargs):
        raise ConnectionError("opened")

parts.Trainer(parts.Classifier(), parts.arguments(), train_dataset=parts.rows(), callbacks=[Opening()]).train()
"""
    code, report, _ = check_script(text)
    assert (code, found(report)) == (0, [])


def test_a_process_that_the_script_starts_stops_there_too_and_its_report_arrives(check_script, folder):
    text = f"""
import multiprocessing

def job():
    import sys
    sys.path.insert(0, {str(CORPUS)!r})
    import parts
    parts.train(eval_dataset=parts.rows(6), compute_metrics=parts.accuracy)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=job)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    code, report, _ = check_script(text)
    assert (code, found(report)) == (0, [])
    assert report["figures"]["metrics"] == ["eval_accuracy", "eval_loss"]
    assert not (folder / "out").exists()


def test_what_a_script_prints_is_not_in_the_report(check_script):
    _, report, err = check_script(f"print('a line of the script')\n{BEGIN}trainer.train()\n")
    assert report["target"] == "script.py"
    assert "a line of the script" in err


def test_a_script_gets_its_own_arguments_name_and_folder(check_script, folder):
    (folder / "beside.py").write_text("here = True\n")
    text = "import sys, beside\nassert (sys.argv[1:], __name__) == (['--json', 'x'], '__main__')\nsys.exit(7)\n"
    _, report, _ = check_script(text, "--json", "x")
    assert "exit code 7" in report["problems"][0]["message"]
    del sys.modules["beside"]


def test_the_process_is_as_before_after_a_script_was_checked(check_script):
    before = (list(sys.argv), list(sys.path), dict(os.environ), sys.modules["__main__"])
    check_script(f"{BEGIN}trainer.train()\n")
    assert (list(sys.argv), list(sys.path), dict(os.environ), sys.modules["__main__"]) == before
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()  # an optimizer may make steps again
    assert weight.item() == -1


def test_a_rank_that_is_not_the_first_prints_nothing(folder, capsys, monkeypatch):
    (folder / "run.yaml").write_text("save_strategy: 'no'\n")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["run.yaml"])
    assert capsys.readouterr().out == ""


def test_a_run_that_nobody_asked_to_check_continues(make_trainer):
    assert stop_if_requested(make_trainer()) is None


def test_a_run_that_is_checked_ends_by_an_exit_that_except_exception_does_not_catch(
    make_trainer, tmp_path, monkeypatch
):
    trainer = make_trainer()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "report.json"))
    with pytest.raises(PreflightDone) as caught:
        trainer.train()
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 0
    assert not isinstance(caught.value, Exception)
    assert json.loads((tmp_path / "report.json").read_text())["problems"] == []
    assert trainer.state.global_step == 0
