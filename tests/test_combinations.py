"""Train with many options at once: what holds for each of them alone holds for all of them together."""

import gc
import random
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from combination_runs import (
    Combination,
    build,
    differences,
    draw_combination,
    fingerprint,
    generators,
    run,
    run_stopped,
    surroundings,
)

from tr_dist.testing import run_ranks

LAST = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 3, "logging_steps": 2, "max_steps": 9}
BEST = {**LAST, "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0}}
EMA = {"ema_decay": 0.8, "ema_start_step": 2}
RULES = {"parameter_rules": [{"params": "head", "lr_scale": 0.1}]}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}

PICKED = {
    "average-best-skip": Combination(
        {**BEST, **EMA, **RULES, "on_nonfinite": "skip", "gradient_accumulation_steps": 2, "bf16_full_eval": True},
        parts=True,
        bad=(4, 17),
        dropout=0.2,
        statistics=True,
    ),
    "average-noise-checkpointing-16-bits": Combination(
        {**LAST, **EMA, "neftune_noise_alpha": 5.0, "activation_checkpointing": True, "bf16": True},
        at_random=True,
        evaluation="dict",
        metrics="streaming",
        dropout=0.2,
        statistics=True,
    ),
    "compiled-noise-average-skip": Combination(
        {**LAST, **EMA, **COMPILED, "neftune_noise_alpha": 5.0, "on_nonfinite": "skip", "eval_on_start": True},
        parts=True,
        bad=(4,),
        dropout=0.2,
        counts=True,
    ),
    "compiled-checkpointing-smoothing": Combination(
        {
            **BEST,
            **COMPILED,
            "torch_compile_backend": "aot_eager",
            "activation_checkpointing": True,
            "label_smoothing_factor": 0.1,
            "bf16": True,
        },
        dropout=0.2,
    ),
    "adafactor-plateau-found-size-grouped": Combination(
        {
            **BEST,
            **PLATEAU,
            "optim": "adafactor",
            "on_nonfinite": "skip",
            "auto_find_batch_size": True,
            "train_sampling_strategy": "group_by_length",
            "include_num_input_tokens_seen": "non_padding",
            "gradient_accumulation_steps": 3,
        },
        parts=True,
        bad=(4, 17),
        statistics=True,
        watched=True,
    ),
    "overfit-greedy-raise-workers": Combination(
        {
            **LAST,
            **PLATEAU,
            **EMA,
            "lr_scheduler_type": "greedy",
            "overfit_batches": 2,
            "on_nonfinite": "raise",
            "dataloader_num_workers": 2,
        },
        at_random=True,
        metrics="function",
    ),
}
DRAWN = (2, 6, 7, 17, 204, 300, 308)


def combination(name):
    """Return a picked combination, or a drawn one; only picked ones compile and load in processes, which is slow."""
    if name in PICKED:
        return PICKED[name]
    return draw_combination(name).but(*COMPILED, dataloader_num_workers=0)


ONLY_AT_NIGHT = ("compiled-noise-average-skip", "compiled-checkpointing-smoothing", *DRAWN[1:])


def names(*chosen):
    """Return names of combinations, all or those given; most wait for the night."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ONLY_AT_NIGHT), id=str(name))
        for name in chosen or (*PICKED, *DRAWN)
    ]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_other_process_writes_here(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a combination ends with, trained once."""
    ends = {}

    def end(name):
        if name not in ends:
            ends[name] = run(combination(name), tmp_path_factory.mktemp("alone"))
        return ends[name]

    return end


@pytest.mark.parametrize("name", names())
def test_a_second_run_gives_the_same_bits_and_leaves_nothing_behind(tmp_path, alone, name):
    alone(name)  # the compiler starts threads of its own the first time
    trainer, last = build(combination(name), tmp_path)
    before = surroundings(trainer)
    trainer.train()
    assert differences(alone(name), fingerprint(trainer, last)) == []
    gc.collect()
    assert differences(before, surroundings(trainer)) == []
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not {"grad_scale", "found_inf"} & set(vars(trainer.optimizer))
    modes, drawn = [module.training for module in trainer.model.modules()], generators()
    trainer.evaluate()
    gc.collect()
    assert differences(before, surroundings(trainer)) == []
    assert [module.training for module in trainer.model.modules()] == modes
    assert generators() == drawn


