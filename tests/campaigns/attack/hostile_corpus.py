"""Make checkpoints whose content is hostile, and go through every door with each: restore, import and the command."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fuzz_parsers import Holding, plain_state
from shared.commands import command

from tr_ckpt import Checkpointer, CheckpointError, RNGState
from tr_ckpt.hf_import import convert

MANIFEST = "manifest.json"

NAMES = (
    "../../x", "/etc/passwd", "a/../../x", "..", ".", "", "C:\\x", "a\\..\\x", "D:x", "nul", "com1.json", "x.", "x ",
    "\x1b[2Jx", "a\0b", "\ud800", "x" * 300, "a//b", "\u2028",
)  # fmt: skip


# Doors that must refuse whatever is hostile: others look at names and sizes alone, or at tensors alone.
STRICT = ("restore", "verify", "convert", "import")

# What is only large, or is not looked at.
HARMLESS = ("a rank beyond all", "weights: many entries")


def _header(content: Any, size: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


def _tensor(shape: list[int], end: int, dtype: str = "F32", start: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TENSORS: dict[str, bytes] = {
    "empty": b"",
    "a length beyond the file": _header(b"{}", 2**40),
    "a length beyond all": _header(b"{}", 2**64 - 1),
    "a deep header": _header(b'{"a":' * 100_000),
    "many entries": _header({str(n): _tensor([0], 0) for n in range(100_000)}),
    "a shape beyond all": _header({"t": _tensor([2**62, 2**62], 4)}) + bytes(4),
    "a terabyte": _header({"t": _tensor([2**38], 2**40)}) + bytes(4),
    "overlapping": _header({"t": _tensor([2], 8), "u": _tensor([2], 12, start=4)}) + bytes(12),
    "a pickle": pickle.dumps({"t": 1}),
    "escape sequences": _header({"\x1b[2J": _tensor([1], 4, "\x1b[31m")}) + bytes(4),
}

JSON: dict[str, bytes] = {
    "deep lists": b"[" * 200_000,
    "deep tuples": b'{"$tuple": [' * 5_000 + b"]}" * 5_000,
    "digits": b'{"n": ' + b"9" * 1_000_000 + b"}",
    "a name twice among many": b"{" + b",".join(b'"%d":0' % n for n in range(200_000)) + b',"0":0}',
    "keys of one hash": json.dumps({"$dict": [[{"$int": hex(n * (2**61 - 1))}, 0] for n in range(1, 50_000)]}).encode(),
    "a tuple key that is deep": b'{"$dict": [[' + b'{"$tuple": [' * 300 + b"]}" * 300 + b", 1]]}",
    "arrays of one tensor": json.dumps([{"$array": {"tensor": "t", "dtype": "|u1", "shape": [4]}}] * 9999).encode(),
    "an array of objects": b'{"$array": {"tensor": "t", "dtype": "|O", "shape": [1]}}',
    "an array of a terabyte": b'{"$array": {"tensor": "t", "dtype": "<f8", "shape": [1000000000000]}}',
    "a dtype of a terabyte": b'{"$numpy": {"dtype": "S1000000000000", "data": ""}}',
    "an unknown tag": b'{"$\\u001b[2J": 1}',
    "a module as dtype": b'{"$dtype": "_dynamo"}',
    "no text": b"\xff\xfe\x00",
}


def _laughs(depth: int) -> bytes:
    levels = b"".join(b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1]) for level in range(depth))
    return b"\x80\x02(]q\x00" + levels + b"t."


class _Runs:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


PICKLES: dict[str, bytes] = {
    "shared lists": _laughs(80),
    "a list in itself": b"]q\x00h\x00a.",
    "a deep tuple": b")" + b"\x85" * 500_000 + b".",
    "a place in the memo": b"Nr\xff\xff\xff\xff.",
    "a length": b"\x8e" + struct.pack("<Q", 2**62) + b".",
    "an array of bytes": b"\x96" + struct.pack("<Q", 2**40) + b".",
    "a name": b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
    "an old name": b"(S'true'\nios\nsystem\n.",
    "an extension": b"\x82\x01.",
    "attributes": b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.",
    "many dimensions": b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(" + b"K\x01" * 100_000
    + b"tcnumpy\ndtype\n(X\x02\x00\x00\x00f8K\x00K\x01tR\x89C\x08" + bytes(8) + b"tb.",
}  # fmt: skip

# Size and stride of tensors over four numbers.
VIEWS = (
    ([10**12], [0]),
    ([2**40, 2**40], [0, 0]),
    ([2**62, 2], [0, 0]),
    ([5], [1]),
    ([2], [2**62]),
    ([1] * 70, [1] * 70),
)


class _View:
    def __init__(self, size: list[int], stride: list[int]) -> None:
        self.size, self.stride = tuple(size), tuple(stride)

    def __reduce__(self) -> Any:
        storage = torch.zeros(4)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.size, self.stride, False, OrderedDict())


def archived(program: bytes) -> bytes:
    """Return a whole file of `torch.save` around a pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        opened.writestr("x/data.pkl", program)
        opened.writestr("x/version", "3\n")  # without which torch reads none
        opened.writestr("x/data/0", bytes(16))
    return made.getvalue()


def vouch(folder: Path, changes: Callable[[dict[str, Any]], None] = lambda content: None) -> None:
    """Have a manifest say that everything is as it was written, and whatever else."""
    content = json.loads((folder / MANIFEST).read_text())
    for name in content["files"]:
        held = (folder / name).read_bytes()
        content["files"][name] = {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
    content["manifest_sha256"], content["sections"] = "0" * 64, {}
    changes(content)
    text = json.dumps(content)
    (folder / MANIFEST).write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))


