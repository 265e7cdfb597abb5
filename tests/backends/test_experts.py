"""Experts that processes share out: the numbers of one process, and checkpoints of any number of them."""

import pytest
import torch
import torch.distributed as dist
from stop_at import StopAt
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mesh")

SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SHARDED = {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 60}}


class Experts(nn.Module):
    """Weights of four experts, stacked; skips the routes to experts that are not here."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8) / 4), nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, hidden, numbers, weights):
        output = torch.zeros_like(hidden)
        for number in range(len(self.up)):
            share = (weights * (numbers == number)).sum(dim=1, keepdim=True)
            output = output + share * (nn.functional.gelu(hidden @ self.up[number].T) @ self.down[number].T)
        return output


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x):
        hidden = x.flatten(0, 1)
        weights, numbers = self.gate(hidden).softmax(dim=-1).topk(2)
        return x + self.experts(hidden, numbers, weights).view_as(x)


class Plain(nn.Module):
    """Names its experts in `ep_plan`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

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


def qwen(**options):
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **HEADS, **sizes, **options))


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, **HEADS, num_local_experts=4, num_experts_per_tok=2))


MODELS = {
    "plain": Plain,
    "qwen": qwen,
    "mixtral": mixtral,
    "balanced": lambda: qwen(output_router_logits=True, router_aux_loss_coef=0.5),
    "dense": lambda: qwen(mlp_only_layers=[0, 1]),
}


def rows(number):
    """Return rows of words of which some are no targets, in every row another number of them; lengths differ."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(24, (number, 6), generator=generator)
    hidden = torch.randint(4, (number, 1), generator=generator) > torch.arange(6)
    labels = words.masked_fill(hidden, -100)
    return [
        {"input_ids": row[: 4 + at % 3], "labels": label[: 4 + at % 3]}
        for at, (row, label) in enumerate(zip(words, labels, strict=True))
    ]


def collate(samples):
    """Return a batch that is as long as its longest row: other processes' are longer or shorter."""
    fill = {"input_ids": 0, "labels": -100}
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in fill.items()
    }


def train(folder, name, options, steps=4, resume=None):
    """Run in every rank; returns losses, norms and evaluations, and the whole weights on rank 0."""
    sizes = options.get("parallelism_config", "")
    plan = {"ep_plan": {"layers.*.experts": "experts"}} if name == "plain" and "ep" in sizes.replace("rep", "") else {}
    args = TrainingArguments(
        folder,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        eval_steps=2,
        save_strategy="steps",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        label_names=["labels"],
        log_level="error",
        **{"max_grad_norm": 0.5, "save_steps": 2, "eval_strategy": "steps"} | plan | options,
    )
    trainer = Trainer(MODELS[name](), args, train_dataset=rows(48), eval_dataset=rows(7), data_collator=collate)
    if name == "balanced":  # its loss is divided by the count of the step in one part, and not in the other
        trainer.loss_is_scaled_for_ga = True
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
    replicas = world // 2 if "tp=2" in sizes or "sp=2" in sizes else world
    return world, {"parallelism_config": sizes, "per_device_train_batch_size": 4 // replicas, **options}


ALONE = {"per_device_train_batch_size": 4}
MESHES = {
    "ep 2": mesh(2, "ep=2"),
    "ep 2 of units": mesh(2, "ep=2", **SHARDED),
    "ep 2, shards 4": mesh(4, "ep=2,dp_shard=4", **SHARDED),
    "ep 2, replicas 2, shards 2": mesh(4, "ep=2,dp_replicate=2,dp_shard=2", **SHARDED),
    "ep 2, replicas 4": mesh(4, "ep=2"),
    "ep 4": mesh(4, "ep=4"),
    "ep 4, replicas 2, shards 2": mesh(4, "ep=4,dp_replicate=2,dp_shard=2", **SHARDED),
    "ep 2, tp 2": mesh(4, "ep=2,tp=2"),
    "ep 2, tp 2, shards 2": mesh(4, "ep=2,tp=2,dp_shard=2", **SHARDED),
    "ep 2, sp 2": mesh(2, "ep=2,sp=2"),
    "ep 2, sp 2, replicas 2": mesh(4, "ep=2,sp=2"),
    "ep 2, sp 2, shards 2": mesh(4, "ep=2,sp=2,dp_shard=2", **SHARDED),
    "ep 4, sp 2, replicas 2": mesh(4, "ep=4,sp=2"),
    "ep 2, pp 2": (4, {"parallelism_config": "ep=2,pp=2", "per_device_train_batch_size": 2}),
    "ep 2, pp 2, shards 2": (
        4,
        {"parallelism_config": "ep=2,pp=2,dp_shard=2", "per_device_train_batch_size": 2, **SHARDED},
    ),
    "tp 2": mesh(2, "tp=2"),
    "tp 2, shards 2": mesh(4, "tp=2,dp_shard=2", **SHARDED),
}


def on(form, folder, name, options=None, *arguments):
    """Return what every rank of a mesh returns."""
    world, sizes = (1, ALONE) if form == "alone" else MESHES[form]
    if world == 1:
        return [train(folder, name, sizes | (options or {}), *arguments)]
    return run_ranks(train, world, folder, name, sizes | (options or {}), *arguments, timeout_s=300)


def assert_close(found, alone, tolerance):
    assert found[0]
    for ours, expected in zip(found[0], alone[0], strict=True):
        assert ours == pytest.approx(expected, rel=tolerance)
    for name, value in found[1].items():
        torch.testing.assert_close(value, alone[1][name], rtol=tolerance, atol=tolerance)


def in_the_night(first, *others):
    """Return parameters of which every change runs the first; the backend's session runs all."""
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in others)]


