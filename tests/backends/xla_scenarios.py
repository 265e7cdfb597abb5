"""What XLA has to do, by groups that are run in one process each: starting one costs seconds, and some exclude others.

`python xla_scenarios.py GROUP FOLDER` runs a group and writes FOLDER/results.json: for each scenario what it failed
with, or nothing. `test_xla.py` looks at it.
"""

import contextlib
import copy
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import test_generation
import test_numbers
import test_optimizers
import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import check_strategy

REPLICA = {"strategy": "xla"}
DEVICES = {"fsdp": "full_shard", "fsdp_config": {"xla": True, "xla_fsdp_v2": True}}
ALONE = {"strategy": "single"}
# In the words of the documentation: parameters of every replica in parts, gathered in float32.
SHARDED = {"fsdp": "full_shard", "fsdp_config": {"xla": True, "xla_fsdp_settings": {"compute_dtype": "float32"}}}
GROUPS = {
    "replica": REPLICA,
    "devices": DEVICES,
    "sharded": SHARDED,
    "bf16": REPLICA,
    "downcast": REPLICA,
    "optimizers": {},
}
# 32-bit sums in another order, by kernels of another library: a few units in the last place, over ten steps.
TOLERANCE = 5e-6


def scenario(*groups, row=None):
    """Note a scenario of some groups, and the row of the matrix that it is a part of."""

    def note(function):
        function.groups, function.row = groups, row
        SCENARIOS[function.__name__] = function
        return function

    return note


SCENARIOS = {}


def samples(number, inputs=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(inputs, generator=generator), "labels": torch.tensor(i % 3)} for i in range(number)]


