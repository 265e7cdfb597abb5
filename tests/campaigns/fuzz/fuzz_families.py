"""Draw runs: each family looks at one part of what users do, among choices from all the others."""

import random
from dataclasses import replace

from fuzz_configuration import LANGUAGE_MODELS, OVERRIDES, OWN_LOADERS, Run
from fuzz_habits import HABITS
from fuzz_losses import DIVISIONS, LOOKS
from fuzz_models import MODELS
from fuzz_optimizers import GIVEN, NAMED, SCHEDULES

STOPPABLE = (
    "on_step_begin",
    "on_substep_end",
    "on_evaluate",
    "on_prediction_step",
    "on_epoch_end",
    "on_log",
    "on_save",
)
LOSSES = ("model", "function", "function_counted", "smoothing", *OVERRIDES)


def draw(seed, number, family=None):
    """Draw the run of a seed with this number: the same every time.

    Args:
        seed: of the whole session.
        number: of the run in it.
        family: which one; None draws that too, each as often as its weight says.
    """
    rng = random.Random(f"{seed} {number} {family}")
    if family is None:
        family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    run = FAMILIES[family][0](rng, _any_run(rng))
    return _consistent(rng, replace(run, family=family))


def _any_run(rng):
    """Draw what every run has: model, data, length, updates, and what is logged."""
    of_one_process = [name for name in MODELS if name not in MESHES]
    model = rng.choice([*of_one_process, "linear", "mlp", "mlp_counted", "mlp_masks"])
    run = Run(
        seed=rng.randint(0, 99),
        data_seed=rng.choice([None, None, None, 9]),
        model=model,
        data=rng.choice(["list", "list", "torch"]),
        length=rng.randint(1, 24),
        batch=rng.randint(1, 7),
        accumulation=rng.choice([1, 1, 2, 3, 4]),
        epochs=rng.choice([1, 1, 2, 2, 0.5, 1.5, 3]),
        max_steps=rng.choice([-1, -1, -1, *range(1, 7)]),
        rate=rng.choice([0.01, 0.05]),
        clip=rng.choice([1.0, 1.0, 0.0, 0.01, 100.0]),
        decay=rng.choice([0.0, 0.0, 0.1]),
        schedule=rng.choice(["linear", "cosine", "constant"]),
        logging_steps=rng.choice([1, 1, 1, 2, 3, 0.4]),
        log_first=rng.random() < 0.2,
    )
    if model in LANGUAGE_MODELS:
        run = replace(run, ragged=rng.random() < 0.5)
    return run


def _consistent(rng, run):
    """Give a run what its other choices need."""
    for what_is_needed in (_for_data, _for_loss, _for_evaluation):
        run = replace(run, **what_is_needed(rng, run))
    if run.steps > 12:
        run = replace(run, max_steps=rng.randint(2, 12))
    habits = tuple((name, at) for name, at in run.habits if HABITS[name].suits(run))
    return replace(run, habits=habits)


def _for_data(rng, run):
    needed = {}
    if run.data == "stream" and run.max_steps < 1:
        needed["max_steps"] = rng.randint(1, 6)
    if run.is_stream:
        needed |= {"loader": "trainer", "order": "random"}
    if run.drop_last and run.length < run.batch:
        needed["batch"] = run.length
    if run.data == "noisy" and run.kind not in ("numbers", "classes"):
        needed["model"] = "mlp"
    if run.tokens_seen != "no" and run.kind != "tokens":
        needed |= {"model": "llama", "ragged": True}
    return needed


def _for_loss(rng, run):
    needed = {"loss": "function_counted"} if run.loss == "smoothing" and run.kind == "numbers" else {}
    if run.model == "gpt2" and run.optimizer == "adafactor":
        # It limits the update of a tensor as a whole, and a third of c_attn.bias has a gradient of rounding alone.
        needed["optimizer"] = "adamw_torch"
    return needed


def _for_evaluation(rng, run):
    needed = {}
    follows = run.schedule == "reduce_lr_on_plateau"
    if follows:
        needed |= {"warmup": 0, "evaluation": "epoch" if run.evaluation == "no" else run.evaluation}
    if run.schedule == "polynomial" and run.warmup and run.steps <= max(run.warmup, 1):
        needed["warmup"] = 0  # by hand, and with transformers, it divides by what is left
    if follows or run.best or run.patience:
        needed["eval_sets"] = False
    if run.around == "predict" and (run.drop_last or run.ragged):
        needed["around"] = ""
    if needed.get("evaluation", run.evaluation) == "epoch":
        needed["eval_delay"] = 0
    return needed


