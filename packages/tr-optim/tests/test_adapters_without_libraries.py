"""What adapters say where their library is not installed, and that nothing else asks for it."""

import importlib
import importlib.machinery
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_optim.adapters import registry, require, require_parts

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {
    "galore_torch": "galore-torch",
    "lomo_optim": "lomo-optim",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "schedulefree": "schedulefree",
    "optimi": "torch-optimi",
    "grokadamw": "grokadamw",
}
SAME_AS = {"rmsprop_bnb_32bit": "rmsprop_bnb"}
NEEDS = {
    "galore_torch_adamw": "galore_torch",
    "galore_torch_adafactor": "galore_torch",
    "lomo_optim": "lomo_optim",
    "adalomo_optim": "lomo_optim",
    "adamw_bnb_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "paged_adamw_32bit": "bitsandbytes",
    "lion_8bit": "bitsandbytes",
    "lion_32bit": "bitsandbytes",
    "paged_lion_8bit": "bitsandbytes",
    "paged_lion_32bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "ademamix_8bit": "bitsandbytes",
    "paged_ademamix_32bit": "bitsandbytes",
    "paged_ademamix_8bit": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "rmsprop_bnb_8bit": "bitsandbytes",
    "rmsprop_bnb_32bit": "bitsandbytes",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_radam": "schedulefree",
    "schedule_free_sgd": "schedulefree",
    "stable_adamw": "optimi",
    "grokadamw": "grokadamw",
    "adamw_torch_8bit": "torchao",
    "adamw_torch_4bit": "torchao",
}


@pytest.fixture
def no_libraries(monkeypatch):
    """Have none of them installed, whether they are or not."""
    find = importlib.machinery.PathFinder.find_spec

    def find_no_library(name, path=None, target=None):
        return None if name in EXTRAS else find(name, path, target)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", find_no_library)
    for library in EXTRAS:
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"tr_optim.adapters.{library}", raising=False)


def arguments():
    given = {"optim_args": None, "learning_rate": 0.1, "max_grad_norm": 0, "gradient_accumulation_steps": 1}
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-8, "on_nonfinite": "ignore", "warmup_steps": 2}
    return SimpleNamespace(**given, **adam, optim="x", optim_target_modules="all-linear", seed=0)


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(no_libraries, name):
    model = nn.Linear(4, 4)
    factory = getattr(registry, SAME_AS.get(name, name))
    given = [[{"params": list(model.parameters()), "weight_decay": 0.0}], arguments()]
    library = NEEDS[name]
    message = rf"that of {library}, which is not installed; pip install 'tr-optim\[{EXTRAS[library]}\]'"
    with pytest.raises(ImportError, match=message):
        factory(*given, *([model] if getattr(factory, "needs_model", False) else []))


@pytest.mark.parametrize("library", EXTRAS)
def test_importing_an_adapter_says_the_same(no_libraries, library):
    with pytest.raises(ImportError, match=rf"pip install 'tr-optim\[{EXTRAS[library]}\]'"):
        importlib.import_module(f"tr_optim.adapters.{library}")


def test_what_a_library_needs_itself_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "half_installed"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('not wanted')\n")
    (folder / "part.py").write_text("import what_it_needs\n")
    (folder / "whole.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ImportError, match=r"half_installed, which cannot be imported \(No module named 'what_it_needs'"
    ):
        require_parts("half_installed", ("whole", "part"), "x")
    assert require_parts("half_installed", ("whole",), "x")[0].number == 1
    assert "half_installed" not in sys.modules
    with pytest.raises(ImportError, match=r"no_such_library, which is not installed; pip install 'tr-optim\[x\]'"):
        require("no_such_library.part", "x")


def test_every_name_has_a_factory_and_every_extra_is_declared():
    offered = {
        entry.name: entry
        for entry in distribution("tr-optim").entry_points
        if entry.group == "tr.optimizers" and entry.value.startswith("tr_optim.adapters.")
    }
    assert offered.keys() == {*NEEDS, "muon"}
    assert all(entry.load() is getattr(registry, SAME_AS.get(name, name)) for name, entry in offered.items())
    extras = PROJECT["optional-dependencies"]
    for extra in EXTRAS.values():
        assert [required.partition(">")[0] for required in extras[extra]] == [extra]
    assert [required.partition(">")[0] for required in PROJECT["dependencies"]] == ["tr-log", "torch", "numpy"]


def test_nothing_is_imported_before_a_name_is_asked_for():
    unwanted = [*EXTRAS, "transformers"]
    code = f"import sys, tr_optim, tr_optim.adapters.registry; print([n for n in {unwanted} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"


def test_embeddings_get_a_group_of_their_own_in_each_group_that_has_some():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    embedding, weight, bias = model.parameters()
    groups = [{"params": [embedding, weight], "weight_decay": 0.1}, {"params": [bias]}, {"params": []}]
    divided = registry._embeddings_whole(groups, model)
    assert [[id(p) for p in group["params"]] for group in divided] == [[id(weight)], [id(embedding)], [id(bias)], []]
    assert [group.get("optim_bits") for group in divided] == [None, 32, None, None]
    assert [group.get("weight_decay") for group in divided] == [0.1, 0.1, None, None]
    assert all(isinstance(p, torch.Tensor) for group in divided for p in group["params"])
