"""Override points of optimizer, sampler and context: the same run as in the reference."""

from contextlib import contextmanager

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE

EVALUATION = data.classes(9, seed=8)


def test_an_optimizer_class_with_its_arguments_makes_the_same_run(parity):
    options = {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-6})}
    parity(models.Mlp, data.classes(), options=options, weight_decay=0.1)


def test_an_override_of_the_optimizer_class_makes_the_same_run(parity):
    def subclass(trainer):
        class Own(trainer):
            @staticmethod
            def get_optimizer_cls_and_kwargs(args, model=None):
                return torch.optim.NAdam, {"lr": args.learning_rate, "betas": (0.8, 0.9)}

        return Own

    parity(models.Mlp, data.classes(), subclass=subclass, weight_decay=0.1)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_the_named_optimizers_have_the_class_and_arguments_of_the_reference(tmp_path, name):
    found = []
    for side in (REFERENCE, OURS):
        args = side.arguments(output_dir=str(tmp_path), optim=name, adam_beta1=0.8, use_cpu=True, report_to="none")
        found.append(side.trainer.get_optimizer_cls_and_kwargs(args))
    (kind, expected), (ours, options) = found
    assert ours is kind
    assert options == expected


class Backwards(torch.utils.data.Sampler):
    """The samples from the last to the first."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return reversed(range(len(self.dataset)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sampler_of_ones_own_gives_the_same_batches(parity, accumulation):
    def subclass(trainer):
        class Own(trainer):
            def _get_train_sampler(self, train_dataset=None):
                return Backwards(train_dataset)

            def _get_eval_sampler(self, eval_dataset):
                return Backwards(eval_dataset)

        return Own

    parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        subclass=subclass,
        eval_strategy="epoch",
        gradient_accumulation_steps=accumulation,
    )


def test_a_context_of_ones_own_acts_the_same(parity):
    def subclass(trainer):
        class Own(trainer):
            @contextmanager
            def compute_loss_context_manager(self):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    yield

        return Own

    parity(models.Mlp, data.classes(), EVALUATION, subclass=subclass, eval_strategy="epoch")


def test_what_the_optimizer_holds_is_told_in_the_same_way(parity):
    outcomes = parity(models.Mlp, data.classes(), weight_decay=0.1)
    expected, told = (
        {
            "group": outcome.trainer.get_optimizer_group(outcome.trainer.model.first.weight)["weight_decay"],
            "members": [len(members) for members in outcome.trainer.get_optimizer_group()],
            "numbers": outcome.trainer.get_num_trainable_parameters(),
            "total": outcome.trainer.get_total_train_batch_size(outcome.trainer.args),
            "rates": outcome.trainer.get_learning_rates(),
        }
        for outcome in outcomes
    )
    assert told == expected


@pytest.mark.reference_fails
def test_the_group_of_every_parameter_is_found(parity):
    """The reference compares tensors element by element, which fails where their shapes differ."""
    reference, ours = parity(models.Mlp, data.classes(), weight_decay=0.1)
    with pytest.raises(RuntimeError, match="must match the size"):
        reference.trainer.get_optimizer_group(reference.trainer.model.norm.bias)
    assert ours.trainer.get_optimizer_group(ours.trainer.model.norm.bias)["weight_decay"] == 0.0
