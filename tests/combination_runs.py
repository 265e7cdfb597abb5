"""Draw combinations of the Trainer's options at random, and run them: what `test_combinations.py` compares."""

import dataclasses
import math
import random
import tempfile
import threading
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch
from shared.callbacks import Stop, StopAt
from shared.results import history
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed

PAD, BAD, WORDS = 0, 1, 16


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + self.drop(nn.functional.gelu(self.layer(self.norm(hidden))))


class Words(nn.Module):
    """A classifier of rows of words; a row with the word `BAD` makes the loss of its batch NaN."""

    main_input_name = "input_ids"

    def __init__(self, dropout=0.0, statistics=False):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.statistics = nn.BatchNorm1d(8) if statistics else nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        mask = attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        logits = self.head(self.statistics(pooled))
        logits = logits * torch.where((input_ids == BAD).any(), math.nan, 1.0)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class CountingWords(Words):
    """The same, with a loss that is a sum over the targets of the whole step."""

    def forward(self, input_ids, attention_mask, labels=None, num_items_in_batch=None):
        outputs = super().forward(input_ids, attention_mask, labels)
        if labels is not None and num_items_in_batch is not None:
            outputs["loss"] = outputs["loss"] * (labels != -100).sum() / num_items_in_batch
        return outputs


def rows(number, bad=()):
    draw = random.Random(0)
    found = []
    for index in range(number):
        words = [draw.randint(2, WORDS - 1) for _ in range(draw.randint(1, 6))]
        words = [BAD, *words] if index in bad else words
        found.append({"input_ids": words, "labels": words[-1] % 3})
    return found


