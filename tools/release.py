"""Release one package: raise its version, fold its change fragments, widen its dependants' ranges, commit and tag.

    nox -s release -- tr-args patch --dry-run       (or `python tools/release.py ...` where towncrier is installed)

`first` releases the version that is there; `patch`, `minor` and `major` raise it. Before 1.0 a minor version may break
what worked, from 1.0 on only a major one: see CONTRIBUTING.md. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("patch", "minor", "major")
KINDS = ("breaking", "feature", "fix")
LIMIT_S = 120


class ReleaseError(Exception):
    """The release would break a rule; the message says which, and what to change."""


@dataclass
class Plan:
    """What a release changes: the new text of each file, by its path below the root; None removes it."""

    name: str
    version: Version
    files: dict[str, str | None] = field(default_factory=dict)
    notes: str = ""

    @property
    def tag(self) -> str:
        """The tag of the release."""
        return f"{self.name}-v{self.version}"


def plan(root: Path, name: str, part: str) -> Plan:
    """Return what releasing a package changes.

    Raises:
        ReleaseError: it may not be released like this.
    """
    folder = root / "packages" / name
    if not (folder / "pyproject.toml").is_file():
        known = ", ".join(path.parent.name for path in sorted(root.glob("packages/*/pyproject.toml")))
        raise ReleaseError(f"there is no package {name!r}; there are: {known}")
    current, found = _version(folder), fragments(folder)
    if part == "first":
        if tags := _git(root, "tag", "--list", f"{name}-v*").split():
            raise ReleaseError(f"{name} was released before, as {tags[-1]}; give patch, minor or major")
        made = Plan(name, current)
    else:
        removed = removed_names(root, name)
        if not found:
            raise ReleaseError(
                f"packages/{name}/changes has no fragment: nothing that users notice changed since {current}"
            )
        made = Plan(name, raised(current, part))
        check_part(name, current, part, removed, found)
    _release_files(root, made, current, found)
    for dependant in sorted(root.glob("packages/*/pyproject.toml")):
        _widen(root, dependant.parent, made)
    return made


def fragments(folder: Path) -> dict[str, str]:
    """Return the change fragments of a package: which kind each file in its folder `changes` is of.

    Raises:
        ReleaseError: a file's name says no kind, or it is empty.
    """
    found = {}
    for path in sorted((folder / "changes").glob("*")):
        kind = path.suffixes[-2][1:] if path.suffix == ".md" and len(path.suffixes) > 1 else ""
        if kind not in KINDS:
            raise ReleaseError(
                f"{path.name} in {folder.name}/changes: call it NAME.KIND.md, KIND one of {', '.join(KINDS)}"
            )
        if not path.read_text("utf-8").strip():
            raise ReleaseError(f"{path.name} in {folder.name}/changes is empty: write what changes for users")
        found[path.name] = kind
    return found


def raised(version: Version, part: str) -> Version:
    """Return the next version."""
    major, minor, micro = version.release
    return Version(
        {"major": f"{major + 1}.0.0", "minor": f"{major}.{minor + 1}.0"}.get(part, f"{major}.{minor}.{micro + 1}")
    )


def first_that_may_break(version: Version) -> str:
    """Return the version at which what works with `version` may stop to work: a range ends before it."""
    return f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"


def check_part(name: str, current: Version, part: str, removed: list[str], found: dict[str, str]) -> None:
    """Check that the part of the version that is raised says what changed.

    Raises:
        ReleaseError: too small a part.
    """
    breaking = [file for file, kind in found.items() if kind == "breaking"]
    least = PARTS.index("major" if current.major else "minor") if removed or breaking else 0
    if current.major and "feature" in found.values():
        least = max(least, PARTS.index("minor"))
    if removed and not breaking:
        raise ReleaseError(
            f"{name} no longer has the public {_names(removed)}: put them back, or write a fragment of the kind "
            f"'breaking' that says what to use instead, and release a {PARTS[least]} version"
        )
    if PARTS.index(part) < least:
        reason = (
            f"it no longer has the public {_names(removed)}" if removed else f"{', '.join(breaking) or 'a feature'}"
        )
        raise ReleaseError(
            f"{name} {current} cannot be followed by a {part} version ({reason}): release a {PARTS[least]} one"
        )


def removed_names(root: Path, name: str) -> list[str]:
    """Return the public names (`api.txt`) of the last release that the package has no more.

    Raises:
        ReleaseError: the last release has no tag.
    """
    tag = f"{name}-v{_version(root / 'packages' / name)}"
    if not _git(root, "tag", "--list", tag).strip():
        raise ReleaseError(
            f"there is no tag {tag} to compare with: fetch the tags (git fetch --tags), or, if {name} was never "
            f"released, release it with 'first'"
        )
    before = _git(root, "show", f"{tag}:packages/{name}/api.txt").split()
    return sorted(set(before) - set((root / "packages" / name / "api.txt").read_text("utf-8").split()))


def folded(changelog: str, version: Version, lines: str) -> str:
    """Return a changelog with further lines: in the section of a version, which is made above the others if missing."""
    head, *sections = re.split(r"(?m)^(?=## )", changelog)
    if sections and sections[0].split("\n")[0] == f"## {version}":
        if lines:
            separator = "" if sections[0].rstrip().rpartition("\n\n")[2].startswith("- ") else "\n"
            sections[0] = sections[0].rstrip("\n") + f"\n{separator}{lines}\n" + ("\n" if sections[1:] else "")
        return head + "".join(sections)
    return head + f"## {version}\n\n{lines}\n" + ("\n" if sections else "") + "".join(sections)


def notes_of(changelog: str, version: Version) -> str:
    """Return the lines of a version's section."""
    for section in re.split(r"(?m)^## ", changelog)[1:]:
        title, _, text = section.partition("\n")
        if title.strip() == str(version):
            return text.strip()
    raise ReleaseError(f"the changelog has no section {version}")


