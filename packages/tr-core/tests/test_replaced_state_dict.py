"""Models whose `state_dict` a script replaces, so that less is saved with them."""

import pytest
import torch
from memory_checkpointer import MemoryCheckpointer
from safetensors.torch import load_file
from small_models import Classifier, samples
from torch import nn

from tr_core import TrainerCallback


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        return {"should_training_stop": state.global_step == 3}


class OfClass(Classifier):
    def state_dict(self, *args, **kwargs):
        return {f"renamed.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class Both(OfClass):
    """A class that loads what it gives."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({name.removeprefix("renamed."): v for name, v in state_dict.items()}, strict)


def last_layer_alone(model):
    """Replace it as alpaca-lora's script does."""
    old = model.state_dict
    model.state_dict = (
        lambda self, *_, **__: {name: value for name, value in old().items() if name.startswith("layers.3")}
    ).__get__(model, type(model))
    return model


def of_class(model):
    own = OfClass()
    own.load_state_dict(model.state_dict())
    return own


def both(model):
    own = Both()
    nn.Module.load_state_dict(own, model.state_dict())
    return own


@pytest.mark.parametrize("change", [last_layer_alone, of_class, both])
def test_a_resumed_run_ends_as_one_that_never_stopped(make_trainer, change):
    def make(*callbacks, **options):
        torch.manual_seed(0)
        model = change(Classifier())
        keeper = options.setdefault("checkpointer", MemoryCheckpointer())
        trainer = make_trainer(
            20, model=model, callbacks=list(callbacks), save_strategy="steps", save_steps=3, **options
        )
        return trainer, keeper

    alone, _ = make()
    alone.train()
    stopped, keeper = make(StopAt())
    stopped.train()
    held = set(keeper.saved[3]["model"])
    whole = set(nn.Module.state_dict(alone.model))
    assert held == (set(alone.model.state_dict()) if change is both else whole)
    replaced = stopped.model.state_dict
    resumed, _ = make(checkpointer=keeper)
    resumed.train(resume_from_checkpoint=True)
    for mine, theirs in zip(alone.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert stopped.model.state_dict == replaced  # it is the script's own again


@pytest.mark.parametrize("change", [last_layer_alone, of_class, both])
def test_the_best_model_is_loaded_at_the_end(make_trainer, change):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True}
    scores = iter([1.0, 3.0, 2.0, 1.0, 0.0, 9.0])
    seen = []

    class Keep(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())

    torch.manual_seed(0)
    trainer = make_trainer(
        20,
        model=change(Classifier()),
        checkpointer=MemoryCheckpointer(),
        eval_dataset=samples(8, 1),
        compute_metrics=lambda prediction: {"score": next(scores)},
        metric_for_best_model="score",
        greater_is_better=True,
        callbacks=[Keep],
        **options,
    )
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), seen[1])


def test_save_model_writes_what_the_script_chose(make_trainer, tmp_path):
    trainer = make_trainer(8, model=last_layer_alone(Classifier()))
    trainer.save_model(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == {"layers.3.weight", "layers.3.bias"}
