"""Draw ways to train with an optimizer at random, train so, and by a loop as plain as it can be written.

`python tests/optimizer_combination_runs.py --number 500` compares more of them than `test_optimizer_combinations.py`.
"""

import argparse
import itertools
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too
from optimizer_settings import SETTINGS, Setting

import tr_core.testing
import tr_dist.testing
from tr_core import SingleDevice, Trainer, TrainingArguments, set_seed
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_log import PrinterCallback
from tr_optim import LossScaler

STEPS, ROWS_OF_A_STEP, WORDS, WIDTH = 7, 12, 20, 16
MAX_NORM, RATE, SCALE = 0.2, 1e-2, 2.0**10
OVERFLOWS_IN = 4  # of the steps, from 1; a basis is due in it

CHOICES = {
    "accumulation": (1, 3),
    "clips": (False, True),
    "precision": ("fp32", "bf16", "fp16"),
    "checkpointing": ("none", "reentrant", "non-reentrant"),
    "tied": (False, True),
    "ranks": (1, 2),
    "loop": ("trainer", "own"),
}


@dataclass(frozen=True, eq=False)
class Combination:
    """One way to train.

    Attributes:
        setting: the optimizer; whether it clips is not its own matter here.
        accumulation: micro-batches of a step.
        clips: whether gradients are clipped to a norm.
        precision: `fp32`; `bf16` with autocast; `fp16` with scaled losses, computed in float32, as a CPU does not
            compute in float16.
        checkpointing: of activations.
        tied: whether the head is the embedding.
        ranks: processes.
        loop: `trainer`, or `own` for one that is written by hand.
    """

    setting: Setting
    accumulation: int
    clips: bool
    precision: str
    checkpointing: str
    tied: bool
    ranks: int
    loop: str

    def __str__(self):
        words = [str(self.setting), f"{self.accumulation} micro-batches", self.precision]
        words += ["clipped"] * self.clips + ["tied"] * self.tied
        words += [self.checkpointing] * (self.checkpointing != "none")
        return ", ".join([*words, f"{self.ranks} ranks", f"{self.loop} loop"])


def all_combinations():
    """Return every combination that there is; an optimizer that averages nothing has no ranks in an own loop."""
    made = itertools.starmap(Combination, itertools.product(SETTINGS, *CHOICES.values()))
    return [each for each in made if each.setting.in_backward or each.ranks == 1 or each.loop == "trainer"]


def draw(number, seed):
    """Return so many combinations, each optimizer as often as the others."""
    chance = random.Random(seed)
    pools = {str(setting): [c for c in all_combinations() if c.setting == setting] for setting in SETTINGS}
    for pool in pools.values():
        chance.shuffle(pool)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pools.values()))
    return list(itertools.islice((each for each in turns if each is not None), number))


REFUSALS = {
    "micro-batches": "gradient_accumulation_steps=3: (ada)?lomo applies and frees each gradient",
    "clipping": "max_grad_norm=0.2 cannot be held with optim_args='mode=immediate'",
    "scaling": "takes no scaled loss: an overflow would be in the weights before it is seen",
    "parts": "comes in several parts in one backward pass, .* Set use_reentrant=False",
}


def reason_to_refuse(combination):
    """Return the name of the reason why a combination cannot be had, or None."""
    setting = combination.setting
    if combination.accumulation > 1 and not setting.accumulates:
        return "micro-batches"
    if setting.way == "immediate" and combination.clips:
        return "clipping"
    if combination.precision == "fp16" and updates_projections_at_once(setting):
        return "scaling"
    if combination.ranks > 1 and combination.checkpointing == "reentrant" and not setting.in_backward:
        return "parts"
    return None


def updates_projections_at_once(setting):
    """Whether weights change in the backward pass, by projections."""
    return setting.way == "immediate" or (setting.in_backward and setting.optim.startswith(("apollo", "fira")))


class Network(nn.Module):
    """A layer that is used three times, a norm, and a head that may be the embedding; notes which rows it saw."""

    supports_gradient_checkpointing = True

    def __init__(self, tied, checkpointing="none"):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 24, bias=False)
        self.narrow = nn.Linear(24, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.checkpointing, self.seen = checkpointing, []
        self.overflows_in = range(0)  # calls whose loss overflows once it is scaled

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.checkpointing = "reentrant" if gradient_checkpointing_kwargs["use_reentrant"] else "non-reentrant"

    def forward(self, x, labels, index):
        self.seen.append(index.tolist())
        hidden = self.embed(x)
        for _ in range(3):
            hidden = self._segment(lambda h: torch.tanh(self.mlp(self.norm(h))) + h, hidden)
        hidden = self._segment(lambda h: self.narrow(torch.tanh(self.wide(h))), hidden)
        logits = self._segment(self.lm_head, hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss * (1e38 if len(self.seen) - 1 in self.overflows_in else 1.0), "logits": logits}

    def _segment(self, function, hidden):
        if self.checkpointing == "none":
            return function(hidden)
        return checkpoint(function, hidden, use_reentrant=self.checkpointing == "reentrant")


def rows():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (STEPS * ROWS_OF_A_STEP, 5), generator=generator)
    return [{"x": row, "labels": row.roll(1), "index": torch.tensor(i)} for i, row in enumerate(tokens)]


