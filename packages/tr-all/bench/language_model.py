"""Measure tokens a second and MFU of a language model: a loop by hand, this Trainer, and that of transformers.

All train the same Llama with random weights, in bfloat16 on a GPU, on the same tokens, with and without
`torch.compile`, in turn, each in a process of its own. A run is measured from the end of its warm-up to its last step,
with the device waited for at both ends. MFU takes the operations of forward and backward without recomputation, and the
peak of the device in `tr_core.flops`; without a known peak it is left out.

Run: nox -s bench -- language-model [--sizes 125M 1.3B --rounds 5], or with `--sizes tiny` on a CPU
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core.flops import peak_flops

CONTENDERS = ("by hand", "tr-core", "transformers")
RATE, MAX_NORM = 1e-4, 1.0
LIMIT_S = 1200


@dataclass(frozen=True)
class Size:
    """Shapes of a model, and what a step trains on: sequences of so many tokens."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    sequences: int
    tokens: int


SIZES = {
    "125M": Size(768, 2048, 12, 12, 32_000, 16, 1024),
    "1.3B": Size(2048, 5461, 24, 16, 32_000, 4, 1024),
    "tiny": Size(64, 128, 2, 4, 256, 2, 32),
}


def build(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.tokens,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def operations_per_token(model: nn.Module, size: Size) -> float:
    """Return the floating-point operations of forward and backward for a token, with those of attention.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T, N without the embedding.
    """
    numbers = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    return 6.0 * numbers + 12.0 * size.layers * size.width * size.tokens


class Clock:
    """Notes the time, once the device is idle, at the step after warming up."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._device, self._warm_up, self._steps = device, warm_up, 0
        self.begun_s = 0.0

    def now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def before_forward(self, *given: Any) -> None:
        if self._steps == self._warm_up:
            self.begun_s = self.now_s()
        self._steps += 1


def rows(size: Size, steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (steps * size.sequences, size.tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def by_hand(model: nn.Module, data: list, size: Size, device: torch.device, *, compiled: bool) -> None:
    """The loop that one would write: autocast, clipping, a fused AdamW, a schedule."""
    model.to(device).train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    loader = torch.utils.data.DataLoader(
        data, batch_size=size.sequences, shuffle=True, pin_memory=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / len(loader)))
    parameters = list(model.parameters())
    for batch in loader:
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def by_trainer(library: str, model: nn.Module, data: list, size: Size, device: torch.device, *, compiled: bool) -> None:
    if library == "tr-core":
        from tr_core import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size.sequences,
        num_train_epochs=1,
        learning_rate=RATE,
        max_grad_norm=MAX_NORM,
        bf16=True,
        optim="adamw_torch_fused",
        torch_compile=compiled,
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        report_to="none",
        use_cpu=device.type == "cpu",
    )
    Trainer(model, args, train_dataset=data).train()


def measure(contender: str, size: Size, steps: int, warm_up: int, *, compiled: bool) -> dict[str, float]:
    """Train once, in this process; return tokens a second, MFU (0 if unknown) and the peak of memory in bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, data, clock = build(size), rows(size, warm_up + steps), Clock(device, warm_up)
    operations = operations_per_token(model, size)
    model.register_forward_pre_hook(clock.before_forward)
    if contender == "by hand":
        by_hand(model, data, size, device, compiled=compiled)
    else:
        by_trainer(contender, model, data, size, device, compiled=compiled)
    rate = steps * size.sequences * size.tokens / (clock.now_s() - clock.begun_s)
    peak = peak_flops(device, torch.bfloat16)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"tokens_per_second": rate, "mfu": rate * operations / peak if peak else 0.0, "memory_bytes": memory}


def in_a_process(contender: str, name: str, options: argparse.Namespace, *, compiled: bool) -> dict[str, float]:
    given = [contender, name, str(options.steps), str(options.warm_up), str(int(compiled))]
    done = subprocess.run(
        [sys.executable, __file__, "--measure", *given], stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["125M", "1.3B"])
    parser.add_argument("--rounds", type=int, default=5, help="times that each one runs (default 5)")
    parser.add_argument("--steps", type=int, default=60, help="measured steps of a run (default 60)")
    parser.add_argument("--warm-up", type=int, default=15, help="steps before them (default 15)")
    parser.add_argument("--without-compile", action="store_true", help="do not measure torch.compile")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.measure:
        contender, name, steps, warm_up, compiled = options.measure
        found = measure(contender, SIZES[name], int(steps), int(warm_up), compiled=bool(int(compiled)))
        print(json.dumps(found))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}; {options.rounds} rounds of {options.steps} steps in turn; medians\n")
    results: dict[str, Any] = {}
    for name in options.sizes:
        for compiled in (False,) if options.without_compile else (False, True):
            case = f"{name}, compiled" if compiled else name
            results[case] = compare(name, options, compiled=compiled)
            report(case, results[case])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare(name: str, options: argparse.Namespace, *, compiled: bool) -> dict[str, dict[str, float]]:
    """Return the medians of every contender, and its tokens a second beside those by hand, round by round."""
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
    for number in range(options.rounds):
        turn = number % len(CONTENDERS)
        for contender in CONTENDERS[turn:] + CONTENDERS[:turn]:
            found[contender].append(in_a_process(contender, name, options, compiled=compiled))
    medians: dict[str, dict[str, float]] = {}
    for contender, runs in found.items():
        medians[contender] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        pairs = zip(runs, found["by hand"], strict=True)
        shares = [mine["tokens_per_second"] / hand["tokens_per_second"] for mine, hand in pairs]
        medians[contender]["ratio"] = statistics.median(shares)
    return medians


def report(case: str, medians: dict[str, dict[str, float]]) -> None:
    print(f"{case}\n  {'':14}{'tokens/s':>12}{'beside by hand':>16}{'MFU':>8}{'memory':>12}")
    for contender, found in medians.items():
        mfu = f"{100 * found['mfu']:.1f} %" if found["mfu"] else ""
        memory = f"{found['memory_bytes'] / 2**30:.2f} GiB" if found["memory_bytes"] else ""
        print(f"  {contender:14}{found['tokens_per_second']:12,.0f}{found['ratio']:16.3f}{mfu:>8}{memory:>12}")
    print(flush=True)


if __name__ == "__main__":
    main()