class Layers(nn.Module):
    """With dropout, and a weight that two modules share."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.second.weight
        self.drop = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        hidden = self.drop(torch.tanh(self.first(x)))
        logits = self.last(torch.tanh(self.again(torch.tanh(self.second(hidden)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer_of(folder, options, model=None, number=24, callbacks=(), **parts):
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        **options,
    }
    arguments = TrainingArguments(**given)
    return Trainer(model or Layers(), arguments, train_dataset=samples(number), callbacks=list(callbacks), **parts)


def weights(trainer):
    state = trainer.strategy.full_state_dict(trainer.model_wrapped)
    assert all(value.device.type == "cpu" for value in state.values())
    return {name: value.detach().clone() for name, value in state.items()}


def assert_weights(mine, theirs, tolerance):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def refused(function, *words):
    with pytest.raises(ValueError) as error:
        function()
    assert all(word in str(error.value) for word in words), error.value


def compilations():
    from torch_xla.debug import metrics

    return (metrics.metric_data("CompileTime") or [0])[0]


def transfers():
    from torch_xla.debug import metrics

    return (metrics.metric_data("TransferFromDeviceTime") or [0])[0]


@scenario("replica", "devices", "sharded", row="promises")
def the_strategy_keeps_the_promises_of_the_protocol(folder, options):
    from tr_dist.xla import XLA

    strategy = XLA.from_arguments(TrainingArguments(output_dir=str(folder), use_cpu=True, **options))
    assert (strategy.rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
    assert strategy.device.type == "xla"
    check_strategy(strategy)
    strategy.close()


def _numbers(model_name, accumulation):
    def run(folder, options):
        """43 rows: the last micro-batch has 7, which four devices divide unevenly."""
        shared = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 12}
        found = test_numbers.train(str(folder / "x"), model_name, 43, {**shared, **options})
        alone = test_numbers.train(str(folder / "1"), model_name, 43, {**shared, **ALONE})
        test_numbers.assert_close(found, alone, TOLERANCE)
        assert sorted(found[2]) == sorted(alone[2])

    run.__name__ = f"numbers_are_those_of_a_plain_run_of_{model_name}_accumulating_{accumulation}"
    scenario("replica", "devices", *(["sharded"] if accumulation > 1 else []), row="numbers")(run)


for name in ("Network", "Counting"):
    for size in (1, 2):
        _numbers(name, size)


@scenario("replica", "devices", row="once")
def every_sample_is_used_once_an_epoch(folder, options):
    given = {**options, "per_device_train_batch_size": 4, "num_train_epochs": 3}
    used = test_numbers.train(str(folder), "Network", 43, given)[2]
    assert sorted(used) == sorted(list(range(43)) * 3)


@scenario("replica", row="average")
def an_average_of_the_weights_is_that_of_a_plain_run(folder, options):
    averages = [weights_after(folder, {**kind, "ema_decay": 0.8}) for kind in (options, ALONE)]
    assert_weights(*averages, 10 * TOLERANCE)
    assert any(not torch.equal(value, averages[0][name]) for name, value in weights_after(folder, options).items())


def weights_after(folder, options):
    trainer = trainer_of(folder, options)
    trainer.train()
    return weights(trainer)


@scenario("replica", "devices", "sharded", row="resume")
def a_run_with_dropout_resumes_bit_equal(folder, options):
    saving = {**options, "save_strategy": "steps", "save_steps": 5, "optim": "adamw_torch_fused"}  # the default
    whole = trainer_of(folder / "whole", saving, Layers(0.2))
    whole.train()
    stopped = trainer_of(folder / "stopped", saving, Layers(0.2), callbacks=[test_numbers.StopAt(7)])
    with contextlib.suppress(test_numbers.Stop):
        stopped.train()
    resumed = trainer_of(folder / "stopped", saving, Layers(0.2))
    resumed.train(resume_from_checkpoint=True)
    assert_weights(weights(resumed), weights(whole), 0)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (resumed, whole)]
    assert losses[0][-2:] == losses[1][-2:]


@scenario("replica", "devices", "sharded", row="other strategy")
def checkpoints_are_those_of_a_plain_run(folder, options):
    """Saved with XLA and resumed without, and the reverse; the states that are loaded are those that were saved."""
    saving = {"save_strategy": "steps", "save_steps": 6, "num_train_epochs": 1, "optim": "adamw_torch"}
    ends = {}
    for name, kind in (("x", options), ("plain", ALONE)):
        trainer = trainer_of(folder / name, {**saving, **kind})
        trainer.train()
        ends[name] = weights(trainer)
    files = {name: sorted(path.name for path in (folder / name / "checkpoint-6").iterdir()) for name in ("x", "plain")}
    assert files["x"] == files["plain"]
    more = {"save_strategy": "no", "num_train_epochs": 2, "optim": "adamw_torch"}
    for name, kind in (("x", ALONE), ("plain", options)):
        trainer = trainer_of(folder / name, {**more, **kind})
        trainer.train(resume_from_checkpoint=True)
        ends[f"{name} resumed"] = weights(trainer)
    assert_weights(ends["x"], ends["plain"], TOLERANCE)
    assert_weights(ends["x resumed"], ends["plain resumed"], 10 * TOLERANCE)  # Adam divides by what is near 0
    from safetensors.torch import load_file

    saved = load_file(folder / "x" / "checkpoint-6" / "model.safetensors")
    assert set(saved) < set(ends["x"])  # a shared weight is written once
    assert all(torch.equal(value, ends["x"][name]) for name, value in saved.items())


@scenario("replica", "devices", row="export")
def the_model_is_exported_for_any_program(folder, options):
    from safetensors.torch import load_file

    trainer = trainer_of(folder, options)
    trainer.train()
    trainer.save_model(str(folder / "exported"))
    plain = Layers()
    missing, unexpected = plain.load_state_dict(load_file(folder / "exported" / "model.safetensors"), strict=False)
    assert (missing, unexpected) in ((["again.weight"], []), (["second.weight"], []))
    assert_weights(dict(plain.state_dict()), weights(trainer), 0)


class Counts(TrainerCallback):
    def __init__(self):
        self.compiled, self.read = [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.compiled.append(compilations())
        self.read.append(transfers())


@scenario("replica", "devices", "sharded")
def few_programs_are_compiled_and_nothing_is_read_in_a_step(folder, options):
    """Two for each kind of step: the first has no optimizer state yet. The short last batch of a pass is one more."""
    counts = Counts()
    quiet = {"logging_strategy": "no", "optim": "adamw_torch", "warmup_steps": 3, "max_grad_norm": 0.1}
    trainer_of(folder, {**options, **quiet, "num_train_epochs": 3}, number=26, callbacks=[counts]).train()
    assert len(counts.compiled) == 21  # seven steps a pass, the last of two samples
    gained = [after - before for before, after in zip(counts.compiled, counts.compiled[1:], strict=False)]
    assert set(counts.read) == {counts.read[0]}, counts.read
    assert sum(gained[:5]) <= 2, gained  # the second step's, and another where the learning rate is 0 at first
    assert gained[5] <= 1, gained  # the short batch
    assert sum(gained[6:]) <= 1, gained  # the step after it, whose leftovers are of another kind
    assert sum(gained[8:]) == 0, gained


@scenario("replica")
def micro_batches_of_a_step_are_one_program(folder, options):
    """However many there are: the graph does not grow with the accumulation."""
    compiled = []
    for accumulation in (4, 12):
        counts = Counts()
        before = compilations()
        steps = {"logging_strategy": "no", "gradient_accumulation_steps": accumulation, "max_steps": 4}
        model = Layers()
        model.extra = nn.Parameter(torch.zeros(accumulation))  # so that none of the other's programs fits
        trainer_of(folder, {**options, **steps, "optim": "sgd"}, model, number=192, callbacks=[counts]).train()
        compiled.append(counts.compiled[-1] - before)
        assert set(counts.read) == {counts.read[0]}
    assert compiled[1] <= compiled[0] <= 6, compiled


@scenario("replica", "devices")
def an_evaluation_is_run_batch_by_batch(folder, options):
    from torch_xla.debug import metrics

    trainer = trainer_of(folder, options, eval_dataset=samples(40), compute_metrics=lambda p: {"n": len(p.predictions)})
    before = metrics.counter_value("MarkStep") or 0
    first = trainer.evaluate()
    compiled = compilations()
    second = trainer.evaluate()
    assert first["eval_n"] == 40
    assert first["eval_loss"] == second["eval_loss"]
    assert (metrics.counter_value("MarkStep") or 0) - before >= 2 * 40 // trainer.args.per_device_eval_batch_size
    if options is REPLICA:  # reading what lies on several devices is a program each time
        assert compilations() == compiled
    plain = trainer_of(folder, ALONE, eval_dataset=samples(40)).evaluate()
    assert abs(plain["eval_loss"] - first["eval_loss"]) < TOLERANCE


@scenario("replica", "devices", row="generation")
def generation_gives_the_tokens_of_a_plain_run(folder, options):
    """A few tokens: each is a program of its own, for the row is longer by one."""
    found = []
    for kind in (ALONE, options):
        trainer = test_generation.trainer_of(str(folder), {**kind, "generation_max_length": 4}, layers=1)
        found.append(torch.as_tensor(trainer.predict(test_generation.rows(2)).predictions))
    assert torch.equal(*found)
    assert len(found[0].unique()) > 1


@scenario("replica", "devices", row="bf16")
def bf16_computes_in_bfloat16_and_keeps_weights_whole(folder, options):
    trainer = trainer_of(folder, {**options, "bf16": True})
    seen = []
    handle = trainer.model.last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.train()
    handle.remove()
    assert set(seen) == {torch.bfloat16}
    assert {value.dtype for value in weights(trainer).values()} == {torch.float32}
    plain = trainer_of(folder, {**ALONE, "bf16": True})
    plain.train()
    assert_weights(weights(trainer), weights(plain), 2e-2)  # bfloat16 has 8 bits


@scenario("replica")
def weights_that_modules_share_stay_shared(folder, options):
    trainer = trainer_of(folder, options)
    trainer.train()
    assert trainer.model.again.weight is trainer.model.second.weight
    assert trainer.model.again.weight.device.type == "xla"
    plain = trainer_of(folder, ALONE)
    plain.train()
    assert_weights(weights(trainer), weights(plain), 10 * TOLERANCE)


def _in_the_optimizer(optim, **more):
    def run(folder, options):
        wanted = {"optim": optim, "max_steps": 4, "lr_scheduler_type": "constant", **more}
        ends = []
        for kind in (options, ALONE):
            trainer = trainer_of(folder, {**wanted, **kind})
            trainer.train()
            ends.append(weights(trainer))
        assert_weights(*ends, 1e-4)

    run.__name__ = f"{optim}_gives_the_weights_of_a_plain_run"
    scenario("replica")(run)


_in_the_optimizer("galore_adamw", optim_target_modules=["first", "last"], optim_args="rank=2, update_proj_gap=2")
_in_the_optimizer("galore_adamw_layerwise", optim_target_modules=["first", "last"], optim_args="rank=2")
_in_the_optimizer("lomo", max_grad_norm=0)
_in_the_optimizer("adalomo", max_grad_norm=0)


@scenario("replica", row="overflow")
def updates_that_are_not_finite_are_left_out(folder, options):
    data = samples(24)
    data[5]["x"] = data[5]["x"] * float("inf")
    ends = []
    for kind in (options, ALONE):
        trainer = trainer_of(folder, {**kind, "on_nonfinite": "skip"})
        trainer.train_dataset = data
        trainer.train()
        ends.append(weights(trainer))
        assert sum(entry.get("skipped_steps", 0) for entry in trainer.state.log_history) == 2
    assert_weights(*ends, 10 * TOLERANCE)


@scenario("replica", row="recompute")
def activations_that_are_computed_again_have_the_same_dropout(folder, options):
    """In one step: torch_xla begins the next one's random numbers where the state was set last."""
    ends, calls = [], []
    for recomputes in (False, True):
        given = {"gradient_checkpointing": recomputes, "max_steps": 1, "optim": "sgd"}
        trainer = trainer_of(folder, {**options, **given}, Blocks(0.5))
        Counting.calls = 0
        trainer.train()
        calls.append(Counting.calls)
        ends.append(weights(trainer))
    assert calls == [2, 4]
    assert_weights(*ends, TOLERANCE)


