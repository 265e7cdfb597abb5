"""Measure how far every backend is from one process on the union of the ranks' batches, and write it down.

    python tests/backends/equality.py [--write packages/tr-dist/docs/equality.md] [ROW ...]

Needs the packages; rows of DeepSpeed are left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from variants import VARIANTS

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

WORDS, WIDTH, LENGTH = 11, 16, 8
TOTAL, STEPS, RATE, MAX_NORM = 12, 6, 0.5, 0.05
EVEN, SHORT = 36, 31  # samples: three micro-batches of 12, or two and one of 7
ROUNDING = 2.0**-24  # of float32

CASES = {
    f"{accumulation}{' clip' * clips}{' mask' * masks}{' short' * is_short}": (accumulation, clips, masks, is_short)
    for accumulation, clips, masks, is_short in itertools.product((1, 3), (False, True), (False, True), (False, True))
}

_UNITS = {"transformer_layer_cls_to_wrap": ["Sequential"]}
# row -> (numbers of ranks, arguments)
ROWS = {
    "DDP": ((2, 3), VARIANTS["ddp"]),
    "FSDP2 full_shard": ((2, 3), {"fsdp": "full_shard auto_wrap", "fsdp_config": _UNITS}),
    "FSDP2 shard_grad_op": ((2, 3), {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": _UNITS}),
    "FSDP2 no_shard": ((2, 3), {"fsdp": "no_shard"}),
    "FSDP2 hybrid_shard, 2 machines of 2": ((4,), {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": _UNITS}),
    "FSDP2 full_shard, offload": ((2,), {"fsdp": "full_shard offload"}),
    "ZeRO-0": ((2,), VARIANTS["zero_0"]),
    "ZeRO-1": ((2,), VARIANTS["zero_1"]),
    "ZeRO-2": ((2, 3), VARIANTS["zero_2"]),
    "ZeRO-3": ((2, 3), VARIANTS["zero_3"]),
    "ZeRO-2, offload": ((2,), VARIANTS["zero_2_offload"]),
    "ZeRO-3, offload": ((2,), VARIANTS["zero_3_offload"]),
}


class Language(nn.Module):
    """A causal language model whose loss is the mean over the targets of the whole step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        embedded = self.embed(input_ids)
        before = embedded.cumsum(1) / torch.arange(1, LENGTH + 1, device=embedded.device, dtype=embedded.dtype)[:, None]
        logits = self.head(embedded + self.mix(before))
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        count = (targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


def rows(number, masks):
    """Return samples; masked ones have from none to all of their targets left, so that ranks have unequal numbers."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(number):
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[0] = -100  # is not a target: nothing comes before it
        if masks:
            labels[: index * 5 % (LENGTH + 1)] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def train(case, options, world_size=1, exact=False):
    """Return losses of all steps, and the weights (on rank 0)."""
    accumulation, clips, masks, is_short = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, save_strategy="no", use_cpu=True, disable_tqdm=True, log_level="error", logging_steps=1,
            optim="sgd", learning_rate=RATE, max_steps=STEPS, per_device_train_batch_size=TOTAL // world_size,
            gradient_accumulation_steps=accumulation, max_grad_norm=MAX_NORM if clips else 0.0, **options,
        )  # fmt: skip
        model = Language().double() if exact else Language()
        trainer = Trainer(model, args, train_dataset=rows(SHORT if is_short else EVEN, masks))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
        weights = {name: value.detach().double().clone() for name, value in weights.items()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.strategy.close()
    return losses, weights


def train_all(options, cases):
    """Run in every rank; where they are four, two machines of two."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 4:
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return [train(case, options, world_size) for case in cases]


def difference(one, other):
    """Return the largest relative difference of two runs' losses, and the largest absolute one of their weights."""
    assert len(one[0]) == len(other[0]) == STEPS
    assert one[1].keys() == other[1].keys()
    losses = max(abs(a - b) / abs(b) for a, b in zip(one[0], other[0], strict=True))
    return losses, max(float((value - other[1][name]).abs().max()) for name, value in one[1].items())


def gradient_sizes():
    """Return two sizes of the first step's gradient, and the size of the largest weight.

    They are the mean over the targets of their gradients' absolute values, of the weight where it is largest; and the
    sum over the weights of the absolute values of the mean gradient, divided by the loss.
    """
    model, targets, losses = Language(), 0, 0.0
    parameters = list(model.parameters())
    sizes, sums = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for sample in rows(EVEN, masks=False):
        for place in range(1, LENGTH):
            labels = torch.full((1, LENGTH), -100)
            labels[0, place] = sample["labels"][place]
            loss = model(sample["input_ids"][None], labels)["loss"]
            for size, total, gradient in zip(sizes, sums, torch.autograd.grad(loss, parameters), strict=True):
                size += gradient.abs()
                total += gradient
            targets, losses = targets + 1, losses + float(loss.detach())
    largest = max(float(size.max()) for size in sizes) / targets
    return (
        largest,
        sum(float(t.abs().sum()) for t in sums) / losses,
        max(float(p.detach().abs().max()) for p in parameters),
    )


def bounds(sizes):
    """Return what losses and weights may differ by, from what `gradient_sizes` returned: see the text of the page."""
    largest, slope, weight = sizes
    weights = STEPS * (RATE * largest * order_of_sums() + 2 * ROUNDING * weight)
    return order_of_sums() + slope * weights, weights


def order_of_sums():
    """Return what the order of the longest sum makes, relative to the sum of its terms' absolute values."""
    return 4 * math.sqrt(EVEN * (LENGTH - 1)) * ROUNDING


def measure(row, world_size, references, cases):
    """Return by case how far a row is from one process."""
    with warnings.catch_warnings():
        ranks = run_ranks(train_all, world_size, ROWS[row][1], cases, timeout_s=590)
    return {case: difference(found, references[case]) for case, found in zip(cases, ranks[0], strict=True)}


def table(measured, number):
    """Return one table in Markdown: of losses (0) or weights (1)."""
    lines = ["| " + " | ".join(["", "ranks", *CASES, "largest"]) + " |", "|---|---|" + "---|" * (len(CASES) + 1)]
    for (row, world_size), found in measured.items():
        values = [found[case][number] for case in CASES]
        lines.append("| " + " | ".join([row, str(world_size), *(f"{v:.0e}" for v in (*values, max(values)))]) + " |")
    return "\n".join(lines)


def page(measured, sizes):
    """Return the page that says what was measured."""
    loss_bound, weight_bound = bounds(sizes)
    libraries = f"torch {torch.__version__}"
    if any(row.startswith("ZeRO") for row, _ in measured):
        libraries += f" and deepspeed {importlib.import_module('deepspeed').__version__}"
    return (Path(__file__).parent / "equality_page.md").read_text(encoding="utf-8").format(
        libraries=libraries,
        numbers=sum(p.numel() for p in Language().parameters()),
        steps=STEPS, rate=RATE, total=TOTAL, length=LENGTH, max_norm=MAX_NORM, left=SHORT % TOTAL,
        targets=EVEN * (LENGTH - 1), order=f"{order_of_sums():.1e}",
        **{name: f"{size:.2f}" for name, size in zip(("largest", "slope", "weight"), sizes, strict=True)},
        losses=table(measured, 0), weights=table(measured, 1),
        loss_bound=f"{loss_bound:.1e}", weight_bound=f"{weight_bound:.1e}",
    )  # fmt: skip


def main(argv):
    """Measure the rows that are named, or all, print the page, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="rows to measure; all of them if none is given")
    parser.add_argument("--write", type=Path, help="file to write the page to")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    chosen = given.rows or [row for row in ROWS if has_deepspeed or not row.startswith("ZeRO")]
    references = {case: train(case, {}) for case in CASES}
    measured = {("float32, one process", 1): {c: difference(references[c], train(c, {}, exact=True)) for c in CASES}}
    for row in chosen:
        for world_size in ROWS[row][0]:
            measured[row, world_size] = measure(row, world_size, references, list(CASES))
            largest = [max(pair[n] for pair in measured[row, world_size].values()) for n in (0, 1)]
            print(f"{row}, {world_size} ranks: losses {largest[0]:.1e}, weights {largest[1]:.1e}", flush=True)
    sizes = gradient_sizes()
    text = page(measured, sizes)
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    exceeding = [
        (row, case) for row, found in measured.items() for case, pair in found.items()
        if any(value > bound for value, bound in zip(pair, bounds(sizes), strict=True))
    ]  # fmt: skip
    if exceeding:
        print(f"beyond the bounds: {exceeding}", file=sys.stderr)
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
