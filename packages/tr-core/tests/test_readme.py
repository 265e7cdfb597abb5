"""What the README shows works, and what it says of names and defaults is so."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier

from tr_core import SingleDevice, Trainer, TrainingArguments

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_of_the_readme_train_evaluate_and_find_a_learning_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    program = "\n".join(blocks).replace("TrainingArguments(", "partial(TrainingArguments, use_cpu=True)(")
    names = {"__name__": "example", "partial": partial}
    exec(compile(program, "README.md", "exec", dont_inherit=True), names)
    assert names["trainer"].evaluate()["eval_accuracy"] > 0.8
    assert 1e-4 < names["finder"].suggestion < 1


def test_a_trainer_shows_its_progress_and_keeps_its_metrics_by_itself(make_trainer):
    def kinds(**options):
        return {type(callback).__name__ for callback in make_trainer(**options).callback_handler.callbacks}

    assert {"MetricsFile", "ProgressCallback"} <= kinds(disable_tqdm=False)
    assert "PrinterCallback" not in kinds(disable_tqdm=False)
    assert {"MetricsFile", "PrinterCallback"} <= kinds(disable_tqdm=True)
    assert "ProgressCallback" not in kinds(disable_tqdm=True)


def test_parts_may_be_objects_instead_of_names(tmp_path):
    class Watch:
        def on_step_end(self, args, state, control, **kwargs):
            self.step = state.global_step

    model, watch, keeper, device = Classifier(), Watch(), MemoryCheckpointer(tmp_path), SingleDevice("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, disable_tqdm=True)
    trainer = Trainer(
        model,
        args,
        train_dataset=samples(16),
        callbacks=[watch],
        optimizers=(optimizer, None),
        strategy=device,
        checkpointer=keeper,
    )
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.strategy is device
    assert (watch.step, keeper.saves) == (2, [2])


def test_an_optimizer_of_ones_own_is_offered_by_an_entry_point(make_trained, installed):
    given = []

    def build(params, args):
        given.extend((group, args) for group in params)
        return torch.optim.SGD(params, lr=args.learning_rate)

    origin = SimpleNamespace(name="mine", version="1.0")
    offered = SimpleNamespace(name="mine", value="mine:build", group="tr.optimizers", dist=origin, load=lambda: build)
    installed(offered, beside=True)
    trainer = make_trained(optim="mine", weight_decay=0.1)
    assert all({"params", "weight_decay"} <= set(group) and args is trainer.args for group, args in given)
    assert {group["weight_decay"] for group, _ in given} == {0.1, 0.0}
    assert isinstance(trainer.optimizer, torch.optim.SGD)
