"""Subclasses with a loss of their own, as public code writes them, on transformers' Trainer and on ours."""

import copy
from collections import defaultdict

import torch
from habit_parts import logged
from subclass_parts import Classes, assert_equal, class_rows, run_alike, run_both
from torch import nn
from torch.nn import functional


def test_class_weights_taken_out_of_the_keywords_weigh_the_loss(tmp_path):
    class WeightedTrainer:
        def __init__(self, *args, class_weights=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.class_weights = class_weights

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = self.class_weights.to(outputs.logits.device)
            loss = nn.CrossEntropyLoss(weight=weights)(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    run_alike(
        tmp_path,
        WeightedTrainer,
        build=lambda kind, parts: kind(**parts, class_weights=torch.tensor([1.0, 4.0, 0.5])),
        classes=True,
        eval_strategy="epoch",
        parts={"eval_dataset": lambda: class_rows(6, seed=1)},
    )


def test_a_focal_loss_of_the_older_signature_is_a_mean_of_the_micro_batches(tmp_path):
    def focal(base):
        class FocalTrainer(base):
            gamma = 2.0

            def compute_loss(self, model, inputs, return_outputs=False):
                outputs = model(x=inputs["x"])
                entropies = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
                loss = ((1 - torch.exp(-entropies)) ** self.gamma * entropies).mean()
                return (loss, outputs) if return_outputs else loss

        return FocalTrainer

    def of_today(base):
        class FocalTrainer(focal(base)):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return super().compute_loss(model, inputs, return_outputs)

        return FocalTrainer

    theirs, ours = run_both(tmp_path, (of_today, focal), classes=True, gradient_accumulation_steps=2)
    assert logged(ours.trainer) == logged(theirs.trainer)
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_a_teacher_given_first_and_prepared_by_the_accelerator_is_distilled(tmp_path):
    class DistillationTrainer:
        def __init__(self, teacher_model=None, *args, temperature=2.0, alpha=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.alpha, self.temperature = alpha, temperature
            self.teacher = self.accelerator.prepare_model(teacher_model, evaluation_mode=True)

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            with torch.no_grad():
                known = self.teacher(**inputs).logits
            loss = functional.kl_div(
                functional.log_softmax(outputs.logits / self.temperature, dim=-1),
                functional.softmax(known / self.temperature, dim=-1),
                reduction="batchmean",
            )
            loss = self.alpha * outputs.loss + (1 - self.alpha) * loss * self.temperature**2
            return (loss, outputs) if return_outputs else loss

    _, ours = run_alike(
        tmp_path,
        DistillationTrainer,
        build=lambda kind, parts: kind(Classes(seed=5), parts.pop("model"), **parts, temperature=3.0),
        classes=True,
        max_steps=4,
    )
    assert not ours.trainer.teacher.training
    assert all(
        torch.equal(a, b) for a, b in zip(ours.trainer.teacher.parameters(), Classes(seed=5).parameters(), strict=True)
    )


def test_pairs_of_a_batch_are_contrasted_with_all_others(tmp_path):
    class ContrastiveTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            queries = functional.normalize(model(**inputs["query"]).logits, dim=-1)
            texts = functional.normalize(model(**inputs["text"]).logits, dim=-1)
            scores = queries @ texts.T / 0.05
            loss = functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
            return (loss, {"scores": scores}) if return_outputs else loss

    def pairs(samples):
        features = torch.stack([sample["x"] for sample in samples])
        return {"query": {"x": features}, "text": {"x": features.flip(-1)}}

    theirs, ours = run_both(
        tmp_path, ContrastiveTrainer, classes=True, remove_unused_columns=False, parts={"data_collator": pairs},
        per_device_train_batch_size=4, label_names=[], num_train_epochs=2,
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_parts_of_the_loss_kept_until_a_log_are_averaged_in_it(tmp_path):
    class StoringTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.stored = {"train": defaultdict(list), "eval": defaultdict(list)}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            norm = outputs.logits.pow(2).mean()
            kept = self.stored["train" if model.training else "eval"]
            kept["entropy"].append(loss.item())
            kept["norm"].append(norm.item())
            loss = loss + 0.1 * norm
            return (loss, outputs) if return_outputs else loss

        def log(self, logs, start_time=None):
            kept = self.stored["train" if "loss" in logs else "eval"]
            for name, values in kept.items():
                logs[name] = torch.tensor(values).mean().item()
            kept.clear()
            return super().log(logs, start_time)

    theirs, ours = run_both(
        tmp_path, StoringTrainer, classes=True, logging_steps=3, eval_strategy="steps", eval_steps=3, max_steps=6,
        parts={"eval_dataset": lambda: class_rows(6, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours, but=("start_time",))
    assert "entropy" in ours.history[0]


def test_an_auxiliary_loss_is_added_to_what_super_returns(tmp_path):
    class AuxiliaryTrainer:
        def compute_loss(self, model, inputs, *args, **kwargs):
            outputs_too = kwargs.pop("return_outputs", False)
            loss, outputs = super().compute_loss(model, inputs, *args, return_outputs=True, **kwargs)
            loss = loss + 0.01 * torch.logsumexp(outputs.logits, dim=-1).pow(2).mean()
            return (loss, outputs) if outputs_too else loss

    run_alike(tmp_path, AuxiliaryTrainer, classes=True, gradient_accumulation_steps=2, num_train_epochs=2)


def test_a_distance_from_the_first_weights_holds_them_near(tmp_path):
    class AnchoredTrainer:
        def __init__(self, *args, strength=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.strength = strength
            self.anchors = {name: value.detach().clone() for name, value in self.model.named_parameters()}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            distance = sum((value - self.anchors[name]).pow(2).sum() for name, value in model.named_parameters())
            self.log({"distance": distance.item()})
            loss = loss + self.strength * distance
            return (loss, outputs) if return_outputs else loss

    run_alike(tmp_path, AnchoredTrainer, classes=True)


def test_weights_of_losses_set_on_the_model_after_construction_are_trained(tmp_path):
    class UncertaintyTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model.log_variances = nn.Parameter(torch.zeros(2))

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            losses = torch.stack([outputs.loss, outputs.logits.abs().mean()])
            loss = (torch.exp(-model.log_variances) * losses + model.log_variances).sum()
            return (loss, outputs) if return_outputs else loss

    _, ours = run_alike(tmp_path, UncertaintyTrainer, classes=True, optim="adamw_torch")
    assert ours.weights["log_variances"].abs().min() > 0


def test_a_curriculum_goes_by_the_epoch_of_the_state(tmp_path):
    class CurriculumTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            share = min(1.0, self.state.epoch / self.args.num_train_epochs + 1 / max(self.state.max_steps, 1))
            self.log({"share": share})
            loss = share * outputs.loss
            return (loss, outputs) if return_outputs else loss

    run_alike(tmp_path, CurriculumTrainer, classes=True, num_train_epochs=2, gradient_accumulation_steps=2)


def test_a_loss_that_is_small_enough_stops_the_run_from_compute_loss(tmp_path):
    class StoppingTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            if self.state.global_step == 1:
                self.control.should_log = True
            if self.state.global_step == 2:
                self.control.should_training_stop = True
            return loss

    _, ours = run_alike(tmp_path, StoppingTrainer, classes=True, logging_steps=100)
    assert ours.trainer.state.global_step == 3


def test_mixed_up_samples_are_drawn_from_a_generator_of_ones_own(tmp_path):
    class MixupTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.draws = torch.Generator().manual_seed(3)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if not model.training:
                return super().compute_loss(model, inputs, return_outputs)
            features, labels = inputs["x"], inputs["labels"]
            share = torch.rand((), generator=self.draws)
            order = torch.randperm(len(features), generator=self.draws)
            logits = model(x=share * features + (1 - share) * features[order]).logits
            first, second = (functional.cross_entropy(logits, kind) for kind in (labels, labels[order]))
            return share * first + (1 - share) * second

    theirs, ours = run_both(
        tmp_path, MixupTrainer, classes=True, per_device_train_batch_size=4, num_train_epochs=2, eval_strategy="epoch",
        parts={"eval_dataset": lambda: class_rows(6, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_two_noisy_forwards_of_a_batch_must_agree(tmp_path):
    def consistent(base):
        class ConsistencyTrainer(base):
            noise = torch.Generator()

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                self.noise.manual_seed(self.state.global_step)
                first, second = (
                    model(x=inputs["x"] + 0.1 * torch.randn(inputs["x"].shape, generator=self.noise)).logits
                    for _ in range(2)
                )
                known = torch.log_softmax(first, -1), torch.log_softmax(second, -1)
                apart = sum(
                    functional.kl_div(one, other, reduction="batchmean", log_target=True)
                    for one, other in (known, known[::-1])
                )
                entropy = functional.cross_entropy(first, labels) + functional.cross_entropy(second, labels)
                return (entropy + apart) / 2

        return ConsistencyTrainer

    run_alike(tmp_path, consistent, classes=True)


def test_a_sum_over_the_count_is_scaled_by_the_processes_as_in_copied_code(tmp_path):
    class SummedTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="sum")
            if num_items_in_batch is None:
                num_items_in_batch = inputs["labels"].numel()
            loss = loss / num_items_in_batch
            if self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs:
                loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    class Counting(Classes):
        loss_function = staticmethod(functional.cross_entropy)

        def forward(self, x, labels=None, **kwargs):
            return super().forward(x, labels)

    theirs, ours = run_both(
        tmp_path,
        SummedTrainer,
        classes=True,
        parts={"model": Counting},
        gradient_accumulation_steps=2,
        num_train_epochs=2,
    )
    once, twice = ours.called("compute_loss")[:2]  # what it is divided by is seen in the first micro-batch
    assert twice["num_items_in_batch"] == 2 * once["num_items_in_batch"]
    first = [name for name, _ in ours.calls].index("compute_loss")
    del ours.calls[first : first + 2]
    assert_equal(theirs, ours)


def test_a_frozen_copy_of_the_first_model_is_the_reference(tmp_path):
    class ReferenceTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference = copy.deepcopy(self.accelerator.unwrap_model(self.model)).eval().requires_grad_(False)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            own, known = (
                torch.log_softmax(kind(x=inputs["x"]).logits, -1).gather(-1, labels[:, None]).squeeze(-1)
                for kind in (model, self.reference)
            )
            margins = self.accelerator.gather_for_metrics((own - known).detach())
            self.log({"margin": margins.mean().item()})
            return -functional.logsigmoid(0.5 * (own - known)).mean()

    run_alike(tmp_path, ReferenceTrainer, classes=True)
