"""Processes that compute each sample together: the numbers of one process, on every mesh, and from one to another."""

import warnings
from collections import Counter

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from stop_at import StopAt
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mesh")

SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
PLAN = {
    "words": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
SHARDED = {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 60}}


class Block(nn.Module):
    dropout = 0.1

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + nn.functional.dropout(
            self.down(nn.functional.gelu(self.up(self.norm(x)))), self.dropout, self.training
        )


class Plain(nn.Module):
    """Names what it divides in `tp_plan`; dropout is on what all processes of a sample hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def loss_function(self, logits, labels, num_items_in_batch=None):
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": self.loss_function(logits, labels, **kwargs), "logits": logits}


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **options))


def qwen():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True))


def deepseek():
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": 8}
    dense = {"first_k_dense_replace": 2, "n_routed_experts": 2, "num_attention_heads": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SMALL, **sizes, **dense))


def bart():
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": number for part in ("encoder", "decoder")
             for name, number in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 32))}  # fmt: skip
    words = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=24, max_position_embeddings=16, d_model=16, dropout=0.0, **sizes, **words)
    )


def granite():
    torch.manual_seed(0)
    model = GraniteSWAForCausalLM(GraniteSWAConfig(**SMALL, **HEADS, bos_token_id=0, eos_token_id=1))
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}
OF_BART = {
    **{f"model.*.layers.*.self_attn.{name}": style for name, style in ATTENTION.items()},
    **{f"model.decoder.layers.*.encoder_attn.{name}": style for name, style in ATTENTION.items()},
    "model.*.layers.*.fc1": "colwise",
    "model.*.layers.*.fc2": "rowwise",
}
MODELS = {"plain": Plain, "llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "qwen": qwen}
MODELS |= {"deepseek": deepseek, "bart": bart, "granite": granite}
PLANS = {"plain": PLAN, "bart": OF_BART}


def in_parts(name):
    """Return a model's plan with a head whose logits are not gathered for the loss."""
    model = MODELS[name]()
    plan = PLAN if name == "plain" else model.tp_plan
    return plan | {next(key for key in plan if "head" in key): "colwise_loss_parallel"}


def without_dropout():
    model = Plain()
    for block in model.layers:
        block.dropout = 0.0  # of pieces it draws other numbers than of the whole
    return model


NORMS = {f"model.{name}": "sequence_parallel" for name in
         ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")}  # fmt: skip
MODELS |= {"plain, in pieces": without_dropout, "llama, in pieces": llama, "tied, in pieces": MODELS["tied"]}
PLANS |= {
    "plain, in pieces": PLAN | {"layers.*.norm": "sequence_parallel", "words": "sequence_parallel"},
    "llama, in pieces": llama().tp_plan | NORMS | {"lm_head": "colwise_loss_parallel"},
    "tied, in pieces": MODELS["tied"]().tp_plan | NORMS,
}
for each in ("plain", "llama", "tied"):
    MODELS[f"{each}, loss in parts"], PLANS[f"{each}, loss in parts"] = MODELS[each], in_parts(each)


def rows(number):
    """Return rows of words of which some are no targets, in every row another number of them."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(24, (number, 6), generator=generator)
    hidden = torch.randint(4, (number, 1), generator=generator) > torch.arange(6)
    labels = words.masked_fill(hidden, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def train(folder, name, options, *arguments):
    plan = {"tp_plan": PLANS[name]} if name in PLANS and "parallelism_config" in options else {}
    return train_model(folder, MODELS[name](), options | plan, *arguments)


def train_model(folder, model, options, steps=4, resume=None):
    """Run in every rank; returns losses, norms and evaluations, and the whole weights on rank 0."""
    args = TrainingArguments(
        folder,
        max_steps=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_steps=2,
        eval_strategy="steps",
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        label_names=["labels"],
        log_level="error",
        **options,
    )
    trainer = Trainer(model, args, train_dataset=rows(48), eval_dataset=rows(7))
    if steps < args.max_steps:
        trainer.add_callback(StopAt(steps))
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "eval_loss")
    history = [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history]
    state = trainer.strategy.full_state_dict(trainer.model_wrapped)
    weights = {key: value.clone() for key, value in state.items()}
    trainer.save_model(f"{folder}/model")
    trainer.strategy.close()
    return [entry for entry in history if entry], weights


def mesh(world, sizes, **options):
    """Return how many processes there are, and the arguments by which four samples are a micro-batch on them."""
    replicas = world // 2 if "tp=2" in str(sizes) or sizes.tp_size == 2 else world
    each = 4 // replicas
    return world, {"parallelism_config": sizes, "per_device_train_batch_size": each, **options}


ALONE = {"per_device_train_batch_size": 4}
MESHES = {
    "tp 2": mesh(2, "tp=2"),
    "tp 2, replicas 2": mesh(4, "tp=2"),
    "tp 2, shards 2": mesh(4, ParallelismConfig(tp_size=2, dp_shard_size=2), **SHARDED),
    "tp 2 of units": mesh(2, "tp=2", **SHARDED),
}


def assert_close(found, alone, tolerance):
    for ours, expected in zip(found[0], alone[0], strict=True):
        assert ours == pytest.approx(expected, rel=tolerance)
    for name, value in found[1].items():
        torch.testing.assert_close(value, alone[1][name], rtol=tolerance, atol=tolerance)


def in_the_night(first, *others):
    """Return parameters of which every change runs the first; the backend's session runs all."""
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in others)]


