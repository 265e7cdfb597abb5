"""Read what a checkpoint holds: the states of its parts, single tensors, and slices of them, saved whole or in shards.

Verify the files first. Tensors are read one at a time, and of a DTensor the slices of this rank's shard alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import codec, discovery, names, reads, shard_index, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError, Damage, UnreadableError
from tr_ckpt.layout import Layout, fill
from tr_ckpt.manifest import Manifest
from tr_ckpt.shard_index import Chunk, Index, SavedTensor


class CheckpointReader:
    """Reads a checkpoint. A context manager: a file of tensors is opened at its first use, and mapped until the end.

    Args:
        folder: the checkpoint.
        owned: the names of the files of each part, as its manifest has them.

    Attributes:
        bytes_read: how many bytes of tensors were taken out of the files.
    """

    def __init__(self, folder: Path, owned: Mapping[str, Collection[str]]) -> None:
        self.bytes_read = 0
        self._folder = folder
        self._owned = owned
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def state(self, part: str, rank: int = 0, layout: Layout | None = None) -> Any:
        """Return the state of a part, its tensors in host memory; of a DTensor this rank's shard. Not collective.

        Args:
            part: its name.
            rank: number of this process.
            layout: how the state is distributed over the ranks; None if it is not.

        Raises:
            CheckpointError: its files are not in the format of a save, or do not fit `layout`.
            UnreadableError: a file cannot be read.
        """
        stem = names.stem(part, rank)
        encoded, index = self.encoded(stem), self.index(part, stem)
        copies: dict[str, torch.Tensor] = {}

        def copy(name: str) -> torch.Tensor:
            if name not in copies:
                saved = _saved(index, name)
                shard = None if layout is None else layout.empty(name, saved)
                if shard is None:
                    # A copy stays valid if the mapped file is removed or cut later.
                    copies[name] = self.tensor(name, saved).clone()
                else:
                    copies[name] = fill(name, saved, shard, self.slice)
            return copies[name]

        try:
            return codec.decode(encoded, copy)
        except UnreadableError:
            raise
        except (CheckpointError, RecursionError) as error:
            raise CheckpointError(f"{stem}.json: {error}") from error

    def encoded(self, stem: str) -> Any:
        """Return the content of the JSON file of a state.

        Raises:
            CheckpointError: it is not strict JSON.
            UnreadableError: it cannot be read.
        """
        path = self._folder / f"{stem}.json"
        untrusted.require_regular_file(path)
        try:
            return untrusted.read_json(path)
        except UnreadableError:
            raise
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error

    def index(self, part: str, stem: str | None = None) -> Index:
        """Return where the tensors of a part are; where each rank has a state of its own, of the one named `stem`.

        Raises:
            CheckpointError: its index or its file is not in the format of a save.
            UnreadableError: it cannot be read.
        """
        if (name := names.index_name(part)) in self._owned[part]:
            return shard_index.read(self._folder / name, self._owned[part])
        return self._index_of_file(f"{stem or part}.safetensors")

    def _index_of_file(self, file: str) -> Index:
        if not reads.is_there(self._folder / file):
            return {}
        index: Index = {}
        for name in self._open(file).keys():  # noqa: SIM118
            view = self._open(file).get_slice(name)
            shape = tuple(view.get_shape())
            chunks = (Chunk(file, (0,) * len(shape), shape),) if math.prod(shape) else ()
            index[name] = SavedTensor(tensor_file.dtype_of(view.get_dtype()), shape, None, chunks)
        return index

    def tensor(self, name: str, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor: a view of the mapped file if it is all in one, otherwise put together in memory.

        Raises:
            CheckpointError: a file does not hold it.
            UnreadableError: a file cannot be read.
        """
        if len(saved.chunks) == 1:
            return self.slice(name, saved, saved.chunks[0])
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for chunk in saved.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.size, strict=True))
            whole[box] = self.slice(name, saved, chunk)
        return whole

    def slice(
        self,
        name: str,
        saved: SavedTensor,
        chunk: Chunk,
        offset: tuple[int, ...] | None = None,
        size: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Return a view of a chunk of the tensor `name`, or of the `size` numbers from `offset` on inside the chunk.

        It is a view of the mapped file: copy it before the reader is closed.

        Raises:
            CheckpointError: the file is not a safetensors file or does not hold the chunk.
            UnreadableError: it cannot be read.
        """
        try:
            view = self._open(chunk.file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{chunk.file}: {error}") from error
        if tuple(view.get_shape()) != chunk.size:
            raise CheckpointError(f"{chunk.file}: {name!r} has the shape {view.get_shape()}, not {list(chunk.size)}")
        sides = zip(offset or (0,) * len(chunk.size), size or chunk.size, strict=True)
        box = tuple(slice(start, start + length) for start, length in sides)
        values = view[box] if box else view[...]
        if values.dtype != saved.dtype:
            raise CheckpointError(f"{chunk.file}: {name!r} is of {values.dtype}, not {saved.dtype}")
        self.bytes_read += values.numel() * values.element_size()
        return values

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            untrusted.require_regular_file(self._folder / file)
            try:
                self._opened[file] = self._stack.enter_context(reads.tensors(self._folder / file))
            except UnreadableError:
                raise
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is not a valid safetensors file: {error}") from error
        return self._opened[file]

    def problems(self) -> list[Damage]:
        """Return which files of parts cannot be loaded although their bytes are intact. Reads no numbers of tensors.

        Raises:
            UnreadableError: a file cannot be read.
        """
        found = []
        for part, owned in sorted(self._owned.items()):
            for file in owned:
                try:
                    self._check(part, file)
                except UnreadableError:
                    raise
                except (CheckpointError, SafetensorError, OSError, RecursionError) as error:
                    said = isinstance(error, CheckpointError) and file in str(error)
                    found.append(Damage(file, "form", str(error) if said else f"{file} cannot be loaded: {error}"))
        return found

    def _check(self, part: str, file: str) -> None:
        """Open a file as a load would, and follow its references to tensors."""
        stem = file.removesuffix(".json")
        if file.endswith(names.INDEX_SUFFIX):
            for name, saved in shard_index.read(self._folder / file, self._owned[part]).items():
                for chunk in saved.chunks:
                    self.slice(name, saved, chunk)
        elif file.endswith(".safetensors"):
            self._open(file)
        elif file.endswith(".json"):
            encoded, index = self.encoded(stem), self.index(part, stem)
            empty: dict[torch.dtype, torch.Tensor] = {}

            def look(name: str) -> torch.Tensor:
                saved = _saved(index, name)
                if len(saved.chunks) != 1 or saved.dtype != torch.uint8:
                    return empty.setdefault(saved.dtype, torch.empty(0, dtype=saved.dtype))
                return self.tensor(name, saved)  # it may be the bytes of a NumPy array

            codec.decode(encoded, look)


def _saved(index: Index, name: Any) -> SavedTensor:
    if name not in index:
        raise CheckpointError(f"the tensor {name!r:.80} is in no file of it")
    return index[name]


def problems(folder: Path, described: Manifest) -> list[Damage]:
    """Return which files of a checkpoint's parts cannot be loaded although their bytes are intact.

    Raises:
        UnreadableError: a file cannot be read.
    """
    with CheckpointReader(folder, described.parts) as reader:
        return reader.problems()


def verify_loadable(folder: Path, described: Manifest) -> None:
    """Read every file, compare it with the manifest, and open it as a load would.

    Raises:
        DamagedCheckpointError: the message names every wrong file.
        UnreadableError: a file cannot be read.
    """
    discovery.verify(folder, described)
    discovery.raise_if_damaged(problems(folder, described))