def _updates(rng, run):
    """Losses, micro-batches and what a step is divided by."""
    return replace(run, loss=rng.choice(LOSSES), accumulation=rng.randint(1, 4), drop_last=rng.random() < 0.3)


def _divisions(rng, run):
    """Ways to divide a loss by the count, and to use the count without dividing."""
    run = rng.choice([_updates, _evaluations])(rng, run)
    loss = rng.choice(
        ["function_counted", "function_counted", "function_looked", "override_counted", "override_looked"]
    )
    if loss.startswith("override"):
        run = replace(run, model=rng.choice(["mlp_counted", *LANGUAGE_MODELS]), ragged=False)
    ways = list(LOOKS if loss.endswith("looked") else DIVISIONS)
    run = replace(run, loss=loss, way=rng.choice(ways), accumulation=rng.randint(1, 4), bf16=rng.random() < 0.3)
    return replace(run, twice=rng.random() < 0.1)


def _language(rng, run):
    """Causal language models, padded and with prompts that are not learnt."""
    run = replace(run, model=rng.choice(LANGUAGE_MODELS), ragged=rng.random() < 0.7)
    return replace(_updates(rng, run), evaluation=rng.choice(["no", "epoch"]), length=rng.randint(1, 12))


def _data(rng, run):
    """Data sets of every kind, their order and their ends."""
    run = replace(
        run, data=rng.choice(["torch", "epochs", "arrow", "stream", "stream", "sized_stream", "sized_stream"])
    )
    order = rng.choice(["random", "random", "random", "sequential", "sequential", "random_computed"])
    return replace(
        run, order=order, drop_last=rng.random() < 0.3, epochs=rng.choice([1, 2, 2.5, 3]), length=rng.randint(1, 40)
    )


def _loaders(rng, run):
    """A user's own loader of training data."""
    loaders = [name for name in OWN_LOADERS if name != "own_workers"]
    return replace(run, loader=rng.choice(loaders), epochs=rng.choice([1, 2, 3]), data=rng.choice(["list", "torch"]))


def _optimizers(rng, run):
    """Optimizers by name, given, and built by the user."""
    return replace(run, optimizer=rng.choice([*NAMED, *GIVEN]), decay=rng.choice([0.0, 0.1]))


def _schedules(rng, run):
    """Learning rates over a run."""
    warmup = rng.choice([0, 0, 1, 2, 0.3, 20])
    return replace(run, schedule=rng.choice(list(SCHEDULES)), warmup=warmup, max_steps=rng.choice([-1, -1, 3, 9]))


def _evaluations(rng, run):
    """When is evaluated, on what, and what that changes."""
    return replace(
        run,
        evaluation=rng.choice(["steps", "steps", "epoch"]),
        eval_steps=rng.choice([1, 2, 3, 0.4]),
        eval_length=rng.randint(1, 9),
        eval_batch=rng.randint(1, 5),
        eval_delay=rng.choice([0, 0, 0, 2]),
        eval_first=rng.random() < 0.2,
        metrics=rng.random() < 0.5,
        loss=rng.choice(LOSSES),
        around=rng.choice(["", "", "before", "after", "predict", "predict"]),
        eval_sets=rng.random() < 0.2,
        eval_flush=rng.choice([None, None, 1, 2]),
        logging=rng.choice(["steps", "steps", "epoch", "no"]),
    )


def _options(rng, run):
    """Precision, counts of tokens, columns that nobody takes, betas."""
    run = rng.choice([_updates, _evaluations, _language])(rng, run)
    run = replace(
        run, data=rng.choice(["list", "columns"]), bf16=rng.random() < 0.5, betas=rng.choice([(0.9, 0.999), (0.8, 0.9)])
    )
    return replace(run, tokens_seen=rng.choice(["no", "all", "non_padding"]) if rng.random() < 0.3 else "no")


def _best(rng, run):
    """The best model, and a run that ends because it does not get better."""
    strategy = rng.choice(["steps", "epoch"])
    steps = rng.choice([1, 2])
    run = replace(
        run, evaluation=strategy, eval_steps=steps, save=strategy, save_steps=steps, max_steps=-1, eval_delay=0
    )
    return replace(run, best=rng.random() < 0.8, patience=rng.choice([0, 1, 2]), epochs=rng.choice([2, 3]), rate=0.3)