@scenario("replica")
def memory_figures_are_left_out_where_the_device_has_none(folder, options):
    output = trainer_of(folder, {**options, "skip_memory_metrics": False, "max_steps": 1}).train()
    assert any("mem_cpu" in name for name in output.metrics)


@scenario("replica")
def counters_are_logged_after_an_evaluation(folder, options):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    trainer = trainer_of(
        folder, {**options, "debug": "tpu_metrics_debug", "log_level": "info"}, eval_dataset=samples(4)
    )
    trainer.logger.logger.addHandler(handler) if hasattr(trainer.logger, "logger") else trainer.logger.addHandler(
        handler
    )
    trainer.evaluate()
    assert any("Metric: CompileTime" in text for text in records)


@scenario("replica", row="refused")
def what_cannot_be_had_is_refused(folder, options):
    from tr_dist.xla import XLA, XlaSharding

    refused(lambda: XLA(precision="fp16", use_cpu=True), "fp16", "bf16=True")
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(folder, options, model, optimizers=(optimizer, None))
    refused(trainer.train, "SGD was built before the model was moved to xla:0")
    refused(lambda: XLA(XlaSharding(recomputes=True), use_cpu=True), "xla_fsdp_grad_ckpt=True computes units again")


@scenario("devices")
def every_device_holds_a_part_of_weights_and_optimizer_state(folder, options):
    trainer = trainer_of(folder, {**options, "max_steps": 3, "optim": "adamw_torch"})
    trainer.train()
    over = trainer.strategy.over_devices
    assert over.count == 4
    divided = {name for name, parameter in trainer.model.named_parameters() if over.is_divided(parameter)}
    assert {"first.weight", "second.weight", "last.weight", "first.bias"} <= divided
    assert "last.bias" not in divided  # three numbers for four devices
    state = trainer.optimizer.state[trainer.model.first.weight]
    assert over.is_divided(state["exp_avg"])
    assert over.is_divided(state["exp_avg_sq"])


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


