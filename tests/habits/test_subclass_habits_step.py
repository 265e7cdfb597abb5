"""Subclasses with a training step of their own, as public code writes them, on transformers' Trainer and on ours."""

import pytest
import torch
from habit_parts import logged
from subclass_parts import assert_equal, class_rows, run_alike, run_both
from torch import nn

import tr_core


class Attack:
    """Fast gradient method on the weights of one layer."""

    def __init__(self, model, size, name):
        self.model, self.size, self.name, self.kept = model, size, name, {}

    def disturb(self):
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and self.name in name:
                self.kept[name] = weight.data.clone()
                norm = torch.norm(weight.grad)
                if norm != 0:
                    weight.data.add_(self.size * weight.grad / norm)

    def restore(self):
        for name, weight in self.model.named_parameters():
            if name in self.kept:
                weight.data = self.kept.pop(name)


def test_a_disturbed_embedding_of_the_older_signature_adds_its_gradient(tmp_path):
    def adversarial(base):
        class AdversarialTrainer(base):
            def __init__(self, size=1.0, layer="embeddings", *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.attack = Attack(self.model, size, layer)

            def training_step(self, model, inputs, num_items_in_batch=None):
                model.train()
                inputs = self._prepare_inputs(inputs)
                for is_attack in (False, True):
                    if is_attack:
                        self.attack.disturb()
                    loss = self.compute_loss(model, inputs)
                    (loss / self.args.gradient_accumulation_steps).backward()
                self.attack.restore()
                return loss.detach() / self.args.gradient_accumulation_steps

        return AdversarialTrainer

    def older(base):
        class AdversarialTrainer(adversarial(base)):
            def training_step(self, model, inputs):
                return super().training_step(model, inputs)

        return AdversarialTrainer

    theirs, ours = run_both(
        tmp_path, (adversarial, older), classes=True, gradient_accumulation_steps=2, num_train_epochs=2,
        build=lambda kind, parts: kind(0.5, "embeddings", parts.pop("model"), **parts),
    )  # fmt: skip
    assert logged(ours.trainer) == logged(theirs.trainer)
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_weights_disturbed_from_an_epoch_on_are_put_back_after_the_second_backward(tmp_path):
    class WeightPerturbationTrainer:
        start, size = 1.0, 0.1

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            if self.state.epoch is not None and self.state.epoch >= self.start:
                kept = {name: weight.data.clone() for name, weight in model.named_parameters()}
                for weight in model.parameters():
                    weight.data += self.size * weight.grad / (weight.grad.norm() + 1e-6) * weight.data.norm()
                with self.autocast_smart_context_manager():
                    again = self.compute_loss(model, inputs)
                self.optimizer.zero_grad()
                self.accelerator.backward(again)
                for name, weight in model.named_parameters():
                    weight.data.copy_(kept[name])
            return loss.detach()

    run_alike(tmp_path, WeightPerturbationTrainer, classes=True, num_train_epochs=3)


def test_projected_steps_of_an_attack_keep_the_first_gradient_aside(tmp_path):
    class ProjectedTrainer:
        rounds, rate, radius = 3, 0.3, 0.5

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            layer = self.model.embeddings
            start = layer.weight.data.clone()
            grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
            for number in range(self.rounds):
                layer.weight.data.add_(self.rate * layer.weight.grad / layer.weight.grad.norm())
                moved = layer.weight.data - start
                if moved.norm() > self.radius:
                    layer.weight.data = start + self.radius * moved / moved.norm()
                model.zero_grad()
                if number == self.rounds - 1:
                    for name, weight in model.named_parameters():
                        weight.grad = grads[name]
                self.compute_loss(model, self._prepare_inputs(inputs)).backward()
            layer.weight.data = start
            return loss

    run_alike(tmp_path, ProjectedTrainer, classes=True, num_train_epochs=2)


def test_the_gradient_of_the_worst_neighbour_is_applied_where_the_weights_were(tmp_path):
    class SharpnessTrainer:
        radius = 0.05

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
            moves = [self.radius * weight.grad / (norm + 1e-12) for weight in model.parameters()]
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move)
            model.zero_grad()
            super().training_step(model, inputs, num_items_in_batch)
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.sub_(move)
            return loss

    run_alike(tmp_path, SharpnessTrainer, num_train_epochs=2, max_grad_norm=0.5)


