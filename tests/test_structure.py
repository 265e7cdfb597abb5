"""Hold the sources to their structure: what a function takes, who imports whom, sizes, and the words of prose."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path for path in (ROOT / "packages").iterdir() if (path / "src").is_dir())
CORE = ROOT / "packages/tr-core/src/tr_core"
PUBLIC_NAMES = {
    path.name.replace("-", "_"): {*(path / "api.txt").read_text("utf-8").split(), "testing"} for path in PACKAGES
}
# What a newcomer would have to learn first; the field says it otherwise.
PRIVATE_WORDS = re.compile(
    r"\b(told|reckon\w*|anew|owed|beforehand|likewise|of then|of now|passed over|as ever|cannot be had|stands in|"
    r"Have ranks|goes on with)\b",
    re.IGNORECASE,
)
# Below a root, what is documented for users as well; of `adapters`, the module of each library.
PUBLIC_MODULES = re.compile(
    r"tr_\w+\.testing|tr_core\.(collators|preflight)|tr_ckpt\.(hf_import|sharded)|"
    r"tr_all\.drop_in|tr_log\.(phases|report\.\w+)|tr_dist\.(accelerate_strategy|deepspeed|fsdp|mps|xla)|"
    r"tr_optim\.adapters\.(bitsandbytes|galore_torch|grokadamw|lomo_optim|optimi|schedulefree|torchao)"
)
# Tests that are about the inside of a package.
KNOW_THE_INSIDE = {
    "campaigns/attack/conditions_shards.py": "writes the shards of 1,000 ranks in one process",
    "backends/test_many_stages.py": "runs one process of many, and says what its neighbours would",
    "backends/test_accelerate_files.py": "compares how the launcher reads a file with how accelerate does",
    "backends/test_sequences.py": "counts what a step exchanges, and calls a divided model by itself",
    "backends/substitute_device.py": "lets another device be taken for a Mac's",
    "campaigns/crash/crash_mutations.py": "plants faults in saves",
    "campaigns/fuzz/faults.py": "plants faults in training",
    "test_long_logs.py": "takes a log of a few entries for a long one",
    "backends/test_wrong_plans.py": "builds what is refused as one of many processes",
    "test_snapshot.py": "restores what is held in memory into a run that was just built",
    "test_plan.py": "compares an estimate with what is held and counted",
    "test_second_device.py": "asks anew whether a device has generators, and moves batches between devices",
    "test_files_visited.py": "counts files from where a save and a resume begin",
}
MOST_FILES, MOST_FILES_OF_CORE, MOST_CODE_LINES, MOST_TYPE_CHECKING = 368, 123, 48_221, 7


def sources(folder: Path) -> list[Path]:
    """Return the files of a package, without what is there for tests."""
    return [path for path in sorted(folder.rglob("*.py")) if "testing" not in (path.stem, path.parent.name)]


def modules(package: Path) -> dict[str, Path]:
    source = package / "src"
    names = {path: ".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(package: Path) -> dict[str, set[str]]:
    """Return which module of a package imports which, in functions and for annotations too."""
    found, known = {}, modules(package)
    for name, path in known.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= (below & set(known)) or ({node.module} & set(known))
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names} & set(known)
        found[name] = targets - {name}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach one another."""
    reached = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for target in graph[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        reached[start] = seen
    return [group for name in graph if len(group := {other for other in reached[name] if name in reached[other]}) > 1]


def code_lines(text: str) -> int:
    """Count lines that hold code: no comment, no docstring, not blank."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def inside_imports(path: Path):
    """Yield what a file imports of the packages that is not public: as line, module and name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            root = module.partition(".")[0]
            if root not in PUBLIC_NAMES or (module == root and name in {"", *PUBLIC_NAMES[root]}):
                continue
            if module == root or not PUBLIC_MODULES.fullmatch(module) or name.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {module} {name}".strip()


def parameters(folder: Path):
    """Yield each parameter in a folder's sources, as file, function, name and annotation."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    annotation = ast.unparse(given.annotation) if given.annotation else ""
                    yield path.relative_to(folder), node.name, given.arg, annotation


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_two_files_import_each_other_in_a_circle_annotations_included(package):
    assert circles(imports(package)) == []


def test_only_the_face_and_the_preflight_take_a_trainer():
    taking = [
        f"{path}: {function}({name}: {annotation})"
        for path, function, name, annotation in parameters(CORE)
        if path.parts[0] not in ("trainer.py", "preflight")
        and (name == "trainer" or re.search(r"\bTrainer\b", annotation))
    ]
    assert taking == []


def test_eight_files_take_a_run():
    taking = {str(path) for path, _, _, annotation in parameters(CORE) if re.search(r"\bRun\b", annotation)}
    assert taking <= {
        "loop.py",
        "legs.py",
        "training.py",
        "batch_size_search.py",
        "recovery.py",
        "snapshot.py",
        "checkpoint/saving.py",
        "checkpoint/restoring.py",
    }


def test_arguments_are_typed_by_what_is_read_of_them():
    assert [
        f"{path}: {function}" for path, function, name, a in parameters(CORE) if name == "args" and a == "Any"
    ] == []


def test_few_files_import_for_annotations_alone():
    found = [path for path in CORE.rglob("*.py") if "if TYPE_CHECKING" in path.read_text("utf-8")]
    assert len(found) <= MOST_TYPE_CHECKING


def test_capabilities_are_declared_and_not_asked_for():
    texts = {path.relative_to(CORE): path.read_text("utf-8") for path in CORE.rglob("*.py")}
    asked = re.compile(r"(get|has)attr\((self\.)?_?strategy, ")
    # What a user's strategy leaves out is added in one place; a strategy that surrounds another hands on the rest.
    assert sorted(str(path) for path, text in texts.items() if asked.search(text)) == [
        "optim/fused_backward.py",
        "single_device.py",
    ]
    in_backward = [str(path) for path, text in texts.items() if 'getattr(optimizer, "fused_in_backward"' in text]
    assert in_backward == ["optim/fused_backward.py"]


def test_the_repository_has_its_size():
    texts = [path.read_text("utf-8") for package in PACKAGES for path in sources(package / "src")]
    assert len(texts) <= MOST_FILES
    assert sum(map(code_lines, texts)) <= MOST_CODE_LINES


def test_tr_core_has_few_files():
    assert len(list(sources(CORE))) <= MOST_FILES_OF_CORE


def test_tests_across_packages_import_public_names_only():
    folder = ROOT / "tests"
    assert all((folder / name).exists() for name in KNOW_THE_INSIDE)
    files = [
        path for path in sorted(folder.rglob("*.py")) if path.relative_to(folder).as_posix() not in KNOW_THE_INSIDE
    ]
    assert [found for path in files for found in inside_imports(path)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_tests_of_a_package_import_public_names_only_of_the_others(package):
    own = package.name.replace("-", "_")
    files = sorted((package / "tests").rglob("*.py"))
    found = [found for path in files for found in inside_imports(path)]
    assert [each for each in found if not re.search(rf": {own}\b", each)] == []


def test_what_two_files_of_tests_need_is_shared():
    """Look at what is defined at the top of a file, and has six lines or more."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            node.body = node.body[ast.get_docstring(node) is not None :]
            if (text := ast.unparse(node)).count("\n") > 4:
                found.setdefault(text, set()).add(path.name)
    assert [files for files in found.values() if len(files) > 1] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_prose_says_it_in_the_words_of_the_field(package):
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted((package / "src").rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if PRIVATE_WORDS.search(line)
    ]
    assert found == []
