"""A checkpointer that keeps everything in memory, for tests of what is saved and when."""

import copy
from pathlib import Path


class MemoryCheckpointer:
    """Keeps deep copies of the parts' states by step.

    Attributes:
        saved: the states by step, each by the name of its part.
        saves: the steps of all calls of `save`, in order.
    """

    def __init__(self, folder="memory"):
        self.folder, self.saved, self.saves = Path(folder), {}, []

    def save(self, step, parts, *, write_extra=None, protected=(), on_commit=None):
        self.saved[step] = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        self.saves.append(step)
        if on_commit is not None:
            on_commit(self.path(step))
        return self.path(step)

    def restore(self, parts, source=None, *, optional=()):
        if source is None and not self.saved:
            return None
        step = max(self.saved) if source is None else int(str(source).rpartition("-")[2])
        if missing := sorted(set(parts) - set(self.saved[step]) - set(optional)):
            raise ValueError(f"there is no {', '.join(missing)} in it")
        for name, part in parts.items():
            if name not in self.saved[step]:
                continue
            part.load_state_dict(copy.deepcopy(self.saved[step][name]))
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
