"""The same weights and logs, bit by bit, on any number of processes, also if it changes when a run is killed."""

import hashlib
import itertools
import json
import os
import shutil

import pytest
import torch
from shared.images import Images
from shared.killed import Killed
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import RankError, run_ranks

STEPS, KILLS = 9, (3, 6)
LIMIT_S = 300  # four processes with two workers each take a while to start
SCHEDULES = [legs for length in (1, 2, 3) for legs in itertools.product((1, 2, 4), repeat=length)]


class Dense(nn.Module):
    """Sizes that are no multiples of anything, and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Dropout(0.3), nn.Linear(37, 5))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Convolutions(nn.Module):
    """A model of images."""

    def __init__(self):
        super().__init__()
        layers = (nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(7 * 36, 5))
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values, labels=None):
        logits = self.layers(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def dense_rows(number):
    drawn = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(13, generator=drawn), "labels": torch.randint(5, (), generator=drawn)} for _ in range(number)
    ]


def masked_rows(number):
    """Sentences of 11 words, of which from none to all are targets."""
    drawn, rows = torch.Generator().manual_seed(2), []
    for index in range(number):
        words = torch.randint(23, (11,), generator=drawn)
        rows.append({"input_ids": words, "labels": words.masked_fill(torch.arange(11) < index % 12, -100)})
    return rows


def language_model(dropout=0.1):
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import: each process of the others does without

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, **sizes, num_key_value_heads=1, attention_dropout=dropout))


SUBJECTS = {
    "dense": (Dense, lambda: dense_rows(47), lambda: dense_rows(13), {}),
    "language": (
        language_model,
        lambda: masked_rows(76),
        lambda: masked_rows(13),
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},
    ),
    "without dropout": (lambda: language_model(0.0), lambda: masked_rows(76), lambda: masked_rows(13), {}),
    "images": (Convolutions, lambda: Images(47), lambda: Images(13), {"max_grad_norm": 0.3}),
}


def train(subject, folder, options, kill_at=None):
    """Return the SHA-256 of weights and of logs, and the losses."""
    make, rows, eval_rows, own = SUBJECTS[subject]
    args = TrainingArguments(
        folder,
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 1,
            "save_total_limit": 2,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "log_level": "error",
        }
        | own
        | options,
    )
    torch.manual_seed(0)
    trainer = Trainer(make(), args, train_dataset=rows(), eval_dataset=eval_rows())
    if kill_at is not None:
        trainer.add_callback(Killed(kill_at))
    trainer.train(resume_from_checkpoint=os.path.isdir(folder) and any("checkpoint-" in n for n in os.listdir(folder)))
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    held = hashlib.sha256(b"".join(weights[name].detach().numpy().tobytes() for name in sorted(weights)))
    logs = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry  # means and times of the last leg alone
    ]
    trainer.strategy.close()
    return held.hexdigest(), hashlib.sha256(json.dumps(logs, sort_keys=True).encode()).hexdigest(), logs


RANDOM = ("dense", "language", "images")
ELASTIC = {"elastic": "bitwise", "virtual_shards": 4}
SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}
STRATEGIES = {"ddp": {}, "fsdp": {"fsdp": "full_shard"}}


def run(subject, root, legs, options):
    """Return the hashes of weights and logs at the end of legs, all of which but the last are killed."""
    folder = root / "-".join(map(str, legs))
    if len(legs) > 1:
        shutil.copytree(killed(subject, root, legs[:-1], options), folder)
    return run_ranks(train, legs[-1], subject, str(folder), options, timeout_s=LIMIT_S)[0][:2]


def killed(subject, root, legs, options):
    """Return the folder of a run that was killed in each of some legs; it is made once."""
    folder = root / "-".join(["killed", *map(str, legs)])
    if not folder.exists():
        if len(legs) > 1:
            shutil.copytree(killed(subject, root, legs[:-1], options), folder)
        with pytest.raises(RankError):
            run_ranks(train, legs[-1], subject, str(folder), options, KILLS[len(legs) - 1], timeout_s=LIMIT_S)
    return folder


# The other pairs are among the schedules of the night.
@pytest.mark.parametrize(
    ("subject", "strategy"), [("dense", "fsdp"), pytest.param("images", "ddp", marks=pytest.mark.slow)]
)
def test_one_two_and_four_processes_end_with_the_same_bits(subject, strategy, tmp_path):
    options = ELASTIC | STRATEGIES[strategy]
    whole = run(subject, tmp_path, (1,), options)
    assert run(subject, tmp_path, (2,), options) == whole
    assert run(subject, tmp_path, (4, 1), options) == whole
    if strategy == "ddp":
        assert run(subject, tmp_path, (3,), options) == whole


def test_replicas_and_shards_of_the_model_end_with_the_same_bits(tmp_path):
    options = ELASTIC | {"optim": "adamw_torch"}
    replicas = run("dense", tmp_path / "ddp", (1,), options)
    assert run("dense", tmp_path / "fsdp", (2,), options | STRATEGIES["fsdp"]) == replicas


def test_the_ordinary_strategy_has_other_bits_on_two_processes(tmp_path):
    both = [run("dense", tmp_path, (n,), {"per_device_train_batch_size": 8 // n}) for n in (1, 2)]
    assert both[0] != both[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("subject", RANDOM)
@pytest.mark.slow
def test_all_schedules_of_at_most_three_legs(subject, strategy, tmp_path, record_property):
    ends = {}
    for legs in SCHEDULES:
        workers = {"dataloader_num_workers": 2 * (len(legs) % 2)} if subject == "images" else {}
        ends[legs] = run(subject, tmp_path, legs, ELASTIC | STRATEGIES[strategy] | workers)
    print(subject, strategy, len(ends), set(ends.values()))
    assert len(set(ends.values())) == 1
    record_property("sha256", " ".join(next(iter(ends.values()))))


@pytest.mark.parametrize("subject", RANDOM)
@pytest.mark.slow
def test_eight_processes_and_one(subject, tmp_path):
    options = ELASTIC | {"virtual_shards": 8, "per_device_train_batch_size": 1}
    whole = run(subject, tmp_path, (1,), options)
    assert run(subject, tmp_path, (8,), options) == whole
    assert run(subject, tmp_path, (8, 2, 8), options) == whole


def test_a_run_is_that_of_as_many_ordinary_processes_as_there_are_shards(tmp_path):
    plain = {"per_device_train_batch_size": 2}
    ordinary = run_ranks(train, 4, "without dropout", str(tmp_path / "4"), plain, timeout_s=120)[0][2]
    elastic = run_ranks(train, 2, "without dropout", str(tmp_path / "2"), ELASTIC, timeout_s=120)[0][2]
    assert [set(entry) for entry in elastic] == [set(entry) for entry in ordinary]
    for mine, theirs in zip(elastic, ordinary, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_8bit", "muon", "galore_adamw", "apollo_adamw"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.slow
def test_optimizers_on_replicas(optim, bf16, tmp_path):
    options = ELASTIC | {"optim": optim, "bf16": bf16, "optim_target_modules": "all-linear"}
    if not optim.startswith(("galore", "apollo")):
        del options["optim_target_modules"]
    ends = {run("language", tmp_path, (number,), options) for number in (1, 2, 4)}
    assert len(ends) == 1


class Normed(Dense):
    """A batch norm, whose running statistics depend on the order of batches."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(37))


