"""Scenarios that both Trainers train alike: data, events, logs, counts, state, checkpoints, weights, bit for bit."""

import json
import math
from contextlib import contextmanager

import datasets
import parity_data as data
import parity_models as models
import pytest
import torch
from parity_callbacks import At
from torch.nn import functional as F
from torch.utils.data import DataLoader

CLASSES, EVALUATION = data.classes(), data.classes(9, seed=8)
TOKENS, EVEN_TOKENS = (
    data.tokens(),
    data.tokens(6, seed=9, masked=False),
)  # as many targets in each row: see `evaluated`
SEVERAL = {"near": EVALUATION, "far": data.classes(5, seed=9)}
CAUSAL = {"per_device_train_batch_size": 2, "learning_rate": 0.01}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3}


def of(model=models.Mlp, train=CLASSES, evaluation=None, **more):
    """Return a scenario: what the fixture `parity` is given."""
    return (model, train, evaluation), more


def evaluated(**more):
    """Return a scenario with evaluations; of tokens, the reference takes the mean of the batches' means."""
    return of(evaluation=more.pop("evaluation", EVALUATION), **more)


def with_flag(event, step, **more):
    """Return a scenario in which a callback sets flags at one event of one step."""
    flags = {name: more.pop(name) for name in list(more) if name.startswith("should_")}
    return evaluated(callbacks=lambda: [At(event, step, **flags)], **more)


def saved(**more):
    return of(save_strategy="steps", **more)


# Data


class Fetched(data.Samples):
    def __getitems__(self, indices):
        return [self.samples[index] for index in indices]


class Sized(data.Stream):
    def __len__(self):
        return len(self.samples)


class Restarting(data.Stream):
    """A stream in another order each pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        count = len(self.samples)
        return iter([self.samples[(index + 5 * self.epoch) % count] for index in range(count)])


def table():
    rows = [{**sample, "x": sample["x"].tolist(), "note": "text", "weight": 1.0} for sample in data.classes().samples]
    return datasets.Dataset.from_list(rows)


def changed(change, samples=data.classes):
    """Return samples of which each was changed."""
    made = samples()
    return data.Samples([change(dict(sample)) for sample in made.samples])


def renamed(name, **options):
    return changed(lambda sample: {**sample, name: sample.pop("labels")}, **options)


def poisoned():
    samples = data.classes()
    samples.samples[4]["x"][0] = math.nan
    return samples


class AnyInput(models.Linear):
    def forward(self, x, labels=None):
        return super().forward(x.float().reshape(len(x), -1).expand(-1, 5), labels)


VALUES = {
    "lists": lambda x: x.tolist(),
    "arrays": lambda x: x.numpy(),
    "integer tensors": lambda x: x.long(),
    "numbers": lambda x: float(x[0]),
}


def half_frozen():
    model = models.Mlp()
    model.first.requires_grad_(False)
    return model


# Losses and overrides


def summed(outputs, labels, num_items_in_batch=None):
    if num_items_in_batch is None:
        return F.cross_entropy(outputs["logits"], labels)
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def collate(samples):
    return {"x": torch.stack([s["x"] for s in samples]), "labels": torch.tensor([s["labels"] for s in samples])}


class WeightedLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class OwnLoaders:
    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        return DataLoader(self.train_dataset, 3, shuffle=True, collate_fn=collate, generator=generator)

    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(self.eval_dataset, 3, collate_fn=collate)


class OwnOptimizer:
    def create_optimizer(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.7)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer, lambda step: 1 - step / (2 * num_training_steps)
            )
        return self.lr_scheduler


class OwnStep:
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        return loss


class OwnPrediction:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return 2 * loss, logits, labels


class OwnDecay:
    def get_decay_parameter_names(self, model):
        return ["last.weight"]


class OwnEvaluation:
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return {**metrics, "eval_score": -metrics["eval_loss"]}


class OwnOptimizerClass:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.NAdam, {"lr": args.learning_rate, "betas": (0.8, 0.9)}


class Backwards(torch.utils.data.Sampler):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return reversed(range(len(self.dataset)))


class OwnSamplers:
    def _get_train_sampler(self, train_dataset=None):
        return Backwards(train_dataset)

    def _get_eval_sampler(self, eval_dataset):
        return Backwards(eval_dataset)


class OwnContext:
    @contextmanager
    def compute_loss_context_manager(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield


class OwnCount:
    def _get_num_items_in_batch(self, batch_samples, device):
        return sum(int((batch["labels"] != -100).sum()) for batch in batch_samples)


class EverySecond:
    def _maybe_log_save_evaluate(self, *given, **named):
        if self.state.global_step % 2:
            super()._maybe_log_save_evaluate(*given, **named)


class OwnBest:
    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return {**metrics, "eval_own": -metrics["eval_loss"]}

    def _determine_best_metric(self, metrics, trial):
        return super()._determine_best_metric(metrics=metrics, trial=trial)


def before(kind):
    """Return what puts a class before a side's Trainer."""
    return lambda trainer: type(kind.__name__, (kind, trainer), {})


