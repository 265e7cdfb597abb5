"""Subclasses that are built, mixed and steered in their own way, on transformers' Trainer and on ours."""

import copy

import pytest
import torch
import transformers
from habit_parts import Net, rows
from subclass_parts import assert_equal, class_rows, run_alike, run_both
from torch import nn

import tr_core


def test_mixins_before_the_trainer_each_add_to_the_loss(tmp_path):
    def mixed(base):
        class Scaling:
            scale = 0.5

            def compute_loss(self, model, inputs, *args, **kwargs):
                result = super().compute_loss(model, inputs, *args, **kwargs)
                return (self.scale * result[0], result[1]) if isinstance(result, tuple) else self.scale * result

        class Shrinking:
            def __init__(self, *args, shrinkage=0.0, **kwargs):
                super().__init__(*args, **kwargs)
                self.shrinkage = shrinkage

            def compute_loss(self, model, inputs, *args, **kwargs):
                result = super().compute_loss(model, inputs, *args, **kwargs)
                size = self.shrinkage * sum(weight.abs().sum() for weight in model.parameters())
                return (result[0] + size, result[1]) if isinstance(result, tuple) else result + size

        return type("MixedTrainer", (Scaling, Shrinking, base), {})

    theirs, ours = run_both(
        tmp_path, mixed, build=lambda kind, parts: kind(**parts, shrinkage=0.01), eval_strategy="epoch",
        parts={"eval_dataset": lambda: rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_a_mixin_that_defines_train_wraps_the_run(tmp_path):
    def wrapping(base):
        class TwicePhased:
            def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, **kwargs):
                self.phases = []
                self.model.body.requires_grad_(False)
                self.args.learning_rate /= 2
                super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)
                self.phases.append(self.state.global_step)
                self.model.body.requires_grad_(True)
                self.optimizer, self.lr_scheduler = None, None
                self.args.learning_rate *= 2
                result = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)
                self.phases.append(self.state.global_step)
                return result

        class PhasedTrainer(TwicePhased, base):
            pass

        return PhasedTrainer

    theirs, ours = run_both(tmp_path, wrapping)
    assert ours.trainer.phases == theirs.trainer.phases == [4, 4]
    assert_equal(theirs, ours)


def test_attributes_are_set_before_super_and_used_by_what_super_calls(tmp_path):
    class EarlyTrainer:
        def __init__(self, model, *args, frozen=(), **kwargs):
            self.frozen = list(frozen)
            self.created = 0
            for name in self.frozen:
                getattr(model, name).requires_grad_(False)
            super().__init__(model, *args, **kwargs)

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.created += len(self.frozen)

    theirs, ours = run_alike(
        tmp_path, EarlyTrainer, build=lambda kind, parts: kind(parts.pop("model"), **parts, frozen=["body"])
    )
    assert ours.trainer.created == theirs.trainer.created == 1


