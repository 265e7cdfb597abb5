"""`trainer ckpt` lists and verifies, and says in words what is wrong."""

import io
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from ckpt_parts import flip, foreign, parts, rewritten, save

from tr_ckpt import Checkpointer, discovery, files, reads
from tr_ckpt.command import listing, main
from tr_ckpt.command.terminal import Progress

LOSSES = {9: 0.75, 10: 0.5, 20: 0.625}


@pytest.fixture
def run(tmp_path):
    """A folder with the checkpoints 9, 10 and 20, the second of them the best."""
    for step in (9, 10, 20):
        save(tmp_path, step, best=10 if step > 9 else 9, losses=LOSSES)
    return tmp_path


def rows(output):
    """Return the lines of the table, without its heading."""
    return output.split("\n\n")[0].splitlines()[1:]


def test_ls_lists_every_checkpoint_by_step(run, trainer_ckpt):
    heading, first, second, third, empty, of_each = trainer_ckpt("ls", run).out.splitlines()
    headings = ["checkpoint", "step", "size", "ranks", "saved at (UTC)", "eval_loss", "mark", "condition"]
    assert re.split(r"\s{2,}", heading) == headings
    assert re.match(r"checkpoint-9 +9 +\d.* kB +1  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +0\.75 +complete$", first)
    assert re.match(r"checkpoint-10 +10 .* 0\.5  best +complete$", second)
    assert re.match(r"checkpoint-20 +20 .* 0\.625  newest +complete$", third)
    assert empty == ""
    assert of_each == "parts: model scheduler trainer_state"


@pytest.mark.parametrize("width", [120, 80, 60, 45])
def test_ls_fits_the_terminal(run, width, capsys, monkeypatch):
    (run / "checkpoint-10" / "model.json").unlink()
    foreign(run, 5)
    (run / ".tmp-writing-checkpoint-30@elsewhere@1@ab").mkdir()
    monkeypatch.setenv("COLUMNS", str(width))
    main(["ls", str(run)])
    lines = capsys.readouterr().out.splitlines()
    longest = ".tmp-writing-checkpoint-30@elsewhere@1@ab:"  # a name is not broken
    assert max(map(len, lines)) <= max(width, len(longest))
    assert "checkpoint" in lines[0]
    assert "condition" in lines[0]


def test_ls_marks_what_was_saved_last_and_says_why_it_is_not_the_last_step(run, trainer_ckpt):
    save(run, 12)
    output = trainer_ckpt("ls", run).out
    assert [line.split()[0] for line in rows(output) if "newest" in line] == ["checkpoint-12"]
    note = (
        "checkpoint-12 was saved after checkpoint-20: a run went back, or started over. Resuming takes checkpoint-12.\n"
    )
    assert output.endswith(note)


def test_ls_shows_a_file_that_is_missing_but_not_one_that_was_changed(run, capsys, trainer_ckpt):
    flip(run / "checkpoint-9" / "model.safetensors")
    assert main(["ls", str(run)]) == 0
    (run / "checkpoint-20" / "model.json").unlink()
    capsys.readouterr()
    output = trainer_ckpt("ls", run, code=1).out
    assert [line.split()[-1] for line in rows(output)] == ["complete", "complete", "damaged"]
    assert "checkpoint-20: model.json is missing\n" in output
    assert [line.split()[0] for line in rows(output) if "newest" in line] == ["checkpoint-10"]


def test_ls_lists_the_checkpoints_of_another_program_as_such(run, trainer_ckpt):
    foreign(run, 5, log_history=[{"step": 4, "loss": 3.5}])
    output = trainer_ckpt("ls", run).out
    assert re.match(r"checkpoint-5 +5 +1\.\d+ kB +loss 3\.5 +foreign$", rows(output)[0])
    assert "checkpoint-5: it was written by another program, as transformers' Trainer writes them" in output


def test_what_is_to_be_said_of_many_is_said_once(tmp_path, trainer_ckpt):
    for step in (5, 10, 15, 20):
        foreign(tmp_path, step)
    output = trainer_ckpt("ls", tmp_path).out
    assert output.count("another program") == 1
    assert "checkpoint-5, checkpoint-10 … checkpoint-20 (4): it was written by another program" in output


