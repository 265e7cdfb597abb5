"""Hold the site's pages to the code: the page of arguments, the commands that pages name, and their Python blocks."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from shared.commands import command
from shared.typed_page import FILE, TYPED_ELSEWHERE, type_page

import tr_all
from tr_all import Seq2SeqTrainingArguments, Trainer
from tr_dist import Loop

ROOT = Path(__file__).resolve().parent.parent
HOW_TO = ROOT / "packages/tr-all/docs/how-to"
OWN = sorted((ROOT / "packages/tr-all/docs").rglob("*.md"))
PAGES = [
    *OWN,
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("packages/*/docs/*.md")),
    ROOT / "README.md",
]
# Of the other packages' pages with Python, those whose own tests do not run it.
NOT_RUN_THERE = [
    ROOT / f"packages/tr-dist/docs/{name}.md" for name in ("accelerate", "elastic", "hangs", "mesh", "sharding")
]
NOT_RUN_THERE += [ROOT / f"packages/tr-core/docs/{name}.md" for name in ("blame", "rewind")]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK_OF_ANY = re.compile(r"^```([\w{}]*)[^\n]*\n.*?^```", re.DOTALL | re.MULTILINE)
# Pages whose commands are run as they are, one after the other in an empty folder; of the last, with TRL.
TYPED = ["csv", "from-scratch", "sft-with-trl"]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        importlib.import_module("regen")  # it finds its own modules below tools
        return importlib.import_module("argument_reference")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_what_is_generated_from_the_code_is_what_it_says(tool):
    for path, text in sys.modules["regen"].generated().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run `nox -s regen`"


def test_the_page_of_arguments_names_every_field_once(tool):
    headings = re.findall(r"^### (\w+)$", tool.PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == list(tool.named())


def test_the_page_of_arguments_has_every_rule(tool):
    source = ast.parse((ROOT / "packages/tr-args/src/tr_args/rules.py").read_text("utf-8"))
    said = [node.value.elts[1] for node in ast.walk(source) if isinstance(node, ast.Yield)]
    texts = [
        piece.value
        for text in said
        for piece in (text.values if isinstance(text, ast.JoinedStr) else [text])
        if isinstance(piece, ast.Constant)
    ]
    page = tool.PAGE.read_text("utf-8").lower()
    assert len(texts) > 10
    assert [text for text in texts if text.lower() not in page] == []


def test_every_session_that_a_page_names_is_one_of_nox():
    noxfile = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    sessions = {node.name for node in noxfile.body if isinstance(node, ast.FunctionDef)} | {"format"}
    named = {(page.name, name) for page in PAGES for name in re.findall(r"nox -s (\w+)", page.read_text("utf-8"))}
    assert {name for _, name in named} > {"quickstart", "tests", "docs"}
    assert {found for found in named if found[1] not in sessions} == set()


def test_every_test_that_a_page_names_is_there():
    known = {}
    for path in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/test_*.py")):
        names = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        known.setdefault(path.name, {""}).update(names)
    named = re.compile(r"`[\w/]*?(test_\w+\.py)(?:::(\w+))?`")
    found = {each for page in PAGES for each in named.findall(page.read_text("utf-8"))}
    assert len(found) > 50
    assert [f"{file}::{test}" for file, test in sorted(found) if test not in known.get(file, ())] == []


def test_every_subcommand_that_a_page_names_explains_itself(capsys):
    typed = re.compile(r"(?:^|`)trainer ([a-z-]+)", re.MULTILINE)
    named = {name for page in PAGES for name in typed.findall(page.read_text("utf-8")) if not name.startswith("-")}
    assert named >= {"check", "ckpt", "doctor", "launch", "ls", "report", "tail", "version", "watch"}
    for name in sorted(named - {"version", "nonsense"}):  # the page of performance measures a wrong command too
        try:
            code = command(name)(["--help"])
        except SystemExit as ended:
            code = ended.code
        assert not code, name
        assert capsys.readouterr().out, name


def test_the_tables_of_names_have_names_of_ours():
    known = {*inspect.signature(Trainer).parameters, *dir(Trainer), *dir(Seq2SeqTrainingArguments)}
    known |= {*dir(tr_all), *dir(Loop), *(field.name for field in dataclasses.fields(Seq2SeqTrainingArguments))}
    known |= {"output_dir", "loop", "forward", "loss", "tr_dist", "tr_all", "rank", "strategy", "barrier", "args"}
    ours = []
    for row in re.findall(r"^\|(.*)\|$", (ROOT / "packages/tr-all/docs/how-to/migrating.md").read_text("utf-8"), re.M):
        for code in re.findall(r"`([^`]*)`", row.split("|", 1)[1]):
            ours += re.findall(r"\b[a-z]+_[a-z_]+\b(?=$|\(|=|,)", code)
    assert len(ours) > 30
    assert sorted({name for name in ours if name not in known}) == []


def test_the_python_of_every_page_is_python():
    for page in PAGES:
        for block in BLOCK.findall(page.read_text("utf-8")):
            compile(block, str(page), "exec", dont_inherit=True)


def program_of(page):
    """Return the blocks of Python that are no files, as one program."""
    files = {text for _, text in FILE.findall(page.read_text("utf-8"))}
    return "\n".join(block for block in BLOCK.findall(page.read_text("utf-8")) if block not in files)


@pytest.mark.parametrize(
    "page", [page for page in (*OWN, ROOT / "README.md") if program_of(page)], ids=lambda p: p.stem
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks of a page are one program; it trains in an empty folder on the CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = program_of(page)
    exec(compile(program, page.name, "exec", dont_inherit=True), {"__name__": "page"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPED if name != "sft-with-trl"])  # that one: tests/ecosystem
def test_what_a_page_says_to_type_can_be_typed(name, tmp_path):
    done = type_page(HOW_TO / f"{name}.md", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if name == "csv":
        assert '"name": "lily"' in done.stdout


def texts_of_sources():
    """Return every string of the packages' sources, with … where a value goes."""
    texts = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = [piece.value if isinstance(piece, ast.Constant) else "…" for piece in node.values]
                texts.append("".join(pieces))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%(\.\d)?[sdrfg]", "…", node.value))
    return texts


