"""Whatever a checkpoint or the Hub says, a terminal obeys nothing of it."""

import json
import logging
from types import SimpleNamespace

import ckpt_foreign
import pytest
import torch
from ckpt_malice import rewritten, vouched
from ckpt_parts import Holding, parts
from test_hub_hostile import LiteralApi

from tr_ckpt import Checkpointer, CheckpointError, HubRepository, PushError
from tr_ckpt.command import main
from tr_ckpt.errors import printable

# Clears the screen, sets the title, rings, goes back a line, turns the writing, and hides; C1, DEL, half a character.
EVIL = "\x1b[2J\x1b]0;owned\x07\r\x08\x9b31m\x7f\u202e\u200b\u2028\ud800"
NAME = f"x{EVIL}y"


def test_what_is_printed_as_itself_stays():
    for text in ("", "plain text", "caf\u00e9 \u65e5\u672c \U0001f600 \u2026 \u2014"):
        assert printable(text) is text
    assert printable("a\n\tb", lines=True) == "a\n\tb"
    assert printable("a\n\tb") == "a\\n\\tb"


def test_everything_else_is_written_out_once():
    made = printable(EVIL)
    assert made.isprintable()
    assert made.startswith("\\x1b[2J\\x1b]0;owned\\x07\\r\\x08\\x9b31m\\x7f\\u202e\\u200b\\u2028\\ud800")
    assert printable(made) == made


@pytest.mark.parametrize("kind", [CheckpointError, PushError])
def test_an_error_shows_what_it_holds(kind):
    assert str(kind(EVIL)) == printable(EVIL)
    assert str(kind("two\nlines")) == "two\nlines"


class Refusing(Holding):
    def load_state_dict(self, state_dict):
        raise RuntimeError(f"no {EVIL}")


@pytest.fixture
def run(tmp_path):
    """Two checkpoints whose every text is hostile."""
    checkpointer = Checkpointer(tmp_path / "run")
    for step in (1, 2):
        state = {
            "log_history": [{"step": step, f"eval_{EVIL}": step / 2}],
            "best_metric": step / 2,
            "best_global_step": step,
        }
        held = {
            EVIL: torch.full((3,), float(step)),
            "text": f"{EVIL}{step}",
            f"k{EVIL}": {"$x": step, EVIL: EVIL * step},
        }
        checkpointer.save(step, {"model": Refusing(held), "trainer_state": Refusing(state)})
        folder = checkpointer.path(step)
        rewritten(folder, saved_at=EVIL, versions={EVIL: EVIL})
    return tmp_path / "run"


def shown(capsys, *arguments):
    """Run the command, and demand that a terminal obeys nothing of what it prints."""
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        for line in text.split("\n"):
            assert line.isprintable(), line
    return code, printed.out + printed.err


def test_ls_verify_diff_and_export_print_nothing_that_is_obeyed(run, tmp_path, capsys):
    code, text = shown(capsys, "ls", run)
    assert code == 0
    assert shown(capsys, "verify", run)[0] == 0
    assert shown(capsys, "ls", run, "--json")[0] == 0
    code, text = shown(capsys, "diff", run / "checkpoint-1", run / "checkpoint-2", "--all", "--manifest")
    assert code == 1
    assert "\\x1b[2J" in text
    assert shown(capsys, "export", run, tmp_path / "model")[0] == 0
    code, text = shown(capsys, "export", run, tmp_path / "model2", "--part", EVIL.replace("\ud800", ""))
    assert code == 2


def test_prune_and_seal_print_nothing_that_is_obeyed(run, capsys, monkeypatch):
    path = run / "checkpoint-2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert shown(capsys, "verify", run)[0] == 1
    assert shown(capsys, "seal", run / "checkpoint-2", "--yes")[0] == 0
    assert shown(capsys, "prune", run, "--keep", "1", "--yes")[0] == 0


def test_a_folder_of_any_name_beside_checkpoints_is_listed(run, capsys):
    (run / f".tmp-writing-{NAME.replace(chr(0xD800), '')}@host@1@ab").mkdir()
    code, text = shown(capsys, "ls", run)
    assert "in another container, writing x\\x1b[2J" in " ".join(text.split())


def test_errors_of_a_restore_and_log_lines_hold_nothing_that_is_obeyed(run, caplog):
    for name, content in (
        ("model.json", json.dumps({f"${EVIL}": 1}).encode()),
        ("model.safetensors", EVIL.encode("utf-8", "replace")),
    ):
        (run / "checkpoint-2" / name).write_bytes(content)
        vouched(run / "checkpoint-2")
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(run).restore({"model": Refusing({})}, run / "checkpoint-2")
        assert str(caught.value).isprintable()
    with pytest.raises(CheckpointError, match="refused its state") as caught:
        Checkpointer(run).restore({"model": Refusing({})}, run / "checkpoint-1")
    assert str(caught.value).isprintable()
    manifest = run / "checkpoint-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step"', json.dumps(EVIL)))
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError):
        Checkpointer(run).restore({"model": Refusing({})})
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_import_prints_nothing_that_is_obeyed(tmp_path, capsys, caplog):
    left = ckpt_foreign.save(tmp_path / "theirs", 2, ckpt_foreign.make(), **{EVIL: EVIL})
    (left / f"folder{EVIL}".replace("\ud800", "")).mkdir()
    assert shown(capsys, "import", left, tmp_path / "ours")[0] == 0
    torch.save({EVIL.replace("\ud800", ""): ckpt_foreign.Payload(tmp_path / "x")}, left / "optimizer.pt")
    assert shown(capsys, "import", left, tmp_path / "more")[0] == 2
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_what_the_hub_says_is_not_obeyed(tmp_path, caplog):
    class Evil(LiteralApi):
        def list_repo_commits(self, repo_id, revision):
            return [SimpleNamespace(commit_id=self.sha, title=EVIL)] * 3

        def snapshot_download(self, *given, **more):
            raise ConnectionError(f"no {EVIL}")

    pytest.importorskip("huggingface_hub")
    folder = Checkpointer(tmp_path / "saved").save(2, parts(2))
    files = {f"last-checkpoint/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files["last-checkpoint/manifest.json"] = b"{"
    for api in (Evil(files), LiteralApi(files)):
        api.list_repo_commits = Evil.list_repo_commits.__get__(api)
        repository = HubRepository("ci/run", endpoint=api.endpoint, retry_delays_s=(0,))
        repository._api = api
        with caplog.at_level(logging.INFO), pytest.raises(CheckpointError) as caught:
            Checkpointer(tmp_path / "run", hub=lambda held=repository: held).restore(parts(), "hub")
        assert "\\x1b[2J" in str(caught.value)
        assert str(caught.value).isprintable()
    assert all(record.getMessage().isprintable() for record in caplog.records)
