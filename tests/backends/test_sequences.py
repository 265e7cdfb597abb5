"""Processes that have pieces of each sequence: the numbers of one process, on every mesh, and from one to another."""

import os

import pytest
import torch
import torch.distributed as dist
from test_mesh import ALONE, SHARDED, SMALL, StopAt, assert_close, in_the_night, row
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

pytestmark = pytest.mark.column("mesh")

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
PLAN = {"layers.*.qkv.*": "colwise", "layers.*.out": "rowwise"}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.out, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), dropout
        self.qkv = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x, mask):
        normed = self.norm(x)
        states = [linear(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in self.qkv]
        mixed = F.scaled_dot_product_attention(*states, attn_mask=mask, is_causal=mask is None)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Plain(nn.Module):
    """Learned positions, and its own calls of attention; bidirectional where it gets a mask."""

    def __init__(self, dropout=0.0, with_positions=True, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.places, self.with_positions = nn.Embedding(32, 16), with_positions
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))

    def loss_function(self, logits, labels, num_items_in_batch=None):
        how = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, **kwargs):
        if position_ids is None or not self.with_positions:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.words(input_ids) + self.places(position_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=False) if self.recomputes else layer(hidden, mask)
        logits = self.head(hidden)
        return (
            {"loss": self.loss_function(logits, labels, **kwargs), "logits": logits} if labels is not None else logits
        )


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **options))


def qwen(**options):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True, **options))


def balanced():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **HEADS, **sizes))


def attending(name):
    model = llama()
    model.config._attn_implementation_internal = name  # set as where it is installed
    return model


SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MODELS = {
    "plain": Plain,
    "recomputed": lambda: Plain(recomputes=True),
    "dropout": lambda: Plain(0.1),
    "llama": llama,
    "eager": lambda: llama(attn_implementation="eager"),
    "qwen": qwen,
    "sliding": lambda: qwen(**SLIDING),
}


