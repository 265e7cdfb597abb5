"""Know the packages of this repository, their dependencies and their paths: the one list everything else reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """One independently released distribution.

    Attributes:
        name: distribution name, as given to pip (`tr-core`).
        siblings: names of the packages in this repository that it requires.
        torch: whether it requires torch; the two that do not must import without it.
    """

    name: str
    siblings: tuple[str, ...] = ()
    torch: bool = True

    @property
    def module(self) -> str:
        """Import name: the distribution's name with an underscore."""
        return self.name.replace("-", "_")

    @property
    def path(self) -> Path:
        """Folder that holds the package's `pyproject.toml`."""
        return ROOT / "packages" / self.name

    @property
    def source(self) -> Path:
        """Folder of the importable module."""
        return self.path / "src" / self.module


PACKAGES = (
    Package("tr-log", torch=False),
    Package("tr-args", siblings=("tr-log",), torch=False),
    Package("tr-core", siblings=("tr-args", "tr-log")),
    Package("tr-ckpt", siblings=("tr-log",)),
    Package("tr-optim", siblings=("tr-log",)),
    Package("tr-dist", siblings=("tr-log",)),
    Package("tr-all", siblings=("tr-args", "tr-log", "tr-core", "tr-ckpt", "tr-optim", "tr-dist")),
)


def package(name: str) -> Package:
    """Return the package called `name`.

    Raises:
        KeyError: no package has that name; the message lists those there are.
    """
    for candidate in PACKAGES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no package named {name!r}; there are: {', '.join(p.name for p in PACKAGES)}")


def with_siblings(name: str) -> tuple[Package, ...]:
    """Return the packages to install for `name` to work: its siblings first, then itself."""
    this = package(name)
    return (*(package(sibling) for sibling in this.siblings), this)
