"""What turns data into a model's inputs is saved with the model, also where only the collator knows it."""

from pathlib import Path

import pytest
from small_models import samples

import tr_core


class Processor:
    def __init__(self, name):
        self.name = name

    def save_pretrained(self, folder):
        (Path(folder) / "processor.txt").write_text(self.name, encoding="utf-8")


class Collator:
    def __init__(self, **held):
        vars(self).update(held)

    def __call__(self, rows):
        return tr_core.default_data_collator(rows)


def saved(make_trainer, tmp_path, **parts):
    make_trainer(train_dataset=samples(4), **parts).save_model(str(tmp_path / "saved"))
    file = tmp_path / "saved" / "processor.txt"
    return file.read_text(encoding="utf-8") if file.exists() else None


@pytest.mark.parametrize("name", ["tokenizer", "processor", "processing_class", "feature_extractor", "image_processor"])
def test_a_processor_that_only_the_collator_knows_is_saved(make_trainer, tmp_path, name):
    assert saved(make_trainer, tmp_path, data_collator=Collator(**{name: Processor("its")})) == "its"


def test_the_trainers_own_comes_first(make_trainer, tmp_path):
    parts = {"processing_class": Processor("own"), "data_collator": Collator(tokenizer=Processor("its"))}
    assert saved(make_trainer, tmp_path, **parts) == "own"


def test_a_collator_without_one_saves_nothing(make_trainer, tmp_path):
    assert saved(make_trainer, tmp_path, data_collator=Collator(tokenizer=None, processor="text")) is None
