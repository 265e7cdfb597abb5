"""What arguments ask of a model for a run, and that it is undone: use_cache and Liger kernels."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.callbacks import Looks
from support.data import samples
from support.models import Classifier

from tr_core import Trainer
from tr_core.preflight import check
from tr_core.runtime.compilation import apply_liger_kernel


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing_kwargs": {"debug": True}}, {"liger_kernel_config": {"a": 1}}]
)
def test_options_of_what_is_switched_off_are_refused(make_trainer, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} has no effect alone; set .*=True, or leave it out"):
        make_trainer(8, **options)


# use_cache


class Config:
    """A configuration as transformers' are: it can save itself."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def save_pretrained(self, folder):
        with open(f"{folder}/config.json", "w") as file:
            json.dump(vars(self), file)


class Configured(Classifier):
    def __init__(self, **values):
        super().__init__()
        self.config = Config(**values)


@pytest.mark.parametrize("asked", [False, True])
def test_use_cache_is_that_of_the_arguments_in_training_and_the_models_own_afterwards(make_trained, tmp_path, asked):
    model = Configured(use_cache=not asked)
    folder = tmp_path / "during"

    class Saves(Trainer):
        def log(self, logs, start_time=None):
            self.save_model(folder)
            super().log(logs, start_time)

    watch = Looks(lambda: model.config.use_cache)
    make_trained(8, trainer_class=Saves, model=model, use_cache=asked, callbacks=[watch])
    assert watch.seen == [asked] * 2
    assert model.config.use_cache is not asked
    assert json.loads((folder / "config.json").read_text()) == {"use_cache": not asked}


def test_building_a_trainer_leaves_the_models_configuration_alone(make_trainer):
    model = Configured(use_cache=True)
    make_trainer(8, model=model)
    assert model.config.use_cache is True


def test_use_cache_is_put_back_after_an_exception(make_trainer):
    model = Configured(use_cache=True)

    class Fails(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        make_trainer(8, trainer_class=Fails, model=model).train()
    assert model.config.use_cache is True


def test_a_configuration_without_use_cache_gets_none(make_trainer):
    model = Configured(size=3)
    make_trainer(8, model=model).train()
    assert vars(model.config) == {"size": 3}


# Liger kernels


@pytest.fixture
def liger(monkeypatch):
    """Stand in for the package: its kernels need a GPU."""
    calls = []

    def apply(rope=True, model=None):
        calls.append((model, rope))

    package, part = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__ = object()
    part.monkey_patch = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply, "qwen3": apply}, _apply_liger_kernel_to_instance=apply
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", part)
    return calls


def test_liger_kernels_need_their_package(make_trainer):
    with pytest.raises(ImportError, match="use_liger_kernel=True needs the package liger-kernel, .* pip install liger"):
        make_trainer(8, use_liger_kernel=True)


def test_liger_kernels_are_put_into_the_model_once_with_their_options(make_trainer, liger):
    model = Configured(model_type="llama")
    options = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    trainer = make_trainer(8, model=model, eval_dataset=samples(4), **options)
    assert liger == []
    trainer.evaluate()
    trainer.train()
    assert liger == [(model, False)]


def test_liger_kernels_that_there_are_not_are_an_error_in_words(make_trainer, liger):
    with pytest.raises(ValueError, match=r"no kernels for Classifier \(model_type None\); .* for llama, qwen3"):
        apply_liger_kernel(Classifier(), None)
    with pytest.raises(ValueError, match=r"liger_kernel_config has \['ropes'\], which 'llama' does not take; it takes"):
        apply_liger_kernel(Configured(model_type="llama"), {"ropes": True})


# Special tokens


class TextConfig(Config):
    def get_text_config(self):
        return self


TOKENIZER = SimpleNamespace(eos_token_id=7, bos_token_id=None, pad_token_id=0)


def test_a_model_without_a_configuration_of_transformers_is_left_as_it_is(make_trained):
    model = Configured(eos_token_id=2)
    make_trained(8, model=model, processing_class=TOKENIZER)
    assert vars(model.config) == {"eos_token_id": 2}


def test_a_check_tries_a_step_with_the_tokens_of_the_tokenizer(make_trainer):
    seen = []

    class Sees(Configured):
        def forward(self, *inputs, **named):
            seen.append(self.config.eos_token_id)
            return super().forward(*inputs, **named)

    model = Sees()
    model.config = TextConfig(eos_token_id=2, pad_token_id=1)
    check(make_trainer(8, model=model, processing_class=TOKENIZER))
    assert set(seen) == {7}