class Blocks(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(Counting(nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh()) for _ in range(2)))
        self.last = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.last(self.blocks(x)), labels)}


@scenario("devices", "sharded", row="recompute")
def units_may_be_computed_again(folder, options):
    """All but the first, whose input needs no gradient."""
    again = {"transformer_layer_cls_to_wrap": ["Counting"], "xla_fsdp_grad_ckpt": True}
    ends, calls = [], []
    for kind in ({**options, "fsdp_config": {**options["fsdp_config"], **again}}, ALONE):
        Counting.calls = 0
        trainer = trainer_of(folder, {**kind, "optim": "sgd", "num_train_epochs": 1}, Blocks())
        trainer.train()
        ends.append(weights(trainer))
        calls.append(Counting.calls)
    assert calls == [6 * 3, 6 * 2]
    assert_weights(*ends, TOLERANCE)


@scenario("sharded")
def a_model_in_parts_is_not_called_by_itself(folder, options):
    trainer = trainer_of(folder, {**options, "max_steps": 1})
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "XlaFullyShardedDataParallel"
    assert [name for name, _ in trainer.model.named_parameters()] == [name for name, _ in Layers().named_parameters()]
    with pytest.raises(RuntimeError, match="was called itself, as generate.. does; call what prepare.. returned"):
        trainer.model(**{name: value[None].to("xla") for name, value in samples(1)[0].items()})
    refused(trainer_of(folder, {**options, "optim": "lomo", "max_grad_norm": 0}).train, "Lomo consumes gradients in")