def rows(number, form="targets", length=7):
    """Return rows of an odd length of which some words are no targets, in every row another number of them."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(24, (number, length), generator=generator)
    hidden = torch.randint(4, (number, 1), generator=generator) > torch.arange(length)
    labels = words.masked_fill(hidden, -100)
    found = [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]
    if form == "padding":
        masks = (torch.randint(3, length + 1, (number, 1), generator=generator) > torch.arange(length)).long()
        for each, mask in zip(found, masks, strict=True):
            each |= {"attention_mask": mask, "labels": each["labels"].masked_fill(mask == 0, -100)}
    if form == "packed":
        for number, each in enumerate(found):
            cut = 1 + number % (length - 1)
            each["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    return found


def train(folder, name, options, form="targets", steps=4, resume=None):
    """Run in every rank; returns losses, norms and evaluations, and the whole weights on rank 0."""
    plan = {"tp_plan": PLAN} if name == "plain" and "tp" in options.get("parallelism_config", "") else {}
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
        **plan,
        **options,
    )
    trainer = Trainer(MODELS[name](), args, train_dataset=rows(48, form), eval_dataset=rows(7, form))
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
    replicas = world // (4 if "tp=2" in sizes else 2)
    return world, {"parallelism_config": sizes, "per_device_train_batch_size": 4 // replicas, **options}


RING = "cp_comm_strategy=alltoall"
MESHES = {
    "sp 2": mesh(2, "sp=2"),
    "sp 2, tp 2": mesh(4, "sp=2,tp=2"),
    "sp 2, shards 2": mesh(4, "sp=2,dp_shard=2", **SHARDED),
    "sp 2, replicas 2": mesh(4, "sp=2"),
    "cp 2": mesh(2, "cp=2"),
    "cp 3": mesh(3, "cp=3"),  # of 8 heads
    "cp 2, tp 2": mesh(4, "cp=2,tp=2"),
    "cp 2, shards 2": mesh(4, "cp=2,dp_shard=2", **SHARDED),
    "ring 2": mesh(2, f"cp=2,{RING}"),
    "ring 3": mesh(3, f"cp=3,{RING}"),
    "ring 2, tp 2": mesh(4, f"cp=2,tp=2,{RING}"),
    "ring 2, shards 2": mesh(4, f"cp=2,dp_shard=2,{RING}", **SHARDED),
}


@row("numbers")
@pytest.mark.parametrize(
    ("name", "form", "data"),
    in_the_night(
        ("qwen", "sp 2", "targets"),
        ("qwen", "sp 2, shards 2", "targets"),
        ("llama", "ring 3", "padding"),
        *(("recomputed", form, "targets") for form in ("sp 2", "ring 2")),
        *((name, form, "targets") for name in ("llama", "plain") for form in MESHES),
        *(("qwen", form, "targets") for form in ("cp 2", "sp 2, tp 2", "sp 2, replicas 2")),
        *((name, "sp 2", data) for name in ("llama", "eager", "plain", "sliding") for data in ("padding", "packed")),
        ("sliding", "sp 2", "targets"),
        ("sliding", "cp 3", "padding"),
        ("eager", "cp 3", "packed"),
        ("sliding", "cp 2", "packed"),
        ("plain", "cp 2", "padding"),
        ("eager", "sp 2", "targets"),
    ),
)
def test_pieces_of_sequences_give_the_numbers_of_one_process(name, form, data, tmp_path):
    accumulated = {"gradient_accumulation_steps": 3, "per_device_eval_batch_size": 2}
    world, options = MESHES[form]
    alone = train(str(tmp_path / "alone"), name, ALONE | accumulated, data)
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), name, options | accumulated, data, timeout_s=300):
        assert_close(rank, alone, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({"bf16": True}, 0.05, marks=row("bf16"), id="bf16"),
        pytest.param({"gradient_checkpointing": True}, 2e-5, marks=row("recompute"), id="recomputed"),
        pytest.param({"label_smoothing_factor": 0.1}, 2e-5, marks=row("numbers"), id="smoothed"),
    ],
)
@pytest.mark.parametrize("form", ["sp 2", "cp 2", "ring 2"])
def test_what_a_run_may_have_beside_gives_the_numbers_of_one_process(form, options, tolerance, tmp_path):
    alone = train(str(tmp_path / "alone"), "llama", ALONE | options)
    world, on_mesh = MESHES[form]
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), "llama", on_mesh | options, timeout_s=300):
        assert_close(rank, alone, tolerance)


@pytest.mark.slow
@row("numbers")
@pytest.mark.parametrize(("name", "form"), [("plain", "sp 2"), ("llama", "cp 2"), ("llama", "ring 2")])
def test_compiled_pieces_give_the_numbers_of_one_process(name, form, tmp_path):
    alone = train(str(tmp_path / "alone"), name, ALONE)
    world, options = MESHES[form]
    compiled = options | {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for rank in run_ranks(train, world, str(tmp_path / "mesh"), name, compiled, timeout_s=300):
        assert_close(rank, alone, 2e-5)


@pytest.mark.slow
@row("resize")
@pytest.mark.parametrize(("first", "second"), [("sp 2", "alone"), ("alone", "sp 2")])
def test_a_run_goes_on_on_another_mesh(first, second, tmp_path):
    def run(form, *arguments):
        if form == "alone":
            return train(str(tmp_path / "out"), "llama", ALONE, "targets", *arguments)
        world, options = MESHES[form]
        return run_ranks(train, world, str(tmp_path / "out"), "llama", options, "targets", *arguments, timeout_s=300)[0]

    whole = train(str(tmp_path / "whole"), "llama", ALONE)
    run(first, 2)
    resumed = run(second, 4, True)
    assert_close((resumed[0][-4:], resumed[1]), (whole[0][-4:], whole[1]), 2e-5)
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "model").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in resumed[1].items())


@pytest.mark.slow
@row("resume")
@pytest.mark.parametrize("form", ["sp 2", "cp 2", "ring 2"])
def test_a_run_with_dropout_that_stopped_goes_on_to_the_same_bits(form, tmp_path):
    def run(folder, *arguments):
        options = MESHES[form][1]
        return run_ranks(train, 2, str(tmp_path / folder), "dropout", options, "targets", *arguments, timeout_s=300)[0]

    whole = run("whole")
    run("out", 2)
    history, weights = run("out", 4, True)
    assert history[-4:] == whole[0][-4:]
    assert all(torch.equal(value, whole[1][name]) for name, value in weights.items())


class Alone(nn.Module):
    """Each word by itself: there is nothing to exchange, and nothing shows that there is not."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)

    def forward(self, input_ids):
        return self.head(self.words(input_ids))


class Pooled(Plain):
    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids=position_ids).mean(1)


class Targets(Plain):
    """Calls its labels otherwise, and takes their mean."""

    def forward(self, input_ids, position_ids=None, targets=None):
        logits = super().forward(input_ids, position_ids=position_ids)
        return self.loss_function(logits, targets)


class Masked(Plain):
    """Says which labels count in an input whose name sounds like labels."""

    def forward(self, input_ids, position_ids=None, labels=None, label_mask=None):
        logits = super().forward(input_ids, position_ids=position_ids)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * label_mask.flatten()).sum() / label_mask.sum()