def test_the_messages_of_the_page_of_symptoms_are_those_of_the_sources():
    page = (ROOT / "packages/tr-all/docs/how-to/troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^> `(.+)`$", page, re.MULTILINE)
    assert len(quoted) > 25
    texts = texts_of_sources()
    gone = []
    for message in quoted:
        words = [piece.strip() for piece in message.split("…") if piece.strip()]
        assert max(map(len, words)) > 12, message
        gone += [(message, piece) for piece in words if not any(piece in text for text in texts)]
    assert gone == []


def test_the_numbers_of_the_home_page_are_measured_ones():
    home = (
        (ROOT / "packages/tr-all/docs/index.md").read_text("utf-8").split("## Three numbers")[1].split("## On what")[0]
    )
    measured = (ROOT / "packages/tr-all/docs/performance.md").read_text("utf-8")
    numbers = re.findall(r"\d+\.\d+", home)
    assert len(numbers) > 8
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?!\d)", measured)] == []


def test_the_readme_and_the_home_page_begin_with_the_same_lines():
    pages = [path.read_text("utf-8") for path in (ROOT / "packages/tr-all/docs/index.md", ROOT / "README.md")]
    first, again = (BLOCK.findall(page)[0] for page in pages)
    assert first == again
    assert len([line for line in first.splitlines() if line.strip()]) == 12


def test_every_block_of_python_on_the_site_is_run_by_a_test(capsys):
    """Where: here for the pages of tr-all and those about strategies, else by the tests of the package."""
    here = {*OWN, *NOT_RUN_THERE, ROOT / "README.md"}
    counts, run = Counter(), Counter()
    for page in sorted({*PAGES, *ROOT.glob("packages/tr-all/examples/**/*.md"), *ROOT.glob("packages/*/bench/*.md")}):
        text = page.read_text("utf-8")
        kinds = Counter(kind or "plain" for kind in BLOCK_OF_ANY.findall(text))
        counts += kinds
        tests = [path.read_text("utf-8") for path in (*page.parents[page.parent.name == "docs"].glob("tests/*.py"),)]
        if kinds["python"]:
            assert page in here or any(page.name in test and "python" in test for test in tests), page
            run["python"] += kinds["python"]
        if page.stem in TYPED or str(page.with_suffix("")).endswith(TYPED_ELSEWHERE):
            run["console"] += kinds["console"]
    assert run["python"] == counts["python"] > 40
    with capsys.disabled():
        print(f"\nblocks of code: {dict(counts)}; run by tests: {dict(run)}; the others are output and commands")


@pytest.mark.parametrize("page", NOT_RUN_THERE, ids=lambda page: page.stem)
def test_the_python_of_a_page_about_strategies_runs(page, tmp_path):
    if page.stem == "accelerate":
        pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text("\n".join(BLOCK.findall(page.read_text("utf-8"))), "utf-8")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def lines_of(page):
    """Return the commands that start processes, without `trainer launch`."""
    return [line.split()[2:] for line in page.read_text("utf-8").splitlines() if line.startswith("trainer launch ")]


# performance.md has times behind its commands.
@pytest.mark.parametrize(
    "page", [page for page in OWN if lines_of(page) and page.stem != "performance"], ids=lambda page: page.stem
)
def test_a_command_that_starts_processes_is_one(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for words in lines_of(page):
        assert command("launch")(["--dry_run", *words]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["several-machines", pytest.param("fsdp-deepspeed", marks=pytest.mark.slow)])
def test_the_script_of_a_page_trains_in_two_processes(name, tmp_path):
    page = HOW_TO / f"{name}.md"
    (tmp_path / "train.py").write_text(BLOCK.findall(page.read_text("utf-8"))[0], "utf-8")
    assert ["--nproc", "2", "train.py"] in lines_of(page)
    launch = "import sys; from tr_dist.launching.command import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", launch, "--nproc", "2", "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "outputs").glob("*/checkpoint-20"))) == 1


def test_the_rooms_of_the_architecture_page_exist():
    page = (ROOT / "packages/tr-core/docs/architecture.md").read_text("utf-8")
    core, others = page.split("## The other packages")
    rows = re.findall(r"^\| .+? \| (`.+`) \|$", core.split("## tr-core")[1], re.MULTILINE)
    rooms = [("tr-core", name) for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    for package, row in re.findall(r"^\| (tr-\w+) \| .+? \| (`.+`) \|$", others, re.MULTILINE):
        rooms += [(package, name) for name in re.findall(r"`([\w/.]+)`", row)]
    assert len(rooms) > 100
    sources = {package: ROOT / f"packages/{package}/src" / package.replace("-", "_") for package, _ in rooms}
    assert [room for room in rooms if not (sources[room[0]] / room[1]).exists()] == []