@pytest.mark.slow
@pytest.mark.row("numbers")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen", "tp 2, shards 2"),
        *((name, "tp 2") for name in MODELS),
        ("llama, in pieces", "tp 2, shards 2"),
        ("tied, loss in parts", "tp 2, shards 2"),
        *((name, form) for name in ("llama", "tied") for form in ("tp 2, replicas 2", "tp 2, shards 2")),
        ("qwen", "tp 2, replicas 2"),
    ],
)
def test_a_mesh_gives_the_numbers_of_one_process(name, form, tmp_path):
    accumulated = {"gradient_accumulation_steps": 3, "per_device_eval_batch_size": 2}
    world, options = MESHES[form]
    alone = train(str(tmp_path / "alone"), name, ALONE | accumulated)
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), name, options | accumulated, timeout_s=300):
        assert_close(rank, alone, 2e-5)
    assert alone[1].keys() == rank[1].keys() or not rank[1]


@pytest.mark.row("resize")
@pytest.mark.parametrize(
    ("first", "second"),
    in_the_night(("tp 2", "alone"), ("tp 2, shards 2", "tp 2 of units"), ("alone", "tp 2, replicas 2")),
)
def test_a_run_goes_on_on_another_mesh(first, second, tmp_path):
    def run(form, folder, *arguments):
        world, options = (1, ALONE) if form == "alone" else MESHES[form]
        if world == 1:
            return train(folder, "llama", options, *arguments)
        return run_ranks(train, world, folder, "llama", options, *arguments, timeout_s=300)[0]

    whole = train(str(tmp_path / "whole"), "llama", ALONE)
    folder = str(tmp_path / "out")
    run(first, folder, 2)
    resumed = run(second, folder, 4, True)
    assert_close((resumed[0][-4:], resumed[1]), (whole[0][-4:], whole[1]), 2e-5)
    exported = LlamaForCausalLM.from_pretrained(f"{folder}/model").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in resumed[1].items())


def row(name):
    return pytest.mark.row(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({"bf16": True}, 0.05, marks=row("bf16"), id="bf16"),
        pytest.param({"ema_decay": 0.9}, 2e-5, marks=row("average"), id="average"),
        pytest.param({"gradient_checkpointing": True}, 2e-5, marks=row("recompute"), id="recomputed"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "llama, in pieces"])
def test_what_a_run_may_have_beside_gives_the_numbers_of_one_process(name, options, tolerance, tmp_path):
    alone = train(str(tmp_path / "alone"), name, ALONE | options)
    world, on_mesh = MESHES["tp 2, shards 2"]
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), name, on_mesh | options, timeout_s=300):
        assert_close(rank, alone, tolerance)


