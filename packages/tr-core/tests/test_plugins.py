"""Plugins are listed without an import, and each name belongs to one package."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from tr_core import plugins


def entry(name, value, origin="other"):
    loaded = SimpleNamespace(
        name=name, value=value, group="tr.optimizers", dist=SimpleNamespace(name=origin, version="1.0")
    )
    loaded.load = lambda: value
    return loaded


def test_listing_plugins_imports_nothing(installed):
    listed = entry("fast", "missing_module:Fast")
    listed.load = lambda: pytest.fail("imported")
    installed(listed)
    assert plugins.available("tr.optimizers") == {"fast": "other 1.0"}


def test_one_name_from_two_packages_is_an_error_that_names_both(installed):
    installed(entry("x", "a:A", "one"), entry("x", "b:B", "two"))
    with pytest.raises(plugins.PluginError, match=r"optimizer 'x' is offered by one 1.0 \(a:A\) and two 1.0 \(b:B\)"):
        plugins.load("tr.optimizers", "x")


def test_a_name_whose_module_lacks_the_object_is_an_error_that_names_its_package(installed):
    wrong = EntryPoint("x", "tr_core.plugins:Missing", "tr.optimizers")
    installed(wrong)
    with pytest.raises(plugins.PluginError, match="optimizer 'x' is tr_core.plugins:Missing of .*no attribute 'Miss"):
        plugins.load("tr.optimizers", "x")
