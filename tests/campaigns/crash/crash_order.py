"""Check recorded saves against the protocol: what is synced before what, and what is written last."""

from __future__ import annotations

from pathlib import Path

from crash_operations import Event

MANIFEST = "manifest.json"


def out_of_order(events: list[Event]) -> list[str]:
    """Return what in the operations of a run is not as the protocol has it.

    Each file is synced after its last write, the manifest is begun after all others were synced, its folder is synced
    after the last name in it was made, renamed in one operation, and the folder above it synced before anybody is told.
    """
    return _Order().read(events)


class _Order:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.path_of: dict[int, str] = {}
        self.unsynced: set[str] = set()  # files and folders
        self.uncommitted: set[str] = set()
        self.described: set[str] = set()  # folders whose manifest is begun

    def read(self, events: list[Event]) -> list[str]:
        for event in events:
            getattr(self, f"_{event.kind}", self._other)(event)
        return self.problems

    def _other(self, event: Event) -> None:
        """Removals may be lost."""

    def _make_folder(self, event: Event) -> None:
        self.unsynced |= {event.path, str(Path(event.path).parent)}

    _found_folder = _make_folder

    def _create(self, event: Event) -> None:
        path = Path(event.path)
        if path.name == MANIFEST and (left := self._inside(path.parent, files_only=True)):
            self.problems.append(f"{MANIFEST} is begun before {left} were synced")
        elif str(path.parent) in self.described:
            self.problems.append(f"{path.name} is begun after {MANIFEST}")
        if path.name == MANIFEST:
            self.described.add(str(path.parent))
        if ".tmp-" not in event.path:
            self.problems.append(f"{event.path} is written where a checkpoint is looked for")
        self.path_of[event.inode] = event.path
        self.unsynced |= {event.path, str(path.parent)}

    def _found_file(self, event: Event) -> None:
        self.path_of[event.inode] = event.path
        self.unsynced |= {event.path, str(Path(event.path).parent)}

    def _write(self, event: Event) -> None:
        self.unsynced.add(self.path_of[event.inode])

    def _sync(self, event: Event) -> None:
        self.unsynced.discard(self.path_of[event.inode])

    def _sync_folder(self, event: Event) -> None:
        self.unsynced.discard(event.path)
        self.uncommitted = {path for path in self.uncommitted if str(Path(path).parent) != event.path}

    def _rename(self, event: Event) -> None:
        if ".tmp-writing-" not in event.path:
            return
        if left := [*self._inside(Path(event.path)), *sorted({event.path} & self.unsynced)]:
            self.problems.append(f"{Path(event.target).name} gets its name before {left} were synced")
        self.uncommitted.add(event.target)

    def _promise(self, event: Event) -> None:
        if self.uncommitted:
            self.problems.append(f"step {event.step} is said to be safe before {sorted(self.uncommitted)} is durable")

    def _inside(self, folder: Path, *, files_only: bool = False) -> list[str]:
        known = set(self.path_of.values())
        return sorted(
            Path(path).name
            for path in self.unsynced
            if Path(path).is_relative_to(folder) and path != str(folder) and (path in known or not files_only)
        )
