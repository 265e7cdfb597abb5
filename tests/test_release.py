"""What `tools/release.py` decides: versions, ranges of dependants, changelogs, and which releases it refuses."""

import importlib.util
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
_SPEC = importlib.util.spec_from_file_location("release_of_a_package", ROOT / "tools" / "release.py")
release = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = release  # its dataclasses look for their module
_SPEC.loader.exec_module(release)
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize(
    ("version", "part", "expected"),
    [
        ("0.1.0", "patch", "0.1.1"),
        ("0.1.3", "minor", "0.2.0"),
        ("0.9.0", "major", "1.0.0"),
        ("2.3.1", "minor", "2.4.0"),
    ],
)
def test_the_part_that_is_named_is_raised_and_those_after_it_start_at_zero(version, part, expected):
    assert release.raised(Version(version), part) == Version(expected)


@pytest.mark.parametrize(
    ("requirement", "version", "expected"),
    [
        ("tr-args>=0.1,<0.2", "0.1.9", "tr-args>=0.1,<0.2"),
        ("tr-args>=0.1,<0.2", "0.2.0", "tr-args>=0.1,<0.3"),
        ("tr-dist[deepspeed]>=0.1,<0.2", "1.0.0", "tr-dist[deepspeed]>=0.1,<2"),
        ("tr-args >=1.2, < 2", "2.0.0", "tr-args >=1.2, <3"),
        ("tr-args", "7.0.0", "tr-args"),
    ],
)
def test_a_range_is_widened_just_so_far_that_it_holds_the_new_version(requirement, version, expected):
    assert release.widened(requirement, Version(version)) == expected


def test_a_range_that_leaves_a_version_out_otherwise_is_left_to_a_person():
    with pytest.raises(release.ReleaseError, match=r"'tr-args>=0.1,!=0.2.0,<0.2' leaves out 0.2.0, .* by hand"):
        release.widened("tr-args>=0.1,!=0.2.0,<0.2", Version("0.2.0"))


REMOVED = ["Problem"]


@pytest.mark.parametrize(
    ("current", "part", "removed", "found", "refusal"),
    [
        ("0.1.0", "patch", [], {"a.fix.md": "fix"}, None),
        ("0.1.0", "patch", [], {"a.feature.md": "feature"}, None),
        ("0.1.0", "patch", [], {"a.breaking.md": "breaking"}, r"patch version \(a.breaking.md\): release a minor one"),
        ("0.1.0", "patch", REMOVED, {"a.fix.md": "fix"}, "no longer has the public name Problem: put them back, or"),
        ("0.1.0", "minor", REMOVED, {"a.fix.md": "fix"}, "write a fragment of the kind 'breaking'"),
        ("0.1.0", "patch", REMOVED, {"a.breaking.md": "breaking"}, "public name Problem.: release a minor one"),
        ("0.1.0", "minor", REMOVED, {"a.breaking.md": "breaking"}, None),
        ("1.4.0", "patch", [], {"a.feature.md": "feature"}, r"patch version \(a feature\): release a minor one"),
        ("1.4.0", "minor", [], {"a.feature.md": "feature"}, None),
        ("1.4.0", "minor", REMOVED, {"a.breaking.md": "breaking"}, "public name Problem.: release a major one"),
        ("1.4.0", "major", REMOVED, {"a.breaking.md": "breaking"}, None),
    ],
)
def test_a_version_says_whether_something_broke(current, part, removed, found, refusal):
    if refusal is None:
        release.check_part("tr-args", Version(current), part, removed, found)
        return
    with pytest.raises(release.ReleaseError, match=refusal):
        release.check_part("tr-args", Version(current), part, removed, found)


def test_lines_go_into_a_section_of_their_own_above_the_others():
    before = "# Changelog\n\n## 0.1.0\n\nFirst release.\n\n- a\n"
    after = release.folded(before, Version("0.1.1"), "- b\n- c")
    assert after == "# Changelog\n\n## 0.1.1\n\n- b\n- c\n\n## 0.1.0\n\nFirst release.\n\n- a\n"
    assert release.notes_of(after, Version("0.1.1")) == "- b\n- c"


def test_lines_of_a_first_release_go_to_the_end_of_its_section():
    before = "# Changelog\n\n## 0.1.0\n\nFirst release.\n\n- a\n  further\n"
    assert release.folded(before, Version("0.1.0"), "- b") == before + "- b\n"
    assert release.folded("# Changelog\n\n## 0.1.0\n\nFirst.\n", Version("0.1.0"), "- b").endswith("First.\n\n- b\n")
    assert release.folded(before, Version("0.1.0"), "") == before


@pytest.mark.parametrize("name", ["thing.md", "thing.bug.md", "thing.fix.txt"])
def test_a_fragment_whose_name_says_no_kind_is_refused(tmp_path, name):
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / name).write_text("A line.\n")
    with pytest.raises(release.ReleaseError, match=f"{re.escape(name)} .* KIND one of breaking, feature, fix"):
        release.fragments(tmp_path)


def test_an_empty_fragment_is_refused(tmp_path):
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "thing.fix.md").write_text("\n")
    with pytest.raises(release.ReleaseError, match="is empty: write what changes for users"):
        release.fragments(tmp_path)


def test_a_tag_must_be_that_of_the_checkout():
    with pytest.raises(release.ReleaseError, match=r"the tag says tr-args 99\.0\.0, its pyproject\.toml \d"):
        release.of_tag(ROOT, "tr-args-v99.0.0")
    with pytest.raises(release.ReleaseError, match="not a tag of a release; they are like tr-args-v0.1.0"):
        release.of_tag(ROOT, "v1")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_can_be_released(package):
    """Its version is in pyproject.toml and the changelog, its fragments have kinds, its siblings are in range."""
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    made = release.of_tag(ROOT, f"{package.name}-v{project['version']}")
    assert made.notes
    release.fragments(package)
    versions = {
        path.name: tomllib.loads((path / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        for path in PACKAGES
    }
    lists = (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
    for requirement in (Requirement(line) for lines in lists for line in lines):
        if requirement.name in versions and requirement.specifier:
            assert versions[requirement.name] in requirement.specifier, requirement


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_public_name_that_went_since_the_last_release_has_a_fragment_that_says_so(package):
    try:
        removed = release.removed_names(ROOT, package.name)
    except release.ReleaseError as error:
        pytest.skip(str(error))
    assert not removed or "breaking" in release.fragments(package).values(), removed


def test_the_workflow_publishes_what_was_tested_and_uses_what_the_tools_have():
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    workflow = yaml.safe_load(text)
    (pattern,) = workflow[True]["push"]["tags"]  # YAML reads `on` as true
    assert all(fnmatch(f"{path.name}-v0.1.0", pattern) for path in PACKAGES)
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == ["build", "test"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert jobs["test"]["strategy"]["matrix"]["python"] == ci["jobs"]["tests"]["strategy"]["matrix"]["python"]
    options = set(re.findall(r"--[\w-]+", (ROOT / "tools/release.py").read_text("utf-8")))
    assert (
        set(re.findall(r" (--[\w-]+)", next(line for line in text.splitlines() if "release.py -" in line))) <= options
    )
    requirements = (ROOT / "tools/requirements.py").read_text("utf-8")
    assert all(f"\n{name} = " in requirements for name in re.findall(r"r\.([A-Z_]+)", text))
