"""What a run is made of: a small set of choices, which one line of Python says."""

import math
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

LANGUAGE_MODELS = ("gpt2", "llama")
ON_TOKENS = (*LANGUAGE_MODELS, "llama_even", "llama_even_tied", "moe")
TAKES_COUNT = ("mlp_counted", "mlp_even", "bert", *ON_TOKENS)  # their forward may be given num_items_in_batch
USES_COUNT = ("mlp_counted", "mlp_even", *ON_TOKENS)  # and divides by it
OWN_LOADERS = ("own", "own_shuffled", "own_generator", "own_weighted", "own_batches", "own_list", "own_workers")
OVERRIDES = ("override", "override_looked", "override_counted", "parts")


@dataclass(frozen=True)
class Run:
    """A run; every default is the plainest choice, which a found run is brought back to as far as it goes.

    Attributes:
        family: what drew it; of no consequence.
        rate: the learning rate.
        habits: what a user does to it, by name, and the completed steps after which.
        stops: how it ends early (`raise`, `interrupt`, `signal`, `callback`), after how many steps and at which event;
            after each it is resumed.
        changed: what the run has otherwise once it is resumed, by name.
        restarts: whether the resumed run begins the epoch that it is in again.
        assigned: arguments with the values that they are built with; their own are assigned afterwards.
        way: how its loss is divided by the count, or uses it; empty for the plainest.
        twice: whether `train` is called once more.
        ranks: processes; the batches of those with other samples are together `batch`.
        mesh: directions in which processes compute a sample together, as in `parallelism_config`, and `shard` if those
            with other samples hold shards.
        options: further arguments, by name.
    """

    family: str = "plain"
    seed: int = 42
    data_seed: int | None = None
    model: str = "linear"
    data: str = "list"
    length: int = 8
    ragged: bool = False
    batch: int = 4
    accumulation: int = 1
    epochs: float = 1
    max_steps: int = -1
    drop_last: bool = False
    order: str = "random"
    loader: str = "trainer"
    workers: int = 0
    loss: str = "model"
    way: str = ""
    optimizer: str = "adamw_torch"
    rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    bf16: bool = False
    decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0
    clip: float = 1.0
    logging: str = "steps"
    logging_steps: float = 1
    log_first: bool = False
    evaluation: str = "no"
    eval_steps: float = 2
    eval_length: int = 5
    eval_batch: int = 3
    eval_delay: float = 0
    eval_first: bool = False
    metrics: bool = False
    eval_sets: bool = False
    eval_flush: int | None = None
    tokens_seen: str = "no"
    save: str = "no"
    save_steps: int = 1
    best: bool = False
    patience: int = 0
    around: str = ""
    habits: tuple[tuple[str, int], ...] = ()
    stops: tuple[tuple[str, int, str], ...] = ()
    changed: tuple[tuple[str, Any], ...] = ()
    restarts: bool = False
    assigned: tuple[tuple[str, Any], ...] = ()
    twice: bool = False
    ranks: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Run({', '.join(changed)})"

    @property
    def kind(self):
        """What the samples are."""
        if self.model in ON_TOKENS:
            return "tokens"
        return {"linear": "numbers", "bert": "sentences"}.get(self.model, "classes")

    @property
    def replicas(self):
        """Processes with other samples."""
        return self.ranks // math.prod(size for name, size in self.mesh if name not in ("ep", "shard", "ring"))

    @property
    def is_stream(self):
        """Whether the data has no index."""
        return self.data in ("stream", "sized_stream")

    @property
    def counts(self):
        """Whether the targets of a step are counted."""
        return self.model in TAKES_COUNT or self.loss in ("function_counted", "function_looked", "smoothing")

    @property
    def divides(self):
        """Whether the loss is divided by the count of the step's targets, and not a mean over its own batch."""
        if self.loss == "model":
            return self.model in USES_COUNT
        return self.loss in ("function_counted", "smoothing") or (self.loss == "override_counted" and self.counts)

    @property
    def shifts(self):
        """Whether the first label of a row is nobody's target."""
        return self.model in ON_TOKENS

    @property
    def batches_per_epoch(self):
        """Micro-batches of an epoch."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    @property
    def steps_per_epoch(self):
        """Steps of an epoch."""
        return -(-self.batches_per_epoch // self.accumulation)

    @property
    def steps(self):
        """Steps of the run, if nothing ends it early."""
        return self.max_steps if self.max_steps > 0 else _up(self.epochs * self.steps_per_epoch)

    @property
    def most_epochs(self):
        """Epochs after which the run ends, however short they were cut; a number of steps alone ends one of those."""
        return sys.maxsize if self.max_steps > 0 else _up(self.epochs)

    def after_the_change(self):
        """Return the run as it is once it is resumed."""
        return replace(self, **dict(self.changed), changed=(), stops=(), save="no")

    def plainer(self):
        """Yield this run with one choice after the other brought back, or towards, its default."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name == "family":
                continue
            yield replace(self, **{field.name: field.default})
            if isinstance(value, tuple) and len(value) > 1:
                fewer = [(*value[:i], *value[i + 1 :]) for i in range(len(value))]
                yield from (replace(self, **{field.name: some}) for some in fewer)
            if isinstance(value, int) and not isinstance(value, bool) and value > 2:
                yield from (replace(self, **{field.name: smaller}) for smaller in {value // 2, value - 1})


def _up(number):
    return int(-(-number // 1))
