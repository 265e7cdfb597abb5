"""What callbacks see of a micro-batch and of a step: loss, inputs and outputs."""

import gc
import weakref

import pytest
import torch
from support.callbacks import on
from support.data import samples
from support.models import Base, Classifier, CountedSum, ReturnsTuple
from support.runs import ScaledDevice, log_of
from torch import nn

from tr_core import Trainer, TrainerCallback


class Watch(TrainerCallback):
    """Writes down events with what comes with them."""

    def __init__(self):
        self.events, self.losses, self.inputs, self.outputs = [], [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append("step_begin")

    def on_micro_batch_end(self, args, state, control, *, loss, inputs, outputs=None, **kwargs):
        self.events.append("micro_batch_end")
        self.losses.append(loss)
        self.inputs.append(inputs)
        self.outputs.append(outputs)

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append("substep_end")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.events.append("pre_optimizer_step")


class WatchLoss(TrainerCallback):
    """Takes the loss of every micro-batch and every step, and no outputs."""

    def __init__(self):
        self.micro_batches, self.steps, self.given = [], [], []

    def on_micro_batch_end(self, args, state, control, **kwargs):
        self.micro_batches.append(kwargs["loss"])
        self.given.append(kwargs["outputs"])

    def on_step_end(self, args, state, control, *, loss, **kwargs):
        self.steps.append(loss)


def test_the_event_comes_after_every_micro_batch_and_before_the_substep(make_trainer):
    watch = Watch()
    make_trainer(20, callbacks=[watch], gradient_accumulation_steps=2).train()
    step = ["step_begin", "micro_batch_end", "substep_end", "micro_batch_end", "pre_optimizer_step"]
    assert watch.events == step + step + ["step_begin", "micro_batch_end", "pre_optimizer_step"]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("model_class", [Classifier, CountedSum])
def test_the_losses_of_micro_batches_add_up_to_those_of_steps_which_are_logged(make_trained, accumulation, model_class):
    watch = WatchLoss()
    trainer = make_trained(
        28, model=model_class(), callbacks=[watch], gradient_accumulation_steps=accumulation, logging_steps=1
    )
    logged = log_of(trainer, "loss")
    steps = [watch.micro_batches[n : n + accumulation] for n in range(0, 7, accumulation)]
    assert [sum(step).item() for step in steps] == pytest.approx(logged, rel=1e-6)
    assert [loss.item() for loss in watch.steps] == pytest.approx(logged, rel=1e-6)
    assert not any(loss.requires_grad for loss in watch.micro_batches + watch.steps)


def test_under_float16_the_loss_is_not_the_scaled_one(make_trainer):
    watch = WatchLoss()
    trainer = make_trainer(8, callbacks=[watch])
    trainer.strategy = ScaledDevice()
    trainer.train()
    logged = log_of(trainer, "loss")
    assert [loss.item() for loss in watch.micro_batches] == pytest.approx(logged, rel=1e-6)
    assert max(logged) < 10


def test_inputs_are_the_batch_as_the_loader_gave_it(make_trainer):
    watch, rows = Watch(), samples(8)
    make_trainer(train_dataset=rows, callbacks=[watch], train_sampling_strategy="sequential").train()
    for number, inputs in enumerate(watch.inputs):
        assert torch.equal(inputs["x"], torch.stack([row["x"] for row in rows[4 * number : 4 * number + 4]]))
        assert set(inputs) == {"x", "labels"}


@pytest.mark.parametrize("model_class", [Classifier, ReturnsTuple])
def test_outputs_come_detached_where_a_method_names_them(make_trained, model_class):
    watch = Watch()
    trainer = make_trained(8, model=model_class(), callbacks=[watch])
    logits = [out["logits"] if isinstance(out, dict) else out[1] for out in watch.outputs]
    assert [tuple(each.shape) for each in logits] == [(4, 3), (4, 3)]
    assert not any(each.requires_grad for each in logits)
    assert trainer.scope.outputs is None


@pytest.mark.parametrize("asks", [False, True])
def test_compute_loss_is_asked_for_outputs_only_where_a_method_names_them(make_trainer, asks):
    asked = []

    class Notes(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            asked.append(return_outputs)
            return super().compute_loss(model, inputs, return_outputs)

    watch = WatchLoss()
    make_trainer(8, trainer_class=Notes, callbacks=[watch, Watch()] if asks else [watch]).train()
    assert asked == [asks] * 2
    # One that takes them among others gets what is there.
    assert [outputs is not None for outputs in watch.given] == [asks] * 2


def test_asking_for_outputs_changes_no_number(make_trained):
    runs = []
    for callbacks in ([], [Watch()]):
        torch.manual_seed(0)
        trainer = make_trained(20, model=Classifier(), callbacks=callbacks, gradient_accumulation_steps=2)
        runs.append(([entry.get("loss") for entry in trainer.state.log_history], trainer.model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


@pytest.mark.parametrize("asks", [False, True])
def test_nothing_of_a_micro_batch_outlives_its_event(make_trained, asks):
    """Neither the outputs nor the graph that a loss came from."""
    made, alive = [], []

    class Traced(Base):
        def forward(self, x, labels):
            logits = self.layers(x)
            made.append(weakref.ref(logits))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Asks(TrainerCallback):
        def on_micro_batch_end(self, args, state, control, *, outputs, **kwargs):
            assert outputs["logits"].shape == (4, 3)

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))

    trainer = make_trained(
        24, model=Traced(), callbacks=[Look(), *([Asks()] if asks else [])], gradient_accumulation_steps=3
    )
    assert (alive, trainer.scope.outputs) == ([0, 0], None)


def test_a_dict_of_losses_and_outputs_go_together(make_trained):
    class Parts(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            losses = {"loss": outputs["loss"], "ce": outputs["loss"]}
            return (losses, outputs) if return_outputs else losses

    watch = Watch()
    trainer = make_trained(8, trainer_class=Parts, callbacks=[watch])
    assert watch.outputs[0]["logits"].shape == (4, 3)
    assert trainer.state.log_history[0]["ce"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-7)


def test_an_override_of_training_step_gives_no_outputs(make_trainer):
    class Own(Trainer):
        def training_step(self, model, inputs):
            loss = model(**inputs)["loss"]
            self.strategy.backward(loss)
            return loss.detach()

    watch = Watch()
    make_trainer(8, trainer_class=Own, callbacks=[watch]).train()
    assert watch.outputs == [None, None]
    assert len(watch.losses) == 2


def test_callbacks_may_come_and_go_in_a_run(make_trainer):
    late = Watch()

    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.add_callback(late)
            elif state.global_step == 4:
                trainer.remove_callback(late)

    trainer = make_trainer(24, callbacks=[Adds()])
    trainer.train()
    assert [outputs is not None for outputs in late.outputs] == [True, True]


def test_events_without_a_listener_cost_no_read_and_those_with_one_neither(make_trainer, read_counter):
    reads, watch = [], [Watch(), WatchLoss()]
    note = on("on_step_end", lambda **_: reads.append(len(read_counter.reads)))
    trainer = make_trainer(80, callbacks=[*watch, note], logging_steps=1000)
    with read_counter:
        trainer.train()
    assert len(watch[0].losses) == 20
    assert reads[-1] == reads[2]


def test_a_plain_object_that_names_the_loss_gets_it(make_trained):
    class Plain:
        def __init__(self):
            self.losses = []

        def on_step_end(self, args, state, control, loss, model, **kwargs):
            self.losses.append(loss)
            return {"should_training_stop": state.global_step == 2}

    plain = Plain()
    trainer = make_trained(40, callbacks=[plain])
    assert [loss.item() for loss in plain.losses] == log_of(trainer, "loss")
    assert trainer.state.global_step == 2


def test_an_unknown_flag_is_still_blamed_on_the_method_that_named_the_loss(make_trainer):
    class Wrong(TrainerCallback):
        def on_step_end(self, args, state, control, loss, **kwargs):
            return {"should_stop": True}

    with pytest.raises(ValueError, match=r"Wrong.on_step_end returned unknown flags \['should_stop'\]"):
        make_trainer(4, callbacks=[Wrong()]).train()
