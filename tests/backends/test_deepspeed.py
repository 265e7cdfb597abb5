"""Train with DeepSpeed: the seam's promises at every stage, its own optimizers, other stages at resume, refusals."""

import contextlib
import importlib.util
import os

import pytest
import torch
from safetensors.torch import load_file
from shared.callbacks import Stop, StopAt
from test_numbers import Network, Rows

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import check_strategy
from tr_dist.testing import run_ranks
from tr_optim import GaLoreAdamW, Lomo

pytestmark = [
    pytest.mark.column("deepspeed"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

DIVIDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
HOST = {"device": "cpu"}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2 offload": {"stage": 2, "offload_optimizer": HOST},
    "3": DIVIDED,
    "3 kept whole": {"stage": 3},
    "3 offload": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


def keep_promises(zero):
    from tr_dist.deepspeed import DeepSpeed

    with contextlib.closing(
        DeepSpeed({"gradient_accumulation_steps": 2, "zero_optimization": zero}, use_cpu=True)
    ) as s:
        check_strategy(s)


@pytest.mark.row("promises")
def test_the_strategy_keeps_the_promises_of_the_seam_where_small_parameters_stay_whole():
    run_ranks(keep_promises, 2, {"stage": 3}, timeout_s=120)


def trainer_for(folder, deepspeed, callbacks=(), **options):
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        deepspeed=deepspeed,
        **{"save_strategy": "no", "max_steps": 6, "learning_rate": 1e-2, **options},
    )
    return Trainer(Network(), args, train_dataset=rows, eval_dataset=rows[:7], callbacks=list(callbacks))


def train(folder, deepspeed, stop_at=None, resume=None, **options):
    """Run in every rank; returns losses, norms and learning rates, and the whole weights on rank 0."""
    trainer = trainer_for(folder, deepspeed, [StopAt(stop_at)] if stop_at else [], **options)
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "learning_rate")
    history = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    weights = {k: v.float().clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    if weights:  # on rank 0
        assert trainer.get_num_trainable_parameters() == sum(weight.numel() for weight in weights.values())
    trainer.save_model(f"{folder}/out")
    trainer.strategy.close()
    return history, weights


def train_with(folder, deepspeed, options):
    return train(folder, deepspeed, **options)


def close(one, other, tolerance):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one[1], other[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero", [{"stage": 2}, DIVIDED], ids=["2", "3"])
def test_the_optimizer_of_a_configuration_follows_the_schedule_of_the_arguments(tmp_path, zero):
    settings = {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}
    own = {"type": "AdamW", "params": {**settings, "torch_adam": True}}
    options = {"weight_decay": 0.1, "warmup_steps": 2}
    given = {"zero_optimization": zero}
    [ours, _] = run_ranks(train_with, 2, str(tmp_path / "a"), given, options, timeout_s=120)
    [theirs, _] = run_ranks(train_with, 2, str(tmp_path / "b"), {**given, "optimizer": own}, options, timeout_s=120)
    assert len({rate for _, _, rate in ours[0]}) > 3
    close(theirs, ours, 1e-6)


@pytest.mark.row("bf16")
@pytest.mark.parametrize("zero", [{"stage": 1}, DIVIDED], ids=["1", "3"])
def test_bfloat16_is_near_float32_and_the_weights_come_out_as_one_file(tmp_path, zero):
    given = {"zero_optimization": zero}
    [exact, _] = run_ranks(train_with, 2, str(tmp_path / "a"), given, {}, timeout_s=120)
    [rounded, _] = run_ranks(train_with, 2, str(tmp_path / "b"), given, {"bf16": True}, timeout_s=120)
    close(rounded, exact, 0.05)  # 8 bits of mantissa, over six steps
    assert rounded[0] != exact[0]
    for folder, expected, dtype in (("a", exact, torch.float32), ("b", rounded, torch.bfloat16)):
        saved = load_file(tmp_path / folder / "out" / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {dtype}
        assert all(torch.equal(value.float(), expected[1][name]) for name, value in saved.items())


def stop_at_three(folder, deepspeed, options):
    return train(folder, deepspeed, stop_at=3, save_strategy="steps", save_steps=3, **options)


def go_on(folder, deepspeed, options):
    return train(folder, deepspeed, resume=True, save_strategy="steps", save_steps=3, **options)


@pytest.mark.row("other strategy")
@pytest.mark.parametrize(
    ("first", "second"), [({"stage": 1}, DIVIDED), (DIVIDED, {"stage": 2}), (None, {"stage": 2}), ({"stage": 2}, None)]
)
def test_a_run_goes_on_at_another_stage_and_with_another_strategy(tmp_path, first, second):
    def given(zero):
        return None if zero is None else {"zero_optimization": zero}

    [whole, _] = run_ranks(train_with, 2, str(tmp_path / "a"), given(second), {}, timeout_s=120)
    run_ranks(stop_at_three, 2, str(tmp_path / "b"), given(first), {}, timeout_s=120)
    [resumed, _] = run_ranks(go_on, 2, str(tmp_path / "b"), given(second), {}, timeout_s=120)
    close(resumed, whole, 1e-5)


@pytest.mark.row("resume")
def test_a_run_in_bfloat16_resumes_bit_equal(tmp_path):
    given, options = {"zero_optimization": DIVIDED}, {"bf16": True}
    [whole, _] = run_ranks(train_with, 2, str(tmp_path / "a"), given, options, timeout_s=120)
    run_ranks(stop_at_three, 2, str(tmp_path / "b"), given, options, timeout_s=120)
    [resumed, _] = run_ranks(go_on, 2, str(tmp_path / "b"), given, options, timeout_s=120)
    assert resumed[0] == whole[0]
    assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())


def refuse(folder, zero, options):
    with pytest.raises(ValueError, match="strategy='fsdp'") as caught:
        trainer_for(folder, {"zero_optimization": zero}, **options).train()
    return str(caught.value)


@pytest.mark.row("refused")
@pytest.mark.parametrize("optim", ["galore_adamw", "lomo"])
def test_optimizers_that_need_matrices_are_refused_before_anything_is_trained(tmp_path, optim):
    options = {"optim": optim, "optim_target_modules": "all-linear" if optim.startswith("galore") else None}
    for said in run_ranks(refuse, 2, str(tmp_path), {"stage": 2}, options, timeout_s=120):
        assert f"optim={optim!r}" in said


def begin(strategy, model):
    with strategy.accumulate(model, sync=True):
        pass


def freeze_and_bind(strategy, model, parameters):
    parameters[0].requires_grad_(False)
    strategy.bind_optimizer(model, torch.optim.SGD(parameters))


def bind_and_begin(strategy, model, parameters):
    strategy.bind_optimizer(model, torch.optim.SGD(parameters))
    begin(strategy, model)


WRONG = {
    "unbound": lambda s, model, p: begin(s, model),
    "unwrapped": lambda s, model, p: s.bind_optimizer(s.unwrap(model), torch.optim.SGD(p)),
    "adagrad": lambda s, model, p: s.bind_optimizer(model, torch.optim.Adagrad(p)),
    "adafactor": lambda s, model, p: s.bind_optimizer(model, torch.optim.Adafactor(p)),
    "matrices": lambda s, model, p: s.bind_optimizer(model, GaLoreAdamW(p)),
    "in backward": lambda s, model, p: s.bind_optimizer(model, Lomo(p)),
    "foreign": lambda s, model, p: s.bind_optimizer(model, torch.optim.SGD(Network().parameters())),
    "frozen": freeze_and_bind,
    "empty": lambda s, model, p: s.bind_optimizer(model, torch.optim.SGD([{"params": []}, {"params": p}])),
    "no backward": bind_and_begin,
}


def refuse_in_own_loop(kind):
    from tr_dist.deepspeed import DeepSpeed

    strategy = DeepSpeed({"zero_optimization": {"stage": 2}}, use_cpu=True)
    model = strategy.prepare(Network())
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        WRONG[kind](strategy, model, list(model.parameters()))
    strategy.close()
    return str(caught.value)


@pytest.mark.row("refused")
def test_what_would_not_train_as_elsewhere_is_refused():
    said = {
        "unbound": "call bind_optimizer(model, optimizer)",
        "unwrapped": "the module that prepare() returned, not Network",
        "adagrad": "replaces torch's Adagrad",
        "adafactor": "Adafactor works on whole matrices, where DeepSpeed (ZeRO stage 2) has flat buffers",
        "matrices": "GaLoreAdamW works on whole matrices",
        "in backward": "Lomo consumes gradients in the backward pass, which DeepSpeed averages after it",
        "foreign": "4 of 4 parameters of SGD are not the model's",
        "frozen": "1 of 4 parameters of SGD are frozen",
        "empty": "a parameter group before another one is empty",
        "no backward": "without a backward",
    }
    assert said.keys() == WRONG.keys()
    for kind, expected in said.items():
        assert expected in run_ranks(refuse_in_own_loop, 1, kind, timeout_s=60)[0]


class Spoil(TrainerCallback):
    """Make the loss of a step's first micro-batch infinite on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights = None
        if state.global_step == 2 and self.rank == 1:
            self.weights = model.layers[2].bias
            self.hook = model.register_forward_hook(lambda module, inputs, outputs: spoil(outputs))

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.weights is not None:
            self.hook.remove()


def spoil(outputs):
    outputs["loss"] = outputs["loss"] * float("inf")
    return outputs


def train_twice(folder, zero):
    """Evaluate, train, evaluate, train again, and load the best; the metrics of each."""
    trainer = trainer_for(
        folder, {"zero_optimization": zero}, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, learning_rate=0.3,
    )  # fmt: skip
    losses = [trainer.evaluate()["eval_loss"]]
    for _ in range(2):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    best = trainer.state.best_metric
    trainer.strategy.close()
    return losses, best


def train_without_launcher(folder, zero):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TR_RENDEZVOUS_FILE"):
        del os.environ[name]
    for _ in range(2):
        history, _ = train(folder, {"zero_optimization": zero})
    assert "LOCAL_RANK" not in os.environ
    return len(history)


def test_a_process_without_a_launcher_trains_alone(tmp_path):
    assert run_ranks(train_without_launcher, 1, str(tmp_path), DIVIDED, timeout_s=120) == [6]


def leave_out(folder, zero):
    trainer = trainer_for(folder, {"zero_optimization": zero}, on_nonfinite="skip")
    trainer.add_callback(Spoil(trainer.strategy.rank))
    trainer.train()
    skipped = [entry.get("skipped_steps", 0) for entry in trainer.state.log_history if "loss" in entry]
    finite = all(bool(v.isfinite().all()) for v in trainer.strategy.full_state_dict(trainer.model_wrapped).values())
    trainer.strategy.close()
    return skipped, finite


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, DIVIDED], ids=["0", "2", "3"])
def test_a_trainer_evaluates_trains_twice_and_loads_the_best(tmp_path, zero):
    alone = run_ranks(train_twice, 2, str(tmp_path), zero, timeout_s=120)
    losses, best = alone[0]
    assert losses[2] == pytest.approx(best, rel=1e-5)
    assert losses[1] < losses[0]
    assert alone[1] == alone[0]


@pytest.mark.row("overflow")
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, DIVIDED], ids=["0", "2", "3"])
def test_an_update_that_is_not_finite_is_left_out_on_all_ranks(tmp_path, zero):
    for skipped, finite in run_ranks(leave_out, 2, str(tmp_path), zero, timeout_s=120):
        assert finite
        assert sum(skipped) == 1


EXCHANGES = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")


def count_exchanges(zero, syncs):
    """Return how many exchanges each micro-batch of a step begins, and the gradients' norm."""
    import torch.distributed as dist

    from tr_dist.deepspeed import DeepSpeed

    given = {"gradient_accumulation_steps": len(syncs), "zero_optimization": zero}
    with contextlib.closing(DeepSpeed(given, use_cpu=True)) as strategy:
        model, counts = strategy.prepare(Network()), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.bind_optimizer(model, optimizer)

        def counting(function):
            def call(*arguments, **options):
                counts[-1] += 1
                return function(*arguments, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in EXCHANGES:
                patch.setattr(dist, name, counting(getattr(dist, name)))
            for number, sync in enumerate(syncs):
                counts.append(0)
                with strategy.accumulate(model, sync=sync):
                    inputs = torch.full((1, 8), 1.0 + number + strategy.rank)
                    strategy.backward(model(inputs, torch.tensor([number]))["loss"] / len(syncs))
        norm = float(strategy.clip_grad_norm(model, optimizer, None))
    return counts, norm


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_exchanged_once_a_step_where_they_are_not_divided(stage):
    [(counts, norm), (_, same)] = run_ranks(count_exchanges, 2, {"stage": stage}, [False, False, True], timeout_s=120)
    assert norm == same
    assert counts[2] > 0
    assert (counts[0] > 0) == (counts[1] > 0) == (stage == 2)
    if stage:
        with pytest.raises(RuntimeError, match="a second time without a step between"):
            run_ranks(count_exchanges, 2, {"stage": stage}, [True, True, True], timeout_s=120)
        return
    [(each, again), _] = run_ranks(count_exchanges, 2, {"stage": stage}, [True, True, True], timeout_s=120)
    assert min(each) > 0
    assert again == pytest.approx(norm, rel=1e-5)
