"""Models that users wrap, change, freeze, share and replace, before a run, between runs and in one."""

import copy
from types import MethodType

import pytest
import torch
from habit_parts import (
    RATE,
    Net,
    assert_same,
    at_step,
    batches,
    by_hand,
    logged,
    rows,
    stack,
    when,
)
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, prune

# Replaced and wrapped


def test_another_model_set_before_training_is_the_one_that_trains(make_trainer):
    first, second, other = Net(), Net(seed=3), Net(seed=3)
    trainer = make_trainer(model=first)
    trainer.model = second
    trainer.train()
    by_hand(other, batches(rows()))
    assert_same(second, other)
    assert_same(first, Net())


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


def test_a_model_set_after_an_evaluation_is_trained_clipped_and_measured(make_trainer):
    trainer, other = make_trainer(eval_dataset=rows(4), max_grad_norm=0.01), Net(seed=3)
    trainer.evaluate()
    trainer.model = Net(seed=3)
    trainer.train()
    by_hand(other, batches(rows()), max_norm=0.01)
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    assert_same(trainer.model, other)


def test_a_head_replaced_after_an_evaluation_is_trained_and_clipped(make_trainer):
    trainer, other = make_trainer(eval_dataset=rows(4), max_grad_norm=0.01), Net()
    trainer.evaluate()
    trainer.model.head, other.head = copy.deepcopy(Net(seed=3).head), copy.deepcopy(Net(seed=3).head)
    trainer.train()
    by_hand(other, batches(rows()), max_norm=0.01)
    assert_same(trainer.model, other)


def test_a_head_replaced_in_a_run_is_refused_unless_it_is_given_to_the_optimizer(make_trainer):
    def replace(model, **_):
        model.head = copy.deepcopy(Net(seed=3).head)

    trainer = make_trainer(callbacks=[at_step(2, replace)])
    with pytest.raises(ValueError, match=r"no group of the optimizer holds: \['head.weight', 'head.bias'\]"):
        trainer.train()

    def replace_and_add(model, optimizer, **_):
        replace(model)
        optimizer.add_param_group({"params": list(model.head.parameters())})

    trainer, other = make_trainer(callbacks=[at_step(2, replace_and_add)]), Net()
    trainer.train()
    by_hand(other, batches(rows())[:2])
    other.head = Net(seed=3).head
    by_hand(other, batches(rows())[2:])
    assert_same(trainer.model, other)


def test_another_model_set_in_a_run_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(at_step(2, lambda **_: setattr(trainer, "model", Net(seed=3))))
    with pytest.raises(RuntimeError, match=r"trainer\.model was assigned while training"):
        trainer.train()


@pytest.mark.parametrize("way", ["delete", "none"])
def test_a_trainer_whose_model_was_taken_away_says_so(make_trainer, way):
    trainer = make_trainer(eval_dataset=rows(4))
    if way == "delete":
        del trainer.model
    else:
        trainer.model = None
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises((AttributeError, TypeError, ValueError), match="model"):
            call()


def test_memory_freed_after_training_leaves_evaluation_and_saving(make_trainer, tmp_path):
    trainer, other = make_trainer(eval_dataset=rows(4)), Net()
    trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    by_hand(other, batches(rows()))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other(**stack(rows(4)))["loss"].item())
    trainer.save_model(tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_what_torch_compile_returned_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"what torch.compile\(\) returned.*set torch_compile=True"):
        make_trainer(model=torch.compile(Net(), backend="eager"))


def test_a_model_compiled_in_place_trains_and_is_saved_under_its_names(make_trainer):
    model, other = Net(), Net()
    model.compile(backend="eager")
    trainer = make_trainer(model=model)
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    assert_same(model, other)


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


def test_a_model_of_half_precision_with_float_data_is_an_error(make_trainer):
    with pytest.raises(RuntimeError, match="dtype"):
        make_trainer(model=Net().half()).train()


def test_a_model_given_in_evaluation_mode_trains_in_training_mode(make_trainer):
    model, modes = Net(dropout=0.5).eval(), []
    trainer = make_trainer(model=model)
    model.dropout.register_forward_hook(lambda module, *_: modes.append(module.training))
    trainer.train()
    assert modes == [True] * 4


def test_weights_on_the_meta_device_are_refused(make_trainer):
    with pytest.raises((NotImplementedError, RuntimeError, ValueError), match="meta"):
        make_trainer(model=Net().to("meta")).train()


def test_a_layer_without_weights_yet_is_refused(make_trainer):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.LazyLinear(3)

    with pytest.raises(ValueError, match="uninitialized parameter.*Call `forward` with a dummy batch"):
        make_trainer(model=Lazy()).train()


# Frozen and thawed