class Partial(Dense):
    """A head that only batches with a large first number use."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(13, 5)

    def forward(self, x, labels=None):
        output = super().forward(x, labels)
        return {**output, "loss": output["loss"] + self.other(x).mean()} if x[0, 0] > 0 else output


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self):
        yield from dense_rows(40)


class Drawing(Dense):
    """Noise from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x, labels=None):
        return super().forward(x + torch.randn(x.shape, generator=self.own), labels)


class Noisy(torch.utils.data.Dataset):
    """Rows with noise from a generator of their own."""

    def __init__(self):
        self.rows, self.own = dense_rows(40), torch.Generator()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**row, "x": row["x"] + torch.randn(13, generator=self.own)}


REFUSED = {
    "a model with a generator": (Drawing, {}, lambda: dense_rows(40), "own of the model"),
    "data with a generator": (Dense, {}, Noisy, "dataset.own"),
    "a norm of the batch": (Normed, {}, lambda: dense_rows(40), "running statistics"),
    "a parameter that some shards use": (Partial, {}, lambda: dense_rows(40), "in some shards"),
    "a stream": (Dense, {}, Stream, "__len__ and __getitem__"),
    "an optimizer in the backward pass": (Dense, {"optim": "lomo"}, lambda: dense_rows(40), "backward pass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_same_is_refused(case, tmp_path):
    make, options, rows, words = REFUSED[case]
    given = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True} | ELASTIC | options
    trainer = Trainer(make(), TrainingArguments(str(tmp_path), **given), train_dataset=rows())
    with pytest.raises(ValueError, match=words):
        trainer.train()
    trainer.strategy.close()


def train_what_some_shards_use(folder):
    given = {"max_steps": 3, "per_device_train_batch_size": 1, "report_to": "none", "use_cpu": True, **ELASTIC}
    trainer = Trainer(Partial(), TrainingArguments(folder, fsdp="full_shard", **given), train_dataset=dense_rows(40))
    trainer.train()


def test_a_parameter_that_one_process_does_not_use_is_refused_before_processes_exchange(tmp_path):
    with pytest.raises(
        RuntimeError,
        match=r"parameters of a Partial got no gradient on this rank: .* numbers, other\.weight, other\.bias;",
    ):
        run_ranks(train_what_some_shards_use, 2, str(tmp_path), timeout_s=120)


WRONG = {
    "no number": ({"elastic": "bitwise"}, "power of two"),
    "three shards": ({"elastic": "bitwise", "virtual_shards": 3}, "power of two"),
    "shards alone": ({"virtual_shards": 4}, "elastic='bitwise'"),
    "fp16": ({**ELASTIC, "fp16": True}, "fp16"),
    "a compiled model": ({**ELASTIC, "torch_compile": True}, "torch_compile"),
    "a mesh": ({**ELASTIC, "parallelism_config": "tp=2"}, "parallelism_config"),
    "DeepSpeed": ({**ELASTIC, "strategy": "deepspeed", "deepspeed": {}}, "strategy"),
    "noise by process": ({**ELASTIC, "neftune_noise_alpha": 5}, "neftune_noise_alpha"),
    "metrics by batch": ({**ELASTIC, "batch_eval_metrics": True}, "batch_eval_metrics"),
    "smaller batches": ({**ELASTIC, "auto_find_batch_size": True}, "auto_find_batch_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_when_they_are_made(case, tmp_path):
    options, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        TrainingArguments(str(tmp_path), **options)


class Unfreezes:
    """Makes the first layer trainable after three steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.layers[0].requires_grad_(True)


def test_layers_may_be_frozen_and_freed(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=6, use_cpu=True, report_to="none", **ELASTIC)
    model = Dense()
    model.layers[0].requires_grad_(False)
    before = model.layers[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, args, train_dataset=dense_rows(99), callbacks=[Unfreezes()], optimizers=(optimizer, None))
    trainer.train()
    trainer.strategy.close()
    assert not torch.equal(model.layers[0].weight, before)


def three_processes(folder):
    args = TrainingArguments(folder, use_cpu=True, report_to="none", elastic="bitwise", virtual_shards=2)
    with pytest.raises(ValueError, match="virtual_shards=2 cannot be shared out over 3 processes; start at most 2"):
        Trainer(Dense(), args, train_dataset=dense_rows(40))


def three_for_shards_of_the_model(folder):
    args = TrainingArguments(folder, use_cpu=True, report_to="none", fsdp="full_shard", **ELASTIC)
    with pytest.raises(ValueError, match="elastic with fsdp needs a power of two of processes, not 3; start 2"):
        Trainer(Dense(), args, train_dataset=dense_rows(40))


def test_a_number_of_processes_that_cannot_share_is_refused(tmp_path):
    run_ranks(three_processes, 3, str(tmp_path))
    run_ranks(three_for_shards_of_the_model, 3, str(tmp_path))
