"""The parsers that read what may be anybody's, with files to change for each."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fuzz_batches import Parser
from safetensors.torch import save_file

import tr_ckpt.testing as reading
from tr_ckpt import Checkpointer, CheckpointError, HubRepository, PushError
from tr_log.testing import lines_of_resumed

MANIFEST = "manifest.json"

_JSON = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"[" * 2000, b'{"a":' * 2000, b'"\\ud800"', b'"\\u001b[2J"',
    b"../", b'"../../x"', b'"/etc/passwd"', b"\x00", b"\x1b[2J", b"\xc3\xa9", b"1e400", b"-", b"\xff",
)  # fmt: skip
_TAGS = tuple(
    f'{{"{tag}": {content}}}'.encode()
    for tag, content in (
        ("$tensor", '"state.0.exp_avg"'), ("$tensor", '["a"]'), ("$tuple", "[1]"), ("$tuple", '"ab"'),
        ("$int", '"0xff"'),
        ("$dict", '[[1, 2], [{"$tuple": [1]}, 3]]'), ("$dict", "[1]"), ("$ordered", '[["a", 1]]'),
        ("$float", '"nan"'),
        ("$counter", '[["a", 2]]'), ("$array", '{"tensor": "numbers", "dtype": "<f4", "shape": [2]}'),
        ("$float", "{}"),
        ("$array", '{"tensor": "numbers", "dtype": "<U1", "shape": [-1]}'), ("$size", "[1, 2]"), ("$size", "[1e999]"),
        ("$numpy", '{"dtype": "<f8", "data": "AAAAAAAAAAA="}'), ("$numpy", '{"dtype": "O", "data": ""}'),
        ("$numpy", '{"dtype": "(9999999999,)f8", "data": "AAAA"}'), ("$bytes", '"AAAA"'), ("$dtype", '"float32"'),
        ("$dtype", '"nn"'), ("$device", '"cuda:1"'), ("$device", "3"), ("$python", '"1"'), ("$metadata", "{}"),
    )
)  # fmt: skip
_CODES = tuple(
    bytes(each)
    for each in (
        *[[code] for code in b"(]})tuse.abRQcNGJKMXhjqr"],
        *[[code] for code in range(0x80, 0x99)],
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n)R",
        b"cos\nsystem\n", b"c__builtin__\neval\n",
        b"cnumpy.core.multiarray\nscalar\n", b"c_codecs\nencode\n", b"r\xff\xff\xff\xff", b"B\xff\xff\xff\x7f",
        b"h\x00h\x00h\x00h\x00", b"\x85" * 3000, b"]" * 3000, b"ctorch\nSize\n", b"ctorch\nFloatStorage\n",
    )
)  # fmt: skip


class Holding:
    """A part that gives a state and takes any."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def plain_state() -> dict[str, Any]:
    """Return a state of every kind of value that is saved."""
    state = OrderedDict(weight=torch.arange(6.0).reshape(2, 3), n=3, nan=float("nan"), big=2**70)
    state._metadata = OrderedDict({"": {"version": 1}})  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}, (1, "x"): (1, 2, [3.5, None, True])},
        "module": state,
        "plain": {"a": [1, 2.5, "text", b"bytes", None], "counter": Counter("aab")},
        "numbers": torch.arange(8, dtype=torch.uint8),
        "kinds": [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
    }


def parsers(folder: Path) -> Iterator[Parser]:
    """Yield each parser; what they need to read beside the changed file lies in `folder`."""
    run = Checkpointer(folder / "run")
    saved = run.save(7, {"part": Holding(plain_state()), "rng": Holding({"a": torch.ones(2)})})
    yield _manifest(saved)
    yield _tensors(saved)
    yield _part(saved)
    yield _shards(folder)
    yield from _pickles(folder)
    yield from _foreign_json(folder)
    yield from _hub(saved)
    yield _metrics()
    yield _configuration(folder)


def _written(name: str) -> Callable[[bytes, int], Path]:
    """Return what writes a file into the process's own folder."""

    def prepare(data: bytes, number: int) -> Path:
        path = Path.cwd() / name
        path.write_bytes(data)
        return path

    return prepare


_OWN = re.compile(rb'"manifest_sha256": "[^"]*"')


