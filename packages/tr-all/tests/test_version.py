"""`trainer version`."""

import platform
import re
from importlib.metadata import version

import pytest

from tr_all.cli import main
from tr_all.version import packages, version_of


def test_it_lists_the_seven_packages_and_python_and_torch(capsys):
    assert main(["version"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    seven = ["tr-args", "tr-log", "tr-core", "tr-ckpt", "tr-optim", "tr-dist", "tr-all"]
    assert sorted(packages()) == sorted(seven)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+.*", rows[name]) for name in seven)
    assert rows["python"].startswith(platform.python_version())
    assert rows["torch"] == version("torch")


def test_the_flag_does_what_the_command_does(capsys):
    assert main(["version"]) == main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_what_is_not_installed_has_no_version():
    assert version_of("distribution-of-nobody") is None


def test_it_takes_no_arguments(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["version", "--short"])
    assert exit_.value.code == 2
    assert "--short" in capsys.readouterr().err