def test_ls_of_nothing_but_checkpoints_of_another_program_knows_their_best(tmp_path, trainer_ckpt):
    for step in (5, 10):
        foreign(tmp_path, step, best_model_checkpoint="out/checkpoint-5")
    assert [("best" in line, "newest" in line) for line in rows(trainer_ckpt("ls", tmp_path).out)] == [
        (True, False),
        (False, False),
    ]


def test_a_checkpoint_without_a_manifest_is_listed_as_damaged(run, trainer_ckpt):
    (run / "checkpoint-11").mkdir()
    assert (
        "checkpoint-11: manifest.json is missing, so it is incomplete or was written by"
        in trainer_ckpt("ls", run, code=1).out
    )
    assert main(["ls", str(run / "checkpoint-11")]) == 1


def test_one_that_a_newer_version_wrote_is_told_from_a_damaged_one(run, trainer_ckpt):
    rewritten(run / "checkpoint-20", format=2)
    output = trainer_ckpt("ls", run).out
    assert rows(output)[-1].endswith("not readable")
    assert "checkpoint-20: its format is 2; this version reads 1 — install a newer tr-ckpt\n" in output
    assert main(["verify", str(run)]) == 1


def test_verify_of_nothing_that_could_be_verified_is_no_success(tmp_path, capsys):
    foreign(tmp_path, 5)
    assert main(["verify", str(tmp_path)]) == 1
    save(tmp_path, 6)
    assert main(["verify", str(tmp_path)]) == 0


def test_ls_mentions_what_a_run_left_behind_and_what_one_is_writing(run, trainer_ckpt):
    dead = multiprocessing.get_context("spawn").Process(target=int)
    dead.start()
    dead.join(60)
    (run / ".tmp-writing-checkpoint-40@elsewhere@1@ab").mkdir()
    (run / f".tmp-writing-checkpoint-30@{socket.gethostname()}@{dead.pid}@ab").mkdir()
    (run / f".tmp-removed-checkpoint-3@{socket.gethostname()}@{os.getppid()}@cd").mkdir()
    output = trainer_ckpt("ls", run).out
    ended = "left by a run that ended while writing checkpoint-30; the next save clears it away\n"
    assert f".tmp-writing-checkpoint-30@{socket.gethostname()}@{dead.pid}@ab: {ended}" in output
    assert (
        ".tmp-writing-checkpoint-40@elsewhere@1@ab: of a run on another machine or in another container, writing "
        "checkpoint-40; a run that saves here clears it away once nothing has changed in it for 75 s\n"
    ) in output
    assert re.search(r"\.tmp-removed-checkpoint-3@.*@cd: a run is removing checkpoint-3 now\n", output)


def test_ls_tells_which_have_which_parts(run, capsys):
    Checkpointer(run).save(30, {"model": parts()["model"]})
    main(["ls", str(run)])
    output = capsys.readouterr().out
    assert "parts of checkpoint-9, checkpoint-10, checkpoint-20: model scheduler trainer_state\n" in output
    assert "parts of checkpoint-30: model\n" in output


def test_json_says_all_of_it(run, trainer_ckpt):
    save(run, 12)
    foreign(run, 5)
    (run / "checkpoint-20" / "model.json").unlink()
    (run / ".tmp-writing-checkpoint-30@elsewhere@1@ab").mkdir()
    told = json.loads(trainer_ckpt("ls", "--json", run, code=1).out)
    told_of = {each["name"]: each for each in told["checkpoints"]}
    assert list(told_of) == [f"checkpoint-{step}" for step in (5, 9, 10, 12, 20)]
    assert {name: each["condition"] for name, each in told_of.items()} == {
        "checkpoint-5": "foreign",
        "checkpoint-9": "complete",
        "checkpoint-10": "complete",
        "checkpoint-12": "complete",
        "checkpoint-20": "damaged",
    }
    assert told_of["checkpoint-20"]["problem"] == "model.json is missing"
    twelfth = told_of["checkpoint-12"]
    assert twelfth["marks"] == ["newest"]
    assert twelfth["sequence"] == 4
    assert twelfth["step"] == 12
    assert twelfth["path"] == str(run / "checkpoint-12")
    assert twelfth["bytes"] == sum(path.stat().st_size for path in (run / "checkpoint-12").iterdir())
    assert twelfth["parts"] == ["model", "scheduler", "trainer_state"]
    assert "config.json" in twelfth["files"]
    assert "torch" in twelfth["versions"]
    assert told_of["checkpoint-9"]["metric"] == {"name": "eval_loss", "value": 0.75}
    assert told["left_behind"] == [
        {
            "name": ".tmp-writing-checkpoint-30@elsewhere@1@ab",
            "kind": "writing",
            "target": "checkpoint-30",
            "abandoned": None,
        }
    ]


