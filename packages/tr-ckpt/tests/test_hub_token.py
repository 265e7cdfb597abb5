"""The access token is in nothing that is written, printed, raised or shown."""

import copy
import pickle
import subprocess
import sys
import traceback

import pytest
from ckpt_hub import environment
from minihub import TOKEN

from tr_ckpt import HubRepository
from tr_ckpt.hub.retrying import Secret

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")

WRONG = "hf_WRONGwrong/WRONG+wrong"

SCRIPT = """
import contextlib, logging, pickle, sys, traceback, copy
from types import SimpleNamespace
from ckpt_parts import parts
from tr_ckpt import Checkpointer, CheckpointError, HubCallback, HubRepository, PushError
logging.basicConfig(level=logging.DEBUG)
out, hub_token = sys.argv[1], open(sys.argv[2]).read() or None

class Args(SimpleNamespace):  # as training arguments do
    def __repr__(self):
        return "Args()"

args = Args(output_dir=out, hub_model_id=None, hub_token=hub_token, hub_private_repo=True, hub_revision=None,
            hub_strategy="checkpoint", hub_always_push=True, save_strategy="steps", save_total_limit=None)
del hub_token

@contextlib.contextmanager
def shown(kind):
    try:
        yield
    except kind as error:
        seen = error
        while seen is not None:
            print("".join(traceback.TracebackException.from_exception(seen, capture_locals=True).format()))
            print(repr(seen), vars(seen))
            seen = seen.__cause__ or seen.__context__
    else:
        print("nothing raised", kind)

callback = HubCallback.from_arguments(args)
print(callback, vars(callback), callback.repository, vars(callback.repository))
state = SimpleNamespace(global_step=1, is_world_process_zero=True)
callback.on_init_end(args, state, None)
callback._queue.wait()
with shown(PushError):
    callback.on_train_begin(args, state, None)
Checkpointer(out).save(1, parts(1), on_commit=lambda folder: callback.on_checkpoint(folder, 1))
callback.on_train_end(args, state, None, error=None)
with shown(PushError):
    callback.push_to_hub(out)
with shown(PushError):
    callback.repository.make()
collectives = SimpleNamespace(rank=0, world_size=1, gather_objects=None)
with shown(CheckpointError):
    Checkpointer.from_arguments(args, collectives).restore(parts(), "hub")
with shown(CheckpointError):
    Checkpointer.from_arguments(args, collectives).restore(parts(), "hub:ci/nothing")
args.hub_model_id = "no repository"
with shown(ValueError):
    HubCallback.from_arguments(args)
with shown(TypeError):
    pickle.dumps(callback.repository)
print("done")
"""


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("argument", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("argument", False), ("environment", True), ("login", False)]
        ),
    ],
)
def test_a_token_is_nowhere(given, right, hub, tmp_path):
    """In a process of its own, whose files, output and tracebacks with local variables are all searched."""
    token = TOKEN if right else WRONG
    home = tmp_path / "home"
    of_process = environment(hub, home, HF_HUB_DISABLE_IMPLICIT_TOKEN="0")
    of_process.pop("HF_TOKEN")
    if given == "environment":
        of_process["HF_TOKEN"] = token
    if given == "login":
        home.mkdir()
        (home / "token").write_text(token)
    (tmp_path / "secret").write_text(f"{token}\n" if given == "argument" else "")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "my-run"), str(tmp_path / "secret")],
        env=of_process, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert "done" in done.stdout, printed
    assert ("my-run could not be made on" in printed) is not right
    assert "nothing raised <class 'TypeError'>" not in printed
    assert ("nothing raised <class 'tr_ckpt.errors.PushError'>" in printed) is right
    if right:
        assert hub.repositories["ci/my-run"].private
        assert "last-checkpoint/manifest.json" in hub.files("ci/my-run")
        # At the end there is nothing new, and no commit.
        assert hub.titles("ci/my-run") == ["initial commit", "Training in progress, step 1"]
    for form in (token, token.replace("/", "%2F").replace("+", "%2B")):
        assert form not in printed
        for path in tmp_path.rglob("*"):
            if path.is_file() and path not in (tmp_path / "secret", home / "token"):
                assert form.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("endpoint", ["http://user:hf_SECRET@127.0.0.1:9", "https://hf_SECRET@hub.invalid"])
@pytest.mark.parametrize("from_environment", [True, False])
def test_an_address_with_a_password_is_refused_without_showing_it(endpoint, from_environment, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    if from_environment:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    message = "the address of the Hub at .* holds a user name or a password, which would be in every message; give the"
    with pytest.raises(ValueError, match=message) as caught:
        HubRepository("run", endpoint=None if from_environment else endpoint)
    inside = caught.value.__traceback__.tb_next  # below this test, whose own variables hold the address
    shown = traceback.TracebackException(ValueError, caught.value, inside, capture_locals=True)
    assert "SECRET" not in "".join(shown.format())


def test_a_secret_shows_itself_to_nobody():
    secret = Secret("hf_A/B\n")
    assert f"{secret} {secret!r}" == "<token> <token>"
    assert secret.hide_in("hf_A/B\n, hf_A/B\\n and hf_A%2FB%0A") == "<token>, <token> and <token>"
    assert Secret("").hide_in("as it is") == "as it is"
    for take in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="an access token is not pickled, so that it ends up in no file"):
            take(secret)