class Counted(Plain):
    """Counts every word as a target."""

    def forward(self, input_ids, position_ids=None, labels=None):
        logits = super().forward(input_ids, position_ids=position_ids)
        return -logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None]).mean()


WORDS = {"input_ids": torch.arange(14).reshape(2, 7)}
LABELS = WORDS["input_ids"].masked_fill(WORDS["input_ids"] < 3, -100)  # 11, of which pieces have no exact shares
DIFFERS = "is another one for a sequence in pieces"
TARGETS, MASKED = WORDS | {"targets": LABELS}, WORDS | {"labels": LABELS, "label_mask": torch.ones(2, 7)}
LEFT = WORDS | {"attention_mask": (torch.arange(7) > 2).long().expand(2, -1)}
REFUSALS = {
    "other labels": (Targets, 2, TARGETS, DIFFERS),
    "no labels": (Masked, 2, MASKED, DIFFERS),
    "no labels, whole numbers": (Masked, 2, MASKED | {"label_mask": torch.ones(2, 7, dtype=torch.long)}, DIFFERS),
    "padding is a target": (Counted, 2, WORDS | {"labels": WORDS["input_ids"]}, DIFFERS),
    "a mask of labels": (Masked, 2, MASKED, DIFFERS),
    "heads": (llama, 3, WORDS, "sp_size=3 does not divide num_attention_heads=8; 2, 4, 8 do"),
    "places": (lambda: Plain(with_positions=False), 2, WORDS, "takes the place of a word from position_ids"),
    "no attention": (Alone, 2, WORDS, "called no attention that can be divided"),
    "pooled": (Pooled, 2, WORDS, DIFFERS),
    "heads of a module": (Plain, 3, WORDS, "sp_size=3 does not divide 4 heads; 2, 4 do"),
    "entry": (
        Plain,
        2,
        WORDS | {"labels": torch.zeros(2, dtype=torch.long)},
        "labels of shape (2,) is not of sequences",
    ),
    "balance of experts": (balanced, 2, WORDS | {"labels": LABELS}, DIFFERS),
    "flash": (lambda: attending("flash_attention_2"), 2, WORDS, "set attn_implementation='sdpa', or use sp_size"),
    "ring, padding before words": (llama, 2, LEFT, "attention_mask has words after it; set cp_comm_strategy"),
    "ring, windows": (lambda: qwen(**SLIDING), 2, WORDS, "causal attention over whole sequences alone"),
    "ring, packed": (llama, 2, WORDS | {"position_ids": torch.arange(7)[None] % 4}, "or packed sequences"),
    "ring, eager": (lambda: llama(attn_implementation="eager"), 2, WORDS, "needs attn_implementation='sdpa'"),
    "ring, both directions": (Plain, 2, WORDS | {"attention_mask": torch.ones(2, 7)}, "without attn_mask alone"),
    "ring, dropout": (lambda: llama(attention_dropout=0.1).train(), 2, WORDS, "attention with dropout 0.1 is not done"),
    "cache": (llama, 2, WORDS | {"past_key_values": ()}, "generation with a cache is not done"),
}


def attempt(case):
    from tr_dist.mesh import Mesh
    from tr_dist.mesh.ring import Ring
    from tr_dist.mesh.sequence import Context, Sequences

    build, size, batch, _ = REFUSALS[case]
    kind = {"flash": Context, "ring": Ring}.get(case.partition(",")[0], Sequences)
    names = ["labels"] if case == "a mask of labels" else None
    strategy = Mesh(directions=[kind(size, names)], use_cpu=True)
    try:
        strategy.check_model(build())
        model = strategy.prepare(build())
        if case == "padding is a target":
            model(**{name: value[:, :2] for name, value in batch.items()})  # of these none is padded
        model(**batch)
    except ValueError as error:
        return str(error)
    finally:
        strategy.close(failed=True)
    return ""


@pytest.mark.parametrize(
    "case", ["places", *(pytest.param(name, marks=pytest.mark.slow) for name in REFUSALS if name != "places")]
)
def test_what_cannot_be_divided_is_refused(case):
    for text in run_ranks(attempt, REFUSALS[case][1], case, timeout_s=300):
        assert REFUSALS[case][3] in text


def loss_of_targets(label_names, batches):
    from tr_dist.mesh import Mesh
    from tr_dist.mesh.sequence import Sequences

    strategy = Mesh(directions=[Sequences(2, label_names)], use_cpu=True)
    model = strategy.prepare(Targets())
    found = [model(**batch).item() for batch in batches]
    strategy.close()
    return found


