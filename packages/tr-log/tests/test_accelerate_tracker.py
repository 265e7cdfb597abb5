"""What the trackers of accelerate say where libraries are missing; `nox -s trackers` records with the real ones."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tr_log.accelerate_tracker as adapters
import tr_log.transformers_trackers as callbacks

KINDS = {kind.name: kind for kind in adapters.AccelerateTracker.__subclasses__()}


def test_each_has_its_extra():
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    for name, kind in KINDS.items():
        required = [requirement.partition(">")[0] for requirement in project["optional-dependencies"][name]]
        assert required == ["accelerate", kind.package]


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"aim"}))
def test_each_records_where_transformers_is_not_installed(name, monkeypatch):
    """Which has callbacks for these, that record otherwise; Aim has none there."""
    installed = {KINDS[name].package, "accelerate"}
    monkeypatch.setattr(callbacks, "_is_installed", lambda module: module in installed)
    built = object()
    monkeypatch.setattr(KINDS[name], "from_arguments", lambda args: built)
    assert getattr(callbacks, name)(None) is built
    installed.remove("accelerate")
    with pytest.raises(ImportError, match="pip install transformers"):
        getattr(callbacks, name)(None)


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("missing", ["accelerate", "its library"])
def test_a_missing_library_is_an_error_that_names_the_extra(name, missing, monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda package: None if missing == "accelerate" else object())
    monkeypatch.setitem(sys.modules, KINDS[name].package, None)
    message = rf"report_to names '{name}', .* run `pip install 'tr-log\[{name}\]'`, or take {name} out of report_to"
    with pytest.raises(ImportError, match=message):
        KINDS[name].from_arguments(None)


def test_the_adapters_import_neither_accelerate_nor_a_library():
    script = "import sys, tr_log.accelerate_tracker; print([name for name in sys.argv[1:] if name in sys.modules])"
    names = ("accelerate", "torch", *(kind.package for kind in KINDS.values()))
    ended = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
