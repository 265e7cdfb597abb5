"""Override points of optimizer, sampler and context: the same run as in the reference."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_the_named_optimizers_have_the_class_and_arguments_of_the_reference(tmp_path, name):
    found = []
    for side in (REFERENCE, OURS):
        args = side.arguments(output_dir=str(tmp_path), optim=name, adam_beta1=0.8, use_cpu=True, report_to="none")
        found.append(side.trainer.get_optimizer_cls_and_kwargs(args))
    (kind, expected), (ours, options) = found
    assert ours is kind
    assert options == expected


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