@pytest.mark.parametrize("name", names())
def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, alone, name):
    steps = max(alone(name)["checkpoints"])
    step = random.Random(str(name)).randint(min(3, steps - 1), steps - 1)
    assert differences(alone(name), run_stopped(combination(name), tmp_path, step)) == []


@pytest.mark.parametrize("name", names())
def test_what_must_not_change_numbers_does_not(tmp_path, alone, name):
    given = combination(name)
    changed = given.but(
        "save_total_limit",
        *COMPILED,
        activation_checkpointing=not given.options.get("activation_checkpointing", False),
        logging_steps=1,
        watched=not given.watched,
        parts=not given.parts,
    )
    if "lr_scheduler_kwargs" not in given.options:  # a schedule that follows evaluations
        changed = changed.but(eval_strategy="steps", eval_steps=1, eval_on_start=True)
    if "overfit_batches" not in given.options:
        changed = changed.but(auto_find_batch_size=not given.options.get("auto_find_batch_size", False))
    assert differences(alone(name), run(changed, tmp_path), ["trained", "optimizer"]) == []


def exact(name):
    """Return a combination without what is drawn for each micro-batch, or is computed over one."""
    given = combination(name).but("neftune_noise_alpha", "overfit_batches", "bf16", "auto_find_batch_size")
    # Near zero these two divide a gradient by its own size: rounding would decide the sign of an update.
    optimizer = given.options.get("optim")
    given = given.but(optim="adamw_torch") if optimizer in ("rmsprop", "adagrad") else given
    plain = {"dropout": 0.0, "statistics": False, "at_random": False, "number": 24, "parts": False}
    return given.but(**plain, dataloader_num_workers=0, save_strategy="no", load_best_model_at_end=False)


def assert_close(one, other, tolerance):
    for name in ("trained", "weights", "average"):
        for mine, theirs in zip(one[name], other[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", names("average-best-skip", "adafactor-plateau-found-size-grouped", 2, 6, 7, 300, 308))
def test_accumulation_gives_the_weights_of_one_large_batch(tmp_path, name):
    ends = [
        run(exact(name), tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=6 // size)
        for size in (1, 2, 6)
    ]
    for end in ends[:2]:
        assert_close(end, ends[2], 1e-6)


def run_rank(given, folder, options):
    """Run in every rank."""
    return run(given, folder, **options)


@pytest.mark.parametrize("name", names("average-best-skip", "adafactor-plateau-found-size-grouped", 6))
def test_two_ranks_give_the_weights_of_one_process(tmp_path, name):
    given = exact(name).but(number=23)  # the last micro-batch does not divide evenly
    alone = run(given, tmp_path / "1", per_device_train_batch_size=6)
    ranks = run_ranks(run_rank, 2, given, tmp_path / "2", {"per_device_train_batch_size": 3}, timeout_s=120)
    for rank in ranks:
        assert_close(rank, alone, 2e-6)
    assert differences(*ranks, ["trained", "weights", "average", "optimizer", "schedule", "history"]) == []


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adafactor"])
def test_a_run_that_raises_for_nan_leaves_nothing_behind(tmp_path, optimizer):
    options = {**LAST, **EMA, "on_nonfinite": "raise", "neftune_noise_alpha": 5.0, "activation_checkpointing": True}
    given = Combination({**options, "optim": optimizer}, parts=True, bad=(4,), dropout=0.2)
    trainer, _ = build(given, tmp_path)
    before = surroundings(trainer)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        trainer.train()
    assert differences({**before, "arguments": None}, {**surroundings(trainer), "arguments": None}) == []