def test_a_penalty_on_the_gradient_of_the_inputs_is_trained(tmp_path):
    class PenaltyTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["x"].requires_grad_(True)
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            if torch.is_grad_enabled():
                (grad,) = torch.autograd.grad(loss, inputs["x"], create_graph=True)
                loss = loss + 0.3 * (grad.norm(dim=-1) - 1).pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    theirs, ours = run_both(
        tmp_path, PenaltyTrainer, classes=True, eval_strategy="epoch",
        parts={"eval_dataset": lambda: class_rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_an_average_of_the_weights_is_kept_beside_and_evaluated(tmp_path):
    class AverageTrainer:
        decay = 0.9

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.average = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            for name, weight in model.named_parameters():
                self.average[name].mul_(self.decay).add_(weight.detach(), alpha=1 - self.decay)
            return loss

        def evaluate(self, *args, **kwargs):
            own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
            self.model.load_state_dict(self.average, strict=False)
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self.model.load_state_dict(own, strict=False)

    theirs, ours = run_both(
        tmp_path, AverageTrainer, classes=True, eval_strategy="steps", eval_steps=2, num_train_epochs=2,
        parts={"eval_dataset": lambda: class_rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_a_backward_by_the_accelerator_divides_nothing(tmp_path):
    class DividingTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            if self.args.n_gpu > 1:
                loss = loss.mean()
            if self.deepspeed is None:
                loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    run_alike(tmp_path, DividingTrainer, gradient_accumulation_steps=3, num_train_epochs=2, classes=True)


def test_batches_kept_aside_are_rehearsed_in_a_second_step_within_one(tmp_path):
    class RehearsalTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.kept = []

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.state.global_step % 2 == 1:
                loss = loss + super().training_step(model, dict(self.kept[0]), num_items_in_batch)
            self.kept.append(dict(inputs))
            return loss

    run_alike(tmp_path, RehearsalTrainer, num_train_epochs=2)


def test_gradients_of_two_losses_that_disagree_are_written_by_hand(tmp_path):
    class SurgeryTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            outputs = model(**inputs)
            losses = outputs.loss, outputs.logits.pow(2).mean()
            weights = [weight for weight in model.parameters() if weight.requires_grad]
            first, second = (
                torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights, retain_graph=True)])
                for loss in losses
            )
            if (product := first @ second) < 0:
                first = first - product / (second @ second) * second
            for weight, grad in zip(weights, (first + second).split([w.numel() for w in weights]), strict=True):
                weight.grad = grad.view_as(weight).clone()
            return sum(losses).detach()

    run_alike(tmp_path, SurgeryTrainer, classes=True, num_train_epochs=2)


def test_a_layer_is_frozen_in_the_first_epoch_and_thawed_by_the_step(tmp_path):
    class ThawingTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.model.body.requires_grad_(self.state.epoch >= 1)
            return super().training_step(model, inputs, num_items_in_batch)

    run_alike(tmp_path, ThawingTrainer, num_train_epochs=2)


def test_a_part_put_into_evaluation_mode_by_each_step_keeps_its_statistics(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.body, self.norm, self.head = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, x, labels=None):
            logits = self.head(self.norm(self.body(x))).squeeze(-1)
            return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}

    class StatisticsTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs = self._prepare_inputs(inputs)
            model.train()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    _, ours = run_alike(tmp_path, StatisticsTrainer, parts={"model": Normed})
    assert ours.weights["norm.num_batches_tracked"] == 0


def test_a_second_optimizer_is_stepped_by_the_step(tmp_path):
    class TwoOptimizersTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.strength = nn.Parameter(torch.zeros(()))
            self.second = torch.optim.Adam([self.strength], lr=0.1)

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.second.step()
            self.second.zero_grad()
            self.log({"strength": self.strength.item()})
            return loss

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return outputs["loss"] * torch.exp(-self.strength) + self.strength

    run_alike(tmp_path, TwoOptimizersTrainer, num_train_epochs=2)


def test_a_batch_that_is_left_out_returns_a_zero_without_a_gradient(tmp_path):
    class SkippingTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.state.global_step == 1:
                return torch.tensor(0.0, device=self.args.device)
            return super().training_step(model, inputs, num_items_in_batch)

    run_alike(tmp_path, SkippingTrainer)


def test_a_function_of_the_accelerator_that_is_replaced_is_refused(tmp_path, make_trainer):
    class OldClipping(tr_core.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: torch.tensor(0.0)

    with pytest.raises(
        AttributeError, match=r"clip_grad_norm_ was replaced, and no run calls it: .*override _clip_grad_norm"
    ):
        make_trainer(OldClipping)


def test_the_wrapped_model_is_called_by_a_step_that_knows_no_other(tmp_path):
    class WrappedTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.model_wrapped.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.model_wrapped(**inputs)["loss"]
            with self.accelerator.accumulate(self.model_wrapped):
                self.accelerator.backward(loss)
            everywhere = self.accelerator.gather(loss.detach().repeat(2)).mean().item()
            self.log({"everywhere": everywhere, "step": self.state.global_step})
            return loss.detach()

    run_alike(tmp_path, WrappedTrainer)