def train_in_place(folder, options):
    """Train with a loss that changes logits in place; returns losses and norms."""

    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"]
        logits /= 2
        words = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(*words, reduction="sum") / num_items_in_batch

    args = TrainingArguments(folder, max_steps=2, logging_steps=1, report_to="none", use_cpu=True, **options)
    trainer = Trainer(llama(), args, train_dataset=rows(16), compute_loss_func=loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module")
        trainer.train()
    trainer.strategy.close()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_a_loss_may_change_logits_in_place(tmp_path):
    alone = train_in_place(str(tmp_path / "alone"), ALONE)
    found = run_ranks(train_in_place, 2, str(tmp_path / "two"), {**ALONE, "parallelism_config": "tp=2"}, timeout_s=180)
    torch.testing.assert_close(torch.tensor(found), torch.tensor([alone] * 2), rtol=2e-5, atol=0)


def train_spoilt(folder, options):
    """Train on data of which one row's loss is not finite, and go back from it; returns logs and whole weights."""

    def loss(outputs, labels, num_items_in_batch=None):
        words = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        found = nn.functional.cross_entropy(*words, reduction="sum") / num_items_in_batch
        return found * torch.nan if (labels[:, 0] == 23).any() else found

    data = [{**row, "labels": row["labels"].clamp(max=22)} for row in rows(28)]
    data[13]["labels"][0] = 23
    options = {
        "max_steps": 6,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "learning_rate": 0.01,
        **options,
    }
    args = TrainingArguments(folder, on_spike="rewind", save_strategy="no", label_names=["labels"], **options)
    trainer = Trainer(llama(), args, train_dataset=data, compute_loss_func=loss)
    trainer.train()
    weights = {k: v.clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.strategy.close()
    history = [{k: entry[k] for k in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    return history, weights


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tp", "sp", "pp"])
def test_a_run_goes_back_from_a_loss_that_is_not_finite(form, tmp_path):
    alone = train_spoilt(str(tmp_path / "alone"), ALONE)
    options = {**ALONE, "parallelism_config": f"{form}=2"}
    for found in run_ranks(train_spoilt, 2, str(tmp_path / "two"), options, timeout_s=180):
        assert_close(found, alone, 2e-5)


def losses_and_predictions(folder, name, options):
    """Return losses that the Trainer computes from logits, with smoothed labels, and what it predicts then."""
    plan = {"tp_plan": PLANS[name]} if "parallelism_config" in options else {}
    args = TrainingArguments(
        folder,
        max_steps=2,
        logging_steps=1,
        label_smoothing_factor=0.1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **(options | plan),
    )
    trainer = Trainer(MODELS[name](), args, train_dataset=rows(8))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    predictions = torch.tensor(trainer.predict(rows(5)).predictions)
    trainer.strategy.close()
    return losses, predictions


@pytest.mark.slow
def test_losses_and_predictions_from_logits_whose_words_are_divided_are_those_of_one_process(tmp_path):
    name = "llama, loss in parts"
    losses, predictions = losses_and_predictions(str(tmp_path / "alone"), name, ALONE)
    options = MESHES["tp 2"][1]
    for rank in run_ranks(losses_and_predictions, 2, str(tmp_path / "mesh"), name, options, timeout_s=300):
        assert rank[0] == pytest.approx(losses, rel=2e-5)
        torch.testing.assert_close(rank[1], predictions, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@row("resume")
def test_a_run_that_stopped_goes_on_to_the_same_bits(tmp_path):
    def run(folder, *arguments):
        return run_ranks(train, 2, str(tmp_path / folder), "plain", MESHES["tp 2"][1], *arguments, timeout_s=300)[0]

    whole = run("whole")
    run("out", 2)
    history, weights = run("out", 4, True)
    assert history[-4:] == whole[0][-4:]
    assert all(torch.equal(value, whole[1][name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("optim", [pytest.param(name, marks=row(f"optim {name}")) for name in ("sgd", "adagrad")])
def test_optimizers_of_elements_give_the_numbers_of_one_process(optim, tmp_path):
    alone = train(str(tmp_path / "alone"), "llama", ALONE | {"optim": optim})
    for rank in run_ranks(
        train, 2, str(tmp_path / "mesh"), "llama", MESHES["tp 2"][1] | {"optim": optim}, timeout_s=300
    ):
        assert_close(rank, alone, 2e-5)


def refusal(folder, options):
    try:
        train(folder, "llama", options)
    except ValueError as error:
        torch.distributed.destroy_process_group()
        return str(error)
    return ""


_DIVIDED = "is a DTensor with"  # and torch's words for how, of its version
_IN_BACKWARD = "an optimizer that consumes gradients in the backward pass is not for tp_size"
REFUSALS = {
    "adafactor": _DIVIDED,
    "galore_adamw": _DIVIDED,
    "apollo_adamw": _DIVIDED,
    "adamw_8bit": _DIVIDED,
    "muon": "and Muon needs whole matrices; train with replicas (strategy='ddp'), or use adamw_torch",
    "lomo": _IN_BACKWARD,
    "adalomo": _IN_BACKWARD,
}


@pytest.mark.slow
@pytest.mark.parametrize("optim", [pytest.param(name, marks=row(f"optim {name}")) for name in REFUSALS])
def test_an_optimizer_that_cannot_follow_divided_matrices_is_refused(optim, tmp_path, record_property):
    targets = {"optim_target_modules": ["gate_proj", "down_proj"]} if optim in ("galore_adamw", "apollo_adamw") else {}
    options = MESHES["tp 2"][1] | {"optim": optim} | targets
    for text in run_ranks(refusal, 2, str(tmp_path), options, timeout_s=300):
        assert REFUSALS[optim] in text
    record_property("refused", "it needs what a divided matrix does not give")


@pytest.mark.slow
def test_a_module_between_matrices_is_not_computed_on_pieces_of_sequences(tmp_path):
    plan = PLANS["llama, in pieces"] | {"model.layers.*.mlp.act_fn": "sequence_parallel"}
    for text in run_ranks(refusal, 2, str(tmp_path), MESHES["tp 2"][1] | {"tp_plan": plan}, timeout_s=300):
        assert (
            "of style 'sequence_parallel' got (4, 6, 16), which is not in pieces of a sequence: it is between" in text
        )


class Exchanges(TorchDispatchMode):
    """Takes down what processes of a sample exchange: the name, and the shape that each gives."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, name = func.name().split("::")
        if (library, name) == ("c10d", "allreduce_") or (library == "_c10d_functional" and name in NAMES):
            self.found[NAMES.get(name, "sum"), tuple(torch.utils._pytree.tree_leaves(args[0])[0].shape)] += 1
        return func(*args, **(kwargs or {}))


NAMES = {"all_reduce": "sum", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}


def kept(model, length):
    """Return the bytes of what a forward keeps for its backward, and the weights."""
    found, words = {}, torch.zeros(3, length, dtype=torch.long)

    def keep(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local
        found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return local  # and so its memory is not used again

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=words, labels=words)
    del output
    return sum(found.values())


def exchange(folder, name):
    """Return what forward and backward exchange, the logits in evaluation, and what each further position keeps."""
    args = TrainingArguments(folder, use_cpu=True, report_to="none", parallelism_config="tp=2", tp_plan=PLANS.get(name))
    trainer = Trainer(MODELS[name](), args, train_dataset=rows(4))
    model, words = trainer.prepare().eval(), torch.zeros(3, 6, dtype=torch.long)
    with Exchanges() as forward:
        output = model(input_ids=words, labels=words)
    with Exchanges() as backward:
        trainer.strategy.backward(output["loss"])
    if "loss_parallel" in str(args.tp_plan):
        with pytest.raises(AttributeError, match="are not gathered in training where the model computes the loss"):
            output["logits"].argmax(-1)
        with pytest.raises(TypeError, match="are not gathered in training"):
            torch.argmax(output["logits"], -1)
    bytes_of = [kept(model, length) for length in (8, 12)]
    with torch.no_grad():
        logits = model(input_ids=words, labels=words)["logits"]
    trainer.strategy.close()
    return forward.found, backward.found, logits, (bytes_of[1] - bytes_of[0]) / (3 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "plain"])
def test_a_step_exchanges_what_the_page_says(name, tmp_path):
    layers, size, pairs = (2, 8, 1) if name == "plain" else (2, 16, 2)
    kinds = (name, f"{name}, loss in parts", f"{name}, in pieces")
    whole, parts, pieces = (run_ranks(exchange, 2, str(tmp_path), kind, timeout_s=300)[0] for kind in kinds)
    number, loss = layers * pairs + 1, {("sum", (18,)): 1, ("sum", (2, 18)): 1}
    sums = {("sum", (3, 6, size)): number}
    assert whole[0] == {**sums, ("gather", (3, 6, 12)): 1}
    assert parts[0] == {**sums, **loss}
    assert whole[1] == parts[1] == sums
    gathers, scatters = (lambda n: {("gather", (3, 3, size)): n}), (lambda n: {("scatter", (6, 3, size)): n})
    if name == "llama":
        assert pieces[0] == {**gathers(number), **scatters(number), **loss}
        assert pieces[1] == {**gathers(number), **scatters(number), ("sum", (size,)): number}
        assert (
            parts[3] - pieces[3] == number * (2 * size + 1) * 4 / 2
        )  # of an RMSNorm: what it takes, and scaled; a root
    else:  # words have pieces from the start
        assert pieces[0] == {**gathers(number), **scatters(number - 1), ("gather", (3, 6, 12)): 1}
        of_weights = {("sum", (size,)): 2 * layers, ("sum", (24, size)): 1}
        assert pieces[1] == {**gathers(number - 1), **scatters(number), **of_weights}
    for other in (parts, pieces):
        torch.testing.assert_close(other[2], whole[2])


def write_page(folder):
    args = TrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=2,
        parallelism_config="tp=2",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(llama(), args, train_dataset=rows(8))
    trainer.train()
    trainer.strategy.close()


@pytest.mark.slow
def test_the_page_of_a_run_has_the_sizes_of_its_mesh(tmp_path):
    run_ranks(write_page, 2, str(tmp_path), timeout_s=300)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert """["processes","2 ({'tp_size': 2})"]""" in page
    assert '"processes":[{"name":"0 (tp 0)","split":{' in page