def test_layers_frozen_before_training_keep_their_weights(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.model.body.requires_grad_(False)
    trainer.train()
    other.body.requires_grad_(False)
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)
    assert torch.equal(trainer.model.body.weight, Net().body.weight)


def test_a_layer_frozen_in_a_run_stays_from_then_on(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.add_callback(at_step(2, lambda model, **_: model.body.requires_grad_(False)))
    trainer.train()
    by_hand(other, batches(rows())[:2])
    other.body.requires_grad_(False)
    by_hand(other, batches(rows())[2:])
    assert_same(trainer.model, other)


def test_a_layer_thawed_in_a_run_is_refused_unless_it_is_given_to_the_optimizer(make_trainer):
    def thaw(model, **_):
        model.body.requires_grad_(True)

    def thaw_and_add(model, optimizer, **_):
        thaw(model)
        optimizer.add_param_group({"params": list(model.body.parameters())})

    trainer = make_trainer(callbacks=[at_step(2, thaw)])
    trainer.model.body.requires_grad_(False)
    with pytest.raises(ValueError, match=r"body.weight was unfrozen during training.*would never be updated"):
        trainer.train()

    trainer, other = make_trainer(callbacks=[at_step(2, thaw_and_add)]), Net()
    trainer.model.body.requires_grad_(False)
    trainer.train()
    other.body.requires_grad_(False)
    by_hand(other, batches(rows())[:2])
    other.body.requires_grad_(True)
    by_hand(other, batches(rows())[2:])
    assert_same(trainer.model, other)


def test_a_layer_frozen_and_thawed_again_in_a_run_is_trained(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.add_callback(
        when(on_step_begin=lambda model, state, **_: model.body.requires_grad_(state.global_step >= 2))
    )
    trainer.train()
    other.body.requires_grad_(False)
    by_hand(other, batches(rows())[:2])
    other.body.requires_grad_(True)
    by_hand(other, batches(rows())[2:])
    assert_same(trainer.model, other)


@pytest.mark.parametrize("clips", [0, 0.01])
def test_gradients_outside_the_optimizer_do_not_add_up(make_trainer, clips):
    model = Net()
    head = torch.optim.SGD(model.head.parameters(), lr=RATE)
    trainer = make_trainer(model=model, optimizers=(head, None), max_grad_norm=clips)
    sizes = []
    trainer.add_callback(when(on_pre_optimizer_step=lambda model, **_: sizes.append(model.body.weight.grad)))
    trainer.train()
    other = Net()
    expected = []
    for batch in batches(rows()):
        other.zero_grad()
        other(**batch)["loss"].backward()
        expected.append(nn.utils.clip_grad_norm_(other.parameters(), clips or torch.inf).item())
        with torch.no_grad():
            for parameter in other.head.parameters():
                parameter -= RATE * parameter.grad
    assert logged(trainer, "grad_norm") == pytest.approx(expected)
    assert_same(model, other)


def test_a_model_without_anything_to_train_is_refused(make_trainer):
    model = Net()
    model.requires_grad_(False)
    with pytest.raises((RuntimeError, ValueError), match=r"grad|parameter"):
        make_trainer(model=model).train()


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


def test_a_gradient_hook_changes_what_is_applied(make_trainer):
    trainer, other = make_trainer(), Net()
    for model in (trainer.model, other):
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    trainer.train()
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


def test_a_parametrization_added_after_construction_is_trained(make_trainer):
    trainer, other = make_trainer(), Net()
    for model in (trainer.model, other):
        parametrizations.weight_norm(model.head)
    trainer.train()
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


def test_weights_pruned_by_a_callback_stay_zero(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(at_step(2, lambda model, **_: prune.l1_unstructured(model.body, "weight", amount=6)))
    trainer.train()
    assert int((trainer.model.body.weight == 0).sum()) == 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.first.weight)
        nn.init.eye_(self.second.weight)

    def forward(self, x, labels=None):
        logits = self.second(self.first(x)).sum(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def test_weights_tied_after_construction_get_one_update(make_trainer):
    trainer, other = make_trainer(model=Tied(), learning_rate=0.001), Tied()
    for model in (trainer.model, other):
        model.second.weight = model.first.weight
    trainer.train()
    by_hand(other, batches(rows()), rate=0.001)
    assert trainer.model.second.weight is trainer.model.first.weight
    assert_same(trainer.model, other)


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


def test_a_model_saved_by_hand_after_training_is_the_trained_one(make_trainer, tmp_path):
    trainer, other = make_trainer(), Net()
    trainer.train()
    torch.save(trainer.model.state_dict(), tmp_path / "mine.pt")
    by_hand(other, batches(rows()))
    saved = Net()
    saved.load_state_dict(torch.load(tmp_path / "mine.pt"))
    assert_same(saved, other)


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
