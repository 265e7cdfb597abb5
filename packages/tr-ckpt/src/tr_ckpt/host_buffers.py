"""Hold host memory for one copy of a state, so that training continues while the copy is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_Kind = tuple[torch.dtype, int, bool]


class HostBuffers:
    """Host memory for one copy of a state: allocated at the first save, reused by later ones.

    New memory costs several times as much as the copy into it, because the system maps it page by page. A buffer fits
    tensors of its dtype and size. Buffers that a save did not use are freed, so that at most one copy is held. Only
    the training thread calls the methods; any thread may read what they return.

    Attributes:
        allocations: how many buffers were ever allocated.
        copied_bytes: how many bytes were ever copied.
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
        """Begin a copy of a state: the buffers of the previous copy may be overwritten from here on."""
        while self._used:
            kind, buffer = self._used.pop()
            self._free.setdefault(kind, []).append(buffer)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the host, dense and of the same dtypes and shapes; they are valid after `finish`."""
        copies = {}
        # A buffer made in inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                pinned = tensor.device.type == "cuda"
                copy = self._take((tensor.dtype, tensor.numel(), pinned)).view(tensor.shape)
                # The copy into pinned memory is asynchronous, ordered with the kernels of the current stream.
                copies[name] = copy.copy_(tensor.detach(), non_blocking=pinned)
                self.copied_bytes += copy.nbytes
                if pinned:
                    self._devices.add(tensor.device)
        return copies

    def finish(self) -> None:
        """Wait until all copies are made, and free the buffers that this copy did not use."""
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