# Of rows of several lengths a micro-batch of one process is padded otherwise than those of several; padding is no
# target, and nothing attends to it: attention is causal, and padding is last.
@pytest.mark.row("numbers")
@pytest.mark.parametrize(
    ("name", "form"),
    in_the_night(
        ("qwen", "ep 2"),
        *(
            (name, form)
            for name in ("qwen", "mixtral", "plain")
            for form in MESHES
            if "tp" not in form and "sp" not in form and "pp" not in form
        ),
        *((name, form) for name in ("qwen", "mixtral") for form in MESHES if "tp" in form),
        *(("qwen", form) for form in MESHES if "sp" in form or "pp" in form),
    ),
)
def test_experts_that_are_shared_out_give_the_numbers_of_one_process(name, form, tmp_path):
    accumulated = {"gradient_accumulation_steps": 3, "per_device_eval_batch_size": 2}
    alone = on("alone", str(tmp_path / "alone"), name, accumulated)[0]
    for rank in on(form, str(tmp_path / "mesh"), name, accumulated):
        assert_close(rank, alone, 2e-5)
    assert alone[1].keys() == rank[1].keys() or not rank[1]


@pytest.mark.slow
@pytest.mark.row("resize")
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("ep 2", "alone", "ep 2 of units"),
        ("ep 2", "alone", "ep 4"),
        ("ep 2, shards 4", "ep 2, tp 2", "alone"),
        ("ep 2, pp 2", "ep 2", "ep 2, pp 2, shards 2"),
        ("tp 2, shards 2", "ep 4, replicas 2, shards 2", "ep 2, replicas 2, shards 2"),
    ],
)
def test_a_run_goes_on_with_experts_shared_out_otherwise(first, second, third, tmp_path):
    whole = on("alone", str(tmp_path / "whole"), "qwen")[0]
    folder = str(tmp_path / "out")
    on(first, folder, "qwen", None, 2)
    on(second, folder, "qwen", {"save_steps": 1}, 3, True)
    resumed = on(third, folder, "qwen", None, 4, True)[0]
    assert_close((resumed[0][-3:], resumed[1]), (whole[0][-3:], whole[1]), 2e-5)
    exported = Qwen3MoeForCausalLM.from_pretrained(f"{folder}/model").state_dict()
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
        pytest.param({"optim": "sgd"}, 2e-5, marks=row("optim sgd"), id="sgd"),
        pytest.param({"optim": "adagrad"}, 2e-5, marks=row("optim adagrad"), id="adagrad"),
    ],
)
def test_what_a_run_may_have_beside_gives_the_numbers_of_one_process(options, tolerance, tmp_path):
    alone = on("alone", str(tmp_path / "alone"), "qwen", options)[0]
    for rank in on("ep 2, shards 4", str(tmp_path / "mesh"), "qwen", options):
        assert_close(rank, alone, tolerance)


@pytest.mark.slow
@row("numbers")
def test_the_loss_of_balance_is_the_sum_of_those_of_the_micro_batches(tmp_path):
    """That of each process is of its own tokens: as of one process with the same rows as micro-batches of their own."""
    apart = {"per_device_train_batch_size": 2, "eval_strategy": "no"}
    alone = on("alone", str(tmp_path / "alone"), "balanced", apart | {"gradient_accumulation_steps": 2})[0]
    for rank in on("ep 2", str(tmp_path / "mesh"), "balanced", apart):
        assert_close(rank, alone, 2e-5)


def loads(folder, options):
    """Return the logged `expert_load_max`, and counts of the routes of the first step of the whole model by hand."""
    args = TrainingArguments(
        folder, max_steps=1, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, log_level="error",
        save_strategy="no", ep_plan={"layers.*.experts": "experts"}, **options,
    )  # fmt: skip
    trainer, seen = Trainer(Plain(), args, train_dataset=rows(4), data_collator=collate), []
    for layer in trainer.model.layers:
        layer.gate.register_forward_hook(lambda gate, inputs, output: seen.append(output.topk(2).indices.flatten()))
    trainer.train()
    counts = [trainer.strategy.sum(torch.bincount(numbers, minlength=4)) for numbers in seen]
    trainer.strategy.close()
    return trainer.state.log_history[0]["expert_load_max"], max(float(c.max() / c.sum() * 4) for c in counts)


