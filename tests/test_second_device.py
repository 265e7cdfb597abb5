"""What a run does on a device that is not the CPU: it mixes no devices, reads nothing in a step, and ends alike.

No GPU is needed: `shared.second_device` is a device that computes on the CPU, and refuses what a GPU refuses.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from optimizer_settings import SETTINGS, Setting
from shared.cases import every_second
from shared.results import history
from shared.second_device import DEVICE, MixedDevices, SecondDevice

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments, SingleDevice, Trainer, TrainerCallback
from tr_core.model_io import to_device
from tr_log import PrinterCallback
from tr_optim.projection.basis import has_generator

WORDS, WIDTH, IGNORED, CPU = 20, 16, -100, torch.device("cpu")


@pytest.fixture(autouse=True)
def generators_are_asked_for_anew():
    has_generator.cache_clear()
    yield
    has_generator.cache_clear()


@pytest.fixture
def there():
    with SecondDevice() as device:
        yield device


# The device


def zero(device):
    return torch.zeros((), device=device)


MIXED = {
    "stack": lambda: torch.stack([zero("cpu"), zero("cuda")]),
    "cat": lambda: torch.cat([torch.ones(2), torch.ones(2, device="cuda")]),
    "add": lambda: torch.ones(2) + torch.ones(2, device="cuda"),
    "add to a scalar of the host": lambda: zero("cpu").add_(zero("cuda")),
    "choose from the host": lambda: torch.ones(2)[torch.zeros(1, dtype=torch.int64, device="cuda")],
    "lists": lambda: torch._foreach_add([torch.ones(2, device="cuda")], [torch.ones(2)]),
    "module": lambda: nn.Linear(2, 2, device="cuda")(torch.ones(1, 2)),
    "generator": lambda: torch.ones(2, device="cuda").normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_the_device_refuses_to_mix_devices(there, operation):
    with pytest.raises(MixedDevices, match=r"cpu.*cuda|cuda.*cpu"):
        operation()


def test_a_scalar_of_the_host_meets_tensors_of_the_device_where_a_gpu_allows_it(there):
    ones = torch.ones(2, device="cuda")
    assert (ones + torch.tensor(2.0)).tolist() == [3.0, 3.0]
    assert ones[torch.tensor([0])].device == DEVICE
    assert torch._foreach_mul([ones], torch.tensor(2.0))[0].sum().item() == 4.0
    assert [norm.device for norm in torch._foreach_norm([torch.ones(2), ones])] == [CPU, DEVICE]
    assert (ones.device, ones.is_cuda, ones.get_device(), type(nn.Parameter(ones))) == (DEVICE, True, 0, nn.Parameter)


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "list": lambda x: x.tolist(),
    "copy": lambda x: x.cpu(),
    "copy into": lambda x: torch.empty(2).copy_(x),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_device_counts_reads_and_names_their_place(there, read):
    x = torch.ones(2).to("cuda", non_blocking=True)
    assert not there.reads + there.waits
    read(x)
    assert len(there.reads) == 1
    assert "test_second_device.py" in there.reads[0]


def test_the_device_counts_what_the_host_copies_and_waits_for(there):
    x = torch.ones(2, device="cuda")
    for _ in range(2):
        x.copy_(torch.zeros(2))
    x[torch.tensor([1])].add_(x[:1], alpha=2)
    assert (len(there.waits), there.reads) == (3, [])


def test_a_copy_that_is_not_waited_for_holds_nonsense_until_somebody_waits(there):
    x, pinned = torch.ones(2, device="cuda"), torch.empty(2, pin_memory=True)
    copies = [x.to("cpu", non_blocking=True), pinned.copy_(x, non_blocking=True)]
    assert not any(copy.eq(1).any() for copy in copies)
    torch.cuda.current_stream().synchronize()
    assert all(copy.eq(1).all() for copy in copies)
    assert not there.reads


def test_hooks_of_a_backward_pass_see_the_device(there):
    seen = []
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    weight.register_hook(lambda gradient: seen.append(gradient.device))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(torch.zeros(1, device=p.grad.device).device))
    (weight * 2).sum().backward()
    assert seen == [DEVICE, DEVICE]


# Models and runs


class Network(nn.Module):
    """A norm and two layers on embeddings; its loss is a mean, or a sum over a count that it is given."""

    main_input_name = "input_ids"
    accepts_loss_kwargs = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.head, self.drop, self.calls = nn.Linear(WIDTH, WORDS, bias=False), nn.Dropout(0.1), 0

    def get_input_embeddings(self):
        return self.embed

    def logits(self, input_ids):
        return self.head(self.narrow(torch.tanh(self.wide(self.drop(self.norm(self.embed(input_ids)))))))

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        return {"logits": logits} | ({} if labels is None else {"loss": self.spoil(mean_loss(logits, labels))})

    def spoil(self, loss):
        return loss


def mean_loss(logits, labels, reduction="mean"):
    labels = labels.to(logits.device)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


class Counts(Network):
    accepts_loss_kwargs = True

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.logits(input_ids)
        if labels is None:
            return {"logits": logits}
        total = mean_loss(logits, labels, "sum")
        count = labels.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class NotAlwaysFinite(Network):
    """The loss of the third step is infinite."""

    def spoil(self, loss):
        self.calls += self.training
        return loss * (torch.inf if self.training and self.calls == 3 else 1.0)


class NotAlwaysTrained(Network):
    """The losses of the second and the fourth step depend on no weight."""

    def spoil(self, loss):
        self.calls += self.training
        return loss.detach().requires_grad_() if self.training and self.calls in (2, 4) else loss


class SometimesOfTheHost(Network):
    """Every second loss is a constant of the host."""

    def spoil(self, loss):
        self.calls += 1
        return torch.tensor(0.5, requires_grad=True) if self.calls % 2 == 0 else loss


class Divided(Network):
    """Its loader has put the head elsewhere, which the loss follows."""

    def __init__(self):
        super().__init__()
        self.hf_device_map = {"": 0, "head": "cpu"}
        for name, module in self.named_children():
            module.to(CPU if name == "head" else SecondDevice.now())

    def logits(self, input_ids):
        hidden = self.narrow(torch.tanh(self.wide(self.drop(self.norm(self.embed(input_ids))))))
        return self.head(hidden.to(CPU))


class DividedInHalf(Divided):
    """Its first weight, by which torch chooses a place for the norm, is elsewhere, and all have 16 bits."""

    def __init__(self):
        super().__init__()
        self.hf_device_map = {"embed": "cpu", "": 0}
        self.head.to(SecondDevice.now())
        self.embed.to(CPU)
        self.bfloat16()

    def logits(self, input_ids):
        hidden = self.embed(input_ids.to(CPU)).to(self.head.weight.device)
        return self.head(self.narrow(torch.tanh(self.wide(self.drop(self.norm(hidden)))))).float()


class Steps(TrainerCallback):
    """Notes what the host read and waited for within each step, and after it."""

    def __init__(self, device):
        self.device, self.within, self.after, self.seen = device, [], [], 0

    def new(self):
        everything = [*self.device.reads, *self.device.waits]
        new, self.seen = len(everything) - self.seen, len(everything)
        return new

    def on_step_begin(self, args, state, control, **kwargs):
        self.after.append(self.new())

    def on_step_end(self, args, state, control, **kwargs):
        self.within.append(self.new())


@dataclass
class Ended:
    """What came of a run."""

    weights: list
    history: list
    steps: Steps | None
    result: object


def rows(number):
    tokens = torch.randint(1, WORDS, (number, 5), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(1, 1)
    labels[::3, 2:] = IGNORED
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer_of(folder, device, *, model=Network, trainer_class=Trainer, strategy=SingleDevice, parts=None, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "critical",
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    args = Seq2SeqTrainingArguments(output_dir=str(folder), **{**options, **changes})
    made = {name: make() for name, make in (parts or {}).items()}
    trainer = trainer_class(
        model(), args, train_dataset=rows(24), eval_dataset=rows(13), strategy=strategy(device), **made
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer, resume=None):
    return trainer.train(resume_from_checkpoint=resume)


def run(folder, device, then=train, **how):
    trainer = trainer_of(folder, device.type, **how)
    noted = None if SecondDevice.current is None else Steps(SecondDevice.current)
    if noted is not None:
        trainer.add_callback(noted)
    result = then(trainer)
    weights = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
    return Ended(weights, history(trainer), noted, result)


def on_both(folder, then=train, **how):
    """Run on the CPU and on the device; return what came of both."""
    here = run(folder / "here", CPU, then, **how)
    with SecondDevice():
        return here, run(folder / "there", DEVICE, then, **how)


def assert_alike(here, there):
    for mine, theirs in zip(here.weights, there.weights, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True)
    assert [without_nan(entry) for entry in there.history] == [without_nan(entry) for entry in here.history]


def without_nan(entry):
    """Return an entry of the log that is equal to one with NaN in the same places."""
    return {name: "NaN" if value != value else value for name, value in entry.items()}


# A run


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class ByBatch:
    """Batches are on the device."""

    def __init__(self):
        self.right = []

    def __call__(self, prediction, compute_result):
        self.right.append((prediction.predictions.argmax(-1) == prediction.label_ids).float().mean())
        return {"right": float(torch.stack(self.right).mean())} if compute_result else None


class Streams:
    """A metric whose state is where it is given."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.count = 0

    def update(self, preds, target):
        self.right, self.count = self.right + (preds.argmax(-1) == target).sum(), self.count + target.numel()

    def compute(self):
        return {"right": self.right / self.count}