def test_a_metric_that_is_no_number_leaves_the_json_valid(tmp_path, capsys):
    save(tmp_path, 1, losses={1: float("nan")})
    main(["ls", "--json", str(tmp_path)])
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["checkpoints"][0]["metric"] == {"name": "eval_loss", "value": "nan"}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ({"metric_for_best_model": "f1"}, "eval_f1"),
        ({"metric_for_best_model": "eval_f1"}, "eval_f1"),
        ({"metric_for_best_model": None}, "eval_f1"),  # its value is the best one the state holds
        ({"metric_for_best_model": "absent"}, "eval_loss"),
    ],
)
def test_the_metric_shown_is_the_one_that_chooses_the_best(tmp_path, written, shown, capsys):
    folder = foreign(
        tmp_path,
        5,
        best_metric=0.25,
        best_global_step=5,
        log_history=[{"step": 5, "eval_loss": 2.0, "eval_f1": 0.25, "eval_runtime": 0.25}],
    )
    (folder / "training_args.json").write_text(json.dumps(written))
    main(["ls", str(tmp_path)])
    assert shown in capsys.readouterr().out.splitlines()[0]


def test_verify_names_the_file_and_the_tensor(run, trainer_ckpt):
    flip(run / "checkpoint-20" / "model.safetensors")
    output = trainer_ckpt("verify", run, code=1).out
    assert [line.split()[-1] for line in rows(output)] == ["verified", "verified", "damaged"]
    assert [line.split()[0] for line in rows(output) if "newest" in line] == ["checkpoint-10"]
    where = r"checkpoint-20: model\.safetensors was changed after it was written: its SHA-256 differs.*tensor.* weight"
    assert re.search(where, output)
    told = json.loads(trainer_ckpt("verify", "--json", run, code=1).out)
    assert [each["condition"] for each in told["checkpoints"]] == ["verified", "verified", "damaged"]
    assert "model.safetensors was changed" in told["checkpoints"][2]["problem"]


def test_verify_names_all_damage_of_a_checkpoint(run, trainer_ckpt):
    folder = run / "checkpoint-10"
    (folder / "scheduler.json").unlink()
    flip(folder / "model.safetensors")
    [line] = [
        line for line in trainer_ckpt("verify", folder, code=1).out.splitlines() if line.startswith("checkpoint-10: ")
    ]
    assert "scheduler.json is missing" in line
    assert "model.safetensors was changed" in line


def test_one_checkpoint_can_be_verified_under_any_name(run, trainer_ckpt):
    (run / "checkpoint-9").rename(run / "best")
    [row] = rows(trainer_ckpt("verify", run / "best").out)
    assert re.match(r"best +9 .*verified$", row)
    assert "newest" not in row


def test_a_step_that_a_killed_run_was_replacing_is_listed(run, trainer_ckpt):
    (run / "checkpoint-20").rename(run / ".tmp-replaced-checkpoint-20@elsewhere@1@ab")
    output = trainer_ckpt("verify", run).out
    assert re.match(r"checkpoint-20 .* newest +verified$", rows(output)[-1])
    assert "of a run on another machine or in another container, replacing checkpoint-20" in output


def test_the_prefix_can_be_given(tmp_path, trainer_ckpt):
    Checkpointer(tmp_path, prefix="epoch").save(1, parts(1))
    assert "epoch-1" in trainer_ckpt("ls", tmp_path, "--prefix", "epoch").out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_verify_shows_how_far_it_is_on_a_terminal_and_leaves_nothing_there(run, capsys, monkeypatch):
    end = Progress.end
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Progress, "end", lambda progress: (progress._bars.refresh(), end(progress)))
    assert main(["verify", str(run)]) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert re.match(r"100% \S+ \d.* kB .* checkpoint-20/", lines[-2]), lines
    assert max(map(len, lines)) <= 80
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # back to where it began, which is cleared