def _rounded(trainer):
    return all(torch.equal(value, value.bfloat16().float()) for value in weights(trainer).values())


@scenario("bf16")
def every_float_is_bfloat16(folder, options):
    trainer = trainer_of(folder, options)
    trainer.train()
    assert _rounded(trainer)
    third = (torch.ones(1, dtype=torch.float64) / 3).to("xla").cpu()
    assert third.item() == (torch.ones(1) / 3).bfloat16().item()


@scenario("downcast")
def floats_are_bfloat16_and_doubles_floats(folder, options):
    trainer = trainer_of(folder, options)
    trainer.train()
    assert _rounded(trainer)
    third = (torch.ones(1, dtype=torch.float64) / 3).to("xla").cpu()
    assert third.item() == (torch.ones(1) / 3).item()


# galore-torch leaves its moments as they are when it takes new bases; XLA's SVD chooses other signs for these,
# and updates differ from there on. They are those of one process as long as a basis lasts.
ONE_BASIS = {"galore_torch_adamw": {"optim_args": "rank=4,update_proj_gap=200"}}


def of_each_optimizer(folder, file):
    """Train each optimizer on XLA and without; write nothing, what was wrong, or why it was refused.

    What cannot be compiled stays in the process: it ends after a failure, and another goes on with those that are left.
    """
    results = json.loads(file.read_text()) if file.exists() else {}
    while left := [name for name in test_optimizers.OPTIMIZERS if name not in results]:
        name, found = left[0], {}
        results[name] = "failed: the process was ended"
        file.write_text(json.dumps(results))
        for kind in ("xla", "single"):  # torch has to know of the device before its first backward pass
            options = {"per_device_train_batch_size": 12, "strategy": kind, **ONE_BASIS.get(name, {})}
            found[kind] = test_optimizers.train(f"{folder}/{kind}", options, [name])[name]
        try:
            why = test_optimizers.check(name, "xla", found["xla"], found["single"])
            results[name] = f"refused: {why}" if why else ""
        except pytest.skip.Exception as error:
            results[name] = str(error)
        except AssertionError as error:
            results[name] = f"failed: {error}"
        file.write_text(json.dumps(results))
        print(name, results[name][-300:] or "passed", flush=True)
        if results[name].startswith("failed"):
            return


def main(group, folder, wanted=""):
    if group == "optimizers":
        of_each_optimizer(folder, Path(folder, "results.json"))
        return
    results = {}
    for name, function in SCENARIOS.items():
        if group not in function.groups or not any(part in name for part in wanted.split(",")):
            continue
        place = Path(folder) / name
        place.mkdir(parents=True)
        try:
            function(place, copy.deepcopy(GROUPS[group]) if group == "devices" else GROUPS[group])
            results[name] = ""
        except Exception:  # each scenario is a test of its own
            results[name] = traceback.format_exc()
        print(name, "failed" if results[name] else "passed", flush=True)
    Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("default")
    os.environ.pop("USE_TORCH_XLA", None)
    torch.set_num_threads(1)
    main(*sys.argv[1:])
