"""Each line of the documentation that starts something is run in a shell, and trains as many processes as it says."""

import importlib.util
import sys
import tomllib

import pytest
from launched_jobs import HERE, run, said
from terminal import answer
from workplace import BIN, GLUE, Workplace

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

LINES = {line["id"]: line for line in tomllib.loads((HERE / "documented_lines.toml").read_text("utf-8"))["line"]}
IN_SHELL = {name: line for name, line in LINES.items() if "test" not in line}
# How many such lines each file of the documentation has.
COUNTS = {"000": 5, "001": 3, "002": 18, "003": 3, "004": 5}


@pytest.fixture
def workplace(tmp_path, tiny_bert):
    return Workplace(tmp_path, tiny_bert)


@pytest.mark.parametrize("name", IN_SHELL)
def test_a_line_of_the_documentation_trains_the_processes_it_asks_for(name, workplace, request):
    line = IN_SHELL[name]
    if "needs" in line and importlib.util.find_spec(line["needs"]) is None:
        pytest.skip(f"needs {line['needs']}")
    text = line["text"]
    for old, new in line.get("changes", ()):
        assert old in text
        text = text.replace(old, new)
    if "config" in line:
        workplace.configure(line["config"], **line.get("config_changes", {}))
    code, output, errors = workplace.run_in_shell(text, 4 // line["processes"], **line.get("environment", {}))
    assert code == 0, errors
    (end,) = said(output)
    assert (end["world_size"], end["strategy"]) == (line["processes"], line["strategy"])
    assert end["visible"] == line.get("visible", "")
    losses, tolerance = expected(text, request)
    assert end["losses"] == pytest.approx(losses, abs=tolerance)


def expected(text, request):
    """Return the losses of one process, and how near those of the line have to be."""
    if "run_glue" in text:
        return request.getfixturevalue("glue_alone"), 0.02  # some compute in bfloat16, one learns more slowly
    if "train.py" in text:
        return request.getfixturevalue("accelerate_alone")["losses"], 1e-5
    return request.getfixturevalue("losses_alone"), 1e-5


@pytest.fixture(scope="session")
def glue_alone(tmp_path_factory, tiny_bert):
    place = Workplace(tmp_path_factory.mktemp("glue"), tiny_bert)
    given = "--model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --num_train_epochs 3"
    numbers = "--per_device_train_batch_size 32 --learning_rate 5e-5 --output_dir out"
    code, output, errors = place.run_in_shell(f"python {GLUE} {given} {numbers}", 4)
    assert code == 0, errors
    return said(output)[0]["losses"]


@pytest.mark.parametrize("name", ["notebook_launcher", "notebook_launcher with a model"])
@pytest.mark.parametrize(
    ("launcher", "loop"), [("tr_dist", "accelerate"), ("tr_dist", "trainer"), ("accelerate", "trainer")]
)
def test_a_notebook_launches_a_function(name, launcher, loop, workplace, notebook_alone):
    options = ["--with_model"] if "(model,)" in LINES[name]["text"] else []
    code, output, errors = notebook(workplace, launcher, loop, *options)
    assert code == 0, errors
    (end,) = said(output)
    assert end["world_size"] == 2
    assert end["losses"] == pytest.approx(notebook_alone[loop], abs=1e-5)


def notebook(place, *words, **variables):
    """Without GPUs the number of processes has to be said, and to Accelerate that the CPU is meant."""
    text = f"import sys; sys.path.insert(0, {str(HERE)!r}); from notebook_run import main; main()"
    command = [sys.executable, "-c", text, *words]
    return run(command, cwd=place.folder, ACCELERATE_USE_CPU="true", **variables)


@pytest.fixture(scope="session")
def notebook_alone(tmp_path_factory, tiny_bert):
    losses = {}
    for loop in ("trainer", "accelerate"):
        place = Workplace(tmp_path_factory.mktemp("notebook"), tiny_bert)
        code, output, errors = notebook(place, "tr_dist", loop, PROCESSES="1", BATCH_SIZE="4")
        assert code == 0, errors
        losses[loop] = said(output)[0]["losses"]
    return losses


def test_the_list_of_lines_is_complete():
    at = [place for line in LINES.values() for place in line["at"]]
    assert len(set(at)) == len(at)
    assert {file: sum(place.startswith(file) for place in at) for file in COUNTS} == COUNTS
    for name, line in LINES.items():
        assert ("changes" in line) == ("because" in line), name
        assert "test" not in line or line["test"] in globals(), name


def test_what_accelerate_config_asks_for_is_a_file_that_both_launchers_take(workplace, losses_alone):
    """At a terminal, with Enter for each question but two: several GPUs, and two of them."""
    home, answers = workplace.folder / "home", {"type of machine": "4", "How many GPU": "2"}
    code, seen = answer([BIN / "accelerate", "config"], answers, HF_HOME=str(home))
    assert code == 0, seen
    file = home / "accelerate" / "default_config.yaml"
    assert "distributed_type: MULTI_GPU\n" in file.read_text()
    for launch in ("accelerate launch --main_process_port $PORT", "trainer launch"):
        line = f"{launch} --config_file home/accelerate/default_config.yaml trainer-program.py ..."
        code, output, errors = workplace.run_in_shell(line, 2)
        assert code == 0, errors
        (end,) = said(output)
        assert (end["world_size"], end["strategy"]) == (2, "DDP")
        assert end["losses"] == pytest.approx(losses_alone, abs=1e-5)


def test_what_trainer_config_asks_for_is_a_file_that_accelerate_reads(workplace):
    file = workplace.folder / "answered.yaml"
    answers = {"type of machine": "4", "How many GPU": "2"}
    code, seen = answer([BIN / "trainer", "config", "--config_file", file], answers)
    assert code == 0, seen
    assert f"start with: trainer launch --config_file {file} SCRIPT" in seen
    text = "from accelerate.commands.config.config_args import load_config_from_file as f; print(f('answered.yaml'))"
    code, output, errors = workplace.run_in_shell(f'python -c "{text}"', 2)
    assert code == 0, errors
    assert "num_processes=2" in output
    assert "MULTI_GPU" in output
