"""List the GPUs of this machine, hidden ones too, as nvidia-smi numbers them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,pci.bus_id", "--format=csv,noheader")
_MIG_QUERY = ("nvidia-smi", "-L")


@dataclass(frozen=True)
class PhysicalGPU:
    """One GPU of this machine.

    Attributes:
        index: its number in nvidia-smi, which counts by PCI bus.
        uuid: its name all over the world, beginning with `GPU-`.
        name: its model.
        bus_id: its place on the PCI bus, such as `00000000:07:00.0`.
        mig_uuids: names of the parts it is divided into, beginning with `MIG-`.
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    mig_uuids: tuple[str, ...] = ()


class SmiError(RuntimeError):
    """nvidia-smi is there and does not say what GPUs there are; the text says why."""


def read_physical_gpus(*, timeout_s: float = 20.0, with_mig: bool = False) -> list[PhysicalGPU]:
    """Return what nvidia-smi lists, none where there is no such program. CUDA's variables have no effect on it.

    Args:
        timeout_s: seconds that it gets: beside a GPU that hangs, it hangs too.
        with_mig: ask for the parts of divided GPUs too.

    Raises:
        SmiError: it failed, gave no answer in time, or one that cannot be read.
    """
    try:
        gpus = [_gpu(line) for line in _output(_QUERY, timeout_s).splitlines() if line.strip()]
        parts = _mig_uuids(_output(_MIG_QUERY, timeout_s)) if with_mig else {}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SmiError(f"nvidia-smi cannot be started: {error.strerror}") from None
    return [PhysicalGPU(*facts, mig_uuids=tuple(parts.get(facts[1], ()))) for facts in sorted(gpus)]


def _output(command: tuple[str, ...], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise SmiError(f"nvidia-smi gave no answer within {timeout_s:g} s; a GPU or its driver hangs") from None
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
        raise SmiError(f"nvidia-smi ended with exit code {done.returncode} and said: {said}")
    return done.stdout


def _gpu(line: str) -> tuple[int, str, str, str]:
    words = [word.strip() for word in line.split(",")]
    if len(words) < 4 or not words[0].isdigit():
        raise SmiError(f"nvidia-smi said {line!r}, which is not an index, a UUID, a name and a bus")
    return int(words[0]), words[1], ", ".join(words[2:-1]), words[-1]


def _mig_uuids(listing: str) -> dict[str, list[str]]:
    """Return the parts by their GPU's UUID, from lines that end with `(UUID: GPU-...)` and `(UUID: MIG-...)`."""
    parts: dict[str, list[str]] = {}
    uuid = ""
    for line in listing.splitlines():
        found = line.rpartition("(UUID:")[2].rstrip(" )").strip()
        if found.startswith("MIG-"):
            parts.setdefault(uuid, []).append(found)
        elif found.startswith("GPU-"):
            uuid = found
    return parts
