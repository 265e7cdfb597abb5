"""What overrides of a subclass write while a checkpoint is saved is a part of it, and is there when it resumes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tr_all import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        logits = self.linear(x).squeeze(-1)
        return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}


class Beside(Trainer):
    """Makes the folder before it saves, as subclasses for transformers do, and adds files."""

    def _save_checkpoint(self, model, trial, **kwargs):
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens.json").write_text(f"{self.state.global_step}")
        return super()._save_checkpoint(model, trial, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir, "shards").mkdir()
        Path(output_dir, "shards", "0.bin").write_bytes(b"1")

    def _load_rng_state(self, checkpoint):
        self.found = Path(checkpoint, "tokens.json").read_text()


class OwnModel(Beside):
    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir, "adapter.bin").write_bytes(b"2")


def trainer(kind, folder, **changes):
    torch.manual_seed(0)
    data = [{"x": torch.tensor([row, 1.0]), "labels": torch.tensor(row)} for row in torch.linspace(-1, 1, 16).tolist()]
    args = TrainingArguments(
        output_dir=str(folder),
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        lr_scheduler_type="constant",
        **changes,
    )
    return kind(Net(), args, train_dataset=data)


@pytest.mark.parametrize("kind", [Beside, OwnModel])
@pytest.mark.parametrize("save_async", [False, True])
def test_files_of_overrides_are_in_the_checkpoint_and_a_run_resumes_with_them(tmp_path, kind, save_async):
    whole = trainer(kind, tmp_path / "whole", max_steps=6)
    whole.train()
    first = trainer(kind, tmp_path / "parts", max_steps=4, save_async=save_async)
    first.train()
    folder = tmp_path / "parts" / "checkpoint-4"
    assert (folder / "tokens.json").read_text() == "4"
    assert (folder / "shards" / "0.bin").read_bytes() == b"1"
    assert (folder / "model.safetensors").exists() is (kind is Beside)
    assert (folder / "adapter.bin").exists() is (kind is OwnModel)
    assert (folder / "optimizer.safetensors").exists()
    assert sorted(path.name for path in folder.parent.glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    resumed = trainer(kind, tmp_path / "parts", max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.found == "4"
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_folder_of_another_program_is_not_taken_into_the_checkpoint(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"3")
    trainer(Beside, tmp_path, max_steps=2).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert (tmp_path / "checkpoint-2.replaced-1" / "optimizer.pt").exists()


def test_with_the_model_alone_no_override_of_the_optimizer_is_called(tmp_path):
    trainer(Beside, tmp_path, max_steps=2, save_only_model=True).train()
    assert not (tmp_path / "checkpoint-2" / "shards").exists()
    assert (tmp_path / "checkpoint-2" / "tokens.json").exists()
