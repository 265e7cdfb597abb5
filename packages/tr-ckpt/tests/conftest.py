"""Set up what all tests here share."""

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, where NumPy is not installed
    import torch  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file, here and in started processes

import ckpt_foreign
import minihub

# The Hub of these tests is on loopback: being told to stay off the network must not keep them from it. The client reads
# this when it is imported.
os.environ.pop("HF_HUB_OFFLINE", None)

# Import torch once for all processes that tests start, not in each of them.
multiprocessing.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
)


@pytest.fixture(autouse=True)
def hub_within_reach(monkeypatch):
    """Take back what the client was told before, where tests of others had imported it; and the variable they set."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if "huggingface_hub" in sys.modules:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    """Let a sync return at once: tests make thousands, and none of them can see what it does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run():
    """A run at step 3, of a program that saves as transformers does."""
    parts = ckpt_foreign.make()
    ckpt_foreign.train(parts, 3)
    return parts


@pytest.fixture
def left(tmp_path, run):
    """What that program saved of it."""
    return ckpt_foreign.save(tmp_path / "theirs", 3, run)


@pytest.fixture(autouse=True)
def any_width(monkeypatch):
    """Let what is printed be as wide as it is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def trainer_ckpt(capsys):
    """Return a function that runs the command, demands an exit code, and returns what was printed."""

    def run(*words, code=0):
        from tr_ckpt.command import main

        assert main([*map(str, words)]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def mark(tmp_path):
    """A folder that exists once something was executed."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A Hub on loopback, with the client's settings, which it reads when it is imported, set for tests."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with minihub.MiniHub() as server:
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
            "HF_TOKEN_PATH": str(tmp_path_factory.mktemp("hub") / "no-token"),
        }.items():
            if name != "HF_HUB_DISABLE_XET":  # which older clients do not have
                assert hasattr(constants, name)
            monkeypatch.setattr(constants, name, value, raising=False)
            if name == "HUGGINGFACE_CO_URL_TEMPLATE":  # of which older clients have a copy
                monkeypatch.setattr(pytest.importorskip("huggingface_hub.file_download"), name, value, raising=False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        # Clients before 1.0 keep sessions with the settings of the time when they were opened.
        server.forget_sessions = getattr(pytest.importorskip("huggingface_hub.utils"), "reset_sessions", lambda: None)
        server.forget_sessions()
        yield server
