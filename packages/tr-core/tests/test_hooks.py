"""Hooks that subclasses written for transformers override are called where transformers calls them, or refused."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tr_args import TrainingArguments
from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.compat.accelerator import StrategyAccelerator
from tr_core.compat.refused_hooks import REFUSED
from tr_core.step_scope import StepScope


class Recording(Trainer):
    """Records which hooks a run calls."""

    def __init__(self, *args, **kwargs):
        self.__dict__["called"] = []
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self):
        self.called.append(("processes", self.accelerator.num_processes))
        super().create_accelerator_and_postprocess()

    def _prepare_inputs(self, inputs):
        self.called.append(("inputs", self.model.training))
        return super()._prepare_inputs(inputs)

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        self.called.append(("clip", type(norm)))
        return norm

    def _save_checkpoint(self, model, trial):
        self.called.append(("save", self.state.global_step, trial))
        super()._save_checkpoint(model, trial)

    def _load_best_model(self):
        self.called.append(("best", self.state.best_global_step))
        super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.called.append(("load", resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_dataloader(self, dataset, description, **kwargs):
        self.called.append(("loader", description))
        return super()._get_dataloader(dataset, description, **kwargs)


def classifier():
    torch.manual_seed(0)
    return Classifier()


def names(trainer):
    return [entry[0] for entry in trainer.called]


def test_a_run_calls_the_hooks_of_a_step(make_trainer):
    trainer = make_trainer(8, trainer_class=Recording, max_steps=2, gradient_accumulation_steps=1)
    trainer.train()
    assert names(trainer) == ["processes", "loader", "inputs", "clip", "inputs", "clip"]
    assert trainer.called[3] == ("clip", torch.Tensor)


def test_overriding_hooks_changes_no_number(make_trainer):
    runs = []
    for kind in (Trainer, Recording):
        trainer = make_trainer(20, trainer_class=kind, model=classifier(), logging_steps=1, max_grad_norm=0.1)
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert runs[0] == runs[1]


def test_an_evaluation_prepares_its_inputs_by_the_hook(make_trainer):
    trainer = make_trainer(8, trainer_class=Recording, eval_dataset=samples(8))
    trainer.evaluate()
    assert ("inputs", False) in trainer.called


def test_inputs_that_the_hook_makes_reach_the_model(make_trainer):
    class Doubling(Trainer):
        def _prepare_inputs(self, inputs):
            return {**super()._prepare_inputs(inputs), "x": torch.zeros_like(inputs["x"])}

    seen = []

    class Watching(Classifier):
        def forward(self, x, labels):
            seen.append(x.abs().sum().item())
            return super().forward(x, labels)

    trainer = make_trainer(8, trainer_class=Doubling, model=Watching(), eval_dataset=samples(8), max_steps=2)
    trainer.train()
    trainer.evaluate()
    assert seen
    assert set(seen) == {0.0}


def test_columns_that_a_subclass_names_reach_the_collator(make_trainer):
    seen = []

    class Columns(Trainer):
        def _set_signature_columns_if_needed(self):
            if self._signature_columns is None:
                self._signature_columns = ["prompt", "x", "labels"]

    def collate(rows):
        seen.append(set(rows[0]))
        return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.stack([row["labels"] for row in rows])}

    data = [{**row, "prompt": "a", "other": 1} for row in samples(8)]
    make_trainer(trainer_class=Columns, train_dataset=data, data_collator=collate, max_steps=1).train()
    assert seen[0] == {"prompt", "x", "labels"}


def test_a_subclass_builds_its_loader_by_get_dataloader(make_trainer):
    class Bigger(Trainer):
        def get_train_dataloader(self):
            return self._get_dataloader(
                dataset=self.train_dataset,
                description="Training",
                batch_size=self._train_batch_size * 2,
                sampler_fn=lambda data: list(reversed(range(len(data)))),
                is_training=True,
            )

    trainer = make_trainer(8, trainer_class=Bigger, per_device_train_batch_size=2)
    loader = trainer.get_train_dataloader()
    first = next(iter(loader))
    assert len(first["labels"]) == 4
    assert torch.equal(first["x"][0], trainer.train_dataset[7]["x"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_that_nothing_would_call_is_refused(make_trainer, name):
    kind = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=rf"Mine\.{name} overrides a method .* does not call: \w+"):
        make_trainer(trainer_class=kind)


def test_the_accelerator_answers_for_the_strategy(make_trainer):
    trainer = make_trainer()
    own = trainer.accelerator
    model = nn.Linear(3, 3)
    assert (own.device, own.num_processes, own.process_index) == (torch.device("cpu"), 1, 0)
    assert own.is_main_process
    assert own.is_local_main_process
    assert own.is_last_process
    assert own.distributed_type == "NO"
    assert own.mixed_precision == "no"
    assert own.unwrap_model(model) is model
    assert own.unwrap_model(nn.DataParallel(model)) is model
    assert own.prepare(model) is model
    assert own.prepare(1, model) == (1, model)
    assert own.prepare_data_loader([1]) == [1]
    assert own.prepare_model(nn.Linear(3, 3), evaluation_mode=True).training is False
    assert torch.equal(own.gather(torch.tensor([1, 2])), torch.tensor([1, 2]))
    assert own.gather_for_metrics(["a"]) == ["a"]
    assert own.reduce(torch.tensor([1.0, 2.0]), "mean").tolist() == [1.0, 2.0]
    assert own.pad_across_processes(torch.ones(2, 3), dim=1).shape == (2, 3)
    assert own.get_state_dict(model).keys() == model.state_dict().keys()
    assert own.sync_gradients
    assert own.state.deepspeed_plugin is None
    with own.main_process_first(), own.autocast(), own.accumulate(model), own.no_sync(model):
        own.wait_for_everyone()
    with pytest.raises(AttributeError, match="trainer.accelerator.register_for_checkpointing is not there"):
        _ = own.register_for_checkpointing
    with pytest.raises(ValueError, match="reduction='max' is not known"):
        own.reduce(torch.ones(1), "max")


def test_the_accelerator_says_how_data_is_shared_and_steps_are_accumulated(make_trainer):
    own = make_trainer().accelerator
    assert (own.split_batches, own.dispatch_batches, own.even_batches, own.use_seedable_sampler) == (
        False,
        None,
        True,
        True,
    )
    assert own.gradient_state.sync_gradients
    sharing = {"split_batches": True, "gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}}
    own = make_trainer(gradient_accumulation_steps=2, accelerator_config=sharing).accelerator
    assert own.split_batches
    assert own.gradient_state.plugin_kwargs == {"num_steps": 1, "sync_each_batch": True}
    assert (own.gradient_state.num_steps, own.gradient_state.sync_each_batch) == (1, True)


def test_what_the_accelerator_holds_is_read_only_and_says_what_is_not_there(make_trainer):
    own = make_trainer().accelerator
    assert (own.state.fsdp_plugin, copy.copy(own.state).num_processes) == (None, 1)
    with pytest.raises(AttributeError, match="accelerator.state._shared_state is not there.* for a real one pass"):
        _ = own.state._shared_state
    with pytest.raises(AttributeError, match="accelerator.state.distributed_type = 'FSDP' would do nothing"):
        own.state.distributed_type = "FSDP"
    with pytest.raises(AttributeError, match="accelerator.gradient_state.remainder is not there"):
        _ = own.gradient_state.remainder
    sharded = StrategyAccelerator(
        lambda: SingleDevice("cpu"), lambda: TrainingArguments("out", fsdp="full_shard"), StepScope()
    )
    assert sharded.state.distributed_type == "FSDP"
    with pytest.raises(AttributeError, match="accelerator.state.fsdp_plugin is not there"):
        _ = sharded.state.fsdp_plugin


def test_the_accelerator_splits_samples_between_processes(make_trainer):
    with make_trainer().accelerator.split_between_processes(["a", "b"]) as alone:
        assert alone == ["a", "b"]
    ranks = [StrategyAccelerator(lambda: OfTwo("cpu"), None, StepScope()) for _ in range(2)]
    vars(ranks[1])["_strategy"] = lambda: SimpleNamespace(world_size=2, rank=1)
    given = {"list": [1, 2, 3], "tuple": (1, 2, 3), "tensor": torch.tensor([1, 2, 3])}
    for padding, second in ((False, [3]), (True, [3, 3])):
        for own, expected in zip(ranks, ([1, 2], second), strict=True):
            with own.split_between_processes(given, apply_padding=padding) as part:
                assert (part["list"], part["tuple"]) == (expected, tuple(expected))
                assert part["tensor"].tolist() == expected


def test_backward_of_the_accelerator_leaves_the_division_to_the_step(make_trainer):
    class ByHand(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    class SyncSeen(TrainerCallback):
        seen = []

        def on_micro_batch_end(self, args, state, control, **kwargs):
            self.seen.append(trainer.accelerator.sync_gradients)

    runs = []
    for kind in (Trainer, ByHand):
        options = {"gradient_accumulation_steps": 2, "logging_steps": 1, "max_steps": 3}
        trainer = make_trainer(24, trainer_class=kind, model=classifier(), callbacks=[SyncSeen()], **options)
        trainer.train()
        runs.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.allclose(*runs, atol=1e-7)
    assert SyncSeen.seen[:4] == [False, True, False, True]


def test_a_strategys_own_accelerator_is_the_trainers(make_args):
    strategy = SingleDevice("cpu")
    strategy.accelerator = object()
    trainer = Trainer(Classifier(), make_args(), train_dataset=samples(4), strategy=strategy)
    assert trainer.accelerator is strategy.accelerator


def test_saving_by_a_hook_outside_a_save_is_refused(make_trainer):
    with pytest.raises(RuntimeError, match="_save_checkpoint was called outside a save of the run"):
        make_trainer()._save_checkpoint(None, None)


def test_an_override_of_save_writes_the_models_files(make_trainer, tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            with open(f"{output_dir}/own.json", "w") as file:
                json.dump(sorted(state_dict), file)

    trainer = make_trainer(8, trainer_class=Own, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert json.loads((tmp_path / "final" / "own.json").read_text()) == sorted(trainer.model.state_dict())
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_an_override_of_save_model_need_not_take_internal_call(make_trainer, tmp_path):
    saved = []

    class WithFiles(MemoryCheckpointer):
        def save(self, step, parts, *, write_extra=None, **options):
            write_extra(tmp_path)
            super().save(step, parts, **options)

    class Own(Trainer):
        def save_model(self, output_dir=None):
            saved.append(output_dir)
            super().save_model(output_dir)

    trainer = make_trainer(
        8, trainer_class=Own, checkpointer=WithFiles(), save_strategy="steps", save_steps=1, max_steps=1
    )
    trainer.train()
    assert [Path(folder).name for folder in saved] == ["checkpoint-1"]
    assert not Path(saved[0]).parent.exists()
    assert (tmp_path / "model.safetensors").is_file()


def test_an_override_of_save_model_that_fails_ends_the_save_and_leaves_no_files(make_trainer, tmp_path):
    class Failing(Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call=_internal_call)
            raise OSError("no space left")

    trainer = make_trainer(
        8, trainer_class=Failing, checkpointer=MemoryCheckpointer(), save_strategy="steps", save_steps=1
    )
    with pytest.raises(OSError, match="no space left"):
        trainer.train()
    assert list((tmp_path / "out").glob(".*")) == []


def test_each_part_of_a_batch_is_prepared_by_the_hook_in_training_and_evaluation(make_trainer):
    class Zeros(Trainer):
        parts = []

        def _prepare_input(self, data):
            data = super()._prepare_input(data)
            if isinstance(data, torch.Tensor):
                self.parts.append(tuple(data.shape))
                return data * 0 if data.is_floating_point() else data
            return data

    seen = []

    class Watching(Classifier):
        def forward(self, x, labels):
            seen.append(x.abs().sum().item())
            return super().forward(x, labels)

    trainer = make_trainer(8, trainer_class=Zeros, model=Watching(), eval_dataset=samples(8), max_steps=1)
    trainer.train()
    trainer.evaluate()
    assert set(seen) == {0.0}
    assert len(seen) == 2
    assert len(Zeros.parts) == 4
    nested = trainer._prepare_input({"a": [torch.ones(1)], "b": (torch.ones(1), "text"), "c": Pair(torch.ones(1), 2)})
    assert nested == {"a": [torch.zeros(1)], "b": (torch.zeros(1), "text"), "c": Pair(torch.zeros(1), 2)}


class Pair(NamedTuple):
    first: object
    second: object


def test_a_model_is_moved_by_the_hook_before_it_is_first_used(make_trainer, make_args):
    class Moving(Trainer):
        moved = ()

        def _move_model_to_device(self, model, device):
            self.moved = (*self.moved, (model, device))

    trainer = make_trainer(8, trainer_class=Moving, max_steps=1, eval_dataset=samples(4))
    trainer.train()
    trainer.evaluate()
    assert trainer.moved == ((trainer.model, torch.device("cpu")),)
    other = classifier()
    Trainer._move_model_to_device(trainer, other, torch.device("meta"))
    assert next(other.parameters()).is_meta


def test_names_that_did_not_fit_are_logged_for_an_override_that_loads(make_trainer, caplog):
    trainer = make_trainer()
    result = trainer.model.load_state_dict({"layers.0.weight": torch.zeros(16, 8), "odd": torch.zeros(1)}, strict=False)
    caplog.set_level("WARNING", logger="tr_core")
    trainer._issue_warnings_after_load(result)
    assert "unexpected names: odd" in caplog.text
    assert "missing names: layers.0.bias" in caplog.text


def test_the_tokenizer_is_the_processing_class(make_trainer):
    trainer = make_trainer(tokenizer="first")
    assert trainer.tokenizer == "first"
    trainer.tokenizer = "second"
    assert trainer.processing_class == "second"


class Heads(Trainer):
    """Adds a head to the model where it loads a checkpoint, and calls what it overrides in `inherits`."""

    inherits = True
    optimizer_then = "not called"

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not hasattr(self.model, "head"):
            self.model.head = nn.Linear(3, 3)
        self.optimizer_then = self.optimizer
        if self.inherits:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


class WithHead(Classifier):
    def forward(self, x, labels):
        out = super().forward(x, labels)
        logits = self.head(out["logits"]) if hasattr(self, "head") else out["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_head(has_it):
    torch.manual_seed(0)
    model = WithHead()
    if has_it:
        model.head = nn.Linear(3, 3)
    return model


def test_an_override_that_loads_the_model_does_so_before_there_is_an_optimizer(make_trainer):
    kept = MemoryCheckpointer()
    options = {"trainer_class": Heads, "checkpointer": kept, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make_trainer(model=with_head(True), **options)
    whole.train()
    for source in (True, "memory/checkpoint-2"):
        kept.saved = {2: kept.saved[2]}
        resumed = make_trainer(model=with_head(False), **options)
        resumed.train(resume_from_checkpoint=source)
        assert resumed.optimizer_then is None
        expected = whole.model.state_dict()
        assert resumed.model.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def test_weights_are_those_that_an_override_loads(make_trainer):
    kept = MemoryCheckpointer()
    options = {"checkpointer": kept, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(model=classifier(), **options).train()

    class Own(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            self.folder = resume_from_checkpoint
            nn.init.zeros_(self.model.layers[0].weight)

    own = make_trainer(trainer_class=Own, model=classifier(), learning_rate=0.0, **options)
    own.train(resume_from_checkpoint="memory/checkpoint-2")
    assert own.folder == "memory/checkpoint-2"
    assert not own.model.layers[0].weight.any()
    assert own.state.global_step == 4


def test_a_checkpoint_that_changes_while_an_override_loads_from_it_is_an_error(make_trainer):
    class Older(MemoryCheckpointer):
        def restore(self, parts, source=None, **options):
            return super().restore(parts, f"checkpoint-{min(self.saved) if parts else max(self.saved)}", **options)

    kept = Older()
    options = {"checkpointer": kept, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(model=classifier(), **options).train()
    with pytest.raises(ValueError, match="the checkpoint of step 4 when the model was loaded, and is that of step 2"):
        make_trainer(trainer_class=Recording, model=classifier(), **options).train(resume_from_checkpoint=True)


def test_weights_of_a_checkpoint_are_loaded_by_hand(make_trainer):
    kept = MemoryCheckpointer()
    trainer = make_trainer(model=classifier(), checkpointer=kept, save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train()
    trainer._load_from_checkpoint("memory/checkpoint-1")
    saved = kept.saved[1]["model"]
    assert all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())
    with pytest.raises(ValueError, match="loads into trainer.model; this Classifier is another model"):
        trainer._load_from_checkpoint("memory/checkpoint-1", classifier())


class OfTwo(SingleDevice):
    """Rank 0 of two ranks, whose rank 1 has as many rows, all of them 7."""

    world_size = 2

    def gather(self, tensor):
        return torch.cat([tensor, tensor if tensor.dtype == torch.int64 else torch.full_like(tensor, 7)])

    def gather_objects(self, value):
        return [value, ["other"]]


def test_a_gather_for_metrics_leaves_out_the_filler_sample_of_a_rank():
    scope = StepScope()
    own = StrategyAccelerator(lambda: OfTwo("cpu"), None, scope)
    assert own.gather(torch.ones(1)).tolist() == [1, 7]
    assert own.gather_for_metrics(torch.ones(1)).tolist() == [1, 7]
    scope.total = 1  # of both ranks: rank 0 has a filler
    assert own.gather_for_metrics(torch.ones(1)).tolist() == [7]
    scope.weight = 0.0
    assert own.gather_for_metrics(["mine"]) == ["other"]


def test_a_loader_is_not_divided_by_prepare_and_says_so():
    own = StrategyAccelerator(lambda: OfTwo("cpu"), None, StepScope())
    with pytest.raises(
        RuntimeError, match="each of 2 processes all batches: return the loader of self._get_dataloader"
    ):
        own.prepare(DataLoader(samples(4)))
    with pytest.raises(RuntimeError, match="would give each of 2 processes all batches"):
        own.prepare_data_loader(DataLoader(samples(4)))
    alone = StrategyAccelerator(lambda: SingleDevice("cpu"), None, StepScope())
    assert isinstance(alone.prepare(DataLoader(samples(4))), DataLoader)


def seeded_orders(seed, count=10):
    return [torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist() for epoch in range(3)]


@pytest.mark.parametrize(("seed", "data_seed"), [(3, None), (5, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(range(10), generator=torch.Generator())},
        {"batch_sampler": BatchSampler(RandomSampler(range(10)), 4, drop_last=False)},
        {"sampler": BatchSampler(RandomSampler(range(10)), 4, drop_last=False), "batch_size": None},
    ],
    ids=["shuffle", "sampler", "batch sampler", "batches as a sampler"],
)
def test_a_prepared_loader_shuffles_by_seed_and_epoch(make_trainer, options, seed, data_seed):
    own = make_trainer(seed=seed, data_seed=data_seed).accelerator
    loader = DataLoader(torch.arange(10), **options)
    assert own.prepare(loader) is loader
    assert [torch.cat(list(loader)).tolist() for _ in range(3)] == seeded_orders(3)
    for number in (2, 0):
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        batches.sampler.set_epoch(number)
        assert torch.cat(list(loader)).tolist() == seeded_orders(3)[number]


def test_a_loader_of_a_random_order_is_refused_in_several_processes():
    own = StrategyAccelerator(lambda: OfTwo("cpu"), None, StepScope())
    with pytest.raises(RuntimeError, match="would give each of 2 processes all batches"):
        own.prepare(DataLoader(samples(4), shuffle=True))


def test_backward_of_a_filler_sample_adds_nothing():
    weight, scope = torch.ones(1, requires_grad=True), StepScope(size=2, weight=0.0)
    StrategyAccelerator(lambda: SingleDevice("cpu"), None, scope).backward((weight * 3).sum())
    assert weight.grad.tolist() == [0.0]


def test_gradients_that_are_scaled_for_float16_are_not_clipped_by_parameters():
    own = StrategyAccelerator(None, lambda: SimpleNamespace(fp16=True), StepScope())
    with pytest.raises(RuntimeError, match="scaled for float16; set max_grad_norm, or override _clip_grad_norm"):
        own.clip_grad_norm_([], 1.0)