def batch_of(indices):
    samples = [rows()[index] for index in indices]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass
class Trained:
    """What came of a training.

    Attributes:
        weights: all weights.
        norms: gradient norms before clipping, of each step.
        is_estimated: whether they are said to be estimates.
        seen: rows of each micro-batch, in order.
    """

    weights: torch.Tensor
    norms: list[float]
    is_estimated: bool
    seen: list[list[int]]


def trainer_of(combination, setting, folder, strategy=None, callbacks=(), **changes):
    """Return a Trainer whose arguments are all that makes it a way to train."""
    set_seed(0)
    model = Network(combination.tied)
    if combination.precision == "fp16":
        first = (OVERFLOWS_IN - 1) * combination.accumulation
        model.overflows_in = range(first, first + combination.accumulation)
    options = {
        **setting.arguments,
        "per_device_train_batch_size": ROWS_OF_A_STEP // combination.accumulation // combination.ranks,
        "gradient_accumulation_steps": combination.accumulation,
        "max_grad_norm": MAX_NORM if combination.clips else 0,
        "bf16": combination.precision == "bf16",
        "max_steps": STEPS,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-5,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    if combination.checkpointing != "none":
        options["activation_checkpointing"] = True
        options["activation_checkpointing_kwargs"] = {"use_reentrant": combination.checkpointing == "reentrant"}
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    made = Trainer(model, args, train_dataset=rows(), callbacks=list(callbacks), strategy=strategy)
    made.remove_callback(PrinterCallback)
    return made


def scaling(strategy):
    """Have a strategy scale losses as under float16, which the CPU does not compute in."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    package = tr_core.testing if isinstance(strategy, SingleDevice) else tr_dist.testing
    return package.set_loss_scaler(strategy, scaler)


def train(combination):
    """Train as a combination says, in each of its ranks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return (train_by_trainer if combination.loop == "trainer" else train_by_hand)(combination, folder)


def train_by_trainer(combination, folder):
    if combination.precision == "fp16":
        strategy = scaling(SingleDevice(use_cpu=True) if combination.ranks == 1 else DDP(use_cpu=True))
    else:
        strategy = None
    trainer = trainer_of(combination, combination.setting, folder, strategy)
    try:
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        estimated = getattr(trainer.optimizer, "norm_is_estimated", False)
        return Trained(weights_of(trainer.model), norms, estimated, trainer.model.seen)
    finally:
        trainer.strategy.close(failed=True)


def train_by_hand(combination, folder):
    """Train by the loop that a user of the optimizers alone writes."""
    trainer = trainer_of(combination, combination.setting, folder)
    model, optimizer, max_norm = trainer.model, trainer.create_optimizer(), MAX_NORM if combination.clips else None
    if combination.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": combination.checkpointing == "reentrant"})
    in_backward = combination.setting.in_backward
    if in_backward:
        optimizer.bind(trainer.strategy)
        if optimizer.updates_in_backward:
            optimizer.clip_to(max_norm)
    scaler = LossScaler("cpu", init_scale=SCALE, enabled=combination.precision == "fp16")
    schedule, norms = schedule_of(optimizer), []
    for step in range(STEPS):
        for k in range(combination.accumulation):
            loss = loss_of(model, own_rows(combination, step, k, trainer.strategy.rank), combination)
            if in_backward:
                scaler.backward(optimizer, loss, last=k == combination.accumulation - 1)
            else:
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm(max_norm) if in_backward else clip(model, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        norms.append(norm.item())
        if norm.isfinite():
            schedule.step()
    trainer.strategy.close()
    return Trained(weights_of(model), norms, getattr(optimizer, "norm_is_estimated", False), model.seen)


def own_rows(combination, step, k, rank):
    """Return the rows of a micro-batch on a rank."""
    size = ROWS_OF_A_STEP // combination.accumulation // combination.ranks
    first = step * ROWS_OF_A_STEP + (k * combination.ranks + rank) * size
    return range(first, first + size)


def loss_of(model, indices, combination):
    with torch.autocast("cpu", torch.bfloat16, enabled=combination.precision == "bf16"):
        return model(**batch_of(indices))["loss"] / combination.accumulation


def clip(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), torch.inf if max_norm is None else max_norm)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS))


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


ORDINARY = {
    "lomo": Setting("sgd"),
    "adalomo": Setting("adafactor", options={"optim_args": "scale_parameter=true"}),
}


def ordinary(setting):
    """Return the setting that makes the same updates of ordinary gradients."""
    if setting.optim in ORDINARY:
        return ORDINARY[setting.optim]
    options = dict(setting.options)
    if "optim_args" in options:
        options["optim_args"] = re.sub(", (mode|reduction)=[a-z]+", "", options["optim_args"])
    return Setting(setting.optim.removesuffix("_layerwise"), options=options)


