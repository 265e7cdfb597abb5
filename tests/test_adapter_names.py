"""The Trainer, and optimizers of libraries that may not be installed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from adapter_runs import trainer_of


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