def accuracy(prediction):
    logits, labels = prediction
    return {"accuracy": (logits.argmax(-1) == labels).mean(), "rows": len(labels)}


METRICS = {"compute_metrics": accuracy}
OVERRIDES = [WeightedLoss, OwnLoaders, OwnOptimizer, OwnStep, OwnPrediction, OwnDecay, OwnSamplers, OwnContext]
LOGGING = [
    {"logging_strategy": "no"},
    {"logging_strategy": "epoch"},
    {"logging_steps": 3},
    {"logging_steps": 0.3},
    {"logging_steps": 4, "logging_first_step": True},
    {"logging_steps": 1, "logging_first_step": True},
    {"logging_strategy": "epoch", "logging_first_step": True},
    {"logging_steps": 3, "gradient_accumulation_steps": 2},
    {"logging_steps": 100},
]
SAVING = [
    {"save_strategy": "steps", "save_steps": 3},
    {"save_strategy": "steps", "save_steps": 5},
    {"save_strategy": "steps", "save_steps": 0.3},
    {"save_strategy": "steps", "save_steps": 100},
    {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1},
    {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2},
    {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2},
    {"save_strategy": "epoch"},
    {"save_strategy": "epoch", "max_steps": 7},
    {"save_strategy": "epoch", "save_only_model": True},
]
BESTS = [
    {**BEST, "save_strategy": "best", "metric_for_best_model": "loss"},
    {**BEST, "save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True},
    {**BEST, "save_strategy": "best", "metric_for_best_model": "loss", "load_best_model_at_end": True},
    {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True},
    {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.5},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"},
]
CHECKPOINTED = [None, {"use_reentrant": False}, {"use_reentrant": True}, {"every_n_layers": 2}, {"early_stop": False}]


def each(name, makes, values):
    """Return a row for each value, named after it."""
    return {f"{name}: {getattr(value, '__name__', value)}": makes(value) for value in values}


SCENARIOS = {
    # Steps
    "a plain run": of(models.Linear, data.regression()),
    "a model that returns a tuple": of(models.TupleMlp),
    "a frozen layer": of(half_frozen, weight_decay=0.1),
    **each("samples", lambda count: of(train=data.classes(count)), (16, 17, 18, 3)),
    # The reference's samples a second count those that were dropped.
    **each("dropped of", lambda n: of(train=data.classes(n), dataloader_drop_last=True, but=["rates"]), (16, 18)),
    "accumulation and a dropped batch": of(gradient_accumulation_steps=3, dataloader_drop_last=True, but=["rates"]),
    **each("accumulation", lambda number: of(gradient_accumulation_steps=number), (2, 3, 7)),
    **each("epochs", lambda epochs: of(num_train_epochs=epochs, gradient_accumulation_steps=2), (0.5, 1.5, 1.8)),
    **each("max_steps", lambda steps: of(max_steps=steps), (1, 3, 5, 12)),
    "max_steps inside an epoch with accumulation": of(max_steps=5, gradient_accumulation_steps=2),
    **each("seeds", lambda seeds: of(**seeds), ({"seed": 7}, {"data_seed": 11}, {"seed": 3, "data_seed": 5})),
    "the sequential order": of(train_sampling_strategy="sequential"),
    "worker processes": of(dataloader_num_workers=2, num_train_epochs=1),
    # Data
    **each("a stream that begins again", lambda n: of(train=data.Stream(CLASSES), max_steps=n), (3, 5, 11)),
    # 16 samples are 4 micro-batches: no update is left open at the end of a pass, which the reference drops.
    "a stream with accumulation": of(train=data.Stream(data.classes(16)), max_steps=5, gradient_accumulation_steps=2),
    "a stream with a length": of(train=Sized(CLASSES), gradient_accumulation_steps=2),
    "a stream that is told the epoch": of(train=Restarting(CLASSES), max_steps=9),
    "samples that are fetched many at a time": of(train=Fetched(CLASSES.samples)),
    "a list of samples": of(train=[dict(sample) for sample in CLASSES.samples]),
    "a table of which columns are dropped": of(train=table, evaluation=table),
    "a table that gives tensors": of(train=lambda: table().with_format("torch", columns=["x", "labels"])),
    "a stream of a table": of(train=lambda: table().to_iterable_dataset(), max_steps=6),
    "columns that the model does not take": of(train=changed(lambda sample: {**sample, "note": "a", "weight": 1.0})),
    "labels named label": of(train=renamed("label")),
    "labels that are tensors": of(train=changed(lambda sample: {**sample, "labels": torch.tensor(sample["labels"])})),
    "rows of label_ids": of(models.Linear, renamed("label_ids", samples=data.regression)),
    **each(
        "values that are",
        lambda kind: of(AnyInput, changed(lambda s: {**s, "x": VALUES[kind](s["x"])}, samples=data.regression)),
        VALUES,
    ),
    # Callbacks
    "the events of an accumulated epoch": evaluated(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2),
    **{
        f"{flag} at {event}": with_flag(event, 2, **{flag: True})
        for flag in ("should_training_stop", "should_epoch_stop")
        for event in ("on_step_end", "on_log", "on_step_begin")
    },
    "an epoch stopped at an accumulated step": with_flag(
        "on_step_end", 2, should_epoch_stop=True, gradient_accumulation_steps=2
    ),
    **each("a stop", lambda event: with_flag(event, 5, should_training_stop=True), ("on_epoch_end", "on_epoch_begin")),
    "a stop at an evaluation": with_flag(
        "on_evaluate", 4, should_training_stop=True, eval_strategy="steps", eval_steps=2
    ),
    **{
        f"{flag} asked for at {event}": with_flag(event, step, **{flag: True}, logging_strategy="no")
        for flag in ("should_log", "should_evaluate")
        for event, step in (("on_step_end", 3), ("on_epoch_end", 5), ("on_optimizer_step", 3))
    },
    **{
        f"{flag} taken back at {step}": with_flag(
            "on_step_end", step, **{flag: False}, eval_strategy="steps", eval_steps=2
        )
        for flag in ("should_log", "should_evaluate", "should_training_stop")
        for step in (4, 10)
    },
    **each("logs", lambda arguments: of(**arguments), LOGGING),
    # Evaluations
    **each(
        "evaluations every",
        lambda steps: evaluated(options=METRICS, eval_strategy="steps", eval_steps=steps, logging_steps=2),
        (1, 3, 4, 0.25, None),
    ),
    "an evaluation every epoch": evaluated(options=METRICS, eval_strategy="epoch"),
    "an evaluation at a stop inside an epoch": evaluated(eval_strategy="epoch", max_steps=7),
    **{
        f"evaluations by {strategy} after {delay}": evaluated(eval_strategy=strategy, eval_steps=3, eval_delay=delay)
        for strategy, delay in (("steps", 4), ("steps", 3.5), ("epoch", 2), ("epoch", 1.5), ("steps", 100))
    },
    "an evaluation on start": evaluated(eval_strategy="epoch", eval_on_start=True),
    **each(
        "several sets",
        lambda strategy: of(evaluation=SEVERAL, options=METRICS, eval_strategy=strategy, eval_steps=4),
        ("steps", "epoch"),
    ),
    "a causal model": of(
        models.llama, TOKENS, EVEN_TOKENS, eval_strategy="epoch", per_device_eval_batch_size=2, learning_rate=0.01
    ),
    "an evaluation of a stream": evaluated(
        evaluation=data.Stream(EVALUATION), eval_strategy="epoch", per_device_eval_batch_size=4
    ),
    # Losses
    **{
        f"{model.__name__} with masked tokens, accumulated {number} times": of(
            model, TOKENS, gradient_accumulation_steps=number, **CAUSAL
        )
        for number in (1, 2, 4)
        for model in (models.llama, models.gpt2)
    },
    "ragged sequences": of(
        models.llama,
        data.ragged_tokens(),
        options={"data_collator": data.pad_tokens},
        gradient_accumulation_steps=2,
        **CAUSAL,
    ),
    "a classifier of transformers": of(models.bert_classifier, data.sentences(), learning_rate=0.01),
    **each(
        "masked targets",
        lambda model: of(model, TOKENS, EVEN_TOKENS, learning_rate=0.01, eval_strategy="epoch"),
        (models.bert_tagger, models.t5),
    ),
    **each(
        "a loss divided by the count, accumulation",
        lambda number: evaluated(
            options={"compute_loss_func": summed}, gradient_accumulation_steps=number, eval_strategy="epoch"
        ),
        (1, 2, 3),
    ),
    **each(
        "losses that are not numbers left out of the log, accumulation",
        lambda number: of(
            train=poisoned,
            evaluation=poisoned,
            logging_nan_inf_filter=True,
            logging_steps=3,
            gradient_accumulation_steps=number,
            eval_strategy="epoch",
            per_device_eval_batch_size=4,
        ),
        (1, 2),
    ),
    # Optimizers, schedules and precision
    **each(
        "optimizer",
        lambda name: of(optim=name, weight_decay=0.1),
        ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"),
    ),
    "settings of adam": of(adam_beta1=0.7, adam_beta2=0.9, adam_epsilon=1e-3),
    "momentum of sgd": of(optim="sgd", optim_args="momentum=0.9, nesterov=True"),
    "momentum of rmsprop": of(optim="rmsprop", optim_args="alpha=0.9, momentum=0.5"),
    **{
        f"weight decay of {model.__name__}": of(model, train, weight_decay=0.5, learning_rate=0.01, num_train_epochs=1)
        for model, train in ((models.Mlp, CLASSES), (models.bert_classifier, data.sentences()), (models.llama, TOKENS))
    },
    **each("clipped to", lambda norm: of(max_grad_norm=norm, optim="sgd"), (0.0, 1e-3, 1.0, 1e6)),
    "an accumulated gradient that is clipped": of(max_grad_norm=0.05, optim="sgd", gradient_accumulation_steps=2),
    **{
        f"{schedule} after {warmup} steps": of(
            models.Linear, data.regression(), lr_scheduler_type=schedule, warmup_steps=warmup
        )
        for schedule in ("linear", "cosine", "constant", "constant_with_warmup")
        for warmup in (0, 3, 0.25)
    },
    "settings of a schedule": of(
        models.Linear, data.regression(), lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 1.5}
    ),
    "the greedy schedule": evaluated(
        lr_scheduler_type="greedy",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "min_lr": 1e-3, "max_lr": 1.0},
        eval_strategy="steps",
        eval_steps=1,
    ),
    "bf16": evaluated(bf16=True, learning_rate=0.01, eval_strategy="epoch"),
    "bf16 of a causal model": of(
        models.llama, TOKENS, EVEN_TOKENS, bf16=True, learning_rate=0.01, eval_strategy="epoch"
    ),
    "bf16 with accumulation and clipping": of(bf16=True, gradient_accumulation_steps=2, max_grad_norm=0.1),
    "bf16 with a loss function": of(bf16=True, options={"compute_loss_func": summed}, gradient_accumulation_steps=2),
    # Memory and compilation
    **each(
        "activation checkpointing",
        lambda options: of(
            models.llama,
            TOKENS,
            activation_checkpointing=True,
            activation_checkpointing_kwargs=options,
            gradient_accumulation_steps=2,
            **CAUSAL,
        ),
        CHECKPOINTED,
    ),
    **each(
        "activation checkpointing of",
        lambda model: of(
            model, TOKENS, EVEN_TOKENS, activation_checkpointing=True, learning_rate=0.01, eval_strategy="epoch"
        ),
        (models.gpt2, models.t5, models.bert_tagger),
    ),
    "activation checkpointing by its older name": of(
        models.llama,
        TOKENS,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        **CAUSAL,
    ),
    **each(
        "compiled by",
        lambda backend: evaluated(torch_compile_backend=backend, eval_strategy="epoch"),
        ("eager", "aot_eager"),
    ),
    # The reference's compiled model is called by another name, and the recorder counts our trial call too.
    "a compiled causal model": of(models.llama, TOKENS, torch_compile_backend="eager", but=("batches",), **CAUSAL),
    **each(
        "use_cache",
        lambda on: of(models.llama, TOKENS, EVEN_TOKENS, use_cache=on, eval_strategy="epoch", learning_rate=0.01),
        (False, True),
    ),
    # As a text: the reference writes into the dict that it is given.
    **each(
        "sync_each_batch",
        lambda on: of(
            accelerator_config=json.dumps(
                {
                    "gradient_accumulation_kwargs": {"sync_each_batch": on},
                    "non_blocking": True,
                    "dispatch_batches": False,
                }
            ),
            gradient_accumulation_steps=2,
        ),
        (True, False),
    ),
    # The option is for evaluations outside training, in both.
    **each(
        "in training an evaluation is in 32 bits with",
        lambda option: evaluated(eval_strategy="epoch", **{option: True}),
        ("bf16_full_eval", "fp16_full_eval"),
    ),
    # Overrides
    **{
        f"{kind.__name__}, accumulation {number}": evaluated(
            subclass=before(kind), weight_decay=0.3, eval_strategy="epoch", gradient_accumulation_steps=number
        )
        for kind in OVERRIDES
        for number in (1, 2)
    },
    "OwnEvaluation": evaluated(
        subclass=before(OwnEvaluation), eval_strategy="epoch", metric_for_best_model="score", save_strategy="best"
    ),
    "OwnBest": evaluated(
        subclass=before(OwnBest),
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="eval_own",
        greater_is_better=True,
        load_best_model_at_end=True,
    ),
    "OwnOptimizerClass": of(subclass=before(OwnOptimizerClass), weight_decay=0.1),
    "OwnCount of a causal model": of(
        models.llama, TOKENS, gradient_accumulation_steps=2, subclass=before(OwnCount), **CAUSAL
    ),
    "EverySecond": of(subclass=before(EverySecond)),
    "an optimizer class with its arguments": of(
        options={"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-6})}, weight_decay=0.1
    ),
    # Checkpoints
    **each("saves", lambda arguments: of(**arguments), SAVING),
    **each("the best model", lambda arguments: evaluated(**arguments), BESTS),
    "the best by one of several sets": of(
        evaluation=SEVERAL, metric_for_best_model="far_loss", save_strategy="best", **BEST
    ),
    # Tokens that were seen
    **{
        f"{mode} tokens counted, accumulation {number}": of(
            models.llama,
            data.ragged_tokens(),
            options={"data_collator": data.pad_tokens},
            include_num_input_tokens_seen=mode,
            gradient_accumulation_steps=number,
            **CAUSAL,
        )
        for mode in ("all", "non_padding", True)
        for number in (1, 2)
    },
    "tokens counted between logs": of(
        models.llama,
        TOKENS,
        EVEN_TOKENS,
        include_num_input_tokens_seen="all",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        **CAUSAL,
    ),
}


def left_by(outcome):
    """Return the checkpoints that a run left, and the name of its best one."""
    best = outcome.trainer.state.best_model_checkpoint
    return sorted(path.name for path in outcome.folder.glob("checkpoint-*")), best and best.rsplit("/", 1)[-1]


# From Python 3.12 on a fork beside other threads warns; torch's own threads are idle here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_is_the_same_in_both(parity, scenario):
    given, more = SCENARIOS[scenario]
    reference, ours = parity(*given, **more)
    assert left_by(ours) == left_by(reference)
    # Also the names of times and rates.
    entries = zip(ours.trainer.state.log_history, reference.trainer.state.log_history, strict=True)
    assert all(set(mine) == set(theirs) for mine, theirs in entries)