def _manifest(saved: Path) -> Parser:
    def prepare(data: bytes, number: int) -> Path:
        if number % 8:  # else the digest says it all
            data = _OWN.sub(b'"manifest_sha256": "' + b"0" * 64 + b'"', data, count=1)
            data = data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)
        return _written(MANIFEST)(data, number)

    def parse(path: Path) -> None:
        reading.read_manifest(path.parent)

    seed = (saved / MANIFEST).read_bytes()
    return Parser("manifest", (seed,), (*_JSON, b'"files"', b'"con"', b'"a."'), parse, prepare, (CheckpointError,))


def _tensors(saved: Path) -> Parser:
    def prepare(data: bytes, number: int) -> Path:
        if number % 2:  # the length of the header put right
            end = data.rfind(b"}") + 1
            data = max(0, end - 8).to_bytes(8, "little") + data[8:]
        return _written("t.safetensors")(data, number)

    seed = (saved / "part.safetensors").read_bytes()
    tokens = (*_JSON, b'"F32"', b'"F4"', b'"data_offsets":[0,4]', b'"shape":[0]', b'"__metadata__":{"a":"b"}')
    return Parser("safetensors header", (seed,), tokens, reading.read_tensors, prepare, (CheckpointError,))


def _part(saved: Path) -> Parser:
    def prepare(data: bytes, number: int) -> Path:
        place = Path.cwd()
        if not (place / "part.safetensors").exists():
            os.link(saved / "part.safetensors", place / "part.safetensors")
        _written("part.json")(data, number)
        return place

    def parse(place: Path) -> None:
        reading.read_part(place, "part")

    seeds = ((saved / "part.json").read_bytes(), b"[" + b", ".join((_TAGS[2], *_TAGS[4:6])) + b"]")
    return Parser("part JSON", seeds, (*_JSON, *_TAGS, *_TAGS), parse, prepare, (CheckpointError,))


def _shards(folder: Path) -> Parser:
    held = folder / "shards"
    held.mkdir()
    files = [f"w-shard-{rank}.safetensors" for rank in range(2)]
    chunks = []
    for rank, file in enumerate(files):
        save_file({"w": torch.ones(2, 3)}, held / file)
        chunks.append({"file": file, "offset": [2 * rank, 0], "size": [2, 3]})
    index = {"w": {"dtype": "F32", "shape": [4, 3], "distributed": True, "chunks": chunks}}

    def prepare(data: bytes, number: int) -> Path:
        for file in files:
            if not (Path.cwd() / file).exists():
                os.link(held / file, Path.cwd() / file)
        return _written("w.shards.json")(data, number)

    def parse(path: Path) -> None:
        for shape, dtype in reading.read_shard_index(path, files).values():
            torch.empty(shape, dtype=dtype)

    line = {"dtype": "F32", "shape": [4, 3], "distributed": True, "box": [2, 3], "in": [[0, 2, 1]]}
    seeds = (
        json.dumps({"format": 1, "tensors": index}, indent=1).encode(),
        json.dumps({"format": 2, "files": files, "tensors": {"w": line}}, indent=1).encode(),
    )
    tokens = (
        *_JSON,
        b'"offset": [0, 0]',
        b'"size": [1, 1]',
        b'"shape": [1000000000000]',
        b'"box": [1, 1]',
        b'"in": [[0, 1000000000000, 0]]',
        *(f'"{f}"'.encode() for f in files),
    )
    return Parser("shard index", seeds, tokens, parse, prepare, (CheckpointError,))


def _pickles(folder: Path) -> Iterator[Parser]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    values = [
        plain_state(),
        optimizer.state_dict(),
        {"python": (3, tuple(range(9)), None), "cpu": torch.get_rng_state()},
    ]
    archives = []
    for value in values:
        held = io.BytesIO()
        torch.save(value, held)
        archives.append(held.getvalue())

    def inside(archive: bytes) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            return {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}

    def prepare(records: dict[str, bytes], data: bytes, number: int) -> Path:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as opened:
            for name, content in {**records, "data.pkl": data}.items():  # torch reads only records of their exact size
                opened.writestr(f"x/{name}", content)
        return _written("x.pt")(made.getvalue(), number)

    tokens = (*_CODES, b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"../x", b"x/data/0")
    yield Parser("zip archives", tuple(archives), tokens, reading.read_archive, _written("x.pt"), (CheckpointError,))
    for name, archive in zip(("a model", "an optimizer", "random states"), archives, strict=True):
        records = inside(archive)
        make, errors = partial(prepare, records), (CheckpointError,)
        yield Parser(f"archive of {name}", (records["data.pkl"],), _CODES, reading.read_archive, make, errors)


