"""Hold the repository to the budgets of its design: sizes, names, dependencies, and what a step costs to read."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from package_list import PACKAGES  # noqa: E402

SOURCES = sorted(path for package in PACKAGES for path in package.source.rglob("*.py"))
TOP_LEVEL = {
    "packages",
    "tools",
    "tests",
    "conftest.py",
    "noxfile.py",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "CITATION.cff",
    ".github",
    ".pre-commit-config.yaml",
    "LICENSE",
    ".gitignore",
    ".ci",
}
FORBIDDEN_FILE_NAMES = {"utils.py", "common.py", "helpers.py", "misc.py"}
FORBIDDEN_CLASS_PARTS = re.compile(r"Manager|Helper")
MAX_FUNCTION, MAX_PUBLIC = 60, 25


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path):
    return (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def complexity(node: ast.AST) -> int:
    """Count as ruff's C901 does not: every branch, comprehension and boolean operand, as the design's tables do."""
    branches = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert)
    return 1 + sum(
        len(n.values) - 1 if isinstance(n, ast.BoolOp) else int(isinstance(n, branches)) for n in ast.walk(node)
    )


def public_names(package) -> list[str]:
    module = tree(package.source / "__init__.py")
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_no_function_is_longer_than_its_budget():
    too_long = [
        f"{path.name}:{node.name} {node.end_lineno - node.lineno + 1}"
        for path in SOURCES
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    ]
    assert too_long == []


def test_no_file_or_class_has_a_name_that_says_nothing():
    assert [str(path) for path in SOURCES if path.name in FORBIDDEN_FILE_NAMES] == []
    classes = [n.name for path in SOURCES for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
    assert [name for name in classes if FORBIDDEN_CLASS_PARTS.search(name)] == []


def test_the_top_level_holds_what_the_design_lists_and_nothing_else():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split("\n")
    assert {name.split("/")[0] for name in listed if name} <= TOP_LEVEL


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_public_names_are_few_sorted_and_frozen_in_api_txt(package):
    names = public_names(package)
    assert 0 < len(names) <= MAX_PUBLIC
    assert (package.path / "api.txt").read_text("utf-8").split() == sorted(names)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_brings_what_every_package_brings(package):
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "api.txt", "tests"):
        assert (package.path / name).exists(), name
    assert (package.source / "py.typed").exists()
    project = tomllib.loads((package.path / "pyproject.toml").read_text("utf-8"))["project"]
    required = " ".join(project["dependencies"])
    assert "==" not in required, "siblings and libraries are required by range"
    assert {name for name in re.findall(r"\btr-\w+", required)} == set(package.siblings)
    assert ("torch" in required) == (package.torch and package.name != "tr-all")
    assert ("numpy" in required) == ("torch" in required), "torch warns without it, and exchanges objects through it"


def test_a_library_has_one_name_and_one_lowest_version_in_all_packages():
    found = {}
    for path in (package.path / "pyproject.toml" for package in PACKAGES):
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        for required in itertools.chain(project["dependencies"], *extras):
            name, bounds = re.fullmatch(r"([\w.-]+)(?:\[.+?\])?(.*)", required).groups()
            if not name.startswith("tr-"):
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(name + bounds)
    assert {"torch", "numpy", "safetensors", "huggingface-hub", "accelerate", "pyyaml"} <= set(found)
    assert [sorted(given) for given in found.values() if len(given) > 1] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_brings_the_licence_and_what_an_index_shows(package):
    project = tomllib.loads((package.path / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license-files"] == ["LICENSE"]
    assert (package.path / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["authors"]
    assert project["keywords"] == sorted(project["keywords"])
    tested = re.search(r"python: \[(.+)\]", (ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert named == re.findall(r"[\d.]+", tested.group(1)), "the versions that are tested"


def test_an_extra_of_tr_all_is_that_of_the_package_which_uses_it_and_all_has_them_all():
    projects = {p.name: tomllib.loads((p.path / "pyproject.toml").read_text("utf-8"))["project"] for p in PACKAGES}
    extras = projects["tr-all"]["optional-dependencies"]
    assert re.findall(r"[\w-]+", extras.pop("all")[0])[1:] == sorted(extras)
    assert extras.pop("ray") == ["ray[train]>=2.50"]
    for name, required in extras.items():
        (owner,) = re.findall(r"^(tr-\w+)\[" + name + r"\]>=[\d.]+,<[\d.]+$", " ".join(required))
        assert name in projects[owner]["optional-dependencies"]


@pytest.mark.parametrize("package", [p for p in PACKAGES if not p.torch], ids=lambda package: package.name)
def test_a_package_without_torch_imports_without_it(package):
    code = f"import sys, {package.module}; assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_everything_public_imports_no_torch_before_it_is_used():
    code = "import sys, tr_all; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_loop_is_read_in_two_screens_from_entry_to_optimizer_step():
    path = ROOT / "packages/tr-core/src/tr_core/loop.py"
    found = {node.name: node for node in functions(path)}
    run_epochs, train_step = found["run_epochs"], found["train_step"]
    lines = path.read_text("utf-8").splitlines()
    step_line = next(n for n, line in enumerate(lines, 1) if "updates.step()" in line)
    assert run_epochs.lineno < step_line <= train_step.end_lineno
    assert step_line - run_epochs.lineno <= 120
    assert complexity(run_epochs) + complexity(train_step) <= 20


def test_the_loop_asks_for_no_availability_and_no_integration():
    text = (ROOT / "packages/tr-core/src/tr_core/loop.py").read_text("utf-8")
    assert not re.search(r"hasattr|getattr|_available|deepspeed|fsdp|xla|galore|lomo|import_module", text)


def test_every_file_that_a_session_names_exists():
    constants = (node.value for node in ast.walk(tree(ROOT / "noxfile.py")) if isinstance(node, ast.Constant))
    texts = [text for text in constants if isinstance(text, str)]
    named = [text for text in texts if re.fullmatch(r"(packages|tests|tools)/\S+\.\w+", text)]
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_no_path_of_this_machine_is_written_down():
    pattern = re.compile("|".join(re.escape(f"{folder}/") for folder in (Path.home(), ROOT)))
    hits = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.suffix in {".py", ".md", ".toml", ".yml", ".txt"}
        and not {".nox", ".git", ".venv", "outputs"} & set(path.parts)
        and pattern.search(path.read_text("utf-8"))
    ]
    assert hits == []