def test_a_property_takes_the_place_of_the_tokenizer(tmp_path):
    class Tokenizer:
        model_input_names = ["x"]
        pad_token_id = 0

        def save_pretrained(self, folder, **kwargs):
            return ()

    class TokenizerTrainer:
        def __init__(self, *args, tokenizer=None, **kwargs):
            super().__init__(*args, processing_class=tokenizer, **kwargs)

        @property
        def tokenizer(self):
            return self.processing_class

        @tokenizer.setter
        def tokenizer(self, value):
            self.processing_class = value

    tokenizer = Tokenizer()

    def use(trainer):
        trainer.tokenizer = trainer.tokenizer
        trainer.train()
        return trainer.tokenizer is tokenizer

    theirs, ours = run_both(
        tmp_path, TokenizerTrainer, use=use, build=lambda kind, parts: kind(**parts, tokenizer=tokenizer),
        parts={"data_collator": transformers.default_data_collator},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert ours.result


def test_a_callback_that_knows_its_trainer_changes_an_attribute_of_it(tmp_path):
    class Warming(transformers.TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_epoch_begin(self, args, state, control, **kwargs):
            self.trainer.strength = state.epoch / args.num_train_epochs

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.trainer.seen.append(metrics["eval_loss"])

    class WarmingTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.strength, self.seen = 0.0, []
            self.add_callback(Warming(self))

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss + self.strength * outputs["logits"].pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    theirs, ours = run_both(
        tmp_path, WarmingTrainer, num_train_epochs=3, eval_strategy="epoch", learning_rate=0.02,
        parts={"eval_dataset": lambda: rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert len(ours.trainer.seen) == len(theirs.trainer.seen) == 3


def test_a_model_is_built_by_an_overridden_call_model_init(tmp_path):
    class BuildingTrainer:
        def call_model_init(self, trial=None):
            return Net(seed=4)

    theirs, ours = run_both(
        tmp_path, BuildingTrainer, build=lambda kind, parts: kind(model_init=Net, **{**parts, "model": None})
    )
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())
    assert ours.history == theirs.history


def test_the_model_takes_no_count_by_an_attribute_of_the_class(tmp_path):
    class Counting(Net):
        loss_function = staticmethod(nn.functional.mse_loss)

        def forward(self, x, labels=None, **kwargs):
            self.counts = [*getattr(self, "counts", []), kwargs.get("num_items_in_batch")]
            return super().forward(x, labels)

    class MeanTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    theirs, ours = run_both(tmp_path, MeanTrainer, gradient_accumulation_steps=2, parts={"model": Counting})
    assert_equal(theirs, ours, but=("args", "kwargs"))
    assert set(ours.trainer.model.counts) == set(theirs.trainer.model.counts) == {None}


def test_what_a_loss_needs_is_read_from_arguments_of_ones_own(tmp_path):
    class ReadingTrainer:
        def __init__(self, *args, **kwargs):
            self.extra = kwargs.pop("extra_args")
            super().__init__(*args, **kwargs)
            if not hasattr(self, "processing_class"):
                raise AttributeError("an older version")
            self.is_ready = self.args.n_gpu <= 1 and self.args.world_size == 1 and not self.is_in_train

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert self.is_in_train
            assert model is self.model_wrapped
            assert self.accelerator.unwrap_model(model) is self.model
            assert inputs["x"].device == self.args.device == self.accelerator.device
            return self.extra["scale"] * super().compute_loss(model, inputs)

    _, ours = run_alike(tmp_path, ReadingTrainer, build=lambda kind, parts: kind(**parts, extra_args={"scale": 0.25}))
    assert ours.trainer.is_ready


def test_another_subclass_is_made_of_a_subclass(tmp_path):
    def grandchild(base):
        class Weighted(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return 2 * super().compute_loss(model, inputs)

        class Logged(Weighted):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss = Weighted.compute_loss(self, model, inputs, num_items_in_batch=num_items_in_batch)
                self.log({"twice": loss.item()})
                return loss

        return Logged

    run_alike(tmp_path, grandchild)


def test_a_trainer_within_a_trainer_trains_a_model_of_its_own(tmp_path):
    def nested(base):
        class Inner(base):
            pass

        class OuterTrainer(base):
            def train(self, *args, **kwargs):
                warm = copy.deepcopy(self.model)
                inner = Inner(model=warm, args=self.args, train_dataset=self.train_dataset)
                inner.remove_callback(transformers.PrinterCallback)
                inner.train()
                self.model.body.load_state_dict(warm.body.state_dict())
                return super().train(*args, **kwargs)

        return OuterTrainer

    theirs, ours = run_both(tmp_path, nested)
    assert_equal(theirs, ours, but=("args", "kwargs"))


def test_a_search_of_ones_own_trains_each_trial_by_the_trainer(tmp_path):
    class SearchingTrainer:
        def hyperparameter_search(self, hp_space=None, n_trials=2, **kwargs):
            results = []
            for number in range(n_trials):
                self.args.learning_rate = hp_space(number)["learning_rate"]
                self.model = self.model_wrapped = Net()
                self.optimizer = self.lr_scheduler = None
                self.train()
                results.append(self.evaluate()["eval_loss"])
            return {"eval_best": min(results), "number": results.index(min(results))}

    theirs, ours = run_both(
        tmp_path, SearchingTrainer, parts={"eval_dataset": lambda: rows(4, seed=1)},
        use=lambda trainer: trainer.hyperparameter_search(lambda number: {"learning_rate": 0.1 * (number + 1)}),
    )  # fmt: skip
    assert theirs.result["number"] == ours.result["number"]
    assert ours.result["eval_best"] == pytest.approx(theirs.result["eval_best"], rel=3e-7)


def test_a_step_that_knows_whether_gradients_are_exchanged_counts_micro_batches(tmp_path):
    class CountingTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.micro, self.full = 0, 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.micro += 1
            if self.accelerator.sync_gradients:
                self.full += 1
            return super().training_step(model, inputs, num_items_in_batch)

    theirs, ours = run_both(
        tmp_path, CountingTrainer, gradient_accumulation_steps=3, num_train_epochs=2, classes=True,
        parts={"train_dataset": lambda: class_rows(14)},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert (ours.trainer.micro, ours.trainer.full) == (theirs.trainer.micro, theirs.trainer.full) == (14, 6)


def test_a_report_to_a_search_of_ones_own_is_refused(make_trainer):
    class ReportingTrainer(tr_core.Trainer):
        def _report_to_hp_search(self, trial, step, metrics):
            trial.report(metrics["eval_loss"], step)

    with pytest.raises(TypeError, match=r"_report_to_hp_search overrides .*: pass compute_objective to hyperparam"):
        make_trainer(ReportingTrainer)


class WithReference(transformers.trainer_callback.CallbackHandler):
    """Gives callbacks a reference model too."""

    def __init__(self, *parts, reference):
        super().__init__(*parts)
        self.reference = reference

    def call_event(self, event, args, state, control, **extra):
        given = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        for callback in self.callbacks:
            answer = getattr(callback, event)(args, state, control, reference=self.reference, **given, **extra)
            control = control if answer is None else answer
        return control


class Following(transformers.TrainerCallback):
    """Keeps a mean of the weights in the reference model."""

    def on_step_end(self, args, state, control, model=None, reference=None, **kwargs):
        for mean, weight in zip(reference.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


def test_a_handler_of_callbacks_is_replaced_by_one_that_gives_them_a_reference_model(tmp_path):
    class FollowingTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            parts = (self.model, self.processing_class, self.optimizer, self.lr_scheduler)
            self.callback_handler = WithReference(
                self.callback_handler.callbacks, *parts, reference=copy.deepcopy(self.model)
            )
            self.add_callback(Following())
            self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def use(trainer):
        trainer.train()
        return dict(trainer.callback_handler.reference.state_dict())

    theirs, ours = run_both(
        tmp_path, FollowingTrainer, use=use, eval_strategy="epoch", save_strategy="epoch",
        parts={"eval_dataset": lambda: rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert all(torch.equal(value, theirs.result[name]) for name, value in ours.result.items())
    assert not torch.equal(ours.result["head.weight"], ours.weights["head.weight"])
