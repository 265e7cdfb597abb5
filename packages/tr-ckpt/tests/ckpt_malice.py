"""Watch what reading a checkpoint does, and make checkpoints that somebody else has changed."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from ckpt_parts import number_of, parts, rewritten

from tr_ckpt import Checkpointer, CheckpointError, discovery, files, reader
from tr_ckpt.discovery import Found

# What opens files here that is not the code under test: imports.
OF_PYTHON = tuple({*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(files.__file__).parents[1])})
EXECUTING = (
    "exec",
    "os.system",
    "os.posix_spawn",
    "os.exec",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
WRITING = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)

_events: list[tuple[str, tuple]] | None = None


def _audit(event, arguments):
    if _events is not None and (event in (*EXECUTING, *WRITING) or event == "open"):
        _events.append((event, arguments))


sys.addaudithook(_audit)


class Watching:
    """Note what the interpreter is about to open and to run; `judge` says whether all of it lay in one folder."""

    def __enter__(self):
        global _events
        _events = self.events = []
        return self

    def __exit__(self, *_):
        global _events
        _events = None

    def judge(self, folder):
        for event, arguments in self.events:
            if event in EXECUTING:
                called = arguments[0]
                # Python's own: dataclasses and named tuples of what is imported.
                assert event == "exec"
                assert getattr(called, "co_filename", "").startswith((*OF_PYTHON, "<frozen", "<string>"))
                continue
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
            if path.endswith(".run-lock.json"):  # the thread that shows that the folder is in use, not the reader
                continue
            allowed = (str(folder), *OF_PYTHON)
            assert not path or path.startswith(allowed), (event, path)
            assert event == "open"
            mode = arguments[1] if isinstance(arguments[1], str) else ""
            assert not set(mode) & set("wax+")


def vouched(folder, *added):
    """Have the manifest give the size and digest that each file has now."""
    described = json.loads((folder / "manifest.json").read_text())["files"]
    for name in (*described, *added):
        held = files.record(folder / name)
        described[name] = {"bytes": held.bytes, "sha256": held.sha256}
    rewritten(folder, files=described, sections={})


def refused(saved, folder, name, *, vouched=False):
    """Restore from a checkpoint that must be refused by the name of its file."""
    into = parts()
    with Watching() as watching, pytest.raises(CheckpointError, match=re.escape(name)):
        saved.restore(into, folder)
    watching.judge(saved.directory)
    assert number_of(into) == 0
    if not vouched:
        assert saved.restore(into) == 20
    elif folder.parent == saved.directory:  # its bytes are as they are said to be, and `verify` knows better
        described = discovery.check_quickly(Found(None, folder.name, folder))
        discovery.verify(folder, described)
        with pytest.raises(CheckpointError, match=name.partition(".")[0]):
            reader.verify_loadable(folder, described)


def saved_twice(folder):
    """Return a checkpointer with checkpoints of the steps 20 and 30, the numbers in which are the same."""
    checkpointer = Checkpointer(folder)
    checkpointer.save(20, parts(20))
    checkpointer.save(30, parts(30), write_extra=write_configuration)
    return checkpointer


def write_configuration(folder):
    (folder / "config.json").write_text("{}")
