"""Releases from end to end, in a copy of the repository: tagged, built, and installed from a folder of wheels alone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
TRAINING = """
import sys, torch
from tr_core import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "y": y}

rows = [{"x": [n / 10], "label": [n / 5]} for n in range(10)]
args = TrainingArguments(sys.argv[1], max_steps=3, use_cpu=True, save_strategy="no")
trainer = Trainer(Line(), args, train_dataset=rows)
print("trained", trainer.train().global_step, "steps")
"""


class Workplace:
    """A clone of the repository, a folder of wheels as the index, and an environment to install them in."""

    def __init__(self, origin: Path, folder: Path):
        self.folder, self.clone, self.index = folder, folder / "clone", folder / "index"
        identity = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in
                    (("NAME", "A Maintainer"), ("EMAIL", "maintainer@example.invalid"))}  # fmt: skip
        dropped = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PYTHONPATH")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment = inherited | identity | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        # No configuration of this machine: neither pip's nor git's.
        self.environment |= {"PIP_CONFIG_FILE": os.devnull, "GIT_CONFIG_GLOBAL": os.devnull}
        if origin.exists():
            self.run("git", "clone", "--quiet", str(origin / "clone"), str(self.clone))
            shutil.copytree(origin / "index", self.index)

    def run(self, *command: str, fails: bool = False, at: Path | None = None) -> str:
        """Return what a command prints; it must end well, or, if so asked, badly."""
        ran = subprocess.run(command, cwd=at, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S)
        said = f"$ {' '.join(command)}\n{ran.stdout}{ran.stderr}"
        print(said)
        assert bool(ran.returncode) is fails, said
        return ran.stdout + ran.stderr

    def git(self, *words: str) -> str:
        return self.run("git", *words, at=self.clone)

    def release(self, *words: str, fails: bool = False) -> str:
        return self.run(sys.executable, "tools/release.py", *words, fails=fails, at=self.clone)

    def build(self, name: str) -> None:
        """Build a package's wheel, from the sdist, into the index."""
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(self.index), f"packages/{name}")
        self.run(*command, at=self.clone)

    def change(self, name: str, text: str, kind: str, line: str) -> None:
        """Change a file of a package, by its path below the package, with a fragment that says so; commit it."""
        (self.clone / name).write_text(text, "utf-8")
        folder = self.clone / "packages" / name.split("/")[1] / "changes"
        folder.mkdir(exist_ok=True)
        (folder / f"a-change.{kind}.md").write_text(line, "utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "A change")

    def make_environment(self) -> None:
        """Make an environment that has what the packages require, pip included, but none of them."""
        self.run(sys.executable, "-m", "venv", "--without-pip", str(self.folder / "fresh"))
        site = next((self.folder / "fresh").glob("lib/*/site-packages"))
        (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def python(self, *words: str, fails: bool = False) -> str:
        return self.run(str(self.folder / "fresh/bin/python"), "-W", "error", *words, fails=fails, at=self.folder)

    def pip(self, *words: str, fails: bool = False) -> str:
        return self.run(str(self.folder / "fresh/bin/python"), "-m", "pip", "-q", *words, fails=fails, at=self.folder)

    def installed(self, name: str) -> str:
        return self.python("-c", f"from importlib.metadata import version; print(version({name!r}))").strip()

    def trains(self) -> bool:
        return "trained 3 steps" in self.python("-c", TRAINING, str(self.folder / "out"))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return the folder of a workplace in which tr-args, tr-log and tr-core were released for the first time."""
    folder = tmp_path_factory.mktemp("released")
    place = Workplace(folder / "none", folder)
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "packages", "tools"),
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if "/tests/" not in name and (ROOT / name).is_file():
            (place.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.clone / name)
    place.git("init", "--quiet", "--initial-branch", "main")
    place.git("add", "--all")
    place.git("commit", "--quiet", "-m", "Everything")
    place.index.mkdir()
    for name in ("tr-log", "tr-args", "tr-core"):
        place.release(name, "first")
        place.build(name)
    return folder


@pytest.fixture
def place(released, tmp_path):
    return Workplace(released, tmp_path)


def version_of(place, name):
    return re.search(r'(?m)^version = "(.*)"$', (place.clone / f"packages/{name}/pyproject.toml").read_text())[1]


def test_a_package_is_upgraded_under_an_older_sibling_that_works_on(place):
    before = version_of(place, "tr-core")
    place.make_environment()
    place.pip("install", "tr-core")
    assert place.trains()
    text = (place.clone / "packages/tr-args/README.md").read_text() + "\nA line more.\n"
    place.change("packages/tr-args/README.md", text, "fix", "The README has a line more,\nand says so here.\n")
    first = version_of(place, "tr-args")
    said = place.release("tr-args", "patch")
    after = version_of(place, "tr-args")
    assert f"released tr-args-v{after} here" in said
    assert after != first
    assert place.git("log", "-1", "--format=%s%d").startswith(f"tr-args {after} (HEAD -> main, tag: tr-args-v{after}")
    changelog = (place.clone / "packages/tr-args/CHANGELOG.md").read_text()
    assert changelog.startswith(
        f"# Changelog\n\n## {after}\n\n- The README has a line more,\n  and says so here.\n\n## {first}\n"
    )
    assert not list((place.clone / "packages/tr-args/changes").glob("*"))
    assert place.git("status", "--porcelain") == ""
    place.build("tr-args")
    place.pip("install", "--upgrade", "tr-args")
    assert (place.installed("tr-args"), place.installed("tr-core")) == (after, before)
    place.pip("check")
    assert place.trains()


def test_a_break_is_refused_as_a_patch_and_reaches_older_siblings_only_with_their_own_release(place):
    place.make_environment()
    place.pip("install", "tr-core")
    first = version_of(place, "tr-args")
    names = (place.clone / "packages/tr-args/api.txt").read_text()
    place.change("packages/tr-args/api.txt", names.replace("HfArg\n", ""), "fix", "Tidier.\n")
    state = place.git("log", "--all", "--oneline")
    for part in ("patch", "minor"):
        said = place.release("tr-args", part, fails=True)
        assert "refused: tr-args no longer has the public name HfArg: put them back, or write a fragment" in said
    place.git("mv", "packages/tr-args/changes/a-change.fix.md", "packages/tr-args/changes/a-change.breaking.md")
    place.git("commit", "--quiet", "--amend", "-m", "HfArg is gone: argument is its name")
    said = place.release("tr-args", "patch", fails=True)
    assert f"refused: tr-args {first} cannot be followed by a patch version" in said
    assert len(place.git("log", "--all", "--oneline").splitlines()) == len(state.splitlines())

    place.release("tr-args", "minor")
    second = version_of(place, "tr-args")
    for dependant in ("tr-core", "tr-all"):
        assert (place.clone / f"packages/{dependant}/changes/tr-args-{second}.fix.md").exists()
    place.build("tr-args")
    place.pip("install", "--upgrade", "tr-core", "tr-args")
    assert place.installed("tr-args") == first, "the older tr-core does not accept a version that may break it"
    assert "conflict" in place.pip("install", f"tr-args=={second}", "tr-core", fails=True).lower()
    assert place.trains()

    place.release("tr-core", "patch")
    core = version_of(place, "tr-core")
    assert "Accepts tr-args before" in place.git("log", "-1", "-p", "--", "packages/tr-core/CHANGELOG.md")
    place.build("tr-core")
    place.pip("install", "--upgrade", "tr-core", "tr-args")
    assert (place.installed("tr-args"), place.installed("tr-core")) == (second, core)
    place.pip("check")
    assert place.trains()


def test_a_rehearsed_release_changes_nothing(place):
    place.change("packages/tr-log/README.md", "Short.\n", "feature", "Shorter.\n")
    state = place.git("log", "--all", "--oneline")
    said = place.release("tr-log", "minor", "--dry-run")
    assert "+- Shorter." in said
    assert f"would release tr-log-v{version_of(place, 'tr-log').rpartition('.')[0].rpartition('.')[0]}." in said
    assert re.search(r'(?m)^\+dependencies = .*"tr-log>=[\d.]+,<', said)
    assert (place.git("log", "--all", "--oneline"), place.git("status", "--porcelain")) == (state, "")


def test_a_release_needs_a_clean_checkout_and_something_to_say(place):
    said = place.release("tr-log", "patch", fails=True)
    assert "packages/tr-log/changes has no fragment: nothing that users notice changed since" in said
    assert "tr-log was released before, as tr-log-v" in place.release("tr-log", "first", fails=True)
    assert "there is no tag tr-dist-v" in release_with_fragment(place, "tr-dist")
    (place.clone / "packages/tr-log/README.md").write_text("Changed.\n")
    assert "the checkout has changes that are not committed:" in place.release("tr-log", "patch", fails=True)


def release_with_fragment(place, name):
    place.change(f"packages/{name}/README.md", "Short.\n", "fix", "Shorter.\n")
    return place.release(name, "patch", fails=True)


def test_what_the_workflow_builds_is_what_the_tag_says(place):
    tag = f"tr-args-v{version_of(place, 'tr-args')}"
    said = place.release("--of-tag", tag, "--notes", str(place.folder / "notes.md"))
    assert said.split() == ["name=tr-args", "module=tr_args", f"version={version_of(place, 'tr-args')}"]
    assert (place.folder / "notes.md").read_text().startswith("First release")
    assert "refused: the tag says tr-args 7.0.0" in place.release("--of-tag", "tr-args-v7.0.0", fails=True)
    wheels = [str(path) for path in sorted(place.index.iterdir())]
    assert len(wheels) == 6
    place.run(sys.executable, "-m", "twine", "check", "--strict", *wheels)
