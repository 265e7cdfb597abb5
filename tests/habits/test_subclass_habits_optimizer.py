"""Subclasses with optimizers and schedules of their own, on transformers' Trainer and on ours."""

import math

import pytest
import torch
from habit_parts import logged
from subclass_parts import assert_equal, run_alike, run_both
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import tr_core


def test_a_rate_that_falls_from_layer_to_layer_with_the_optimizer_of_the_arguments(tmp_path):
    def layerwise(base):
        class LayerwiseTrainer(base):
            def __init__(self, *args, layer_decay=0.5, **kwargs):
                self.layer_decay = layer_decay
                super().__init__(*args, **kwargs)

            def create_optimizer(self):
                if self.optimizer is None:
                    decayed = self.get_decay_parameter_names(self.model)
                    groups = []
                    for depth, layer in enumerate(("head", "body")):
                        for is_decayed in (True, False):
                            named = getattr(self.model, layer).named_parameters(prefix=layer)
                            groups.append({
                                "params": [weight for name, weight in named if (name in decayed) == is_decayed],
                                "weight_decay": self.args.weight_decay if is_decayed else 0.0,
                                "lr": self.args.learning_rate * self.layer_decay**depth,
                            })  # fmt: skip
                    kind, options = base.get_optimizer_cls_and_kwargs(self.args)
                    self.optimizer = kind(groups, **options)
                return self.optimizer

        return LayerwiseTrainer

    theirs, ours = run_both(
        tmp_path, layerwise, optim="adamw_torch", weight_decay=0.1, lr_scheduler_type="linear", warmup_steps=1,
        num_train_epochs=2,
    )  # fmt: skip
    assert_equal(theirs, ours)
    rates = [[group["lr"] for group in side.trainer.optimizer.param_groups] for side in (theirs, ours)]
    assert rates[0] == rates[1]


def test_groups_of_super_are_split_afterwards(tmp_path):
    class SplittingTrainer:
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            heads = {id(weight) for weight in self.model.head.parameters()}
            for group in list(optimizer.param_groups):
                own = [weight for weight in group["params"] if id(weight) in heads]
                group["params"] = [weight for weight in group["params"] if id(weight) not in heads]
                if own:
                    options = {name: value for name, value in group.items() if name != "params"}
                    optimizer.add_param_group({**options, "params": own, "lr": 10 * group["lr"]})
            return optimizer

    assert_equal(
        *run_both(tmp_path, SplittingTrainer, optim="adamw_torch", learning_rate=0.01, num_train_epochs=2),
        but=("model",),
    )


def test_the_optimizer_is_built_before_super_is_asked(tmp_path):
    class BuildingTrainer:
        def create_optimizer(self, *args, **kwargs):
            if self.optimizer is None:
                self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=self.args.learning_rate / 10)
            return super().create_optimizer(*args, **kwargs)

        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                optimizer = self.optimizer if optimizer is None else optimizer
                self.lr_scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=num_training_steps + 1)
            return super().create_scheduler(num_training_steps, optimizer)

    theirs, ours = run_both(tmp_path, BuildingTrainer, num_train_epochs=2)
    assert_equal(theirs, ours, but=("args", "kwargs"))


def test_a_schedule_with_two_phases_is_given_the_number_of_steps(tmp_path):
    class PhasesTrainer:
        def create_scheduler(self, num_training_steps, optimizer=None):
            warm = self.args.get_warmup_steps(num_training_steps)

            def factor(step):
                if step < warm:
                    return (step + 1) / (warm + 1)
                return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(num_training_steps - warm, 1)))

            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
            return self.lr_scheduler

    _, ours = run_alike(tmp_path, PhasesTrainer, num_train_epochs=2, warmup_steps=2)
    assert len(set(logged(ours.trainer, "learning_rate"))) > 4


