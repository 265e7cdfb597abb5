"""Models that users wrap, change, freeze, share and replace, before a run, between runs and in one."""

import copy
from types import MethodType

import pytest
import torch
from habit_parts import (
    Net,
    assert_same,
    at_step,
    batches,
    by_hand,
    logged,
    rows,
    stack,
)
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune

# Replaced and wrapped


def test_another_model_set_after_training_is_evaluated_and_saved(make_trainer, tmp_path):
    trainer, best = make_trainer(eval_dataset=rows(4)), Net(seed=3)
    trainer.train()
    trainer.model = best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best(**stack(rows(4)))["loss"].item())
    assert trainer.predict(rows(4)).predictions == pytest.approx(best(stack(rows(4))["x"])["logits"].detach().numpy())
    trainer.save_model(tmp_path / "best")
    saved = Net(seed=9)
    saved.load_state_dict(load_file(tmp_path / "best" / "model.safetensors"))
    assert_same(saved, best)


def test_memory_freed_after_training_leaves_evaluation_and_saving(make_trainer, tmp_path):
    trainer, other = make_trainer(eval_dataset=rows(4)), Net()
    trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    by_hand(other, batches(rows()))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other(**stack(rows(4)))["loss"].item())
    trainer.save_model(tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_a_model_in_data_parallel_trains_and_is_saved_under_the_wrappers_names(make_trainer, tmp_path):
    inner, other = Net(), Net()
    trainer = make_trainer(model=nn.DataParallel(inner))
    trainer.train()
    trainer.save_model(tmp_path / "final")
    by_hand(other, batches(rows()))
    assert_same(inner, other)
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert set(saved) == {f"module.{name}" for name in other.state_dict()}


# Types and modes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_turned_to_another_type_before_trains_in_it(make_trainer, dtype):
    data = [{name: value.to(dtype) for name, value in row.items()} for row in rows()]
    trainer, other = make_trainer(model=Net().to(dtype), train_dataset=data), Net().to(dtype)
    trainer.train()
    assert logged(trainer) == pytest.approx(
        by_hand(other, batches(data)), rel=1e-2 if dtype is torch.bfloat16 else 1e-6
    )
    assert trainer.model.head.weight.dtype == dtype
    assert_same(trainer.model, other)


# Hooks, parametrizations, ties


@pytest.mark.parametrize("moment", ["before construction", "after construction", "in the run"])
def test_hooks_of_users_are_called(make_trainer, moment):
    model, calls = Net(), []

    def register(**_):
        model.body.register_forward_hook(lambda *_: calls.append(1))

    if moment == "before construction":
        register()
    trainer = make_trainer(model=model)
    if moment == "after construction":
        register()
    if moment == "in the run":
        trainer.add_callback(at_step(2, register))
    trainer.train()
    assert len(calls) == (2 if moment == "in the run" else 4)


def test_weights_pruned_by_a_callback_stay_zero(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(at_step(2, lambda model, **_: prune.l1_unstructured(model.body, "weight", amount=6)))
    trainer.train()
    assert int((trainer.model.body.weight == 0).sum()) == 6


# Shared and copied


def test_two_trainers_of_one_model_go_on_with_its_weights(make_trainer):
    model, other = Net(), Net()
    first, second = make_trainer(model=model, max_steps=2), make_trainer(model=model, max_steps=2)
    first.train()
    second.train()
    by_hand(other, batches(rows())[:2])
    assert logged(second) == pytest.approx(by_hand(other, batches(rows())[:2]))
    assert_same(model, other)


def test_a_copy_of_a_trainer_is_a_trainer_of_its_own(make_trainer):
    trainer, other = make_trainer(), Net()
    double = copy.deepcopy(trainer)
    double.train()
    by_hand(other, batches(rows()))
    assert_same(double.model, other)
    assert_same(trainer.model, Net())
    assert trainer.state.global_step == 0
    trainer.train()
    assert_same(trainer.model, other)


def test_weights_put_back_between_two_runs_begin_the_second(make_trainer):
    trainer = make_trainer()
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    first = logged(trainer)
    trainer.model.load_state_dict(before)
    trainer.train()
    assert logged(trainer) == first


def test_state_dict_replaced_on_the_instance_does_not_keep_it_from_training(make_trainer):
    trainer, other = make_trainer(), Net()
    usual = trainer.model.state_dict
    trainer.model.state_dict = MethodType(lambda self, *a, **k: {"head.weight": usual()["head.weight"]}, trainer.model)
    trainer.train()
    del trainer.model.state_dict
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)
