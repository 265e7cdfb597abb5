"""List the GPUs of this machine, and determine which of them is which CUDA device in a process, and why.

The list comes from nvidia-smi, with its numbers, hidden GPUs too. The CUDA devices follow from CUDA's variables alone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,pci.bus_id", "--format=csv,noheader")
_MIG_QUERY = ("nvidia-smi", "-L")


@dataclass(frozen=True)
class PhysicalGPU:
    """One GPU of this machine.

    Attributes:
        index: its number in nvidia-smi, which counts by PCI bus.
        uuid: its globally unique name, beginning with `GPU-`.
        name: its model.
        bus_id: its address on the PCI bus, such as `00000000:07:00.0`.
        mig_uuids: names of its MIG devices, beginning with `MIG-`.
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    mig_uuids: tuple[str, ...] = ()


class SmiError(RuntimeError):
    """nvidia-smi exists and failed to list the GPUs; the text says why."""


def read_physical_gpus(*, timeout_s: float = 20.0, with_mig: bool = False) -> list[PhysicalGPU]:
    """Return the GPUs that nvidia-smi lists; none without that program. CUDA's variables have no effect on it.

    Args:
        timeout_s: seconds that it gets: a GPU that hangs makes it hang too.
        with_mig: list the MIG devices too.

    Raises:
        SmiError: it failed, did not answer in time, or its answer cannot be parsed.
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
    """Return the MIG devices by their GPU's UUID, from lines that end with `(UUID: GPU-...)` and `(UUID: MIG-...)`."""
    parts: dict[str, list[str]] = {}
    uuid = ""
    for line in listing.splitlines():
        found = line.rpartition("(UUID:")[2].rstrip(" )").strip()
        if found.startswith("MIG-"):
            parts.setdefault(uuid, []).append(found)
        elif found.startswith("GPU-"):
            uuid = found
    return parts


ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")
_ADVICE = "set CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA numbers GPUs as nvidia-smi does"


@dataclass(frozen=True)
class Numbering:
    """How CUDA interprets its variables.

    Attributes:
        devices: the GPU, or MIG device, of `cuda:0`, `cuda:1`, ...; None if the variables do not determine it.
        why: the explanation, one sentence a line.
        problems: settings that are probably mistakes.
    """

    devices: tuple[PhysicalGPU | None, ...]
    why: tuple[str, ...]
    problems: tuple[str, ...] = ()


def number_gpus(gpus: Sequence[PhysicalGPU], environ: Mapping[str, str]) -> Numbering:
    """Determine which GPU is which CUDA device under CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

    CUDA numbers GPUs by CUDA_DEVICE_ORDER, FASTEST_FIRST if it is not set. CUDA_VISIBLE_DEVICES then lists those that a
    process sees, by number or by the beginning of a UUID. The first invalid entry silently ends the list, and a device
    listed twice empties it.

    Args:
        gpus: all GPUs, in nvidia-smi's order.
        environ: the variables.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    order, why, problems = _order(gpus, environ.get("CUDA_DEVICE_ORDER"))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return Numbering(tuple(order), (*why, "CUDA_VISIBLE_DEVICES is not set: all are visible"), tuple(problems))
    chosen = _Chosen(gpus, order, listed)
    return Numbering(tuple(chosen.devices), (*why, *chosen.why), (*problems, *chosen.problems))


def _order(gpus: Sequence[PhysicalGPU], asked: str | None) -> tuple[Sequence[PhysicalGPU | None], list[str], list[str]]:
    """Return the GPUs in CUDA's order, None for those whose number is unknown; the explanation; and problems."""
    if asked == "PCI_BUS_ID":
        return gpus, ["CUDA_DEVICE_ORDER='PCI_BUS_ID': CUDA numbers GPUs as nvidia-smi does"], []
    problems = []
    said = f"CUDA_DEVICE_ORDER={asked!r}" if asked else "CUDA_DEVICE_ORDER is not set, which is FASTEST_FIRST"
    if asked not in (None, *ORDERS):
        said += ", which is FASTEST_FIRST to CUDA"
        problems = [f"CUDA_DEVICE_ORDER={asked!r} is not known to CUDA; set one of {', '.join(ORDERS)}, or unset it"]
    names = sorted({gpu.name for gpu in gpus})
    if len(names) < 2:
        return gpus, [f"{said}: the GPUs are alike, so CUDA numbers them by PCI bus, as nvidia-smi does"], problems
    unlike = f"{said}: CUDA numbers the fastest first, which among {', '.join(names)} may not be nvidia-smi's order"
    return [None] * len(gpus), [f"{unlike}; {_ADVICE}"], problems


