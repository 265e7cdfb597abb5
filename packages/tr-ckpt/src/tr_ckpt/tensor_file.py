"""Write tensors to a safetensors file, one at a time, and read them back.

Written here rather than by the library so that no more than one tensor is copied to the host at a time, the
digest costs no second pass, and each write can be made to fail in a test. Reading, where the input may be
anybody's, is the library's.

Source: the safetensors format, 8 bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from tr_ckpt import files, reads, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.tensor_damage import HEADER

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",  # not in torch 2.6
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}

# Of the library: it opens no file with a longer header.
MOST_BYTES_OF_HEADER = 100_000_000

DTYPES = {getattr(torch, name): code for name, code in _NAMES.items() if name in vars(torch)}


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write a new safetensors file that any reader of the format loads.

    Raises:
        OSError: it cannot be written.
        CheckpointError: it could not be read back, or this machine stores numbers high byte first.
    """
    return write_each(path, tensors, tensors.__getitem__)


def write_each(path: Path, like: Mapping[str, torch.Tensor], tensor: Callable[[str], torch.Tensor]) -> FileRecord:
    """Write a new safetensors file of tensors that are made one after the other.

    Args:
        path: where.
        like: tensors of the same shapes and dtypes, on any device.
        tensor: makes the one of a name, when its turn has come.

    Raises:
        OSError: it cannot be written.
        CheckpointError: it could not be read back, or this machine stores numbers high byte first.
    """
    if sys.byteorder != "little":
        raise CheckpointError(
            "safetensors holds little-endian numbers and this machine's are big-endian; not supported"
        )
    # Wide numbers first: each tensor then starts at a multiple of its item size, as readers that map the file
    # need.
    ordered = dict(sorted(like.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header, ends = _header(ordered)
    if len(header) - 8 > MOST_BYTES_OF_HEADER:
        raise CheckpointError(
            f"{path.name} was not written: the names and shapes of its {len(ordered):,} tensors take {len(header):,} "
            f"bytes, and safetensors reads at most {MOST_BYTES_OF_HEADER:,}; join tensors (torch.stack), give shorter "
            "names, or save the state as several parts"
        )
    record = files.write_file(path, _blocks(header, map(tensor, ordered)), ends)
    check(path)
    return record


def check(path: Path) -> None:
    """Open a safetensors file as a load does; no number of it is read.

    Raises:
        OSError: there is no such file.
        UnreadableError: it cannot be read.
        CheckpointError: it is no valid safetensors file.
    """
    untrusted.require_regular_file(path)
    try:
        with reads.tensors(path) as file:
            file.keys()
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is no valid safetensors file: {error}") from None


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, in host memory of their own.

    Raises:
        CheckpointError: it is no valid safetensors file.
        UnreadableError: it cannot be read.
    """
    untrusted.require_regular_file(path)
    try:
        with reads.tensors(path) as file:
            # The library maps the file; a copy outlives a file that is removed or cut while the run goes on.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is no valid safetensors file: {error}") from None


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and where it and each tensor that is not empty end in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = {HEADER: 0}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        if end > offset:  # nothing can happen to one without numbers
            ends[name] = end
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    before = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: before + end for name, end in ends.items()}


def _blocks(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        # A device-to-host copy of a tensor that is on a device; waits for it.
        host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        size = host.numel() * host.element_size()
        if size:
            yield memoryview((ctypes.c_char * size).from_address(host.data_ptr()))