def _foreign_json(folder: Path) -> Iterator[Parser]:
    state = {
        "global_step": 3, "epoch": 0.5, "max_steps": 9, "train_batch_size": 8, "best_metric": 0.5,
        "best_global_step": 2,
        "best_model_checkpoint": "out/checkpoint-2", "log_history": [{"loss": 0.5, "step": 3, "eval_loss": 0.25}],
        "stateful_callbacks": {"A": {"args": {}, "attributes": {"x": 1}}, "B": [{"attributes": {}}]}, "total_flos": 0,
    }  # fmt: skip

    def parse(path: Path) -> None:
        reading.read_foreign_state(path.parent)

    seed = json.dumps(state).encode()
    write = _written("trainer_state.json")
    yield Parser("foreign trainer state", (seed,), (*_JSON, b"NaN", b'"x"'), parse, write, (CheckpointError,))

    def show(path: Path) -> None:
        reading.show_state(path.parent)
        reading.compare_state(path, state)

    yield Parser("state in ls and diff", (seed,), (*_JSON, *_TAGS), show, write, (CheckpointError,))

    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.bin"}}
    tokens = (*_JSON, b'"C:\\\\x.bin"', b'"con.bin"', b'"a/b.bin"')
    yield Parser(
        "foreign index",
        (json.dumps(index).encode(),),
        tokens,
        reading.read_weight_map,
        _written("model.safetensors.index.json"),
        (CheckpointError,),
    )


class _Api:
    """A client that answers with what it was given."""

    endpoint = "http://127.0.0.1:9"

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def whoami(self) -> Any:
        return self.answers["whoami"]

    def repo_info(self, repo_id: str, revision: Any) -> Any:
        return SimpleNamespace(sha=self.answers["sha"])

    def list_repo_tree(self, repo_id: str, revision: str, recursive: bool) -> Any:
        return (SimpleNamespace(**entry) for entry in self.answers["tree"])

    def list_repo_commits(self, repo_id: str, revision: str) -> Any:
        return [SimpleNamespace(**entry) for entry in self.answers["commits"]]

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=self.answers["made"])


def _hub(saved: Path) -> Iterator[Parser]:
    files = {f"last-checkpoint/{path.name}": path.stat().st_size for path in saved.iterdir()}
    answers = {
        "whoami": {"name": "ci"}, "sha": "0" * 40, "made": "ci/run",
        "tree": [*({"path": path, "size": size} for path, size in files.items()), {"path": "last-checkpoint"}],
        "commits": [{"commit_id": "1" * 40, "title": "one"}, {"commit_id": "2" * 40, "title": "two"}],
    }  # fmt: skip
    repository = HubRepository("run", token="x", endpoint=_Api.endpoint, retry_delays_s=())
    logging.getLogger("tr_ckpt.hub.resume").disabled = True

    def parse(data: bytes) -> None:
        try:
            api = _Api(json.loads(data))
        except (ValueError, RecursionError):  # as in the client
            repository.ask("nothing was read", lambda api: json.loads(data))
            raise
        for name, path in reading.check_answers(repository, api, saved):
            inside = os.path.normpath(f"/a/b/{path}")
            assert inside.startswith(f"/a/b/{name}/"), path

    seed = json.dumps(answers).encode()
    tokens = (
        *_JSON,
        b'"path": "last-checkpoint/../../../x"',
        b'"last-checkpoint/con"',
        b"//",
        b"\\\\",
        b'"size": null',
    )
    yield Parser("answers of the Hub", (seed,), tokens, parse, lambda data, _: data, (CheckpointError, PushError))


def _metrics() -> Parser:
    lines = b"".join(json.dumps({"step": n, "loss": 0.5 / n, "note": "x"}).encode() + b"\n" for n in range(1, 6))

    def parse(path: Path) -> None:
        lines_of_resumed(path, 3, [{"step": 2, "loss": 0.1}])

    tokens = (*_JSON, b'{"step": 2}\n', b'{"step": true}\n', b"\r\n", b"\n", b'"step"', b",,,", b"x" * 200_000)
    return Parser("metrics files", (lines,), tokens, parse, _written("metrics.jsonl"), ())


def _configuration(folder: Path) -> Parser:
    seed = json.dumps({"model_type": "x", "torch_dtype": "float32", "text_config": {"dtype": "float32"}}).encode()
    return Parser(
        "configuration",
        (seed,),
        (*_JSON, b'"torch_dtype"', b'"dtype": 3'),
        lambda data: reading.config_with_dtype(data, torch.bfloat16),
        lambda data, _: data,
        (CheckpointError,),
    )
