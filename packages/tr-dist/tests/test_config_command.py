"""`trainer config`: Accelerate's questions, and a file that `trainer launch` reads."""

import json
import sys
import types

import pytest

from tr_dist.launching.config_command import main


@pytest.fixture
def answers(monkeypatch):
    """Has Accelerate's command write a given content."""
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}

    def config_command(options):
        with open(options.config_file, "w") as file:
            json.dump(content, file)

    module = types.SimpleNamespace(config_command=config_command)
    for name in ("accelerate", "accelerate.commands", "accelerate.commands.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "accelerate.commands.config.config", module)
    return content


def test_what_accelerate_asks_for_is_written_and_the_next_command_named(answers, tmp_path, capsys):
    path = tmp_path / "new" / "config.json"
    assert main(["--config_file", str(path)]) == 0
    assert json.loads(path.read_text()) == answers
    assert capsys.readouterr().out == f"start with: trainer launch --config_file {path} SCRIPT\n"


def test_a_file_that_exists_is_replaced_only_if_asked(answers, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("mine")
    assert main(["--config_file", str(path)]) == 2
    assert (path.read_text(), "say --overwrite" in capsys.readouterr().err) == ("mine", True)
    assert main(["--overwrite", "--config_file", str(path)]) == 0
    assert json.loads(path.read_text()) == answers


def test_answers_that_cannot_be_started_here_are_named(answers, tmp_path, capsys):
    answers |= {"compute_environment": "AMAZON_SAGEMAKER"}
    assert main(["--config_file", str(tmp_path / "c.json")]) == 2
    assert "AMAZON_SAGEMAKER is started by its own tools" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(answers, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["--config_file", str(tmp_path / "taken" / "c.json")]) == 2
    assert "c.json cannot be written: " in capsys.readouterr().err


def test_without_accelerate_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main(["--config_file", str(tmp_path / "c.yaml")]) == 2
    assert "pip install 'tr-dist[accelerate]'" in capsys.readouterr().err
    assert not (tmp_path / "c.yaml").exists()


def test_answers_on_the_command_line_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--defaults", "--zero_stage", "3"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --defaults --zero_stage 3; the answers are typed" in capsys.readouterr().err