def _best_resumed(rng, run):
    """The best model of a run that is stopped and resumed."""
    run = replace(_best(rng, run), length=rng.randint(6, 16))
    run = replace(run, max_steps=min(max(run.steps, 3), 8))
    return replace(run, stops=tuple(sorted(_stops(rng, run), key=lambda stop: stop[1])))


def _habits(rng, run):
    """What is changed in the middle, and what is put in the place of what was given."""
    if rng.random() < 0.4:
        run = rng.choice([_updates, _data, _loaders, _schedules, _evaluations, _options])(rng, run)
    else:
        run = replace(run, data=rng.choice(["list", "torch", "torch"]), loss=rng.choice(["model", "model", *LOSSES]))
    run = replace(
        run,
        optimizer=rng.choice(["adamw_torch", "adamw_torch", "sgd", "groups", "created"]),
        evaluation=rng.choice(["no", "steps", "epoch"]),
        epochs=2,
    )
    names = [name for name, found in HABITS.items() if found.suits(run)]
    chosen = rng.sample(names, rng.choice([1, 1, 2, 3]))
    return replace(run, habits=tuple((name, rng.randint(0, 3)) for name in chosen))


def _resumes(rng, run):
    """Runs that are stopped in the middle and resumed by another Trainer."""
    run = rng.choice([_updates, _data, _loaders, _optimizers, _schedules, _evaluations])(rng, run)
    run = replace(run, epochs=rng.choice([2, 3]), length=rng.randint(6, 20), around="")
    lasting = [name for name, found in HABITS.items() if found.suits(run) and found.lasts]
    habits = tuple((name, rng.randint(0, 3)) for name in rng.sample(lasting, rng.choice([0, 0, 1])))
    run = replace(run, habits=habits, data=rng.choice([run.data, "noisy"]) if run.data == "torch" else run.data)
    save = {"save": rng.choice(["steps", "steps", "steps", "epoch"]), "save_steps": rng.choice([1, 1, 2])}
    run = replace(run, max_steps=min(max(run.steps, 3), 8), **save)
    return replace(run, stops=tuple(sorted(_stops(rng, run), key=lambda stop: stop[1])))


ASSIGNED = {
    "bf16": [True], "dataloader_pin_memory": [False], "disable_tqdm": [False], "do_eval": [True, False],
    "eval_steps": [3, 7], "eval_strategy": ["epoch", "steps"], "gradient_accumulation_steps": [1, 5],
    "greater_is_better": [True, False], "learning_rate": [0.3], "log_level": ["info", "error"],
    "logging_steps": [2, 9], "lr_scheduler_type": ["cosine", "reduce_lr_on_plateau"], "max_grad_norm": [0.5],
    "metric_for_best_model": ["accuracy"], "num_train_epochs": [5], "per_device_train_batch_size": [3],
    "save_steps": [4], "torch_compile": [True], "torch_compile_backend": ["eager"], "torch_compile_mode": ["default"],
    "use_cpu": [False], "warmup_steps": [3], "weight_decay": [0.4],
}  # fmt: skip


def _arguments(rng, run):
    """Arguments that are assigned after they were built with other values."""
    run = rng.choice([_updates, _evaluations, _schedules, _best])(rng, run)
    names = rng.sample(sorted(ASSIGNED), rng.randint(1, 4))
    if "lr_scheduler_type" in names:  # it needs evaluations
        names = [*(name for name in names if name != "eval_strategy"), "eval_strategy"]
    return replace(run, assigned=tuple((name, rng.choice(ASSIGNED[name])) for name in names))


