"""Print the lowest versions that the packages declare, as constraints for an installer.

`nox -s minimums` installs these and runs the tests of every package with them.
"""

from __future__ import annotations

import re
import tomllib

from package_list import PACKAGES

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[.*\])?>=(?P<floor>[^,;\s]+)")


def floors() -> dict[str, str]:
    """Return the lowest version that is declared for each library, required or extra; siblings are left out.

    Raises:
        ValueError: a requirement has no lowest version, or two packages declare different ones for one library.
    """
    found: dict[str, str] = {}
    for package in PACKAGES:
        project = tomllib.loads((package.path / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project["dependencies"], *(line for extra in extras for line in extra)]:
            if requirement.startswith("tr-"):
                continue
            match = _REQUIREMENT.match(requirement)
            if match is None:
                raise ValueError(
                    f"{package.name} requires {requirement!r} without a lowest version: write it as 'name>=version'"
                )
            name = match["name"].lower().replace("_", "-")
            floor = found.setdefault(name, match["floor"])
            if floor != match["floor"]:
                raise ValueError(
                    f"{package.name} requires {requirement!r}, another package the same library from {floor}: "
                    "declare one lowest version"
                )
    return found


def constraints() -> str:
    """Return what an installer's `-c` takes: a line a library."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(floors().items()))


if __name__ == "__main__":
    print(constraints(), end="")
