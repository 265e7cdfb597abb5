"""A run on two machines that share no file system, each with its own folder, stopped and gone on with."""

import shutil

import pytest
from shared.callbacks import Stop, StopAt
from shared.data import rows
from shared.models import Classifier

from tr_ckpt.testing import give_owners
from tr_core import Trainer, TrainingArguments
from tr_dist import DDP
from tr_dist.testing import run_ranks


class TwoMachines(DDP):
    """Four processes that take themselves for two on each of two machines."""

    def __init__(self, **options):
        super().__init__(**options)
        self.local_rank = self.rank % 2


def train(folder, stop_at, resume, asynchronous, on_each_node=True):
    strategy = TwoMachines(use_cpu=True)
    args = TrainingArguments(
        output_dir=f"{folder}/machine-{strategy.rank // 2}" if on_each_node else folder,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        save_steps=3,
        save_on_each_node=on_each_node,
        save_async=asynchronous,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
    )
    trainer = Trainer(Classifier(seed=0), args, train_dataset=rows(48), callbacks=[StopAt(stop_at)], strategy=strategy)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Stop:
        trainer.checkpointer().wait()
    weights = {name: weight.detach().clone().numpy() for name, weight in trainer.model.state_dict().items()}
    step = trainer.state.global_step
    trainer.save_model(f"{args.output_dir}/final")
    trainer.end()
    return step, weights


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_on_two_machines_goes_on_from_the_newest_step_that_both_have(tmp_path, asynchronous):
    expected = run_ranks(train, 4, str(tmp_path / "alone"), None, None, asynchronous, False, timeout_s=120)
    folder = tmp_path / "stopped"
    run_ranks(train, 4, str(folder), 8, None, asynchronous, timeout_s=120)
    for machine in ("machine-0", "machine-1"):
        assert (folder / machine / "final" / "model.safetensors").exists()
        names = {path.name for path in (folder / machine / "checkpoint-6").iterdir()}
        assert {"model.safetensors", "optimizer.safetensors", "trainer_state.json"} <= names
    assert (folder / "machine-1" / "checkpoint-6" / "rng-3.json").exists()
    assert not (folder / "machine-1" / "checkpoint-6" / "rng-0.json").exists()
    shutil.rmtree(folder / "machine-1" / "checkpoint-6")  # as if it had died just before
    resumed = run_ranks(train, 4, str(folder), None, True, asynchronous, timeout_s=120)
    for (step, weights), (expected_step, expected_weights) in zip(resumed, expected, strict=True):
        assert step == expected_step == 12
        assert all((weights[name] == expected_weights[name]).all() for name in weights)


def train_in_one_folder(folder):
    give_owners(ending_s=0.5)
    args = TrainingArguments(
        output_dir=folder, max_steps=2, save_steps=1, save_on_each_node=True, disable_tqdm=True, use_cpu=True
    )
    with pytest.raises(OSError, match="is in use|no checkpoint could be saved") as raised:
        Trainer(Classifier(seed=0), args, train_dataset=rows(8), strategy=TwoMachines(use_cpu=True)).train()
    return str(raised.value)


def test_machines_that_share_a_folder_do_not_both_write_to_it(tmp_path):
    for text in run_ranks(train_in_one_folder, 4, str(tmp_path), timeout_s=120):
        assert "where the machines of a run share their file system, leave out save_on_each_node" in text