class _Chosen:
    """Reads CUDA_VISIBLE_DEVICES as CUDA does."""

    def __init__(self, gpus: Sequence[PhysicalGPU], order: Sequence[PhysicalGPU | None], listed: str) -> None:
        self._gpus, self._order = gpus, order
        self.devices: list[PhysicalGPU | None] = []
        self.why: list[str] = []
        self.problems: list[str] = []
        if not listed.strip():
            self.why.append(f"CUDA_VISIBLE_DEVICES={listed!r} is empty: no GPU is visible, so training is on the CPU")
            return
        self._read(listed)

    def _read(self, listed: str) -> None:
        shown, kind = f"CUDA_VISIBLE_DEVICES={listed!r}", _kind(listed)
        entries, found = listed.split(","), []
        for number, entry in enumerate(entries):
            device = self._number(entry) if kind == "" else self._by_uuid(entry, kind)
            if isinstance(device, str):
                self._cut(shown, entry, device, entries[number + 1 :])
                break
            if device in found:
                self.devices = []
                self.problems.append(
                    f"{shown} lists {entry.strip()!r} twice, and CUDA then shows no device; list it once"
                )
                return
            found.append(device)
            self.devices.append(device[1])
        if self.devices:
            named = ", ".join(f"{entries[number].strip()} is cuda:{number}" for number in range(len(self.devices)))
            self.why.insert(0, f"{shown}: {named}")
        if kind == "MIG-" and len(self.devices) > 1:
            self.devices = self.devices[:1]
            self.problems.append(
                f"{shown}: a process uses one MIG device, the first; give each process its own, by one "
                "CUDA_VISIBLE_DEVICES for each"
            )

    def _cut(self, shown: str, entry: str, reason: str, later: list[str]) -> None:
        lost = f", so {', '.join(repr(word.strip()) for word in later)} behind it is hidden too" if later else ""
        none = "" if self.devices else ", and no GPU is visible"
        what = f"{shown}: {entry.strip()!r} {reason}; the list ends there{lost}{none}"
        is_meant = entry.strip() in ("-1", "NoDevFiles")  # the usual ways to select none
        (self.why if is_meant else self.problems).append(what)

    def _number(self, entry: str) -> tuple[object, PhysicalGPU | None] | str:
        """Return the device of a number, which also identifies it; or why it is invalid."""
        digits = _leading_number(entry.strip())
        if digits is None or digits < 0:
            return "is not the number of a GPU"
        if digits >= len(self._order):
            return f"is no GPU of this machine, which has {len(self._order)}"
        return digits, self._order[digits]

    def _by_uuid(self, entry: str, kind: str) -> tuple[object, PhysicalGPU | None] | str:
        if not entry.startswith(kind):
            return f"does not begin with {kind!r}, as the first entry does"
        if kind == "GPU-":
            fitting = [(gpu.uuid, gpu) for gpu in self._gpus if gpu.uuid.startswith(entry)]
        else:  # formerly MIG-GPU-<UUID>/<instance>/<instance>; nvidia-smi does not list the last parts
            fitting = [(part, gpu) for gpu in self._gpus for part in gpu.mig_uuids if part.startswith(entry)]
            fitting = fitting or [(entry, gpu) for gpu in self._gpus if entry.startswith(f"MIG-{gpu.uuid}/")]
        if len(fitting) > 1:
            return f"fits {len(fitting)} devices"
        return fitting[0] if fitting else "is no device of this machine"


def _kind(listed: str) -> str:
    return next((kind for kind in ("GPU-", "MIG-") if listed.startswith(kind)), "")


def _leading_number(text: str) -> int | None:
    """Return the number that a text begins with, as C's strtol reads it: CUDA takes `1gpu` for 1."""
    found = re.match("[+-]?[0-9]+", text)
    return int(found[0]) if found else None