def train_plainly(combination, found):
    """Train in one process, with ordinary gradients of the same micro-batches, all of which add up in `.grad`.

    Args:
        combination: what is to be equal to this.
        found: what each of its ranks ended with.

    Returns:
        The weights, and the norms before clipping; those that are said to be estimates are clipped by as they were.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(combination, ordinary(combination.setting), folder)
    model, optimizer = trainer.model, trainer.create_optimizer()
    model.overflows_in = range(0)
    if combination.precision == "bf16":  # what is cast once for three uses adds up their gradients in 16 bits
        model.checkpointing = combination.checkpointing
    schedule, norms = schedule_of(optimizer), []
    for step in range(STEPS):
        for k in range(combination.accumulation):
            for rank in found:
                indices = rank.seen[step * combination.accumulation + k]
                (loss_of(model, indices, combination) / len(found)).backward()
        norm = clip(model, None)
        if combination.precision == "fp16" and step + 1 == OVERFLOWS_IN:
            norms.append(torch.inf)
            optimizer.zero_grad()
            continue
        norms.append(norm.item())
        if combination.clips:
            used = found[0].norms[step] if found[0].is_estimated else norm
            for parameter in model.parameters():
                parameter.grad.mul_(min(1.0, MAX_NORM / (used + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return weights_of(model), norms


def tolerance_of(combination):
    """Return how far weights may be from those of the plain loop, which are changed by some hundredths."""
    if "8bit" in combination.setting.optim:
        return 1e-3  # a rounding error can become a step of 8 bits
    if combination.precision == "bf16":
        return 3e-4  # or of bfloat16, in which the forward pass sees the weights
    # A column's step size is a quotient of two norms of few numbers each.
    return 1e-5 if combination.setting.optim.startswith("apollo") else 1e-6


def problem_of(combination, outcome):
    """Say what is wrong with what came of a combination: the results of its ranks, or an error; empty if nothing is."""
    reason = reason_to_refuse(combination)
    if isinstance(outcome, Exception):
        if reason is not None and re.search(REFUSALS[reason], str(outcome)):
            return ""
        return f"{type(outcome).__name__}: {outcome}"
    if reason is not None:
        return f"is not refused for its {reason}"
    first = outcome[0]
    if any(not torch.equal(first.weights, other.weights) for other in outcome[1:]):
        return "the ranks hold different bits"
    expected, norms = train_plainly(combination, outcome)
    if combination.clips and not max(norm for norm in norms if norm < torch.inf) > 2 * MAX_NORM:
        return f"nothing was to be clipped: the norms are {norms}"
    tolerance = tolerance_of(combination)
    distance = (first.weights - expected).abs().max().item()
    if not distance < tolerance:
        return f"the weights are {distance:.1e} from those of the plain loop"
    share = 0.5 if first.is_estimated else 100 * tolerance
    wrong = [(a, b) for a, b in zip(first.norms, norms, strict=True) if b < torch.inf and not abs(a / b - 1) < share]
    if wrong or any(a < torch.inf for a, b in zip(first.norms, norms, strict=True) if b == torch.inf):
        return f"the norms are {first.norms}, not {norms}"
    return ""


def outcome_of(combination):
    """Train in this process; return the result, or the error."""
    try:
        return [train(combination)]
    except Exception as error:
        return error


def outcomes_of_a_rank(combinations):
    """Train all combinations in every rank; return the result or the error of each."""
    outcomes = []
    for combination in combinations:
        outcome = outcome_of(combination)
        outcomes.append(outcome if isinstance(outcome, list) else RuntimeError(f"{type(outcome).__name__}: {outcome}"))
    return outcomes


def problems_of(combinations, timeout_s=120.0):
    """Return by combination what is wrong with it, empty texts left out."""
    alone = [combination for combination in combinations if combination.ranks == 1]
    outcomes = {combination: outcome_of(combination) for combination in alone}
    shared = [combination for combination in combinations if combination.ranks > 1]
    ranks = run_ranks(outcomes_of_a_rank, 2, shared, timeout_s=timeout_s) if shared else []
    for combination, of_ranks in zip(shared, zip(*ranks, strict=True), strict=False):
        errors = [outcome for outcome in of_ranks if isinstance(outcome, Exception)]
        outcomes[combination] = errors[0] if errors else [outcome[0] for outcome in of_ranks]
    problems = {combination: problem_of(combination, outcome) for combination, outcome in outcomes.items()}
    return {combination: problem for combination, problem in problems.items() if problem}


def main(argv=None):
    """Print what is wrong, and the counts; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=300, help="of combinations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (%(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    began_s = time.monotonic()
    drawn = draw(options.number, options.seed)
    problems = problems_of(drawn, timeout_s=5.0 * len(drawn) + 60)
    for combination, problem in problems.items():
        print(f"{combination}: {problem}")
    refused = sum(reason_to_refuse(combination) is not None for combination in drawn)
    print(
        f"{len(drawn)} of {len(all_combinations())} combinations, {refused} of them refused, "
        f"{time.monotonic() - began_s:.0f} s, mismatches {len(problems)}"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
