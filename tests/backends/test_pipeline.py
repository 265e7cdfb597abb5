"""Stages of layers on a row of processes: the numbers of one process by every schedule, on every mesh."""

import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared.callbacks import Clears
from test_mesh import ALONE, HEADS, SHARDED, SMALL, assert_close, in_the_night, rows, train_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks
from tr_log.phases import active_clock

pytestmark = pytest.mark.column("mesh")
QUIET = {"report_to": "none", "disable_tqdm": True, "log_level": "error"}


class Plain(nn.Module):
    """Takes hidden states in place of words, and says what comes before and after its layers."""

    pp_plan = {
        "words": (["input_ids"], ["inputs_embeds"]),
        "layers": (["inputs_embeds"], ["hidden"]),
        "head": (["hidden", "labels"], ["logits"]),
    }

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def loss_function(self, logits, labels, num_items_in_batch=None):
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def forward(self, input_ids=None, inputs_embeds=None, labels=None, **kwargs):
        hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": self.loss_function(logits, labels, **kwargs), "logits": logits}
        )


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 4}, **HEADS, **options))


def qwen():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | {"num_hidden_layers": 4}, **HEADS))


def tied():
    """In float64: small gradients of its words are sums, whose last bits Adam divides by themselves."""
    return llama(tie_word_embeddings=True).double()


MODELS = {"plain": Plain, "llama": llama, "tied": tied, "qwen": qwen}


def train(folder, name, options, *arguments):
    return train_model(folder, MODELS[name](), options, *arguments)


def row_of(world, sizes, replicas, **options):
    return world, {"parallelism_config": sizes, "per_device_train_batch_size": 4 // replicas, **options}


FORMS = {
    "pp 2": row_of(2, "pp=2", 1),
    "pp 4": row_of(4, "pp=4", 1),
    "all forwards first": row_of(2, "pp=2", 1, pp_schedule="gpipe"),
    "interleaved": row_of(2, "pp=2", 1, pp_schedule="interleaved"),
    "uneven": row_of(2, "pp=2", 1, pp_split=["layers.1"]),
    "pp 2, replicas 2": row_of(4, "pp=2", 2),
    "pp 2, shards 2": row_of(4, "pp=2,dp_shard=2", 2, **SHARDED),
    "pp 2, tp 2": row_of(4, "pp=2,tp=2", 1),
}


@pytest.mark.row("numbers")
@pytest.mark.parametrize(
    ("name", "form"),
    in_the_night(
        ("tied", "pp 2"),
        ("plain", "pp 2"),
        ("llama", "pp 4"),
        ("plain", "all forwards first"),
        ("llama", "interleaved"),
        ("tied", "interleaved"),
        ("plain", "uneven"),
        ("qwen", "pp 2, replicas 2"),
        ("tied", "pp 2, shards 2"),
        ("plain", "pp 2, shards 2"),
        ("llama", "pp 2, tp 2"),
        ("tied", "pp 2, tp 2"),
    ),
)
def test_stages_give_the_numbers_of_one_process(name, form, tmp_path):
    accumulated = {"gradient_accumulation_steps": 3, "per_device_eval_batch_size": 2}
    world, options = FORMS[form]
    alone = train(str(tmp_path / "alone"), name, ALONE | accumulated)
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), name, options | accumulated, timeout_s=300):
        assert_close(rank, alone, 2e-5)
    assert alone[1].keys() == rank[1].keys() or not rank[1]


@pytest.mark.row("resize")
@pytest.mark.parametrize(
    ("first", "second"),
    in_the_night(
        ("pp 2", "alone"),
        ("alone", "pp 2"),
        ("pp 2, shards 2", "pp 2"),
        ("pp 2, tp 2", "interleaved"),
        ("pp 2, replicas 2", "pp 2, tp 2"),
    ),
)
def test_a_run_goes_on_on_other_stages(first, second, tmp_path):
    def run(form, folder, *arguments):
        world, options = (1, ALONE) if form == "alone" else FORMS[form]
        options = options | {"gradient_accumulation_steps": 2}
        if world == 1:
            return train(folder, "tied", options, *arguments)
        return run_ranks(train, world, folder, "tied", options, *arguments, timeout_s=300)[0]

    whole = run("alone", str(tmp_path / "whole"))
    folder = str(tmp_path / "out")
    run(first, folder, 2)
    resumed = run(second, folder, 4, True)
    assert_close((resumed[0][-4:], resumed[1]), (whole[0][-4:], whole[1]), 2e-5)
    exported = LlamaForCausalLM.from_pretrained(f"{folder}/model").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in resumed[1].items())