def _changed(rng, run):
    """Runs that are stopped and go on with other batches, accumulation, ranks, data or lengths."""
    run = replace(rng.choice([_updates, _data])(rng, run), length=rng.randint(6, 20), drop_last=False)
    run = replace(run, model=rng.choice(["linear", "mlp", "mlp_counted"]), schedule="constant", bf16=False)
    run = replace(run, epochs=rng.choice([2, 3]), max_steps=rng.choice([-1, rng.randint(3, 12)]))
    run = replace(_consistent(rng, run), save="steps", save_steps=1, restarts=rng.random() < 0.3)
    if run.steps < 2:
        run = replace(run, max_steps=3)
    stop = rng.randint(1, run.steps - 1)
    choices = {"batch": rng.randint(1, 7), "accumulation": rng.randint(1, 4)}
    if run.max_steps > 0 or rng.random() < 0.2:
        choices["max_steps"] = rng.randint(stop + 1, stop + 12)
    if stop % run.steps_per_epoch == 0 and not run.is_stream:
        choices["length"] = rng.randint(2, 30)
    names = set(rng.sample(sorted(choices), rng.randint(1, len(choices))))
    if rng.random() < 0.02:
        choices |= {"ranks": 2, "batch": 2 * rng.randint(1, 3)}
        names |= {"ranks", "batch"}
    changed = tuple((name, choices[name]) for name in sorted(names))
    return replace(run, changed=changed, stops=(("callback", stop, "on_step_end"),))


def _stops(rng, run):
    """Draw one or two ways in which a run ends before its end."""
    ways, events = ("raise", "raise", "callback", "interrupt", "signal"), ("on_step_end", "on_step_end", *STOPPABLE)
    if run.save == "epoch":  # where a callback stops a run, the epoch ends, and is evaluated and saved as one that did
        ways = tuple(way for way in ways if way != "callback")
    for _ in range(rng.choice([1, 1, 2])):
        yield rng.choice(ways), rng.randint(1, run.max_steps), rng.choice(events)


def _twice(rng, run):
    """Two calls of `train` of one Trainer."""
    return replace(rng.choice([_updates, _data, _loaders])(rng, run), twice=True)


def _workers(rng, run):
    """Data that worker processes load."""
    run = replace(
        _resumes(rng, run),
        data=rng.choice(["torch", "noisy"]),
        length=rng.randint(6, 12),
        max_steps=4,
        loader="trainer",
    )
    loads = {"loader": "own_workers"} if rng.random() < 0.4 else {"workers": 2}
    return replace(run, **loads, stops=(("raise", 3, "on_step_end"),), save="steps", save_steps=1)


def _ranks(rng, run):
    """Two processes, which together make the run of one."""
    models = ("linear", "mlp", "mlp_counted", "mlp_tied", "mlp_frozen", *LANGUAGE_MODELS, "bert")
    run = rng.choice([_updates, _evaluations, _optimizers])(rng, replace(run, model=rng.choice(models)))
    habits = rng.sample(
        ("clip_at_less", "lower_the_rate", "stop_training", "evaluate_in_a_callback", "halve_the_weights"), 1
    )
    run = replace(run, habits=tuple((name, rng.randint(0, 2)) for name in habits), ranks=2, around="", drop_last=False)
    if not run.divides:  # a mean over a batch: two ranks' means of unequal numbers of targets are not the mean of all
        run = replace(run, ragged=False)
    run = replace(run, batch=2 * rng.randint(1, 3), length=rng.randint(2, 20), epochs=2, max_steps=-1)
    run = replace(run, order=rng.choice(["random", "random_computed"]))
    if rng.random() < 0.3:
        run = replace(run, stops=(("callback", 2, "on_step_end"),), save="steps", max_steps=3, habits=())
    return run


