"""What a trainer does around the Hub callback, and what the processes that tests of the Hub start do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

from ckpt_parts import number_of, parts
from ckpt_workers import checkpointer, join
from minihub import TOKEN

from tr_ckpt import Checkpointer, HubCallback, HubRepository


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


def restore(rank: int, world_size: int, rendezvous: str, directory: str, endpoint: str, source: str) -> None:
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    join(rank, world_size, rendezvous)
    into = parts()
    step = checkpointer(directory).restore(into, source)
    Path(f"{rendezvous}-{rank}").write_text(f"{step} {number_of(into)}", encoding="utf-8")
