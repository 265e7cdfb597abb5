"""A run whose newest checkpoint is damaged names the tensor, goes on from the one before, and ends equal."""

import json
import logging
from pathlib import Path

import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import rows
from shared.models import Classifier

from tr_core import Trainer, TrainingArguments, set_seed


class Loading(Trainer):
    """Loads the model by an override, which is called before the rest of the checkpoint is restored."""

    loaded = ()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.loaded = (*self.loaded, Path(resume_from_checkpoint).name)
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def trainer(folder, *callbacks, kind=Trainer):
    set_seed(7)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(Classifier(), args, train_dataset=rows(32), callbacks=list(callbacks))


def section(path, name):
    """Return where a tensor lies in a safetensors file."""
    raw = path.read_bytes()
    before = 8 + int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8:before])[name]["data_offsets"]
    return before + start, before + end


def flip(path, start, end):
    content = bytearray(path.read_bytes())
    content[start] ^= 1
    path.write_bytes(content)


def cut(path, start, end):
    path.write_bytes(path.read_bytes()[: end - 2])


@pytest.mark.parametrize(
    ("damage", "file", "tensor", "message"),
    [
        (
            flip,
            "optimizer.safetensors",
            "state.0.exp_avg",
            "optimizer.safetensors was changed after it was written: its SHA-256 differs, "
            "first in tensor state.0.exp_avg (bytes {start:,} to {end:,})",
        ),
        (
            cut,
            "model.safetensors",
            "layers.3.bias",
            "model.safetensors is {missing:,} bytes short: cut in tensor layers.3.bias (bytes {start:,} to {end:,})",
        ),
    ],
    ids=["a changed byte", "a cut file"],
)
def test_a_damaged_checkpoint_is_named_to_the_tensor_and_the_one_before_is_gone_on_from(
    damage, file, tensor, message, tmp_path
):
    torch.set_num_threads(1)
    alone = trainer(tmp_path / "alone")
    alone.train()
    with pytest.raises(Stop):
        trainer(tmp_path / "run", StopAt(7)).train()
    path = tmp_path / "run" / "checkpoint-6" / file
    start, end = section(path, tensor)
    missing = path.stat().st_size
    damage(path, start, end)
    missing -= path.stat().st_size
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tr_ckpt").addHandler(handler)
    try:
        resumed = trainer(tmp_path / "run")
        resumed.train(resume_from_checkpoint=True)
    finally:
        logging.getLogger("tr_ckpt").removeHandler(handler)
    assert said == [f"skipped checkpoint-6: {message.format(start=start, end=end, missing=missing)}"]
    for mine, theirs in zip(resumed.model.state_dict().values(), alone.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_override_that_loads_the_model_gets_the_folder_of_a_whole_checkpoint(tmp_path):
    torch.set_num_threads(1)
    alone = trainer(tmp_path / "alone")
    alone.train()
    with pytest.raises(Stop):
        trainer(tmp_path / "run", StopAt(7)).train()
    newest = tmp_path / "run" / "checkpoint-6"
    flip(newest / "optimizer.safetensors", *section(newest / "optimizer.safetensors", "state.0.exp_avg"))
    named = trainer(tmp_path / "run", kind=Loading)
    with pytest.raises(ValueError, match="optimizer.safetensors was changed after it was written"):
        named.train(resume_from_checkpoint=str(newest))
    assert named.loaded == ()
    resumed = trainer(tmp_path / "run", kind=Loading)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.loaded == ("checkpoint-4",)
    for mine, theirs in zip(resumed.model.state_dict().values(), alone.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