class LogsOfBoth(Trainer):
    """Logs values of both devices."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.log_metric("of the host", torch.tensor(2.0))
        self.log_metric("of the device", outputs["loss"], weight=torch.tensor(3.0))
        self.log_metric("of either", outputs["loss"] if self.state.global_step % 2 else torch.tensor(1.0))
        parts = {
            "loss": outputs["loss"],
            "of the head": outputs["logits"].square().mean(),
            "constant": torch.tensor(1.0),
        }
        return (parts, outputs) if return_outputs else parts


EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}

# What a run has, and what is read after its steps.
RUNS = {
    "plain": ({}, [0, 1, 0, 1, 0]),
    "a log of each step": ({"logging_steps": 1}, [1, 1, 1, 1, 1]),
    "long windows": ({"logging_steps": 500, "logging_first_step": True}, [1, 0, 0, 0, 0]),
    "accumulation": ({"gradient_accumulation_steps": 4}, [0, 1, 0, 1, 0]),
    "clipping": ({"max_grad_norm": 0.1}, [0, 1, 0, 1, 0]),
    "no clipping": ({"max_grad_norm": 0}, [0, 1, 0, 1, 0]),
    "left-out steps": ({"model": NotAlwaysFinite, "on_nonfinite": "skip"}, [0, 1, 0, 1, 0]),
    "guard": ({"on_nonfinite": "raise"}, [0, 2, 0, 2, 0]),
    "steps without gradients": ({"model": NotAlwaysTrained}, [0, 1, 0, 1, 0]),
    "those with a guard": ({"model": NotAlwaysTrained, "on_nonfinite": "raise"}, [0, 2, 0, 2, 0]),
    "those that may be left out": ({"model": NotAlwaysTrained, "on_nonfinite": "skip"}, [0, 1, 0, 1, 0]),
    "those without clipping": ({"model": NotAlwaysTrained, "max_grad_norm": 0}, [0, 1, 0, 1, 0]),
    "losses of the host": ({"model": SometimesOfTheHost}, [0, 1, 0, 1, 0]),
    "those in evaluations": ({"model": SometimesOfTheHost, **EVALUATES}, [0, 1, 3, 1, 0]),
    "those with a guard's": ({"model": SometimesOfTheHost, "on_nonfinite": "raise"}, [0, 2, 0, 2, 0]),
    "average of weights": ({"ema_decay": 0.5, "ema_start_step": 1, **EVALUATES}, [0, 1, 3, 1, 0]),
    "that of left-out steps": (
        {"ema_decay": 0.5, "model": NotAlwaysFinite, "on_nonfinite": "skip"},
        [0, 1, 0, 1, 0],
    ),
    "smoothing": ({"label_smoothing_factor": 0.1, **EVALUATES}, [0, 1, 6, 1, 0]),  # the first evaluation looks thrice
    "noise": ({"neftune_noise_alpha": 5.0}, [0, 1, 0, 1, 0]),
    "values of both devices": ({"trainer_class": LogsOfBoth, **EVALUATES}, [0, 2, 4, 2, 0]),
    "tokens and operations": (
        {"include_num_input_tokens_seen": "all", "count_flops": True, "peak_flops": 1e12},
        [0, 1, 0, 1, 0],
    ),
    "metrics": ({"parts": {"compute_metrics": lambda: accuracy}, **EVALUATES}, [0, 1, 9, 1, 0]),
    "metrics by batch": (
        {"parts": {"compute_metrics": ByBatch}, "batch_eval_metrics": True, **EVALUATES},
        [0, 1, 4, 1, 0],
    ),
    "streaming metrics": ({"parts": {"compute_metrics": Streams}, **EVALUATES}, [0, 1, 4, 1, 0]),
    "perplexity": ({"model": Counts, "eval_perplexity": True, **EVALUATES}, [0, 1, 6, 1, 0]),
    "schedule of a metric": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVALUATES},
        [0, 1, 3, 1, 0],
    ),
}


@pytest.mark.parametrize(("how", "after"), RUNS.values(), ids=RUNS)
def test_a_run_on_the_device_ends_as_on_the_cpu_and_reads_nothing_in_a_step(tmp_path, how, after):
    here, there = on_both(tmp_path, **how)
    assert_alike(here, there)
    assert there.steps.within == [0] * 6, there.steps.device.reads
    assert there.steps.after[1:] == after, there.steps.device.reads


COUNTED = {
    "of the model": {"model": Counts},
    "smoothed": {"model": Counts, "label_smoothing_factor": 0.1},
    "averaged": {"model": Counts, "ema_decay": 0.5, "on_nonfinite": "skip"},
}


@pytest.mark.parametrize("how", COUNTED.values(), ids=COUNTED)
def test_what_a_loss_is_divided_by_is_looked_at_in_the_first_step_alone(tmp_path, how):
    here, there = on_both(tmp_path, gradient_accumulation_steps=4, **how, **EVALUATES)
    assert_alike(here, there)
    assert there.steps.within == [4, 0, 0, 0, 0, 0], there.steps.device.reads


def test_a_guard_on_the_device_stops_at_the_same_step_with_the_same_words(tmp_path):
    def fail(trainer):
        with pytest.raises(FloatingPointError) as caught:
            trainer.train()
        return str(caught.value)

    here, there = on_both(tmp_path, fail, model=NotAlwaysFinite, on_nonfinite="raise")
    assert_alike(here, there)
    assert here.result == there.result
    assert "step 3" in there.result


class OfTheHost(SingleDevice):
    """Has the norm of a step without gradients on the CPU, as torch's own functions have."""

    def clip_grad_norm(self, model, optimizer, max_norm):
        if all(parameter.grad is None for parameter in model.parameters()):
            return torch.zeros(())
        return super().clip_grad_norm(model, optimizer, max_norm)