def test_nothing_is_drawn_where_there_is_no_terminal(run, capsys):
    main(["verify", str(run)])
    assert capsys.readouterr().err == ""


def test_verify_reads_every_byte(run, monkeypatch):
    read = []
    monkeypatch.setattr(listing.Progress, "advance", lambda self, size_bytes: read.append(size_bytes))
    main(["verify", str(run)])
    held = [path for path in run.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert sum(read) == sum(path.stat().st_size for path in held)


def test_a_file_that_cannot_be_read_is_damage_in_words(run, trainer_ckpt, monkeypatch):
    def record(path):
        raise OSError(5, "Input/output error")

    flip(run / "checkpoint-20" / "model.json")
    monkeypatch.setattr(reads, "digest", record)
    assert "model.json cannot be read: Input/output error" in trainer_ckpt("verify", run / "checkpoint-20", code=1).out


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_folder_without_checkpoints_is_an_error(action, tmp_path, capsys):
    assert main([action, str(tmp_path)]) == 2
    expected = f"no checkpoint in {tmp_path}: it holds neither a manifest.json nor a folder checkpoint-<step>\n"
    assert capsys.readouterr().err == f"trainer ckpt {action}: {expected}"


def test_what_does_not_exist_or_is_no_folder_is_an_error(tmp_path, trainer_ckpt):
    assert main(["ls", str(tmp_path / "absent")]) == 2
    (tmp_path / "file").touch()
    first, second = trainer_ckpt("ls", tmp_path / "file", code=2).err.splitlines()
    hint = "give a run's output folder, or one checkpoint in it"
    assert first == f"trainer ckpt ls: {tmp_path / 'absent'} does not exist; {hint}"
    assert second == f"trainer ckpt ls: {tmp_path / 'file'} is a file; {hint}"


def test_a_folder_that_may_not_be_read_is_an_error_in_words(run, trainer_ckpt, monkeypatch):
    def by_age(directory, prefix):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(discovery, "by_age", by_age)
    assert trainer_ckpt("ls", run, code=2).err == f"trainer ckpt ls: {run}: Permission denied\n"


def test_listing_and_verifying_change_nothing(run, monkeypatch):
    for operation in files.OPERATIONS:
        monkeypatch.setattr(files, operation, lambda *_, operation=operation: pytest.fail(operation))
    (run / ".tmp-writing-checkpoint-30@elsewhere@1@ab").mkdir()
    assert main(["ls", str(run)]) == 0
    assert main(["verify", str(run)]) == 0


def test_help_explains_the_actions(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "trainer ckpt" in text
    for action in ("ls", "verify", "diff", "export", "prune", "seal", "import"):
        assert re.search(rf"^    {action} +\w", text, re.MULTILINE)


@pytest.mark.parametrize("action", ["ls", "verify", "diff", "export", "prune", "seal", "import"])
def test_help_of_each_action_gives_examples_that_parse(action, capsys):
    with pytest.raises(SystemExit):
        main([action, "--help"])
    text = capsys.readouterr().out
    examples = re.findall(rf"^  trainer ckpt ({action} .*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert main(example.replace("'", "").split()) == 2  # understood, but there is no such folder


@pytest.mark.parametrize("arguments", [[], ["list", "."], ["ls"], ["ls", ".", "--pref", "x"], ["prune", "."]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


COMMAND = [sys.executable, "-c", "import sys; from tr_ckpt.command import main; sys.exit(main(sys.argv[1:]))"]


def test_a_reader_that_has_seen_enough_ends_it_quietly(run):
    source, target = os.pipe()
    os.close(source)
    done = subprocess.run([*COMMAND, "ls", str(run)], stdout=target, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(target)
    assert done.stderr == b""
    assert done.returncode == 141


def test_a_terminal_that_knows_only_ascii_is_enough(run):
    rewritten(run / "checkpoint-20", format=2)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "30"}
    done = subprocess.run(
        [*COMMAND, "ls", str(run)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "reads 1 \\u2014" in done.stdout.replace("\n    ", " ")


def test_ctrl_c_is_quiet(run):
    stop = "lambda *_: (print('begun', flush=True), time.sleep(60))"
    command = [COMMAND[0], "-c", f"import time; from tr_ckpt import discovery; discovery.by_age = {stop}; {COMMAND[2]}"]
    process = subprocess.Popen(
        [*command, "verify", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == ""
