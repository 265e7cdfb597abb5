"""What arguments ask of model and process for a run, and that it is undone: TF32, use_cache, Liger kernels."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small_models import Classifier, samples

from tr_core import Trainer, TrainerCallback
from tr_core.runtime import precision
from tr_core.runtime.liger import apply_liger_kernel
from tr_core.runtime.precision import tf32


def precisions():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


class Watch(TrainerCallback):
    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.look())

    def on_prediction_step(self, args, state, control, **kwargs):
        self.seen.append(self.look())


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing_kwargs": {"early_stop": True}}, {"liger_kernel_config": {"a": 1}}]
)
def test_options_of_what_is_switched_off_are_refused(make_trainer, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} has no effect alone; set .*=True, or leave it out"):
        make_trainer(8, **options)


# TF32


def test_tf32_on_a_device_without_it_is_an_error_in_words(make_trainer):
    with pytest.raises(ValueError, match=r"tf32=True needs an NVIDIA GPU of compute capability 8.0 or later, .* cpu"):
        make_trainer(8, tf32=True)


@pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9, of the test's own setting
@pytest.mark.parametrize(("allow", "during"), [(None, ("high", True)), (False, ("highest", False))])
def test_tf32_is_forbidden_or_left_alone_while_the_trainer_computes_and_put_back(make_trainer, allow, during):
    torch.set_float32_matmul_precision("high")
    try:
        watch = Watch(precisions)
        trainer = make_trainer(8, tf32=allow, eval_dataset=samples(4), callbacks=[watch])
        trainer.train()
        assert precisions() == ("high", True)
        trainer.evaluate()
        assert precisions() == ("high", True)
        assert watch.seen == [during] * 3
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_is_allowed_within_the_block_and_put_back_after_an_exception():
    before, during = precisions(), []

    def fail():
        with tf32(True):
            during.append(precisions())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert during == [("high", True)]
    assert precisions() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch names it since 2.9")
def test_a_precision_that_was_set_by_its_newer_name_is_put_back_too():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with tf32(False):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_which_devices_have_tf32(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert precision.has_tf32(torch.device("cuda")) is has
    assert not precision.has_tf32(torch.device("mps"))


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
def test_use_cache_is_that_of_the_arguments_in_training_and_the_models_own_afterwards(make_trainer, tmp_path, asked):
    model = Configured(use_cache=not asked)
    folder = tmp_path / "during"

    class Saves(Trainer):
        def log(self, logs, start_time=None):
            self.save_model(folder)
            super().log(logs, start_time)

    watch = Watch(lambda: model.config.use_cache)
    trainer = make_trainer(8, trainer_class=Saves, model=model, use_cache=asked, callbacks=[watch])
    trainer.train()
    assert watch.seen == [asked] * 2
    assert model.config.use_cache is not asked
    assert json.loads((folder / "config.json").read_text()) == {"use_cache": not asked}


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
