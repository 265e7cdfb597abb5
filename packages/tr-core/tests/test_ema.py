"""An average of the weights: followed while training, evaluated, saved, resumed, and left at the end."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Base, Classifier
from torch import nn

from tr_core import Trainer, TrainerCallback
from tr_core.callbacks.ema import EMACallback, WeightAverage
from tr_core.testing import check_evaluation_weights


def copies(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


class Watch(TrainerCallback):
    """Notes the weights that train after every step, and those that evaluations see."""

    def __init__(self):
        self.trained, self.evaluated = [], []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.trained.append(copies(model))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.trained.append(copies(model))

    def on_prediction_step(self, args, state, control, model, **kwargs):
        self.evaluated.append((state.global_step, copies(model)))


@pytest.fixture
def averaged(make_trainer, tmp_path):
    """Build a Trainer of ten steps whose weights are averaged."""

    def build(model=None, checkpointer=None, callbacks=(), **changes):
        torch.manual_seed(0)
        options = {"ema_decay": 0.9, "learning_rate": 0.05, "per_device_eval_batch_size": 4}
        return make_trainer(
            40,
            model=model or Classifier(dropout=0.2),
            eval_dataset=samples(4, seed=5),
            callbacks=list(callbacks),
            checkpointer=checkpointer or MemoryCheckpointer(tmp_path),
            **{**options, **changes},
        )

    return build


def average_of(trained, decay, start=0, every=1):
    """Return the average after each step, computed one weight at a time."""
    average = [{name: tensor.clone() for name, tensor in trained[start].items()}]
    for number, weights in enumerate(trained[start + 1 :], start=1):
        last = average[-1]
        update = number % every == 0
        average.append({name: moved(last[name], weights[name], decay) if update else last[name] for name in weights})
    return average


def moved(average, weight, decay):
    return torch.lerp(average, weight, 1 - decay) if weight.is_floating_point() else weight


# The average


@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (0, 4), (2, 3), (10, 1)])
def test_the_model_that_training_leaves_is_the_average_of_its_weights(averaged, start, every):
    watch = Watch()
    trainer = averaged(callbacks=[watch], ema_start_step=start, ema_update_steps=every)
    trainer.train()
    assert equal(copies(trainer.model), average_of(watch.trained, 0.9, start, every)[-1])
    assert not equal(copies(trainer.model), watch.trained[-1]) or start == 10


def test_a_run_shorter_than_the_start_leaves_its_weights_as_they_are(averaged):
    watch = Watch()
    trainer = averaged(callbacks=[watch], ema_start_step=11, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert equal(copies(trainer.model), watch.trained[-1])
    assert all(equal(seen, watch.trained[step]) for step, seen in watch.evaluated)


def test_training_itself_is_that_without_an_average(averaged):
    runs = []
    for decay in (None, 0.9):
        watch = Watch()
        averaged(callbacks=[watch], ema_decay=decay, eval_strategy="steps", eval_steps=2).train()
        runs.append(watch.trained)
    assert all(equal(one, other) for one, other in zip(*runs, strict=True))


def test_an_update_and_a_swap_read_nothing_from_the_device(read_counter):
    average = WeightAverage(Classifier(), 0.9)
    with read_counter:
        average.reset()
        average.update()
        with average.swapped_in():
            pass
        average.keep()
    assert read_counter.reads == []


def calls_of_an_update(weights, dtype):
    """Count the calls of this package's functions, torch's, and torch's in C++."""
    average = WeightAverage(nn.ParameterList(torch.ones(3, 2, dtype=dtype) for _ in range(weights)), 0.9)
    average.model.register_buffer("mean", torch.zeros(2, dtype=dtype))
    average.update()
    counted = []

    def count(frame, event, called):
        if event in ("call", "c_call"):
            counted.append(f"{frame.f_code.co_qualname} {getattr(called, '__qualname__', '')}")

    sys.setprofile(count)
    try:
        average.update()
    finally:
        sys.setprofile(None)
    return [name for name in counted if not name.endswith((" getattr", " setprofile"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_many_weights_is_as_many_calls_as_of_few(dtype):
    assert calls_of_an_update(64, dtype) == calls_of_an_update(2, dtype) != []


def test_an_update_follows_a_weight_whose_memory_was_exchanged():
    model = nn.Linear(2, 1, bias=False)
    average = WeightAverage(model, 0.5)
    before = model.weight.detach().clone()
    model.weight.data = before + 1
    average.update()
    assert torch.equal(average.state_dict()["weight"], torch.lerp(before, before + 1, 0.5))


def test_a_step_that_was_left_out_does_not_move_the_average(averaged):
    """A float16 overflow, which a CPU cannot have: the strategy says so here."""
    trainer = averaged(num_train_epochs=1)
    step, skipped, watch = trainer.strategy.step, [], Watch()
    trainer.add_callback(watch)

    def step_but_for_the_last(optimizer):
        if trainer.state.global_step < 9:
            return step(optimizer)
        skipped.append(trainer.state.global_step)
        return False

    trainer.strategy.step = step_but_for_the_last
    trainer.train()
    assert skipped == [9]
    assert equal(copies(trainer.model), average_of(watch.trained[:-1], 0.9)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_step_that_was_not_finite_and_left_out_does_not_move_the_average(averaged, optim, dtype):
    watch, model, bad = Watch(), Classifier().to(dtype), (3, 4, 10)
    data = samples(40)
    for step in bad:
        data[4 * (step - 1)]["x"] = torch.full((8,), torch.nan)
    options = {"train_dataset": data, "train_sampling_strategy": "sequential", "optim": optim, "num_train_epochs": 1}
    averaged(model, callbacks=[watch], on_nonfinite="skip", **options, data_collator=in_type(dtype)).train()
    wide = torch.promote_types(dtype, torch.float32)
    trained = [{name: tensor.to(wide) for name, tensor in weights.items()} for weights in watch.trained]
    assert all(equal(trained[step], trained[step - 1]) for step in bad)
    kept = [weights for step, weights in enumerate(trained) if step not in bad]
    for name, expected in average_of(kept, 0.9)[-1].items():
        torch.testing.assert_close(model.state_dict()[name], expected.to(dtype))


def in_type(dtype):
    def collate(rows):
        x, labels = (torch.stack([row[name] for row in rows]) for name in ("x", "labels"))
        return {"x": x.to(dtype), "labels": labels}

    return collate


def test_an_average_that_may_be_left_out_reads_nothing_and_stays_the_same_to_the_last_bit(read_counter):
    average = WeightAverage(Classifier(), 0.9)
    before = copies(average)
    with torch.no_grad():
        average.model.layers[0].weight.add_(1.0)
    with read_counter:
        average.update(torch.tensor(True))
    assert read_counter.reads == []
    assert equal(average.state_dict(), before)
    average.update(torch.tensor(False))
    assert not equal(average.state_dict(), before)


class Tied(Base):
    """Tied weights, a frozen layer, and norms with running statistics of both kinds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.again = nn.Linear(8, 16)
        self.again.weight = self.layers[0].weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x, labels=None):
        hidden = self.norm(self.layers[:3](x) + self.again(x))
        logits = self.frozen(self.layers[3](hidden)) + self.table
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_tied_weights_frozen_ones_and_buffers_are_averaged_each_in_its_way(averaged):
    watch = Watch()
    trainer = averaged(Tied(), callbacks=[watch], eval_strategy="steps", eval_steps=5)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, EMACallback))
    trainer.train()
    left, expected = copies(trainer.model), average_of(watch.trained, 0.9)[-1]
    held = callback.weight_parts(trainer.model)["ema"].state_dict()
    assert "again.weight" not in held, "one of two names of one weight"
    assert not {"frozen.weight", "norm.num_batches_tracked", "table"} & set(held)
    assert {"norm.running_mean", "norm.running_var"} <= set(held)
    assert left["norm.num_batches_tracked"] == watch.trained[-1]["norm.num_batches_tracked"] == 10
    assert trainer.model.again.weight is trainer.model.layers[0].weight
    for name in held:
        assert torch.equal(left[name], expected[name]), name
    assert equal(
        {name: left[name] for name in ("frozen.weight", "frozen.bias")},
        {name: watch.trained[0][name] for name in ("frozen.weight", "frozen.bias")},
    )


def test_half_precision_weights_are_averaged_in_float32_and_swapped_without_loss(averaged):
    watch = Watch()
    trainer = averaged(Classifier().to(torch.bfloat16), callbacks=[watch], ema_decay=0.99, remove_unused_columns=False)
    trainer.data_collator = lambda rows: {
        "x": torch.stack([row["x"] for row in rows]).bfloat16(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_steps = 1
    trainer.train()
    wide = [{name: tensor.float() for name, tensor in weights.items()} for weights in watch.trained]
    expected = average_of(wide, 0.99)
    for step, seen in watch.evaluated:
        assert equal(seen, {name: tensor.bfloat16() for name, tensor in expected[step].items()})


# Evaluation and saving


def test_evaluations_during_training_see_the_average_and_training_keeps_its_own_weights(averaged):
    watch = Watch()
    trainer = averaged(callbacks=[watch], eval_strategy="steps", eval_steps=2, eval_on_start=True)
    trainer.train()
    expected = average_of(watch.trained, 0.9)
    assert [step for step, _ in watch.evaluated] == [0, 2, 4, 6, 8, 10]
    assert all(equal(seen, expected[step]) for step, seen in watch.evaluated)


def test_predictions_and_saved_models_during_training_are_those_of_the_average(averaged, tmp_path):
    watch = Watch()

    class Use(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 5:
                before = copies(model)
                trainer.predict(samples(4))
                trainer.save_model(tmp_path / "model")
                assert equal(copies(model), before)

    trainer = averaged(callbacks=[watch, Use()])
    trainer.train()
    expected = average_of(watch.trained, 0.9)[5]
    assert [step for step, _ in watch.evaluated] == [5]
    assert equal(watch.evaluated[0][1], expected)
    assert equal(load_file(tmp_path / "model" / "model.safetensors"), expected)


def test_the_weights_are_swapped_back_after_an_exception_and_such_a_run_keeps_them(averaged):
    class Breaks(Trainer):
        def prediction_step(self, *args, **kwargs):
            raise RuntimeError("broken")

    watch = Watch()
    trainer = averaged(callbacks=[watch], eval_strategy="steps", eval_steps=4, trainer_class=Breaks)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert len(watch.trained) == 5
    assert equal(copies(trainer.model), watch.trained[-1])


def test_after_a_run_that_broke_its_own_weights_are_evaluated(averaged):
    watch = Watch()
    trainer = averaged(callbacks=[watch, StopAt(4)])
    with pytest.raises(Stop):
        trainer.train()
    trainer.evaluate()
    assert equal(watch.evaluated[-1][1], watch.trained[4])


def test_after_training_the_model_is_evaluated_as_it_is(averaged):
    watch = Watch()
    trainer = averaged(callbacks=[watch])
    trainer.train()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.evaluate()
    assert all(not weights.any() for weights in watch.evaluated[-1][1].values())


def test_a_swap_inside_a_swap_does_nothing():
    model = Classifier()
    average, before = WeightAverage(model, 0.5), copies(model)
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    own = copies(model)
    with average.swapped_in():
        with average.swapped_in():
            assert equal(copies(model), before)
        assert equal(copies(model), before)
    assert equal(copies(model), own)


def test_the_callback_keeps_the_promises_of_its_seam():
    check_evaluation_weights(EMACallback(0.5))


# Checkpoints


def test_a_checkpoint_holds_the_raw_weights_and_the_average_beside_them(averaged):
    watch, memory = Watch(), MemoryCheckpointer()
    averaged(checkpointer=memory, callbacks=[watch], save_strategy="steps", save_steps=4).train()
    expected = average_of(watch.trained, 0.9)
    for step in (4, 8, 10):
        assert equal(memory.saved[step]["model"], watch.trained[step])
        assert equal(memory.saved[step]["ema"], expected[step])


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9])
def test_a_resumed_run_has_the_same_average_to_the_last_bit(averaged, start, stop):
    options = {"save_strategy": "steps", "save_steps": 1, "ema_start_step": start, "ema_update_steps": 2}
    alone, memory = MemoryCheckpointer(), MemoryCheckpointer()
    whole = averaged(checkpointer=alone, **options)
    whole.train()
    with pytest.raises(Stop):
        averaged(checkpointer=memory, callbacks=[StopAt(stop)], **options).train()
    resumed = averaged(checkpointer=memory, **options)
    resumed.train(resume_from_checkpoint=True)
    assert equal(copies(resumed.model), copies(whole.model))
    assert equal(memory.saved[10]["ema"], alone.saved[10]["ema"])
    assert equal(memory.saved[10]["model"], alone.saved[10]["model"])


def test_resuming_a_finished_run_leaves_the_average_again(averaged):
    memory = MemoryCheckpointer()
    finished = averaged(checkpointer=memory, save_strategy="steps")
    finished.train()
    again = averaged(checkpointer=memory, save_strategy="steps")
    assert again.train(resume_from_checkpoint=True).global_step == 10
    assert equal(copies(again.model), copies(finished.model))
    assert not equal(copies(again.model), memory.saved[10]["model"])


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_the_average_of_its_step(averaged, start, save_only_model):
    values, memory, watch = iter([3.0, 1.0, 2.0, 2.5, 4.0]), MemoryCheckpointer(), Watch()
    trainer = averaged(
        checkpointer=memory,
        callbacks=[watch],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        save_only_model=save_only_model,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        compute_metrics=lambda p: {"score": next(values)},
        ema_start_step=start,
    )
    trainer.train()
    assert trainer.state.best_global_step == 4
    assert equal(copies(trainer.model), dict(watch.evaluated)[4])


@pytest.mark.parametrize("load_best", [False, True])
def test_every_run_of_one_trainer_begins_an_average_of_its_own(averaged, load_best):
    watch = Watch()
    changes = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "best"}
    trainer = averaged(callbacks=[watch], **(changes if load_best else {}))
    trainer.train()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.5)
    changed = copies(trainer.model)
    trainer.train()
    assert equal(watch.trained[11], changed)
    assert equal(copies(trainer.model), average_of(watch.trained[11:], 0.9)[-1])


def test_a_model_made_again_for_a_run_gets_an_average_of_its_own(make_trainer):
    trainer = make_trainer(8, model_init=Classifier, ema_decay=0.9, learning_rate=0.1)
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(copies(trainer.model))
    assert equal(*ends)


# What does not work, in words


def test_a_checkpoint_without_an_average_is_refused(averaged):
    memory = MemoryCheckpointer()
    with pytest.raises(Stop):
        averaged(
            checkpointer=memory, callbacks=[StopAt(3)], ema_decay=None, save_strategy="steps", save_steps=1
        ).train()
    with pytest.raises(ValueError, match="there is no ema in it"):
        averaged(checkpointer=memory, save_strategy="steps").train(resume_from_checkpoint=True)


def test_an_average_of_other_weights_is_refused():
    saved = WeightAverage(Classifier(), 0.9).state_dict()
    other = Classifier()
    other.layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"is of other weights: layers.0.bias, layers.0.weight are only in one"):
        WeightAverage(other, 0.9).load_state_dict(saved)
    saved["layers.0.bias"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"layers.0.bias has the shape \(2,\), the weight \(16,\)"):
        WeightAverage(Classifier(), 0.9).load_state_dict(saved)


def test_a_weight_that_is_trainable_only_since_training_began_is_refused(averaged):
    class Unfreeze(TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            optimizer.add_param_group({"params": list(model.layers[0].parameters())})

        def on_step_end(self, args, state, control, model, **kwargs):
            model.layers[0].requires_grad_(True)

    model = Classifier()
    model.layers[0].requires_grad_(False)
    trainer = averaged(model, callbacks=[Unfreeze()], eval_strategy="steps", eval_steps=3)
    with pytest.raises(ValueError, match=r"no average of layers.0.weight, layers.0.bias: frozen when training began"):
        trainer.train()


def test_weights_that_are_not_whole_tensors_are_refused():
    class Sharded(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Sharded))
    with pytest.raises(ValueError, match="ema_decay averages plain tensors, or shards, but weight is a Sharded"):
        WeightAverage(model, 0.9)


def test_weights_that_another_library_has_taken_away_are_refused():
    model = nn.Linear(2, 2)
    model.bias.data = torch.empty(0)  # as of a model that DeepSpeed divides
    with pytest.raises(ValueError, match="of which bias has none in this process; leave ema_decay out, or divide"):
        WeightAverage(model, 0.9)


def test_two_parts_of_one_name_are_refused(averaged):
    class Mine(EMACallback):
        def weight_parts(self, model):
            return {"optimizer": next(iter(super().weight_parts(model).values()))}

    with pytest.raises(ValueError, match="two callbacks give a part of the checkpoint the name 'ema'; the second is"):
        averaged(callbacks=[EMACallback(0.5)], save_strategy="steps").train()
    with pytest.raises(ValueError, match="a callback gives its part of the checkpoint the name 'optimizer', which is"):
        averaged(callbacks=[Mine(0.5)], ema_decay=None, save_strategy="steps").train()


@pytest.mark.cuda
def test_steps_with_an_average_on_a_cuda_device_do_not_wait_for_it(averaged, no_sync):
    trainer = averaged(callbacks=[no_sync], logging_steps=1000, use_cpu=False, ema_update_steps=2)
    assert trainer.train().global_step == 10
