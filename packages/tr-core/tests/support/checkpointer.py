"""A checkpointer that keeps everything in memory, for tests of what is saved and when."""

import copy
from pathlib import Path
from types import SimpleNamespace


class MemoryCheckpointer:
    """Keeps deep copies of the parts' states by step.

    Attributes:
        saved: the states by step, each by the name of its part.
        saves: the steps of all calls of `save`, in order.
        restored: what the last `restore` did.
    """

    def __init__(self, folder="memory"):
        self.folder, self.saved, self.saves = Path(folder), {}, []
        self.restored = None

    def save(self, step, parts, *, write_extra=None, protected=(), on_commit=None):
        self.saved[step] = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        self.saves.append(step)
        if on_commit is not None:
            on_commit(self.path(step))
        return self.path(step)

    def restore(self, parts, source=None, *, optional=(), only_read=()):
        self.restored = SimpleNamespace(step=None, source=None, skipped=(), loaded=frozenset(), states={})
        if source is None and not self.saved:
            return None
        step = max(self.saved) if source is None else int(str(source).rpartition("-")[2])
        if missing := sorted({*parts, *only_read} - set(self.saved[step]) - set(optional)):
            raise ValueError(f"there is no {', '.join(missing)} in it")
        states = {name: copy.deepcopy(self.saved[step][name]) for name in only_read}
        loaded = [name for name in parts if name in self.saved[step] and name not in states]
        for name in loaded:
            parts[name].load_state_dict(copy.deepcopy(self.saved[step][name]))
        found = {"step": step, "source": self.path(step), "loaded": frozenset(loaded), "states": states}
        self.restored = SimpleNamespace(skipped=(), **found)
        return step

    def steps(self):
        return sorted(self.saved)

    def path(self, step):
        return self.folder / f"checkpoint-{step}"

    def check(self):
        pass

    def wait(self):
        pass

    def close(self):
        pass