def test_both_are_built_by_the_older_method_that_returns_nothing(tmp_path):
    class OlderTrainer:
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate, eps=1e-6)
            self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1 - step / num_training_steps)

    class TodaysTrainer:
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate, eps=1e-6)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1 - step / num_training_steps)
            return self.lr_scheduler

    theirs, ours = run_both(tmp_path, (TodaysTrainer, OlderTrainer), num_train_epochs=2)
    assert ours.history == theirs.history
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_an_optimizer_around_another_looks_ahead(tmp_path):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner, every=2, share=0.5):
            self.inner, self.every, self.share, self.count = inner, every, share, 0
            super().__init__(inner.param_groups, {})
            self.param_groups = inner.param_groups
            self.slow = [weight.detach().clone() for group in self.param_groups for weight in group["params"]]

        def step(self, closure=None):
            loss = self.inner.step(closure)
            self.count += 1
            if self.count % self.every == 0:
                weights = [weight for group in self.param_groups for weight in group["params"]]
                for slow, weight in zip(self.slow, weights, strict=True):
                    slow.add_(weight.detach() - slow, alpha=self.share)
                    weight.data.copy_(slow)
            return loss

    class LookaheadTrainer:
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = Lookahead(torch.optim.Adam(self.model.parameters(), lr=self.args.learning_rate))
            return self.optimizer

    assert_equal(*run_both(tmp_path, LookaheadTrainer, num_train_epochs=2), but=("model",))


def test_a_part_of_the_model_is_left_out_of_the_optimizer_by_requires_grad(tmp_path):
    class FrozenTrainer:
        def create_optimizer(self, model=None):
            for name, weight in self.model.named_parameters():
                weight.requires_grad_(name.startswith("head"))
            return super().create_optimizer(model)

    theirs, ours = run_both(tmp_path, FrozenTrainer, optim="adamw_torch")
    assert_equal(theirs, ours, but=("model",))
    assert ours.trainer.get_num_trainable_parameters() == theirs.trainer.get_num_trainable_parameters() == 4


def test_gradients_are_clipped_by_layer_in_place_of_the_whole(tmp_path):
    class LayerClippingTrainer:
        def _clip_grad_norm(self, model):
            norms = [
                self.accelerator.clip_grad_norm_(layer.parameters(), self.args.max_grad_norm)
                for layer in (self.model.body, self.model.head)
            ]
            return torch.stack(norms).norm()

    run_alike(tmp_path, LayerClippingTrainer, max_grad_norm=0.5)


def test_rates_of_all_groups_are_added_to_the_log(tmp_path):
    class TellingTrainer:
        def create_optimizer(self, model=None):
            groups = [
                {"params": self.model.body.parameters(), "lr": 0.01, "name": "body"},
                {"params": self.model.head.parameters(), "lr": 0.1, "name": "head"},
            ]
            self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                for group in self.optimizer.param_groups:
                    logs[f"rate_{group['name']}"] = group["lr"]
                logs["rates"] = self.get_learning_rates()
            super().log(logs, *args, **kwargs)

    theirs, ours = run_both(tmp_path, TellingTrainer, lr_scheduler_type="cosine")
    assert_equal(theirs, ours, but=("model", "args", "kwargs"))


@pytest.mark.parametrize("name", ["_get_learning_rate", "_inner_training_loop", "_wrap_model", "_run_epoch"])
def test_an_override_of_the_inside_of_the_loop_says_what_to_override(make_trainer, name):
    def call_super(self, *args, **kwargs):
        return getattr(super(tr_core.Trainer, self), name)(*args, **kwargs)

    with pytest.raises(TypeError, match=rf"LoopTrainer.{name} overrides .*: (override|pass|give) \w+"):
        make_trainer(type("LoopTrainer", (tr_core.Trainer,), {name: call_super}))


def test_weight_decay_of_norms_is_switched_on_by_the_arguments_of_a_subclass(tmp_path):
    class DecayingTrainer:
        decays_all = True

        def get_decay_parameter_names(self, model):
            if self.decays_all:
                return [name for name, _ in model.named_parameters()]
            return super().get_decay_parameter_names(model)

    run_alike(tmp_path, DecayingTrainer, optim="sgd", weight_decay=0.5)