def own(folder: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield what makes one of our checkpoints, in a folder that is given, hostile."""
    for kind, content in TENSORS.items():
        yield f"tensors: {kind}", lambda place, held=content: _put(place, "part.safetensors", held)
    for kind, content in JSON.items():
        yield f"JSON: {kind}", lambda place, held=content: _put(place, "part.json", held)
        yield f"manifest: {kind}", lambda place, held=content: (place / MANIFEST).write_bytes(held) and None
    for name in NAMES:
        file = {name: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
        yield f"a file {name!r}", lambda place, held=file: vouch(place, lambda content: content["files"].update(held))
        yield (
            f"a part {name!r}",
            lambda place, n=name: vouch(place, lambda content: content["parts"].update({n: ["part.json"]})),
        )
    for target in ("/dev/zero", "/etc/hostname", ".", "part.json"):
        yield f"a link to {target}", lambda place, to=target: _link(place, "part.safetensors", to)


def _put(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    vouch(folder)


def _link(folder: Path, name: str, target: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def theirs() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield what makes a checkpoint of another program, in a folder that is given, hostile."""
    for kind, program in PICKLES.items():
        for file in ("optimizer.pt", "pytorch_model.bin"):
            yield f"{file}: {kind}", lambda place, f=file, held=program: _replace(place, f, archived(held))
    for size, stride in VIEWS:
        content = _saved({"x": _View(size, stride)})
        yield f"a view {size!r:.30}", lambda place, held=content: _replace(place, "optimizer.pt", held)
    yield "a pickle that runs", lambda place: _replace(place, "optimizer.pt", _saved(_Runs(str(place / "executed"))))
    yield "an old pickle", lambda place: _replace(place, "optimizer.pt", pickle.dumps(_Runs(str(place / "executed"))))
    for kind, content in TENSORS.items():
        yield f"weights: {kind}", lambda place, held=content: _replace(place, "model.safetensors", held)
    for kind, content in JSON.items():
        yield f"state: {kind}", lambda place, held=content: _replace(place, "trainer_state.json", held)
        yield f"index: {kind}", lambda place, held=content: _index(place, held)
    for name in NAMES:
        text = json.dumps({"weight_map": {"weight": f"{name}.bin"}}).encode()
        yield f"index: {name!r}", lambda place, held=text: _index(place, held)
    yield "a rank beyond all", lambda place: _replace(place, "rng_state_99999999999.pth", b"")
    for target in ("/dev/zero", "/etc/hostname"):
        yield f"a link to {target}", lambda place, to=target: _link(place, "optimizer.pt", to)


def _saved(value: Any) -> bytes:
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


def _replace(folder: Path, name: str, content: bytes) -> None:
    if name.startswith("pytorch_model"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)


def _index(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(content)


def make_own(folder: Path) -> Path:
    """Save a checkpoint, and another one to compare it with; returns the later."""
    run = Checkpointer(folder)
    for step in (1, 2):
        run.save(step, {"part": Holding(plain_state() | {"t": torch.zeros(4, dtype=torch.uint8)})})
    return run.path(2)


def make_theirs(folder: Path) -> Path:
    """Write a checkpoint of step 3 as transformers' Trainer does."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    place = folder / "checkpoint-3"
    place.mkdir(parents=True)
    from safetensors.torch import save_file

    save_file(model.state_dict(), place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    torch.save({"last_epoch": 3}, place / "scheduler.pt")
    torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, place / "rng_state.pth")
    (place / "trainer_state.json").write_text(
        json.dumps({"global_step": 3, "log_history": [], "stateful_callbacks": {}})
    )
    return place


def doors_of_own(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the ways in for one of our checkpoints; each refuses, or ends with a code."""
    return {
        "restore": lambda: Checkpointer(folder.parent).restore({"part": Holding()}, folder),
        "ls": lambda: _command("ls", folder.parent),
        "verify": lambda: _command("verify", folder),
        "diff": lambda: _command("diff", folder.parent / "checkpoint-1", folder),
        "export": lambda: _command("export", folder, folder.parent.parent / "exported", "--part", "part"),
        "seal": lambda: _command("seal", folder, "--yes"),
    }


def doors_of_theirs(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the ways in for a checkpoint of another program."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    held = {
        "model": model,
        "optimizer": optimizer,
        "rng": RNGState(),
        "trainer_state": Holding(),
        "callbacks": Holding(),
    }
    return {
        "restore": lambda: Checkpointer(folder.parent / "own").restore(held, folder),
        "convert": lambda: convert(folder, folder.parent.parent / "converted"),
        "ls": lambda: _command("ls", folder.parent),
        "import": lambda: _command("import", folder, folder.parent.parent / "imported"),
    }


def _command(*arguments: object) -> int:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = command("ckpt")([str(each) for each in arguments])
    if not all(line.isprintable() for line in shown.getvalue().split("\n")):
        raise AssertionError(f"it prints what a terminal obeys: {shown.getvalue()!r:.200}")
    if code == 2:
        raise CheckpointError(shown.getvalue())
    return code


def copied(source: Path, target: Path) -> Path:
    """Return a copy of a checkpoint and of what is beside it."""
    shutil.copytree(source.parent, target, symlinks=True)
    return target / source.name