def collate(samples):
    width = max(len(sample["input_ids"]) for sample in samples)
    filled = [sample["input_ids"] + [PAD] * (width - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(filled)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def collate_at_random(samples):
    """Draws from all three generators, as masking and augmentation do."""
    batch = collate(samples)
    chosen = torch.rand(batch["input_ids"].shape) < random.random() * 0.5 + 0.1 * float(np.random.rand())
    batch["input_ids"] = torch.where(chosen & (batch["input_ids"] > BAD), 2, batch["input_ids"])
    return batch


class Accuracy:
    def reset(self):
        self.right = self.seen = 0

    def update(self, preds, target):
        self.right += int((preds.argmax(-1) == target).sum())
        self.seen += len(target)

    def compute(self):
        return self.right / self.seen


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class PartsTrainer(Trainer):
    """Logs a value in every micro-batch, and gives its loss in two parts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.log_metric("length", inputs["attention_mask"].sum().float(), len(inputs["labels"]))
        loss = {"loss": loss, "first_half": loss * 0.5}
        return (loss, outputs) if return_outputs else loss


class KeepLast(TrainerCallback):
    """Keeps what trains as it is after each step: at the end of a run the model may be given other weights."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_step_end(args, state, control, model)  # a resumed run may have no step to make

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights = [value.clone() for value in model.state_dict().values()]


class Watcher(TrainerCallback):
    """Asks for every event that costs something, and does nothing with it."""

    wants_outputs = True

    def on_micro_batch_end(self, args, state, control, **kwargs):
        kwargs["loss"] + 0

    def on_substep_end(self, args, state, control, **kwargs):
        pass

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass


@dataclasses.dataclass(frozen=True)
class Combination:
    """Arguments of a run, and what they do not say.

    Attributes:
        options: training arguments.
        parts: whether the loss comes in parts, and a value is logged with every micro-batch.
        at_random: whether the collator draws random numbers.
        bad: rows with which the loss is NaN.
        evaluation: `one` set of data or a `dict` of two.
        metrics: None, `function` or `streaming`.
        dropout: of the model.
        statistics: whether the model keeps running statistics.
        counts: whether the loss is a sum over the targets of the whole step.
        number: rows of the training data.
        watched: whether a callback asks for every event.
    """

    options: dict
    parts: bool = False
    at_random: bool = False
    bad: tuple = ()
    evaluation: str = "one"
    metrics: str | None = None
    dropout: float = 0.0
    statistics: bool = False
    counts: bool = False
    number: int = 23
    watched: bool = False

    def but(self, *without, **changes):
        """Return it without some options, and with others changed."""
        fields = {field.name for field in dataclasses.fields(self)}
        options = {name: value for name, value in self.options.items() if name not in without}
        options |= {name: value for name, value in changes.items() if name not in fields}
        own = {name: value for name, value in changes.items() if name in fields}
        return dataclasses.replace(self, options=options, **own)

    def __str__(self):
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "options"}
        return f"{given} {self.options}"


def draw_updates(draw):
    """Return arguments of what an update does."""
    options = {
        "optim": draw.choice(["adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad"]),
        "gradient_accumulation_steps": draw.choice([1, 2, 3]),
        "max_grad_norm": draw.choice([1.0, 0.0, 0.05]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "on_nonfinite": draw.choice(["log", "skip", "skip", "raise"]),
        "logging_nan_inf_filter": draw.random() < 0.3,
        "bf16": draw.random() < 0.25,
        "activation_checkpointing": draw.random() < 0.3,
        "label_smoothing_factor": draw.choice([0.0, 0.0, 0.1]),
    }
    if draw.random() < 0.4:
        options |= {
            "ema_decay": draw.choice([0.5, 0.9]),
            "ema_start_step": draw.choice([0, 3]),
            "ema_update_steps": draw.choice([1, 2]),
        }
    if draw.random() < 0.3:
        options["parameter_rules"] = [{"params": "head", "lr_scale": 0.1}, {"params": "norm", "weight_decay": 0.05}]
    if draw.random() < 0.3:
        options["neftune_noise_alpha"] = 5.0
    if draw.random() < 0.15:
        options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    return options


def draw_data(draw):
    """Return arguments of data and length."""
    options = {
        "train_sampling_strategy": draw.choice(["random", "group_by_length", "sequential", "random_computed"]),
        "include_num_input_tokens_seen": draw.choice(["no", "all", "non_padding"]),
        "dataloader_num_workers": draw.choice([0] * 7 + [2]),
        "seed": draw.randint(0, 9),
    }
    options |= {"max_steps": draw.randint(7, 12)} if draw.random() < 0.4 else {"num_train_epochs": 3}
    if draw.random() < 0.2:
        options["overfit_batches"] = draw.choice([2, 3, 0.6])
    elif draw.random() < 0.25:
        options["auto_find_batch_size"] = True
    return options


def draw_events(draw):
    """Return arguments of when to log, evaluate and save."""
    options = {
        "logging_steps": draw.choice([1, 2, 3]),
        "save_steps": draw.choice([2, 3]),
        "save_total_limit": draw.choice([None, 1, 2]),
        "eval_strategy": draw.choice(["no", "steps", "steps", "epoch"]),
        "eval_steps": draw.choice([1, 2, 3]),
    }
    if options["eval_strategy"] == "no":
        return options | {"lr_scheduler_type": draw.choice(["linear", "cosine"]), "warmup_steps": 2}
    schedules = ["linear", "constant_with_warmup", "greedy", "reduce_lr_on_plateau"]
    options |= {
        "lr_scheduler_type": draw.choice(schedules),
        "eval_on_start": draw.random() < 0.3,
        "bf16_full_eval": draw.random() < 0.3,
        "load_best_model_at_end": draw.random() < 0.4,
        "per_device_eval_batch_size": draw.randint(2, 5),
    }
    if options["lr_scheduler_type"] in schedules[2:]:
        options["lr_scheduler_kwargs"] = {"factor": 0.5, "patience": 0}
    else:
        options["warmup_steps"] = 2
    return options


def draw_combination(number):
    """Return the combination of a seed."""
    draw = random.Random(number)
    options = {**draw_updates(draw), **draw_data(draw), **draw_events(draw)}
    evaluation = draw.choice(["one", "dict"])
    if options["eval_strategy"] != "no" and (options["load_best_model_at_end"] or "lr_scheduler_kwargs" in options):
        options["metric_for_best_model"] = "eval_a_loss" if evaluation == "dict" else "loss"
        options["greater_is_better"] = False
    return Combination(
        options,
        parts=draw.random() < 0.4,
        at_random=draw.random() < 0.4,
        bad=(4, 17) if options["on_nonfinite"] == "skip" else (),
        evaluation=evaluation,
        metrics=draw.choice([None, "function", "streaming"]),
        dropout=draw.choice([0.0, 0.2]),
        statistics=draw.random() < 0.2,
        counts=draw.random() < 0.3,
        number=draw.choice([23, 24, 30]),
        watched=draw.random() < 0.2,
    )


def build(combination, folder, callbacks=(), strategy=None, **changes):
    """Return a Trainer of a combination that writes to a folder, and what keeps its last weights."""
    set_seed(3)
    kind = CountingWords if combination.counts else Words
    model = kind(combination.dropout, combination.statistics)
    options = {
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "log_level": "critical",
        "use_cpu": True,
        **combination.options,
        **changes,
    }
    data = rows(9)
    last = KeepLast()
    return (PartsTrainer if combination.parts else Trainer)(
        model,
        TrainingArguments(output_dir=str(folder), **options),
        collate_at_random if combination.at_random else collate,
        train_dataset=rows(combination.number, combination.bad),
        eval_dataset={"a": data[:5], "b": data[5:]} if combination.evaluation == "dict" else data,
        compute_metrics={None: None, "function": accuracy, "streaming": {"accuracy": Accuracy()}}[combination.metrics],
        callbacks=[last, *([Watcher()] if combination.watched else []), *callbacks],
        strategy=strategy,
    ), last


def run(combination, folder, **changes):
    """Train to the end, and return what must be the same."""
    trainer, last = build(combination, folder, **changes)
    trainer.train()
    return fingerprint(trainer, last)


def run_stopped(combination, folder, step):
    """Train to a step, and in another Trainer from the last checkpoint to the end."""
    trainer, _ = build(combination, folder, [StopAt(step)])
    try:
        trainer.train()
    except Stop:
        pass
    else:
        raise AssertionError(f"the run did not reach step {step}")
    trainer, last = build(combination, folder)
    trainer.train(resume_from_checkpoint="auto")
    return fingerprint(trainer, last)


def fingerprint(trainer, last):
    """Return by name all that a run ends with, but times."""
    state = trainer.optimizer.state_dict()
    moments = [
        each[name] for _, each in sorted(state["state"].items()) for name in sorted(each) if torch.is_tensor(each[name])
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    averages = [
        value
        for callback in trainer.callback_handler.callbacks
        if hasattr(callback, "weight_parts")
        for part in callback.weight_parts(trainer.model).values()
        for value in part.state_dict().values()
    ]
    return {
        "trained": last.weights,
        "optimizer": [v.clone() for v in moments],
        "average": [v.clone() for v in averages],
        "weights": [v.clone() for v in trainer.model.state_dict().values()],
        "schedule": repr([sorted(group.items(), key=str) for group in groups]),
        "history": [repr(sorted(entry.items())) for entry in history(trainer)],
        "best": repr((trainer.state.best_metric, trainer.state.best_global_step)),
        "checkpoints": trainer.checkpointer().steps() if trainer.args.save_strategy != "no" else [],
        "tokens": trainer.state.num_input_tokens_seen,
    }


def differences(one, other, names=None):
    """Return the names of what differs between two fingerprints, in a bit."""
    different = []
    for name in names or one:
        mine, theirs = one[name], other[name]
        if mine and isinstance(mine, list) and isinstance(mine[0], torch.Tensor):
            same = len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        else:
            same = mine == theirs
        if not same:
            different.append(name)
    return different


def surroundings(trainer):
    """Return what training and evaluating must leave as it was."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # loaders tell them to end, and wait for the workers alone
            thread.join(30)
    hooks = [
        (name, attribute, len(value))
        for name, module in trainer.model.named_modules()
        for attribute, value in sorted(vars(module).items())
        if "hook" in attribute and hasattr(value, "__len__")
    ]
    return {
        "hooks": hooks,
        "parameter hooks": [bool(p._backward_hooks) for p in trainer.model.parameters()],
        "classes": [(name, type(module)) for name, module in trainer.model.named_modules()],
        "compiled": [module._compiled_call_impl is None for module in trainer.model.modules()],
        "attributes": [sorted(set(vars(module)) - {"_compiled_call_impl"}) for module in trainer.model.modules()],
        "dtypes": [value.dtype for value in trainer.model.state_dict().values()],
        "needs gradient": [p.requires_grad for p in trainer.model.parameters()],
        "identities": [id(p) for p in trainer.model.parameters()],
        "callbacks": [type(callback) for callback in trainer.callback_handler.callbacks],
        "arguments": trainer.args.to_json_string(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": len(active_children()),
        "torch": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        ),
        "numpy generator": id(np.random.get_bit_generator()),
        "files": sorted(path.name for path in Path(tempfile.gettempdir()).glob("tr_[!r]*")),
    }


def generators():
    """Return the state of all random number generators."""
    return repr((random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))
