"""Copy tensors into host memory that is used again from save to save."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_Kind = tuple[torch.dtype, int, bool]


class HostBuffers:
    """Memory on the host for one copy of a state: taken at the first save, used again by those that follow.

    New memory costs several times what copying into it does, as the system hands it out page by page. A buffer fits
    a tensor of its dtype and size; those that a save did not use are given back, so that never more than one copy
    is held. Only the thread that trains calls the methods; what they return may be read by any.

    Attributes:
        allocations: how many buffers were ever taken.
        copied_bytes: how much was ever copied.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self.copied_bytes = 0
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        self._used: list[tuple[_Kind, torch.Tensor]] = []
        self._devices: set[torch.device] = set()

    @property
    def held_bytes(self) -> int:
        """How much memory is held, in use or not."""
        buffers = [buffer for _, buffer in self._used] + [buffer for kept in self._free.values() for buffer in kept]
        return sum(buffer.nbytes for buffer in buffers)

    def begin(self) -> None:
        """Begin a copy of a state: all that was handed out for the one before may be written over from now on."""
        while self._used:
            kind, buffer = self._used.pop()
            self._free.setdefault(kind, []).append(buffer)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the host, dense and of the same dtypes and shapes; read them after `finish` only."""
        copies = {}
        # Whatever mode the caller is in, a buffer must be one that can be written to later, in any other.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                pinned = tensor.device.type == "cuda"
                copy = self._take((tensor.dtype, tensor.numel(), pinned)).view(tensor.shape)
                # Into pinned memory it runs on beside the host, ordered with the kernels of the current stream.
                copies[name] = copy.copy_(tensor.detach(), non_blocking=pinned)
                self.copied_bytes += copy.nbytes
                if pinned:
                    self._devices.add(tensor.device)
        return copies

    def finish(self) -> None:
        """Wait until all copies are made, and give back the buffers that none of them needed."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()  # sync: once a save and device, for all its copies
        self._devices.clear()
        self._free.clear()

    def _take(self, kind: _Kind) -> torch.Tensor:
        kept = self._free.get(kind)
        if kept:
            buffer = kept.pop()
        else:
            dtype, size, pinned = kind
            buffer = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
            self.allocations += 1
        self._used.append((kind, buffer))
        return buffer
