"""Train with ZeRO-3 offload to NVMe: the numbers of one process, checkpoints that any placement reads, nothing left.

DeepSpeed swaps parts of a mebibyte and more only: the layers here are wider than those of other tests.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared.callbacks import Stop, StopAt
from test_numbers import Rows
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("deepspeed")
BUILD = """
import sys
from deepspeed.ops.op_builder import AsyncIOBuilder
if not AsyncIOBuilder().is_compatible():
    sys.exit(3)
AsyncIOBuilder().load()
"""
# Adam divides by roots of sums, so that their last places are seen in the weights.
TOLERANCE = 2e-5


@pytest.fixture(scope="session", autouse=True)
def operator():
    """Build the operator once, which takes minutes, before any test has its time measured."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", BUILD], env=variables, capture_output=True, text=True, timeout=590)
    if done.returncode == 3:
        pytest.skip("needs libaio with its headers (libaio-dev), for DeepSpeed's operator async_io")
    assert done.returncode == 0, done.stderr


def placed(kind, folder):
    """Return the section of ZeRO-3 that has optimizer and parameters where `kind` says."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    parameters = {**disk, "max_in_cpu": 0, "buffer_size": 1_100_000, "buffer_count": 6}
    pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    sections = {
        "none": {},
        "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "optimizer": {"offload_optimizer": disk},
        "optimizer, parameters on cpu": {"offload_optimizer": disk, "offload_param": {"device": "cpu"}},
        "parameters, optimizer on cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": parameters},
        "parameters": {"offload_param": parameters},
        "both": {"offload_optimizer": disk, "offload_param": parameters},
        "both, some parameters kept": {
            "offload_optimizer": disk,
            "offload_param": {**parameters, "max_in_cpu": 600_000},
        },
        "both, pipelined": {"offload_optimizer": {**disk, **pipeline}, "offload_param": parameters},
    }
    # Sub-groups of one wide layer each, of which the last one's is too small to be swapped.
    return {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 200_000, **sections[kind]}


KINDS = (
    "optimizer", "optimizer, parameters on cpu", "parameters, optimizer on cpu", "parameters", "both",
    "both, some parameters kept", "both, pipelined",
)  # fmt: skip


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(),
            nn.Linear(1024, 3),
        )  # fmt: skip

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Branching(Wide):
    """Uses one wide layer in every second forward alone."""

    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(1024, 1024)
        self.forwards = 0

    def forward(self, x, labels=None):
        first, act, second, *others = self.layers
        self.forwards += 1
        hidden = act(first(x))
        hidden = second(hidden) + (self.aside(hidden) if self.forwards % 2 else 0)
        for layer in others:
            hidden = layer(hidden)
        return {"loss": nn.functional.cross_entropy(hidden, labels), "logits": hidden}


class Measure(TrainerCallback):
    """Note how many bytes lie in a folder after each step."""

    def __init__(self, folder):
        self.folder, self.sizes = Path(folder), []

    def on_step_end(self, args, state, control, **kwargs):
        self.sizes.append(swapped_bytes(self.folder))


def swapped_bytes(folder):
    found = {"optimizer": 0, "params": 0}
    for path in Path(folder).rglob("*.swp"):
        with contextlib.suppress(FileNotFoundError):
            found["optimizer" if "optimizer" in path.parts else "params"] += path.stat().st_size
    return found


def train(folder, deepspeed, swap=".", stop_at=None, resume=None, model=Wide, **options):
    """Run in every rank; returns losses and norms, whole weights on rank 0, and what was in the folder of swaps."""
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    size = 12 // int(os.environ.get("WORLD_SIZE", "1")) // options.get("gradient_accumulation_steps", 1)
    settings = {"save_strategy": "no", "max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.1, **options}
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=size, logging_steps=1, disable_tqdm=True, log_level="error",
        use_cpu=True, deepspeed=deepspeed, **settings,
    )  # fmt: skip
    measure = Measure(swap)
    callbacks = [measure, *([StopAt(stop_at)] if stop_at else [])]
    trainer = Trainer(model(), args, train_dataset=rows, eval_dataset=rows[:7], callbacks=callbacks)
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "eval_loss")
    history = [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]
    weights = {k: v.float().clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.save_model(f"{folder}/out")
    trainer.strategy.close()
    return [entry for entry in history if entry], weights, measure.sizes


def train_with(folder, deepspeed, swap, options):
    return train(folder, deepspeed, swap, **options)


def run(world_size, folder, kind, swap, **options):
    """Return rank 0's results; all ranks have the same numbers."""
    swap.mkdir(exist_ok=True)
    given = {"zero_optimization": placed(kind, swap)}
    ranks = run_ranks(train_with, world_size, str(folder), given, str(swap), options, timeout_s=180)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    assert not list(swap.iterdir())  # all that was swapped is gone
    return ranks[0]


def close(one, other, tolerance=TOLERANCE):
    assert [len(entry) for entry in one[0]] == [len(entry) for entry in other[0]]
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(one[1], other[1], rtol=tolerance, atol=tolerance)


def same_bits(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("alone")), None, **ACCUMULATED)


@pytest.mark.row("numbers")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_swapped_trains_as_one_process_with_accumulation_and_clipping(tmp_path, alone, kind):
    found = run(2, tmp_path / "run", kind, tmp_path / "swap", **ACCUMULATED)
    close(found, alone)
    wide = 1024 * 1024 * 4
    assert len(found[2]) == 4
    for size in found[2]:
        # Two wide layers: their parameters, and in the optimizer as many of float32 parameters and of two moments.
        assert (size["optimizer"] >= 2 * 3 * wide) == ("optimizer" in kind.split(",")[0] or kind.startswith("both"))
        assert (size["params"] >= wide) == ("both" in kind or kind.startswith("parameters"))
    saved = load_file(tmp_path / "run" / "out" / "model.safetensors")
    assert saved.keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in saved.items())


SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.row("resume")
@pytest.mark.parametrize(
    ("kind", "bf16"), [("both", False), ("both", True), ("both, pipelined", False), ("optimizer", True)]
)
def test_a_run_resumes_bit_equal(tmp_path, kind, bf16):
    options = {"bf16": bf16, "max_grad_norm": 0.05}
    whole = run(2, tmp_path / "a", kind, tmp_path / "swap", **options)
    run(2, tmp_path / "b", kind, tmp_path / "swap", stop_at=2, **SAVING, **options)
    same_bits(run(2, tmp_path / "b", kind, tmp_path / "swap", resume=True, **SAVING, **options), whole)


@pytest.mark.row("resize")
@pytest.mark.parametrize(
    ("first", "ranks", "second", "then"),
    [
        ("both", 2, "both", 3),
        ("both", 2, "cpu", 2),
        ("both", 2, "none", 1),
        ("cpu", 3, "optimizer", 2),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_and_elsewhere(tmp_path, first, ranks, second, then):
    whole = train(str(tmp_path / "a"), None)
    run(ranks, tmp_path / "b", first, tmp_path / "swap", stop_at=2, **SAVING)
    close(run(then, tmp_path / "b", second, tmp_path / "swap", resume=True, **SAVING), whole)


def test_a_layer_without_a_gradient_stays_as_it_is(tmp_path):
    options = {"model": Branching, "optim": "sgd", "learning_rate": 0.01, "weight_decay": 0.0}
    whole = train(str(tmp_path / "a"), None, **options)
    close(run(1, tmp_path / "b", "both", tmp_path / "swap", **options), whole)


def test_two_runs_at_once_swap_to_one_folder(tmp_path):
    swap = tmp_path / "swap"
    swap.mkdir()
    given = {"zero_optimization": placed("both", swap)}
    alone = train(str(tmp_path / "alone"), None)

    def once(name):
        return run_ranks(train_with, 1, str(tmp_path / name), given, str(swap), {}, timeout_s=180)[0]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(once, ("a", "b")):
            close(found, alone)
    assert not list(swap.iterdir())


def step(strategy, model, optimizer):
    with strategy.accumulate(model, sync=True):
        strategy.backward(model(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))["loss"])
    strategy.step(optimizer)
    optimizer.zero_grad()


def use_in_own_loop(swap, failed):
    """Train twice with one strategy, and end it; returns what is in its folder before and after."""
    from tr_dist.deepspeed import DeepSpeed

    strategy = DeepSpeed({"zero_optimization": placed("both", swap)}, use_cpu=True)
    model = strategy.prepare(Wide())
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy.bind_optimizer(model, optimizer)
        for _ in range(2):
            step(strategy, model, optimizer)
    before = sorted(path.name[:17] for path in Path(swap).iterdir())
    strategy.close(failed=failed)
    return before, [path.name for path in Path(swap).iterdir()]


@pytest.mark.parametrize("failed", [False, True])
def test_folders_are_a_rank_s_own_and_go_as_the_strategy_is_closed(tmp_path, failed):
    [(before, after)] = run_ranks(use_in_own_loop, 1, str(tmp_path), failed, timeout_s=120)
    assert before == ["swapped-by-rank-0"] * 2
    assert after == []


def keep_more(swap):
    from tr_dist.deepspeed import DeepSpeed

    strategy = DeepSpeed({"zero_optimization": placed("optimizer", swap)}, use_cpu=True)
    model = strategy.prepare(Wide())
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    strategy.bind_optimizer(model, optimizer)
    step(strategy, model, optimizer)
    with pytest.raises(ValueError, match="buffer_count=4: this optimizer needs 5, for a parameter") as caught:
        step(strategy, model, optimizer)
    strategy.close()
    return str(caught.value)


@pytest.mark.row("refused")
def test_too_few_buffers_for_an_optimizer_are_refused(tmp_path):
    assert "set it to 5" in run_ranks(keep_more, 1, str(tmp_path), timeout_s=120)[0]


def texts(number):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 30, (number, 5), generator=generator)
    return [{"input_ids": prompt, "labels": torch.tensor([5 + i % 7, 1])} for i, prompt in enumerate(prompts)]


def generate(folder, deepspeed):
    torch.manual_seed(2)
    sizes = {
        "vocab_size": 20_000,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, initializer_factor=3.0))
    args = Seq2SeqTrainingArguments(
        output_dir=folder, predict_with_generate=True, generation_max_length=8, use_cpu=True, disable_tqdm=True,
        log_level="error", save_strategy="no", max_steps=2, optim="sgd", learning_rate=1e-3, deepspeed=deepspeed,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")), per_device_eval_batch_size=2,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, args, train_dataset=texts(8), eval_dataset=texts(6))
    trainer.train()
    found = torch.as_tensor(trainer.predict(texts(6)).predictions)
    trainer.save_model(f"{folder}/out")
    trainer.strategy.close()
    return found


@pytest.mark.row("export")
def test_a_model_generates_and_is_exported_whole(tmp_path):
    (tmp_path / "swap").mkdir()
    alone = generate(str(tmp_path / "1"), None)
    given = {"zero_optimization": placed("both", tmp_path / "swap")}
    for found in run_ranks(generate, 2, str(tmp_path / "2"), given, timeout_s=180):
        assert torch.equal(found, alone)
    ours, theirs = (T5ForConditionalGeneration.from_pretrained(tmp_path / name / "out") for name in "21")
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)
