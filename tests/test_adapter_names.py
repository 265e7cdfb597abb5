"""The Trainer, and optimizers of libraries that may not be installed."""

import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from adapter_runs import trainer_of

from tr_core import plugins


def offered():
    entries = [entry for entry in distribution("tr-optim").entry_points if entry.group == "tr.optimizers"]
    return {entry.name for entry in entries if entry.value.startswith("tr_optim.adapters.")}


def extras():
    return distribution("tr-optim").metadata.get_all("Provides-Extra")


@pytest.mark.parametrize("name", sorted(offered() - {"galore_torch_adamw_8bit"}))
def test_a_name_is_said_to_be_brought_by_an_extra_that_there_is(monkeypatch, name):
    monkeypatch.setattr(plugins, "_entries", lambda group: ())  # as without tr-optim
    with pytest.raises(plugins.PluginError, match=r"pip install 'tr-optim\[.*\]' brings") as raised:
        plugins.load("tr.optimizers", name)
    assert str(raised.value).partition("tr-optim[")[2].partition("]")[0] in extras()


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("lomo_optim", "lomo_optim", "lomo-optim"),
        ("adamw_bnb_8bit", "bitsandbytes", "bitsandbytes"),
        ("adamw_torch_4bit", "torchao", "torchao"),
    ],
)
def test_a_run_says_what_to_install(tmp_path, monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"tr_optim.adapters.{library}", raising=False)
    message = rf"this optimizer is that of {library}, which is not installed; pip install 'tr-optim\[{extra}\]'"
    with pytest.raises(ImportError, match=message):
        trainer_of(tmp_path, optim=name).train()
