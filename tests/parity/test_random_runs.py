"""Runs with arguments drawn at random: what no single scenario combines."""

import random

import parity_data as data
import parity_models as models
import pytest

KINDS = {
    "classes": (models.Mlp, data.classes),
    "regression": (models.Linear, data.regression),
    "tokens": (models.llama, lambda count, seed=3: data.tokens(count, seed=seed, masked=False)),
}


def draw_length(draw, stream):
    """Return arguments of a run's length, and a number of samples."""
    arguments = {
        "per_device_train_batch_size": draw.randint(1, 7),
        "gradient_accumulation_steps": draw.choice([1, 1, 2, 3, 4]),
    }
    step = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    if stream:  # whole updates: the reference carries gradients of a part of one into the next pass
        return {**arguments, "max_steps": draw.randint(1, 9)}, step * draw.randint(1, 4)
    if draw.random() < 0.4:
        return {**arguments, "max_steps": draw.randint(1, 14)}, draw.randint(1, 23)
    return {**arguments, "num_train_epochs": draw.choice([0.3, 1, 1.5, 2, 2.7, 3])}, draw.randint(1, 23)


def draw_events(draw):
    """Return arguments of when to log, evaluate and save."""
    evaluates = draw.choice(["no", "steps", "epoch"])
    arguments = {
        "logging_strategy": draw.choice(["steps", "steps", "epoch", "no"]),
        "logging_steps": draw.choice([1, 2, 3, 5, 0.2, 0.5]),
        "logging_first_step": draw.random() < 0.3,
        "eval_strategy": evaluates,
        "eval_steps": draw.choice([1, 2, 3, 5, 0.3, None]),
        "save_strategy": draw.choice(["no", "no", "steps", "epoch"]),
        "save_steps": draw.choice([1, 2, 4, 0.4]),
        "save_total_limit": draw.choice([None, None, 2, 3]),
        "per_device_eval_batch_size": draw.randint(1, 7),
    }
    if evaluates != "no":
        arguments |= {"eval_delay": draw.choice([0, 0, 1, 2, 3.5]), "eval_on_start": draw.random() < 0.2}
        if draw.random() < 0.5:
            arguments |= {"metric_for_best_model": "loss", "greater_is_better": draw.random() < 0.5}
            arguments["save_strategy"] = draw.choice([arguments["save_strategy"], "best"])
    return arguments


def draw_updates(draw):
    """Return arguments of what an update does."""
    return {
        "max_grad_norm": draw.choice([1.0, 0.0, 0.01]),
        "optim": draw.choice(["adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop"]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "lr_scheduler_type": draw.choice(["linear", "cosine", "constant", "constant_with_warmup"]),
        "warmup_steps": draw.choice([0, 0, 2, 0.2]),
        "bf16": draw.random() < 0.2,
        "seed": draw.randint(0, 5),
        "data_seed": draw.choice([None, None, 9]),
    }


@pytest.mark.parametrize("number", range(24))
def test_a_random_run_is_the_same(parity, number):
    draw = random.Random(number)
    stream = draw.random() < 0.2
    length, count = draw_length(draw, stream)
    model, make = KINDS[draw.choice(["classes", "classes", "regression", "tokens"])]
    train = data.Stream(make(count)) if stream else make(count)
    reference, ours = parity(model, train, make(9, seed=8), **length, **draw_events(draw), **draw_updates(draw))
    folders = [sorted(path.name for path in side.folder.glob("checkpoint-*")) for side in (reference, ours)]
    assert folders[1] == folders[0]
