"""The `trainer` command: it finds subcommands in installed packages and runs them."""

import contextlib
import re
import subprocess
import sys
from importlib import invalidate_caches

import pytest

from tr_all.cli import main, summary


@pytest.fixture
def install(install):
    """Return a function that installs a distribution with one subcommand."""

    def with_command(distribution, command, target, **modules):
        files = {f"{name.replace('__', '/', 1)}.py": source.encode() for name, source in modules.items()}
        entry = f"[tr.commands]\n{command} = {target}\n"
        install(distribution, {f"{distribution}-0.1.dist-info/entry_points.txt": entry.encode(), **files})
        invalidate_caches()

    return with_command


def test_help_lists_each_command_with_what_its_module_says(install, capsys):
    install("greeter", "greet", "greeter_commands:main", greeter_commands='"""Greet people.\n\nMore."""\n')
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: trainer COMMAND [ARGUMENT ...]"
    assert "  greet    Greet people" in lines
    assert any(line.startswith("  version  Show the versions") for line in lines)


def test_help_imports_no_command_and_no_package_above_one(install, capsys):
    install(
        "heavy",
        "lift",
        "heavy_package.lifting:main",
        heavy_package____init__="raise AssertionError('imported')",
        heavy_package__lifting='"""Lift."""\nraise AssertionError("imported")',
    )
    assert main(["--help"]) == 0
    assert "  lift     Lift\n" in capsys.readouterr().out


def test_help_imports_no_torch():
    code = (
        "import sys; from tr_all.cli import main; main(['--help']); assert not {'torch', 'tr_core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


WITHOUT_TORCH = """
import contextlib, io, sys
from tr_all.cli import commands, main
mistakes = ["nonsense", "launch --bad x", "launch", "ckpt ls --bad"]
mistakes += ["check --bad", "config --bad", "doctor --bad", "plan --bad"]
for line in [*(f"{name} --help" for name in commands()), *mistakes]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code or 0
    assert code == (0 if "--help" in line else 2), (line, code)
    assert "torch" not in sys.modules, line
"""


def test_the_help_and_the_errors_of_every_command_come_without_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=120)


def test_a_command_gets_the_words_after_its_name_and_gives_the_exit_code(install, capsys):
    source = "def main(argv):\n    print(argv)\n    return len(argv)\n"
    install("counter", "count", "counter_commands:main", counter_commands=source)
    assert main(["count", "--help", "x"]) == 2
    assert capsys.readouterr().out == "['--help', 'x']\n"


def test_a_command_that_returns_nothing_succeeds(install):
    install("silent", "hush", "silent_commands:main", silent_commands="def main(argv):\n    pass\n")
    assert main(["hush"]) == 0


def test_the_words_of_the_process_are_the_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer", "version"])
    assert main() == 0
    assert "tr-all" in capsys.readouterr().out


def test_a_misspelt_command_is_refused_with_a_suggestion(capsys):
    assert main(["versoin"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trainer: unknown command 'versoin'; did you mean version? There are: ")


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    assert main(["zzz"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trainer: unknown command 'zzz'; there are: ")
    assert "version" in error


def test_a_missing_command_is_refused_with_the_help(capsys):
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trainer: a command is missing\n")
    assert "version" in error


def test_two_packages_that_offer_one_command_are_both_named(install, capsys):
    for name in ("first", "second"):
        install(name, "fight", f"{name}_commands:main", **{f"{name}_commands": "def main(argv):\n    return 0\n"})
    assert main(["fight"]) == 2
    error = capsys.readouterr().err
    assert "first 0.1 (first_commands:main)" in error
    assert "second 0.1 (second_commands:main)" in error
    assert "uninstall one of them" in error


@pytest.mark.parametrize(
    ("source", "reason"), [("import module_of_no_package", "No module named"), ("", "has no attribute 'main'")]
)
def test_a_command_that_cannot_be_loaded_is_reported_with_its_package(install, capsys, source, reason):
    name = f"broken_{len(source)}"
    install(name, "break", f"{name}_commands:main", **{f"{name}_commands": source})
    assert main(["break"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"trainer: command 'break' of {name} 0.1 cannot be loaded: ")
    assert reason in error


def test_a_module_without_source_or_docstring_has_an_empty_summary(install):
    install("bare", "bare", "bare_commands:main", bare_commands="def main(argv):\n    return 0\n")
    assert summary("bare_commands") == ""
    assert summary("module_of_no_package.inner") == ""
    assert summary("sys") == ""


COMMANDS = ["check", "ckpt", "config", "doctor", "launch", "ls", "plan", "report", "tail", "version", "watch"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_packages_are_there(command, capsys):
    assert main(["--help"]) == 0
    assert re.search(rf"^  {command} +\S", capsys.readouterr().out, re.MULTILINE)
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.strip()
