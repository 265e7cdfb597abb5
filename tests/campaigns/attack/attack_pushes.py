"""Push folders with links and private names at every depth: what lies elsewhere or is private must stay at home."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_batches import silence
from runner import HUNG, LOST, OUTSIDE, WRONG_END, Case, Options, Tally

from tr_ckpt import HubCallback

LIMIT_S = 60
SECRET, PUBLIC = b"a secret", b"for all"
MOST_LEVELS = 6
PRIVATE_FILES = (
    ".env", ".env.local", ".netrc", "_netrc", ".git-credentials", "_private", "hang-20260101-000000.txt",
    "core.4711", "core.python.4711", "core", "nohup.out", "x.lock", "events.jsonl", "report.html",
)  # fmt: skip
PRIVATE_FOLDERS = (".git", ".cache", ".ssh", "_private.d", "wandb", "mlruns", "__pycache__", "checkpoint-7", "profile")
PUBLIC_FILES = ("README.md", "config.json", "model.safetensors", "core.py", "__init__.py", "wandb.md", "a b.txt")
PUBLIC_FOLDERS = ("sub", "1_Pooling", "core.d", "runs", "onnx")


class Noted:
    """Stand for a repository, and note what would be uploaded."""

    url = "the Hub"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def upload(self, folder: Path, message: str, *, mirror: Sequence[str] = ()) -> str:
        below = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
        self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in below}
        return self.url


class Tree:
    """A drawn folder, beside what it must not lead to.

    Attributes:
        folder: what is pushed.
        expected: the paths of the files in it that anybody may see.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self.folder, self._elsewhere = root / "folder", root / "elsewhere"
        self.expected: set[str] = set()
        self._folders, self._secrets = [self.folder], [self._elsewhere / "secret.txt", root / ".env"]
        self._elsewhere.mkdir(parents=True)
        for path in self._secrets:
            path.write_bytes(SECRET)
        self._fill(self.folder, 0, is_public=True)
        for _ in range(self._draw.randint(3, 12)):
            self._link()

    def _fill(self, folder: Path, level: int, *, is_public: bool) -> None:
        folder.mkdir(parents=True)
        draw = self._draw
        for name in draw.sample(PUBLIC_FILES, draw.randint(1, 4)):
            (folder / name).write_bytes(PUBLIC if is_public else SECRET)
            if is_public:
                self.expected.add((folder / name).relative_to(self.folder).as_posix())
        for name in draw.sample(PRIVATE_FILES, draw.randint(0, 3)):
            (folder / name).write_bytes(SECRET)
            self._secrets.append(folder / name)
        if level == MOST_LEVELS:
            return
        for name in draw.sample(PUBLIC_FOLDERS, draw.randint(0, 2) if level else 2):
            self._fill(folder / name, level + 1, is_public=is_public)
            if is_public:
                self._folders.append(folder / name)
        for name in draw.sample(PRIVATE_FOLDERS, draw.randint(0, 2)):
            self._fill(folder / name, MOST_LEVELS, is_public=False)

    def _link(self) -> None:
        draw, place = self._draw, self._draw.choice(self._folders) / f"link-{self._draw.randrange(10**9)}"
        kind = draw.choice(("public", "secret", "folder", "elsewhere", "up", "here", "nowhere", "circle"))
        targets: dict[str, Path | str] = {
            "public": self.folder / draw.choice(sorted(self.expected)), "secret": draw.choice(self._secrets),
            "folder": draw.choice(self._folders), "elsewhere": self._elsewhere, "up": "..", "here": ".",
            "nowhere": "nowhere", "circle": place.name,
        }  # fmt: skip
        target = targets[kind]
        place.symlink_to(os.path.relpath(target, place.parent) if draw.random() < 0.5 else target)
        if kind == "public":
            self.expected.add(place.relative_to(self.folder).as_posix())


def cases(options: Options) -> Iterator[Case]:
    """Yield drawn folders to be pushed."""
    for number in range(40 if options.quick else 1_000):
        seed = options.seed * 1_000_003 + number
        yield Case(f"seed {seed}", partial(_push, seed), "pushed folders")


def _push(seed: int, folder: Path) -> Tally:
    tally, tree, repository = Tally(1), Tree(folder, seed), Noted()
    client: Any = repository
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_S)
    try:
        with silence():
            HubCallback(client, output_dir=folder / "run").push_to_hub(tree.folder)
    except Exception as error:
        tally.wrong(HUNG if isinstance(error, TimeoutError) else WRONG_END, f"{type(error).__name__}: {error}")
        return tally
    finally:
        signal.alarm(0)
    if shown := [name for name, content in repository.files.items() if content != PUBLIC]:
        tally.wrong(OUTSIDE, f"{shown} went out")
    if more := sorted(set(repository.files) - tree.expected):
        tally.wrong(OUTSIDE, f"{more} went out, and nobody asked for them")
    if missing := sorted(tree.expected - set(repository.files)):
        tally.wrong(LOST, f"{missing} stayed at home")
    if not tally.problems:
        tally.ends["what is public went out"] += 1
    return tally


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"no end after {LIMIT_S} s")
