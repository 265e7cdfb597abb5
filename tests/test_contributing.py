"""What the files for contributors name exists: paths, sessions, commands, entry points, links."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
FORMS = sorted(path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")
NOXFILE = (ROOT / "noxfile.py").read_text("utf-8")
SESSIONS = {
    *re.findall(r"(?m)^@nox\.session(?:\(.*\))?\n(?:@.*\n)?def (\w+)", NOXFILE),
    *re.findall(r'session\(name="(\w+)"', NOXFILE),
}
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text("utf-8"))["project"]
    for path in ROOT.glob("packages/*/pyproject.toml")
}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page):
    text = (ROOT / page).read_text("utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path
        assert target.is_file(), link
        headings = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in
                    re.findall(r"(?m)^#+ (.+)$", target.read_text("utf-8"))]  # fmt: skip
        assert not heading or heading in headings, link


@pytest.mark.parametrize("page", PAGES)
def test_sessions_that_are_named_exist(page):
    for line in re.findall(r"nox -s ([^`\n]+)", (ROOT / page).read_text("utf-8")):
        words = line.partition("#")[0].partition("--")[0].replace('"', "").split()
        assert {word.partition("(")[0] for word in words} <= SESSIONS, line


def test_paths_that_are_named_exist():
    for name in re.findall(r"`((?:packages|tests|tools|\.github|\.ci)/[^`\s]*)`", CONTRIBUTING):
        if "NAME" not in name:
            assert any((folder / name).exists() for folder in (ROOT, *ROOT.glob("packages/*"))), name
    assert (ROOT / "packages/tr-optim/src/tr_optim/adapters").is_dir()


def test_the_groups_of_entry_points_are_those_of_the_packages_named():
    for group, package in re.findall(r"`(tr\.\w+)` in (tr-\w+)'s", CONTRIBUTING):
        assert group in PROJECTS[package]["entry-points"]
    named = set(re.findall(r"`(tr\.\w+)`", CONTRIBUTING))
    registered = {group for project in PROJECTS.values() for group in project.get("entry-points", {})}
    assert named == registered - {"tr.checkpointers"}


def test_the_packages_are_released_in_an_order_in_which_each_finds_its_siblings():
    order = re.findall(r"tr-\w+", re.search(r"in the order of the imports:([^.]+)\.", CONTRIBUTING)[1])
    assert sorted(order) == sorted(PROJECTS)
    for place, name in enumerate(order):
        siblings = set(re.findall(r"tr-\w+", " ".join(PROJECTS[name]["dependencies"])))
        assert siblings <= set(order[:place]), name


def test_the_hooks_use_the_ruff_of_the_session_and_need_no_session():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "python"
        assert hook["entry"].startswith("ruff ")
        (ruff,) = hook["additional_dependencies"]
        assert f'RUFF = "{ruff}"' in (ROOT / "tools/requirements.py").read_text("utf-8")


def test_the_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert all([dict(author) for author in PROJECTS[name]["authors"]] == citation["authors"] for name in PROJECTS)
    assert {PROJECTS[name]["license"] for name in PROJECTS} == {citation["license"]}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_a_host_needs_and_asks_for_commands_that_exist(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    assert form["name"]
    assert form["description"]
    names = [part["id"] for part in form["body"]]
    assert len(set(names)) == len(names)
    assert all(part["attributes"]["label"] for part in form["body"])
    commands = {
        name for project in PROJECTS.values() for name in project.get("entry-points", {}).get("tr.commands", {})
    }
    assert set(re.findall(r"`trainer ([\w-]+)", path.read_text("utf-8"))) <= commands
    for name in re.findall(r"packages/\S+\.md", path.read_text("utf-8")):
        assert (ROOT / name).exists()
