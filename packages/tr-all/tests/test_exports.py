"""What `tr_all` hands out, and what it costs to import it."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tr_all

ROOT = Path(__file__).parent.parent


def test_importing_the_package_imports_neither_torch_nor_its_siblings():
    code = (
        "import sys, tr_all; dir(tr_all)\n"
        "heavy = {'torch', 'numpy', 'tr_core', 'tr_args', 'tr_log', 'tr_ckpt', 'tr_optim', 'tr_dist'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_arguments_are_imported_without_torch():
    code = "import sys\nfrom tr_all import ArgumentParser, TrainingArguments\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", tr_all.__all__)
def test_a_name_is_the_object_of_the_package_it_comes_from(name):
    origin = importlib.import_module(tr_all._ORIGINS[name])
    assert getattr(tr_all, name) is getattr(origin, name)
    assert name in origin.__all__


def test_a_star_import_brings_every_name():
    namespace = {}
    exec("from tr_all import *", namespace)
    assert set(tr_all.__all__) <= set(namespace)


def test_type_checkers_are_told_the_same_origins():
    tree = ast.parse((ROOT / "src/tr_all/__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == tr_all._ORIGINS


def test_the_names_are_the_frozen_ones():
    frozen = (ROOT / "api.txt").read_text(encoding="utf-8").split()
    assert sorted(tr_all.__all__) == frozen == sorted(tr_all._ORIGINS)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'Trianer'; it has .*Trainer, "):
        _ = tr_all.Trianer
