"""Write tensors to a safetensors file, one at a time, and read them back; recognise DTensors, which go into shards.

The writer is our own: it copies at most one tensor to the host at a time, computes the digest while writing, and lets
tests make each write fail. The library reads files, because their origin may be unknown.

Source: the safetensors format, 8 bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import files, reads, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import HEADER, FileRecord, Unsynced

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

# The library's limit: it opens no file with a longer header.
MOST_BYTES_OF_HEADER = 100_000_000

DTYPES = {getattr(torch, name): code for name, code in _NAMES.items() if name in vars(torch)}
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype of one of safetensors' codes.

    Raises:
        CheckpointError: this version of torch has none.
    """
    if code not in _DTYPE_OF:
        raise CheckpointError(f"torch {torch.__version__} has no dtype {code!r}; a newer one wrote it")
    return _DTYPE_OF[code]


def write(path: Path, tensors: Mapping[str, torch.Tensor], unsynced: Unsynced | None = None) -> FileRecord:
    """Write a new safetensors file that any reader of the format loads; `unsynced` as in `files.write_file`.

    Raises:
        OSError: it cannot be written.
        CheckpointError: it could not be read back, or this machine stores numbers in big-endian order.
    """
    return write_each(path, tensors, tensors.__getitem__, unsynced)


def write_each(
    path: Path,
    like: Mapping[str, torch.Tensor],
    tensor: Callable[[str], torch.Tensor],
    unsynced: Unsynced | None = None,
) -> FileRecord:
    """Write a new safetensors file of tensors that are computed one after the other.

    Args:
        path: the file.
        like: tensors of the same shapes and dtypes, on any device.
        tensor: returns the tensor of a name; called once for each, in the order of the file.
        unsynced: syncs the file later, with others; None waits here.

    Raises:
        OSError: it cannot be written.
        CheckpointError: it could not be read back, or this machine stores numbers in big-endian order.
    """
    if sys.byteorder != "little":
        raise CheckpointError(
            "safetensors holds little-endian numbers and this machine's are big-endian; not supported"
        )
    # Wide numbers first: each tensor then starts at a multiple of its item size. Readers that map the file need that.
    ordered = dict(sorted(like.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header, ends = _header(ordered)
    if len(header) - 8 > MOST_BYTES_OF_HEADER:
        raise CheckpointError(
            f"{path.name} was not written: the names and shapes of its {len(ordered):,} tensors take {len(header):,} "
            f"bytes, and safetensors reads at most {MOST_BYTES_OF_HEADER:,}; join tensors (torch.stack), give shorter "
            "names, or save the state as several parts"
        )
    record = files.write_file(path, _blocks(header, map(tensor, ordered)), ends, unsynced)
    check(path)
    return record


def check(path: Path) -> None:
    """Open a safetensors file as a load does, without reading its numbers.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
        CheckpointError: it is not a valid safetensors file.
    """
    untrusted.require_regular_file(path)
    try:
        with reads.tensors(path) as file:
            file.keys()
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, copied to host memory.

    Raises:
        CheckpointError: it is not a valid safetensors file.
        UnreadableError: it cannot be read.
    """
    untrusted.require_regular_file(path)
    try:
        with reads.tensors(path) as file:
            # The library maps the file; a copy stays valid if the file is removed or cut later.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and the end of the header and of each tensor that is not empty."""
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
        if end > offset:  # an empty tensor cannot be damaged
            ends[name] = end
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    before = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: before + end for name, end in ends.items()}


def _blocks(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        # Copies a tensor from its device to the host; waits for the copy.
        host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        size = host.numel() * host.element_size()
        if size:
            yield memoryview((ctypes.c_char * size).from_address(host.data_ptr()))


def may_exist() -> bool:
    """Whether this process can hold a DTensor: none exists unless their module was imported."""
    return "torch.distributed.tensor" in sys.modules


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor."""
    return may_exist() and isinstance(value, sys.modules["torch.distributed.tensor"].DTensor)


def find_distributed(state: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the DTensors in a nested state, each with its dotted path."""
    if is_distributed(state):
        yield ".".join(steps), state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from find_distributed(value, (*steps, str(key)))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from find_distributed(value, (*steps, str(number)))


def may_have_layout(target: Any) -> bool:
    """Whether `target` holds DTensors, or says itself how its tensors are distributed."""
    if not may_exist():
        return False
    if isinstance(target, torch.nn.Module):
        return any(map(is_distributed, (*target.parameters(), *target.buffers())))
    if isinstance(target, torch.optim.Optimizer):
        return any(is_distributed(parameter) for group in target.param_groups for parameter in group["params"])
    return hasattr(target, "tensor_layout")


def unsupported(tensor: Any) -> str:
    """Return why a tensor cannot be saved, and what to do; empty if it can."""
    if is_distributed(tensor):
        partial = [placement for placement in tensor.placements if placement.is_partial()]
        if partial:
            return (
                f"a DTensor with the placement {partial[0]!r}: no rank has its numbers yet; "
                "give tensor.redistribute(placements=[Replicate(), ...]) in state_dict()"
            )
        return unsupported(_local(tensor))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"a {type(tensor).__qualname__}, a kind of tensor that is more than its numbers; "
            "give a plain tensor in state_dict()"
        )
    if tensor.is_meta:
        return "a tensor on the meta device, which has no numbers; materialise it before saving"
    if tensor.is_nested:
        return "a nested tensor; only dense ones are saved — give the list of tensors that tensor.unbind() returns"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return f"a {kind} tensor; only dense ones are saved — give tensor.to_dense() or tensor.dequantize()"
    if tensor.dtype not in DTYPES:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        return f"a tensor of {tensor.dtype}; safetensors holds {known} — convert it in state_dict()"
    return ""


def _local(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local()


def identity(tensor: Any) -> Hashable:
    """Return a key that is equal for two tensors only if they are the same numbers in the same memory."""
    if is_distributed(tensor):
        # Over the same local memory, two are the same tensor only with the same layout.
        return (id(tensor.device_mesh), tensor.placements, tuple(tensor.shape)), identity(_local(tensor))
    if tensor.numel() == 0 or tensor.device.type == "xla":  # no address to compare
        return id(tensor)
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
