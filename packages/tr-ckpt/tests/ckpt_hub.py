"""What a trainer does around the Hub callback, and what the processes that tests of the Hub start do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from ckpt_parts import parts, restored
from ckpt_workers import checkpointer
from minihub import TOKEN

from tr_ckpt import Checkpointer, HubCallback, HubRepository


def environment(hub, home, **more):
    """Return the environment of a process whose Hub is this one, as a user would set it."""
    return os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more,
    }  # fmt: skip


class Run:
    """Saves, events, and the files of the run itself."""

    parts = staticmethod(parts)

    def __init__(self, output_dir, hub, *, delays=(0, 0), **options):
        self.output_dir = Path(output_dir)
        self.checkpointer = Checkpointer(output_dir, keep_last=options.pop("keep_last", None))
        self.repository = HubRepository(
            options.pop("repo_id", "run"),
            token=options.pop("token", TOKEN),
            endpoint=hub.endpoint,
            retry_delays_s=delays,
            private=options.pop("private", None),
            revision=options.pop("revision", None),
        )
        self.callback = HubCallback(self.repository, output_dir=output_dir, **options)
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.fire("on_init_end")

    def fire(self, event, **context):
        assert getattr(self.callback, event)(None, self.state, None, **context) is None

    def save(self, step, **more):
        self.state.global_step = step
        self.checkpointer.save(
            step,
            {**parts(step), **more},
            write_extra=lambda folder: (folder / "config.json").write_text(json.dumps({"step": step})),
            on_commit=lambda folder: self.callback.on_checkpoint(folder, step),
        )

    def finish(self, **context):
        (self.output_dir / "README.md").write_text("# card")
        (self.output_dir / "model.safetensors").write_bytes(b"final")
        self.fire("on_train_end", **context)

    def settle(self):
        self.callback._queue.wait()

    def push(self, step, **more):
        """Save, and wait for the push."""
        self.save(step, **more)
        self.settle()


def restore(directory: str, endpoint: str, source: str) -> None:
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    assert restored(checkpointer(directory), source) == (2, 2)