MESHES = {
    "llama_even": (
        *({"tp": 2}, {"sp": 2}, {"cp": 2}, {"cp": 2, "ring": 1}, {"pp": 2}, {"tp": 2, "sp": 2}, {"tp": 2, "pp": 2}),
    ),
    "llama_even_tied": ({"tp": 2}, {"cp": 2}, {"pp": 2}),
    "moe": ({"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "sp": 2}, {"pp": 2}, {"pp": 2, "ep": 2}),
    "mlp_even": ({"tp": 2},),
}


def _mesh(rng, model):
    mesh = dict(rng.choice(MESHES[model]))
    ranks = 2 if len(mesh) == 1 or mesh == {"ep": 2, "sp": 2} or "ring" in mesh else 4
    if ranks == 2 and rng.random() < 0.1:
        ranks = 4
    if ranks == 4 and "ep" not in mesh and rng.random() < 0.5:
        mesh["shard"] = 1
    return {"mesh": tuple(mesh.items()), "ranks": ranks}


OPTIONS = {
    "activation_checkpointing": [True, "reentrant"],
    "auto_find_batch_size": [True],
    "batch_eval_metrics": [True],
    "count_flops": [True],
    "dataloader_num_workers": [2],
    "ema_decay": [0.9],
    "eval_do_concat_batches": [False],
    "eval_perplexity": [True],
    "eval_use_gather_object": [True],
    "full_determinism": [True],
    "include_for_metrics": [["loss", "inputs"]],
    "neftune_noise_alpha": [5.0],
    "on_nonfinite": ["skip"],
    "on_spike": ["rewind"],
    "optim": ["adamw_8bit", "adalomo", "muon", "galore_adamw", "adagrad"],
    "overfit_batches": [1],
    "parameter_rules": [[{"params": "mlp", "learning_rate": 0.001}]],
    "pp_schedule": ["gpipe", "interleaved"],
    "prediction_loss_only": [True],
    "remove_unused_columns": [False],
    "save_async": [True],
    "save_only_model": [True],
    "step_compile": ["auto"],
    "torch_compile": [True],
    "torch_empty_cache_steps": [1],
    "train_sampling_strategy": ["group_by_length"],
    "use_cache": [True],
}


def _meshes(rng, run):
    """Processes that compute a sample together, which make the run of one."""
    kinds = (_updates, _evaluations, _optimizers, _schedules, _data, _options, _best, _habits, _twice, _arguments)
    run = rng.choice((*kinds, _resumes, _resumes, _resumes, _resumes))(rng, run)
    run = replace(run, model=rng.choice(["llama_even", *MESHES]), bf16=False, rate=0.01)
    tokens = run.kind == "tokens"
    run = replace(run, **_mesh(rng, run.model), ragged=tokens and rng.random() < 0.5)
    run = replace(
        run, data="torch" if run.data == "noisy" else run.data, tokens_seen=run.tokens_seen if tokens else "no"
    )
    if run.around == "predict":
        run = replace(run, eval_sets=False)
    if run.replicas > 1:
        run = replace(run, batch=run.replicas * rng.randint(1, 3), drop_last=False, loader="trainer")
        run = replace(run, ragged=run.ragged and _consistent(rng, run).divides)
    if "pp" in dict(run.mesh):  # of which the first parameter is another on each stage
        not_in_stages = ("drop_a_gradient", "freeze_a_layer", "drop_the_gradient_so_far")
        run = replace(run, habits=tuple(found for found in run.habits if found[0] not in not_in_stages))
    return _stopped_or_with_options(rng, replace(run, stops=(), max_steps=max(1, min(run.steps, 6))))


def _stopped_or_with_options(rng, run):
    is_stopped = run.save == "steps" and not run.best and not run.patience and rng.random() < 0.7
    if is_stopped:
        run = replace(run, stops=(("callback", rng.randint(1, 3), "on_step_end"),))
    if run.habits:
        return run
    if is_stopped and rng.random() < 0.5:
        other = rng.choice([{"mesh": (), "ranks": 1}, _mesh(rng, run.model)])
        changed = (*other.items(), ("batch", 4))
        plain = {"schedule": "constant", "loader": "trainer", "drop_last": False}
        return replace(run, changed=changed, max_steps=6, save_steps=1, **plain)
    if run.kind == "tokens" and rng.random() < 0.6:
        left_out = {"overfit_batches", "neftune_noise_alpha"} if run.replicas > 1 else set()  # they are by process
        left_out |= {"pp_schedule"} if "pp" not in dict(run.mesh) else set()
        names = rng.sample([name for name in OPTIONS if name not in left_out], rng.choice([1, 1, 2]))
        options = {name: rng.choice(OPTIONS[name]) for name in names}
        if options.get("activation_checkpointing") == "reentrant":
            options |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
        run = replace(run, options=tuple(options.items()))
    return run


FAMILIES = {
    "plain": (lambda rng, run: run, 6),
    "updates": (_updates, 14),
    "divisions": (_divisions, 14),
    "language": (_language, 8),
    "data": (_data, 12),
    "loaders": (_loaders, 8),
    "optimizers": (_optimizers, 8),
    "schedules": (_schedules, 8),
    "evaluations": (_evaluations, 12),
    "options": (_options, 8),
    "best": (_best, 4),
    "best_resumed": (_best_resumed, 4),
    "habits": (_habits, 20),
    "resumes": (_resumes, 14),
    "changed": (_changed, 10),
    "arguments": (_arguments, 6),
    "twice": (_twice, 4),
    "workers": (_workers, 0.4),
    "ranks": (_ranks, 0.4),
    "meshes": (_meshes, 0.4),
}
"""How each family draws, and how often it comes up."""