def test_a_norm_on_the_host_among_those_of_the_device_fails_here_as_on_a_gpu(tmp_path, there):
    trainer = trainer_of(tmp_path, "cuda", strategy=OfTheHost, model=NotAlwaysTrained)
    with pytest.raises(MixedDevices, match=r"aten.stack.default .* cuda:0 \(\), cpu \(\)"):
        trainer.train()


def test_a_read_in_a_step_is_seen(tmp_path, there):
    class Reads(Network):
        def spoil(self, loss):
            assert loss.item() > 0
            return loss

    assert run(tmp_path, DEVICE, model=Reads).steps.within == [1] * 6


# Optimizers

TORCH = [Setting(name) for name in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")]
MUON = [Setting("muon")] if hasattr(torch.optim, "Muon") else []  # from torch 2.9 on


@pytest.mark.parametrize("setting", [*TORCH, *MUON, *every_second(SETTINGS)], ids=str)
def test_every_optimizer_ends_on_the_device_as_on_the_cpu_and_reads_nothing_in_a_step(tmp_path, setting):
    """A projecting one finds new bases in the fourth step, a lazy one also in the second."""
    here, there = on_both(tmp_path, **setting.arguments, max_steps=4)
    assert_alike(here, there)
    assert there.steps.within == [0] * 4, there.steps.device.reads


@pytest.mark.parametrize("setting", TORCH, ids=str)
def test_an_optimizer_that_cannot_leave_out_an_update_itself_costs_one_read_a_step(tmp_path, setting):
    here, there = on_both(tmp_path, **setting.arguments, model=NotAlwaysFinite, on_nonfinite="skip")
    assert_alike(here, there)
    assert there.steps.within == [0 if setting.optim == "adamw_torch_fused" else 1] * 6, there.steps.device.reads


# A model that its loader has divided over devices

PROJECTS = {"optim_args": "rank=2, update_proj_gap=3", "optim_target_modules": "all-linear", "max_grad_norm": 0.1}
GUARDS = {
    "clipping": {"max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0},
    "guard": {"on_nonfinite": "raise", "optim": "adamw_torch"},
    "evaluation": EVALUATES,
    "lomo": {"optim": "lomo", "max_grad_norm": 0.1},
}
OPTIMIZERS = {
    "lomo, left-out steps": {"optim": "lomo", "on_nonfinite": "skip"},
    "adalomo": {"optim": "adalomo", "max_grad_norm": 0.1},
    "galore, layer by layer": {"optim": "galore_adamw_layerwise", **PROJECTS},
    "fira, layer by layer": {"optim": "fira_adamw_layerwise", **PROJECTS},
    "average of weights": {"ema_decay": 0.5, "optim": "adamw_torch"},
    "that of steps that may be left out": {"ema_decay": 0.5, "optim": "adamw_torch", "on_nonfinite": "skip"},
}
DIVIDED = {f"head elsewhere, {name}": {"model": Divided, **how} for name, how in GUARDS.items()} | {
    f"embedding elsewhere, {name}": {"model": DividedInHalf, **how} for name, how in {**GUARDS, **OPTIMIZERS}.items()
}


@pytest.mark.parametrize("how", DIVIDED.values(), ids=DIVIDED)
def test_a_model_over_two_devices_trains_as_on_one(tmp_path, how):
    """Up to the order in which norms are added up, which is by device."""
    here, there = on_both(tmp_path, **how, max_steps=4)
    for mine, theirs in zip(here.weights, there.weights, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(here.history, there.history, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5)


def test_what_is_moved_to_the_cpu_is_there(there):
    moved = to_device({"x": [torch.ones(2, device="cuda")]}, CPU)
    assert moved["x"][0].tolist() == [1.0, 1.0]


# Predictions, and checkpoints


def predict(trainer):
    train(trainer)
    return trainer.predict(rows(7))


def test_predictions_of_the_device_are_those_of_the_cpu(tmp_path):
    here, there = on_both(tmp_path, predict, parts={"compute_metrics": lambda: accuracy})
    assert (here.result.predictions == there.result.predictions).all()
    assert (here.result.label_ids == there.result.label_ids).all()
    assert here.result.metrics["test_accuracy"] == there.result.metrics["test_accuracy"]


class Generates(Network):
    """Goes on with the likeliest token, as many times as a prompt's first token says at most."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=False, pad_token_id=0)
        self.generation_config = SimpleNamespace(max_length=None, max_new_tokens=4, num_beams=None, pad_token_id=0)

    def generate(self, input_ids, **options):
        for _ in range(min(int(input_ids[:, 0].max()), 4)):
            input_ids = torch.cat([input_ids, self.logits(input_ids)[:, -1:].argmax(-1)], dim=1)
        return input_ids


def test_generated_tokens_of_the_device_are_those_of_the_cpu(tmp_path):
    how = {"model": Generates, "trainer_class": Seq2SeqTrainer, "predict_with_generate": True}
    here, there = on_both(tmp_path, predict, **how)
    assert (here.result.predictions == there.result.predictions).all()


@pytest.mark.parametrize("save_async", [False, True], ids=["saved at once", "saved meanwhile"])
def test_a_run_that_is_resumed_on_the_device_ends_as_one_on_the_cpu(tmp_path, save_async):
    how = {
        "ema_decay": 0.5,
        "on_nonfinite": "skip",
        "save_async": save_async,
        "save_steps": 3,
        "save_strategy": "steps",
    }
    here = run(tmp_path / "here", CPU, **how)
    with SecondDevice():
        run(tmp_path / "there", DEVICE, **how, parts={"callbacks": lambda: [StopsAt3()]})
        there = run(tmp_path / "there", DEVICE, lambda trainer: train(trainer, resume=True), **how)
    assert_alike(here, there)
    assert there.steps.within == [0] * 3, there.steps.device.reads


class StopsAt3(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True