def widened(requirement: str, version: Version) -> str:
    """Return a requirement whose range holds a version: the same, or with a later end.

    Raises:
        ReleaseError: it has no end that could be moved.
    """
    parsed = Requirement(requirement)
    if version in parsed.specifier:
        return requirement
    changed = re.sub(r"<\s*[\d.]+", f"<{first_that_may_break(version)}", requirement)
    if version not in Requirement(changed).specifier:
        raise ReleaseError(f"{requirement!r} leaves out {version}, and not by its end alone: change it by hand")
    return changed


def of_tag(root: Path, tag: str) -> Plan:
    """Return which release a tag is, with its notes.

    Raises:
        ReleaseError: the checkout is not that release.
    """
    name, found, version = tag.rpartition("-v")
    folder = root / "packages" / name
    if not found or not name or not (folder / "pyproject.toml").is_file():
        raise ReleaseError(f"{tag!r} is not a tag of a release; they are like tr-args-v0.1.0")
    if str(current := _version(folder)) != version:
        raise ReleaseError(f"the tag says {name} {version}, its pyproject.toml {current}")
    return Plan(name, current, notes=notes_of((folder / "CHANGELOG.md").read_text("utf-8"), current))


def _release_files(root: Path, made: Plan, current: Version, found: dict[str, str]) -> None:
    below = f"packages/{made.name}"
    text = (root / below / "pyproject.toml").read_text("utf-8")
    made.files[f"{below}/pyproject.toml"] = text.replace(
        f'\nversion = "{current}"\n', f'\nversion = "{made.version}"\n', 1
    )
    lines = _rendered(root, made) if found else ""
    changelog = folded((root / below / "CHANGELOG.md").read_text("utf-8"), made.version, lines)
    made.files[f"{below}/CHANGELOG.md"] = changelog
    made.files |= {f"{below}/changes/{file}": None for file in found}
    made.notes = notes_of(changelog, made.version)