@pytest.mark.slow
@pytest.mark.row("resume")
def test_a_run_of_stages_that_stopped_goes_on_to_the_same_bits(tmp_path):
    def run(folder, *arguments):
        return run_ranks(train, 2, str(tmp_path / folder), "tied", FORMS["pp 2"][1], *arguments, timeout_s=300)[0]

    whole = run("whole")
    run("out", 2)
    history, weights = run("out", 4, True)
    assert history[-4:] == whole[0][-4:]
    assert all(torch.equal(value, whole[1][name]) for name, value in weights.items())


def ragged(folder, options):
    """Train on rows of two lengths, so that micro-batches of a step have other shapes, and other ones on each shard."""
    data = [{"input_ids": torch.arange(n) % 24, "labels": torch.arange(n) % 24} for n in (4, 4, 6, 4, 4, 4, 6, 6) * 2]
    options = {"max_steps": 2, "report_to": "none", "use_cpu": True} | options
    order = {"train_sampling_strategy": "sequential", "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(folder, logging_steps=1, per_device_train_batch_size=1, **order, **options)
    trainer = Trainer(MODELS["llama"](), args, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.strategy.close()
    return losses


@pytest.mark.slow
@pytest.mark.row("numbers")
@pytest.mark.parametrize(("shards", "more"), [(1, {}), (2, SHARDED), (2, SHARDED | {"pp_schedule": "interleaved"})])
def test_micro_batches_of_several_shapes_give_the_numbers_of_one_process(shards, more, tmp_path):
    alone = ragged(str(tmp_path / "alone"), {"gradient_accumulation_steps": 8})
    options = {"parallelism_config": f"pp=2,dp_shard={shards}", "gradient_accumulation_steps": 8 // shards, **more}
    for losses in run_ranks(ragged, 2 * shards, str(tmp_path / "mesh"), options, timeout_s=60):
        assert losses == pytest.approx(alone, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({"bf16": True}, 0.05, marks=pytest.mark.row("bf16"), id="bf16"),
        pytest.param({"gradient_checkpointing": True}, 2e-5, marks=pytest.mark.row("recompute"), id="recomputed"),
        pytest.param({"label_smoothing_factor": 0.1}, 2e-5, id="smoothed labels"),
        pytest.param({"on_nonfinite": "skip"}, 2e-5, id="guard"),
        pytest.param({"neftune_noise_alpha": 5.0}, 2e-5, id="noise"),
        pytest.param({"load_best_model_at_end": True}, 2e-5, id="best weights"),
        pytest.param({"average_tokens_across_devices": False}, 2e-5, id="own tokens"),
        pytest.param(
            {"parameter_rules": [{"params": "layers.3", "lr_scale": 0.1}, {"params": "norm", "weight_decay": 0.1}]},
            2e-5,
            id="parameter rules",
        ),
        pytest.param({"optim": "sgd"}, 2e-5, marks=pytest.mark.row("optim sgd"), id="sgd"),
        pytest.param({"optim": "adafactor"}, 2e-5, marks=pytest.mark.row("optim adafactor"), id="adafactor"),
    ],
)
def test_what_a_run_of_stages_may_have_beside_gives_the_numbers_of_one_process(options, tolerance, tmp_path):
    options = options | {"gradient_accumulation_steps": 2}
    alone = train(str(tmp_path / "alone"), "tied", ALONE | options)
    for rank in run_ranks(train, 2, str(tmp_path / "mesh"), "tied", FORMS["pp 2"][1] | options, timeout_s=300):
        assert_close(rank, alone, tolerance)


def train_frozen(folder, options):
    model = tied()
    model.model.embed_tokens.weight.requires_grad_(False)
    return train_model(folder, model, options)


@pytest.mark.slow
def test_tied_words_may_be_frozen(tmp_path):
    options = {"gradient_accumulation_steps": 2}
    alone = train_frozen(str(tmp_path / "alone"), ALONE | options)
    for rank in run_ranks(train_frozen, 2, str(tmp_path / "mesh"), FORMS["pp 2"][1] | options, timeout_s=300):
        assert_close(rank, alone, 2e-5)


class Own(Trainer):
    """Logs a metric where the loss is computed, and keeps what an evaluation predicts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.log_metric("words", inputs["input_ids"].numel())
        return (loss, outputs) if return_outputs else loss


def with_metrics(folder, options):
    args = TrainingArguments(folder, max_steps=2, logging_steps=1, use_cpu=True, save_strategy="no", **QUIET, **options)
    trainer = Own(MODELS["llama"](), args, train_dataset=rows(16), eval_dataset=rows(5))
    trainer.train()
    words = [entry["words"] for entry in trainer.state.log_history if "words" in entry]
    predicted = trainer.predict(rows(5))
    trainer.strategy.close()
    return words, predicted.predictions


@pytest.mark.slow
@pytest.mark.row("numbers")
def test_metrics_of_the_last_stage_and_predictions_are_known_to_all(tmp_path):
    words, predictions = with_metrics(str(tmp_path / "alone"), {"per_device_train_batch_size": 4})
    options = {"per_device_train_batch_size": 4, "parallelism_config": "pp=2"}
    for found, predicted in run_ranks(with_metrics, 2, str(tmp_path / "mesh"), options, timeout_s=300):
        assert found == words
        assert predicted == pytest.approx(predictions, abs=1e-4)


class OwnStep(Trainer):
    def training_step(self, *inputs):
        return super().training_step(*inputs)


TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def refused(folder, kind, options):
    """Return the words with which a run is refused."""
    try:
        args = TrainingArguments(folder, max_steps=1, use_cpu=True, **QUIET, **options)
        model = MODELS["llama"]()
        model.config.output_router_logits = kind == "routes"
        trainer = (OwnStep if kind == "step" else Trainer)(model, args, train_dataset=rows(8))
        if kind in ("optimizer", "model"):
            trainer.add_callback(Clears(kind))
        trainer.train()
    except (ValueError, RuntimeError) as error:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("step", {}, "training_step is overridden, and with pp_size"),
        ("", {"ema_decay": 0.9}, "ema_decay is not done with pp_size"),
        ("", {"torch_compile": True}, "torch_compile is not done with pp_size"),
        (
            "",
            {"optim": "lomo"},
            "consumes gradients in the backward pass, and with pp_size a schedule runs the backward passes",
        ),
        ("", {"pp_split": ["layers.7"]}, "pp_split names layers.7"),
        ("optimizer", TWO, "it would drop the gradients of all; call it after the step"),
        ("model", TWO, "it would drop the gradients of all; call it after the step"),
        ("routes", {}, "output_router_logits=True asks for what all layers give"),
    ],
)
def test_what_stages_cannot_do_is_refused(kind, options, said, tmp_path):
    options = {"parallelism_config": "pp=2"} | options
    for text in run_ranks(refused, 2, str(tmp_path), kind, options, timeout_s=300):
        assert said in text


def groups_made(folder, options):
    """Return how many meshes of processes were made when training began, and when it had saved three times."""
    made, counts = [], []
    usual = DeviceMesh.__init__
    with mock.patch.object(DeviceMesh, "__init__", lambda *given, **named: made.append(0) or usual(*given, **named)):
        args = TrainingArguments(folder, max_steps=3, save_steps=1, use_cpu=True, **QUIET, **options)
        trainer = Trainer(MODELS["llama"](), args, train_dataset=rows(16))
        trainer.add_callback(Counts(counts, made))
        trainer.train()
        counts.append(len(made))
        trainer.strategy.close()
    return counts


class Counts:
    def __init__(self, counts, made):
        self.counts, self.made = counts, made

    def on_train_begin(self, args, state, control, **kwargs):
        self.counts.append(len(self.made))


@pytest.mark.slow
def test_a_save_makes_no_groups_of_processes(tmp_path):
    for begun, ended in run_ranks(groups_made, 2, str(tmp_path), {"parallelism_config": "pp=2"}, timeout_s=300):
        assert begun == ended


class Prepares(Trainer):
    """Prepares each batch, in a way that is another if it is done twice, and counts how often."""

    prepared = 0

    def _prepare_inputs(self, inputs):
        self.prepared += self.model.training
        return super()._prepare_inputs({**inputs, "input_ids": (inputs["input_ids"] + 1) % 24})


def watched(folder, options):
    """Return losses, how often a batch was prepared, parameters in the log and report, and ratios of rates."""
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "peak_flops": 1e6}
    quiet = {"use_cpu": True, "save_strategy": "no", **QUIET}
    args = TrainingArguments(folder, max_steps=2, logging_steps=1, **quiet, **accumulated, **options)
    trainer = Prepares(MODELS["llama"](), args, train_dataset=rows(16))
    trainer.loss_is_scaled_for_ga = True  # nothing is looked at before the first step
    rates = []
    trainer.add_callback(Rates(rates))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with (Path(folder) / "events.jsonl").open(encoding="utf-8") as lines:
        sizes = [trainer.get_num_trainable_parameters(), json.loads(next(lines))["model"]["parameters"]]
    trainer.strategy.close()
    return losses, trainer.prepared, sizes, rates


class Rates:
    def __init__(self, rates):
        self.rates = rates

    def on_log(self, args, state, control, **kwargs):
        rates = active_clock().rates
        self.rates += [rates["flops_per_second"] / rates["tokens_per_second"], rates["flops_per_second"] / rates["mfu"]]


def test_batches_are_prepared_once_and_logs_and_rates_are_of_the_whole_model_and_all_devices(tmp_path):
    losses, prepared, sizes, rates = watched(str(tmp_path / "alone"), {})
    options = {"parallelism_config": "pp=2,tp=2"}
    for found in run_ranks(watched, 4, str(tmp_path / "mesh"), options, timeout_s=300):
        assert found[0] == pytest.approx(losses, rel=2e-5)
        assert found[1:3] == (prepared, sizes)
        assert found[3] == pytest.approx([rates[0], 4 * rates[1]] * 3)  # the peak is that of four devices


def exchanged(folder, steps):
    """Return how often each exchange was made in a run of so many steps, and the bytes passed to each neighbour."""
    passed, usual = Counter[tuple[str, int]](), dist.P2POp.__init__

    def plan(op, kind, tensor, *given, **named):
        usual(op, kind, tensor, *given, **named)
        passed[kind.__name__, op.group_peer] += tensor.nbytes

    options = {"use_cpu": True, "save_strategy": "no", "parallelism_config": "pp=2", **QUIET}
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=5, **options
    )
    trainer = Trainer(MODELS["llama"](), args, train_dataset=rows(10 * 8))
    with mock.patch.object(dist.P2POp, "__init__", plan), profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.train()
    trainer.strategy.close()
    return Counter(event.name for event in seen.events() if event.name.startswith("c10d::")), passed


@pytest.mark.slow
def test_a_step_exchanges_the_calls_and_bytes_of_the_formula(tmp_path):
    ranks = [run_ranks(exchanged, 2, str(tmp_path / str(steps)), steps, timeout_s=300) for steps in (4, 8)]
    hidden_bytes = 2 * 6 * 16 * 4
    for place, (shorter, longer) in enumerate(zip(*ranks, strict=True)):
        more = {name: (longer[0][name] - shorter[0][name]) / 4 for name in longer[0]}
        # Hidden states of five micro-batches and their gradients, losses, and the norm.
        expected = {"c10d::send": 5, "c10d::recv_": 5, "c10d::broadcast_": 1, "c10d::allreduce_": 1}
        assert {name: number for name, number in more.items() if number} == expected
        assert longer[1] == {(kind, 1 - place): 8 * 5 * hidden_bytes for kind in ("isend", "irecv")}