@row("numbers")
def test_labels_of_any_name_are_those_that_label_names_names():
    batches = [TARGETS, {name: value.flip(1) for name, value in TARGETS.items()}]
    expected = [Targets()(**batch).item() for batch in batches]
    for found in run_ranks(loss_of_targets, 2, ["targets"], batches, timeout_s=300):
        assert found == pytest.approx(expected, rel=1e-5)


def exchanges(name):
    """Return the bytes of each all-to-all of a forward and backward, whole logits, and dropout's numbers of a piece."""
    from tr_dist.mesh import Mesh, attention, ring
    from tr_dist.mesh.sequence import Context, Sequences

    sent, exchange, passed = [], attention.exchange, dist.P2POp

    def counted(value, *how):
        sent.append(value.nbytes)
        return exchange(value, *how)

    def counted_way(operation, value, *how):
        if operation is dist.isend:
            sent.append(value.nbytes)
        return passed(operation, value, *how)

    attention.exchange, dist.P2POp = counted, counted_way
    strategy = Mesh(directions=[{"sp": Sequences, "cp": Context, "ring": ring.Ring}[name](2)], use_cpu=True)
    model = strategy.prepare(Plain().double())
    logits = model(**WORDS).detach()  # the first, at which it is looked
    sent.clear()
    with strategy.accumulate(model, sync=True):
        outputs = model(**WORDS, position_ids=None, labels=None)
        strategy.backward(outputs.square().mean())
    of_step = list(sent)
    loss, of_pieces = model(**WORDS, labels=LABELS).values()
    try:
        of_pieces.softmax(-1)
    except AttributeError as error:
        words = str(error)
    strategy.close()
    return of_step, logits, loss.item(), words


@row("numbers")
@pytest.mark.parametrize(
    ("name", "forward", "backward", "copies"),
    [
        ("sp", 4, 4, 1),
        pytest.param("cp", 2, 2, 2, marks=pytest.mark.slow),
        # Keys and values in one, less often by one than there are processes; their gradients as often as these.
        pytest.param("ring", 1, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_exchanges_so_many_tensors_a_layer_and_direction(name, forward, backward, copies):
    model = Plain().double()
    loss, logits = model(**WORDS, labels=LABELS).values()
    for sent, found, found_loss, words in run_ranks(exchanges, 2, name, timeout_s=300):
        rows, piece, features, eight_bytes, layers = 2, 4, 16, 8, 2
        assert sent == [copies * rows * piece * features * eight_bytes] * ((forward + backward) * layers)
        torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
        assert found_loss == pytest.approx(loss.item(), rel=1e-12)
        assert "are not gathered in training" in words


def around(dtype, heads):
    """Return the largest differences of attention around a ring, and of its gradients, from attention of the whole."""
    from tr_dist.mesh import Mesh
    from tr_dist.mesh.ring import Ring

    ring = Ring(dist_size := int(os.environ["WORLD_SIZE"]))
    strategy = Mesh(directions=[ring], use_cpu=True)
    generator = torch.Generator().manual_seed(0)
    # Values have fewer features, as in latent attention.
    shapes = [(2, count, 6 * dist_size, size) for count, size in ((8, 8), (heads, 8), (heads, 4), (8, 4))]
    *whole, weights = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    pieces = [ring.own(state.transpose(1, 2)).transpose(1, 2).requires_grad_() for state in whole]
    expected = F.scaled_dot_product_attention(
        *(state.requires_grad_() for state in whole), is_causal=True, scale=0.3, enable_gqa=True
    )
    found = ring.attention(*pieces, is_causal=True, scale=0.3, enable_gqa=True)
    expected.backward(weights)
    found.backward(ring.own(weights.transpose(1, 2)).transpose(1, 2))
    pairs = [(found, expected), *((piece.grad, state.grad) for piece, state in zip(pieces, whole, strict=True))]
    errors = [(a - ring.own(b.transpose(1, 2)).transpose(1, 2)).detach().abs().max().item() for a, b in pairs]
    strategy.close()
    return errors


@row("numbers")
@pytest.mark.parametrize(
    ("size", "dtype", "heads", "tolerance"),
    [(3, torch.float64, 4, 1e-14), (2, torch.float32, 8, 1e-5), (4, torch.bfloat16, 2, 0.1)],
)
def test_attention_around_a_ring_is_that_of_the_whole_sequence(size, dtype, heads, tolerance):
    for errors in run_ranks(around, size, dtype, heads, timeout_s=100):
        assert max(errors) < tolerance