def _rendered(root: Path, made: Plan) -> str:
    """Return the lines that towncrier makes of the fragments."""
    command = (
        *(sys.executable, "-m", "towncrier", "build", "--draft", "--config", str(root / "tools/towncrier.toml")),
        *("--dir", str(root / "packages" / made.name), "--name", made.name, "--version", str(made.version)),
    )
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if ran.returncode:
        raise ReleaseError(f"towncrier failed: {ran.stderr.strip()}")
    return ran.stdout.strip("\n")


def _widen(root: Path, folder: Path, made: Plan) -> None:
    """Add to a plan that a package accepts the new version, and a fragment that says so: it has to be released too."""
    path = f"packages/{folder.name}/pyproject.toml"
    text = made.files.get(path) or (folder / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    lists = (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
    changed = text
    for requirement in {line for lines in lists for line in lines if Requirement(line).name == made.name}:
        changed = changed.replace(f'"{requirement}"', f'"{widened(requirement, made.version)}"')
    if changed != text:
        made.files[path] = changed
        until = first_that_may_break(made.version)
        made.files[f"packages/{folder.name}/changes/{made.name}-{made.version}.fix.md"] = (
            f"Accepts {made.name} before {until}.\n"
        )


def _names(names: list[str]) -> str:
    return ("names " if names[1:] else "name ") + ", ".join(names)


def _version(folder: Path) -> Version:
    return Version(tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def _git(root: Path, *words: str) -> str:
    ran = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    if ran.returncode:
        raise ReleaseError(f"git {' '.join(words)} failed: {ran.stderr.strip()}")
    return ran.stdout


def _difference(root: Path, made: Plan) -> str:
    lines: list[str] = []
    for path, text in made.files.items():
        before = (root / path).read_text("utf-8") if (root / path).exists() else ""
        lines += difflib.unified_diff(
            before.splitlines(),
            (text or "").splitlines(),
            path,
            path if text is not None else "(removed)",
            "",
            "",
            1,
            "",
        )
    return "\n".join(lines)


def _carry_out(root: Path, made: Plan) -> None:
    for path, text in made.files.items():
        if text is None:
            (root / path).unlink()
            continue
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, "utf-8")
    _git(root, "add", "--all", "--", "packages")
    _git(root, "commit", "--allow-empty", "-m", f"{made.name} {made.version}")
    _git(root, "tag", "--annotate", made.tag, "-m", f"{made.name} {made.version}\n\n{made.notes}")


def main(argv: list[str] | None = None) -> int:
    """Release a package, or say what a tag stands for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="?", help="the package, such as tr-args")
    parser.add_argument("part", nargs="?", choices=("first", *PARTS), help="which part of its version is raised")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and change nothing")
    parser.add_argument("--of-tag", metavar="TAG", help="print the package and version of a tag of this checkout")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="with --of-tag: write the notes of that release")
    given = parser.parse_args(argv)
    if not given.of_tag and not given.part:
        parser.error("give a package and one of first, patch, minor, major, or --of-tag TAG")
    try:
        if given.of_tag:
            made = of_tag(ROOT, given.of_tag)
            print(f"name={made.name}\nmodule={made.name.replace('-', '_')}\nversion={made.version}")
            if given.notes:
                given.notes.write_text(made.notes + "\n", "utf-8")
            return 0
        if not given.dry_run and (changed := _git(ROOT, "status", "--porcelain").strip()):
            raise ReleaseError(
                f"the checkout has changes that are not committed:\n{changed}\nCommit or remove them first"
            )
        made = plan(ROOT, given.name, given.part)
        if _git(ROOT, "tag", "--list", made.tag).strip():
            raise ReleaseError(f"there is a tag {made.tag} already")
        print(_difference(ROOT, made))
        if given.dry_run:
            print(f"\nwould release {made.tag}")
            return 0
        _carry_out(ROOT, made)
    except ReleaseError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    print(f"\nreleased {made.tag} here. To publish it: git push --follow-tags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
