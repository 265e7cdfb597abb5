"""Known causes for which two Trainers make other numbers of one script, as rows of tr-core's docs/differences.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tr_all.comparison import Comparison

ROUNDING = 3e-7  # what the sums of an evaluation's mean loss may be apart, relatively
ALIKE = 0.05  # a ratio this close to a whole number of micro-batches is one


@dataclass(frozen=True)
class Cause:
    """A row of the table of differences.

    Attributes:
        row: its first cell, word for word.
        why: what makes the numbers differ.
        applies: whether it can explain the difference of two runs.
        draws: whether it is about random numbers.
    """

    row: str
    why: str
    applies: Callable[[Comparison], bool]
    draws: bool = False


def causes_of(comparison: Comparison) -> list[Cause]:
    """Return the known causes that apply to two runs that differ."""
    return [] if comparison.equal else [cause for cause in CAUSES if cause.applies(comparison)]


def _in_training(comparison: Comparison) -> bool:
    ends = comparison.theirs.ends != comparison.ours.ends
    return ends or any(name in ("loss", "grad_norm", "train_loss") for name in comparison.differing())


def _fact(name: str) -> Callable[[Comparison], bool]:
    """Whether training differs, and something is so in the run with transformers' Trainer."""
    return lambda comparison: _in_training(comparison) and bool(comparison.theirs.facts.get(name))


def _optimizer(*beginnings: str) -> Callable[[Comparison], bool]:
    return lambda comparison: (
        _in_training(comparison) and str(comparison.theirs.facts.get("optim")).startswith(beginnings)
    )


def _evaluation_losses(comparison: Comparison) -> list[float]:
    """Return how far losses of evaluations are apart, relatively, where nothing of the training is."""
    if _in_training(comparison):
        return []
    keys = [key for key in comparison.keys.values() if not key.equal and key.name.endswith("_loss")]
    return [key.relative for key in keys]


def _losses(comparison: Comparison) -> Iterator[tuple[Any, Any]]:
    key = comparison.keys.get("loss")
    if key is not None and not key.equal:
        yield key.theirs, key.ours


def _times_too_large(comparison: Comparison) -> bool:
    number = comparison.theirs.facts.get("gradient_accumulation_steps") or 1
    pairs = [pair for pair in _losses(comparison) if all(isinstance(value, float) and value for value in pair)]
    return number > 1 and any(abs(theirs / ours - number) < ALIKE * number for theirs, ours in pairs)


def _not_finite(comparison: Comparison) -> bool:
    return any(
        isinstance(theirs, float) and isinstance(ours, float) and math.isfinite(theirs) and not math.isfinite(ours)
        for theirs, ours in _losses(comparison)
    )


def _trained_again(comparison: Comparison) -> bool:
    trainers = [begin["trainer"] for begin in comparison.theirs.begins]
    return _in_training(comparison) and len(trainers) > len(set(trainers))


def _begins_differ(comparison: Comparison) -> bool:
    theirs, ours = ([begin["weights"] for begin in run.begins] for run in (comparison.theirs, comparison.ours))
    return theirs != ours


def _order_follows_torch(comparison: Comparison) -> bool:
    return _in_training(comparison) and comparison.theirs.facts.get("seed_of_torch_is_the_arguments") is False


def _by_length(comparison: Comparison) -> bool:
    facts = comparison.theirs.facts
    wanted = facts.get("group_by_length") or facts.get("train_sampling_strategy") == "group_by_length"
    return _in_training(comparison) and bool(wanted)


def _end_of_text(comparison: Comparison) -> bool:
    collator = comparison.theirs.facts.get("collator") or {}
    is_it = collator.get("name") == "DataCollatorForLanguageModeling" and collator.get("mlm") is False
    return _in_training(comparison) and is_it and collator.get("pads_with_end_of_text", False)


def _generated(comparison: Comparison) -> bool:
    others = [name for name in comparison.differing() if not name.endswith("_loss")]
    return bool(comparison.theirs.facts.get("predict_with_generate")) and bool(others) and not _in_training(comparison)


