"""Setting the arguments of a topic together."""

import pytest

from tr_args import ArgumentsError, TrainingArguments


def test_grouped_setters_set_a_topic_and_return_the_arguments():
    args = (
        TrainingArguments()
        .set_training(learning_rate=1e-4, batch_size=32, num_epochs=2, activation_checkpointing=True)
        .set_evaluate(strategy="steps", steps=100, delay=1)
        .set_save(strategy="steps", steps=200, total_limit=2)
        .set_logging(steps=10, report_to=["tensorboard"], first_step=True)
        .set_optimizer(name="sgd", learning_rate=0.1, beta1=0.8)
        .set_lr_scheduler(name="cosine", warmup_steps=0.05)
        .set_dataloader(train_batch_size=4, num_workers=2, prefetch_factor=3, sampler_seed=7)
        .set_push_to_hub("me/model", token="secret")
        .set_testing(batch_size=3)
        .check()
    )
    assert (args.do_train, args.do_eval, args.do_predict, args.push_to_hub) == (True, True, True, True)
    assert (args.eval_steps, args.save_steps, args.logging_steps, args.eval_delay) == (100, 200, 10, 1.0)
    assert (args.optim, args.learning_rate, args.adam_beta1) == ("sgd", 0.1, 0.8)
    assert (args.lr_scheduler_type, args.warmup_steps, args.data_seed) == ("cosine", 0.05, 7)
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (4, 3)


@pytest.mark.parametrize(
    "setter",
    [
        "set_training",
        "set_evaluate",
        "set_testing",
        "set_save",
        "set_logging",
        "set_optimizer",
        "set_lr_scheduler",
        "set_dataloader",
    ],
)
def test_a_grouped_setter_without_values_sets_the_fields_own_defaults(setter):
    args, fresh = TrainingArguments(), TrainingArguments()
    getattr(args, setter)()
    changed = {
        name for name in args.to_dict() if getattr(args, name) != getattr(fresh, name) and not name.startswith("do_")
    }
    assert changed == set()


def test_a_grouped_setter_sets_nothing_if_one_value_does_not_fit():
    args = TrainingArguments()
    with pytest.raises(ArgumentsError, match="per_device_train_batch_size = 0"):
        args.set_training(learning_rate=1.0, batch_size=0)
    assert args.learning_rate == 5e-5
    assert not args.do_train