@row("numbers")
def test_the_load_of_experts_is_that_over_all_ranks(tmp_path):
    (logged, counted), (other, _) = run_ranks(loads, 2, str(tmp_path), MESHES["ep 2"][1], timeout_s=300)
    assert logged == other == pytest.approx(counted)


def load_of_qwen(folder, options):
    """Return `expert_load_max` of the first step of a model of transformers."""
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "log_level": "error", "save_strategy": "no"}
    args = TrainingArguments(folder, max_steps=1, logging_steps=1, **quiet, **options)
    trainer = Trainer(qwen(), args, train_dataset=rows(4), data_collator=collate)
    trainer.train()
    trainer.strategy.close()
    return trainer.state.log_history[0]["expert_load_max"]


@pytest.mark.slow
@row("numbers")
def test_the_load_of_experts_is_that_of_the_layers_of_all_stages(tmp_path):
    (expected, _) = run_ranks(load_of_qwen, 2, str(tmp_path / "whole"), MESHES["ep 2"][1], timeout_s=300)
    found = run_ranks(load_of_qwen, 4, str(tmp_path / "stages"), MESHES["ep 2, pp 2"][1], timeout_s=300)
    assert found == [pytest.approx(expected)] * 4


def exchanged(options):
    """Return the bytes that a forward and backward of one layer brings to this process, and its number of calls."""
    args = TrainingArguments(
        "out", use_cpu=True, report_to="none", ep_plan={"experts": "experts"}, log_level="error", **options
    )
    trainer = Trainer(Layer(), args, train_dataset=rows(4))
    strategy = trainer.strategy
    layer = strategy.prepare(trainer.model)
    with Moved() as moved:
        layer(torch.randn(1, 5 + dist.get_rank(), 8, requires_grad=True)).sum().backward()
    strategy.close()
    return sum(moved.found), len(moved.found)


class Moved(TorchDispatchMode):
    """Takes down the bytes that exchanges of tensors in parts bring to this process, or take from it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.name() in ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"):
            self.found.append(abs(output.nbytes - args[0].nbytes))
        return output


@pytest.mark.slow
@row("numbers")
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_exchanges_the_bytes_of_the_formula(size):
    tokens, width, k, each = 5 + size - 1, 8, 2, 4
    formula = (size - 1) * tokens * (4 * width * each + k * (8 + 2 * each))
    found = run_ranks(exchanged, size, MESHES[f"ep {size}"][1], timeout_s=300)
    assert found == [(formula, 7)] * size


def refusal(folder, name, options):
    try:
        train(folder, name, options)
    except (ValueError, RuntimeError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return str(error)
    return ""


_DIVIDED = "is a DTensor with"  # and torch's words for how, of its version
_IN_BACKWARD = "an optimizer that consumes gradients in the backward pass is not for ep_size"
REFUSED = {
    "sizes": ("qwen", {"parallelism_config": "ep=3"}, "ep_size=3 does not divide the 2 processes that hold other"),
    "experts": ("dense", {"parallelism_config": "ep=2"}, "Qwen3MoeForCausalLM has no experts that one names"),
    "plan": (
        "qwen",
        {"parallelism_config": "ep=2", "ep_plan": {"layers.*.mlp": "experts"}},
        "no module is called 'layers.*.mlp'",
    ),
    "style": (
        "qwen",
        {"parallelism_config": "ep=2", "ep_plan": {"model.layers.*.mlp.experts": "ep_router"}},
        "has 'ep_router', which is not done here; the style is 'experts'",
    ),
    "stacked": (
        "qwen",
        {"parallelism_config": "ep=2", "ep_plan": {"model.layers.*.self_attn": "experts"}},
        "its parameters are not all stacked by them in dimension 0",
    ),
    "peers": ("qwen", {"parallelism_config": "ep=2,tp=2"}, "does not divide the 1 processes that hold other tokens"),
    "fp16": ("qwen", {"parallelism_config": "ep=2", "fp16": True}, "fp16=True"),
    "adafactor": ("qwen", {"parallelism_config": "ep=2", "optim": "adafactor"}, _DIVIDED),
    "adamw_8bit": ("qwen", {"parallelism_config": "ep=2", "optim": "adamw_8bit"}, _DIVIDED),
    "muon": ("qwen", {"parallelism_config": "ep=2", "optim": "muon"}, "Muon needs whole matrices"),
    "lomo": ("qwen", {"parallelism_config": "ep=2", "optim": "lomo"}, _IN_BACKWARD),
}


@pytest.mark.parametrize(
    "case", [next(iter(REFUSED)), *(pytest.param(c, marks=pytest.mark.slow) for c in [*REFUSED][1:])]
)
@row("numbers")
def test_what_cannot_be_shared_out_is_refused_with_the_words_that_mend_it(case, tmp_path):
    name, options, said = REFUSED[case]
    for text in run_ranks(refusal, 2, str(tmp_path), name, options | {"max_grad_norm": 0.5}, timeout_s=300):
        assert said in text