def _settings_written(comparison: Comparison) -> bool:
    return bool(comparison.theirs.facts.get("generation_settings_written"))


CAUSES = (
    Cause(
        "Random numbers drawn while loading",
        "a data set, transform or collator draws random numbers: there from the global stream, here from one that is "
        "seeded for each batch",
        _fact("loading_draws"),
        draws=True,
    ),
    Cause(
        "Dropout",
        "the model draws random numbers, and each pass of a data loader takes one from the same stream there, not here",
        _fact("model_draws"),
        draws=True,
    ),
    Cause(
        "Order of the data",
        "torch was given another seed than that of the arguments, which the order follows there, not here",
        _order_follows_torch,
    ),
    Cause(
        "Building a Trainer",
        "the weights differ when training begins: building a Trainer seeds the generators there, not here",
        _begins_differ,
    ),
    Cause(
        "A loss that is NaN or infinite",
        "the log hides it there, and shows it here",
        _not_finite,
    ),
    Cause(
        "A model whose forward takes `**kwargs` and ignores `num_items_in_batch` (`BertForSequenceClassification`, "
        "`BertForTokenClassification`, T5), accumulation N",
        "the loss there is that of here times the number of micro-batches",
        _times_too_large,
    ),
    Cause(
        "Evaluation loss of a loss over tokens",
        "training is equal; the mean is over rows of the means of batches there, over targets here",
        lambda comparison: max(_evaluation_losses(comparison), default=0.0) > ROUNDING,
    ),
    Cause(
        "Rounding of an evaluation's mean loss",
        "training is equal; sums in float32 there, in float64 here",
        lambda comparison: 0.0 < max(_evaluation_losses(comparison), default=0.0) <= ROUNDING,
    ),
    Cause(
        "Padding of generations and labels",
        "training is equal; metrics of generations differ",
        lambda comparison: _generated(comparison) and not _settings_written(comparison),
    ),
    Cause(
        "Evaluation with generation",
        "training is equal; an evaluation there writes default settings into the model, which the next one obeys",
        lambda comparison: _generated(comparison) and _settings_written(comparison),
    ),
    Cause(
        "`DataCollatorForLanguageModeling(mlm=False)`, pad token = end of text",
        "the ends of texts are left out of the loss there, not here",
        _end_of_text,
    ),
    Cause(
        "`group_by_length`, resumed past its first epoch, or with random numbers drawn on the host",
        "the order is a function of the seed here, and of what else was drawn there",
        _by_length,
    ),
    Cause(
        "`neftune_noise_alpha` with padded batches",
        "noise by the padded length there, by each row's real tokens here; from another stream of random numbers",
        _fact("neftune_noise_alpha"),
    ),
    Cause(
        "`bf16=True` and a loss computed outside the model's forward (`compute_loss_func`, `compute_loss`)",
        "the loss is in float32 there, under autocast here",
        _fact("bf16"),
    ),
    Cause(
        "`auto_find_batch_size`",
        "other batch sizes were tried after memory ran out",
        _fact("auto_find_batch_size"),
    ),
    Cause(
        "A second `train()` of one Trainer",
        "it keeps the moments of the first run's optimizer there, and begins with new ones here",
        _trained_again,
    ),
    Cause("GaLore's basis", "full SVD there, subspace iteration here", _optimizer("galore")),
    Cause("`apollo_adamw`", "the limiter and the order of weight decay differ", _optimizer("apollo")),
    Cause("`adamw_8bit`", "bitsandbytes' there, our own here", _optimizer("adamw_8bit")),
    Cause(
        "`galore_*`, `lomo`, `adalomo`",
        "the libraries' classes there, our own here",
        _optimizer("lomo", "adalomo"),
    ),
    Cause(
        "`schedule_free_*`",
        "evaluations and saves round the weights there, and do not change them here",
        _optimizer("schedule_free"),
    ),
    Cause(
        "`whole_word_mask=True`",
        "always the mask token there; the arguments' shares here",
        lambda comparison: (comparison.theirs.facts.get("collator") or {}).get("name", "").endswith("WholeWordMask"),
    ),
)
