from types import SimpleNamespace

import pytest
import torch
from support.callbacks import on
from support.data import MapStyle, Stream, samples
from support.models import Classifier, ReturnsDataclass, ReturnsTuple
from support.runs import log_of, steps_with
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tr_core import EarlyStoppingCallback, Trainer, TrainerCallback


class Recorder:
    """Writes down every event; no subclass of anything."""

    def __init__(self):
        self.events = []


for _event in {name for name in vars(TrainerCallback) if name.startswith("on_")} - {
    "on_micro_batch_end",
    "on_checkpoint",
}:  # see test_loop.py

    def _note(self, args, state, control, _event=_event, **kwargs):
        self.events.append(_event.removeprefix("on_"))

    setattr(Recorder, _event, _note)


def events_of(make_trainer, number=20, **changes):
    recorder = Recorder()
    trainer = make_trainer(number, callbacks=[recorder], **changes)
    trainer.train()
    return recorder.events, trainer


def training_entries(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_run_says_what_it_trains_and_how(make_trainer, caplog):
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "ema_decay": 0.9}
    trainer = make_trainer(20, max_steps=2, learning_rate=0.5, warmup_steps=1, **arguments)
    with caplog.at_level("INFO", "tr_core"):
        trainer.train()
    (said,) = [message for message in caplog.messages if message.startswith("training begins")]
    count = trainer.get_num_trainable_parameters()
    assert said.splitlines()[1:] == [
        f"  model      Classifier, {count} trainable parameters",
        "  optimizer  AdamW, learning rate 0.5, schedule linear, warmup over 1 of 2",
        "  precision  weights in float32",
        "  averaging  decay 0.9; evaluations and saved models use the averaged weights",
        "  batch      8 samples a step = 4 on a device x 2 micro-batches",
        "  data       20 samples an epoch, 2 steps",
        "  device     cpu",
        f"  output     {trainer.args.output_dir}",
    ]


# Step and epoch arithmetic


def test_no_gradient_survives_the_end_of_an_epoch_over_a_stream(make_trainer):
    leaked = []

    class Look(TrainerCallback):
        def on_epoch_begin(self, args, state, control, model, **kwargs):
            leaked.extend(p.grad for p in model.parameters() if p.grad is not None)

    sizes = []
    count = on("on_step_end", lambda **_: sizes.append(trainer.scope.size))
    trainer = make_trainer(
        train_dataset=Stream(samples(12)), max_steps=4, gradient_accumulation_steps=2, callbacks=[Look(), count]
    )
    trainer.train()
    assert (leaked, sizes) == ([], [2, 1, 2, 1])


@pytest.mark.parametrize("flag", ["should_epoch_stop", "should_training_stop"])
def test_an_update_that_was_begun_is_finished_before_a_stop(make_trained, flag):
    """Asked to stop between two micro-batches, a run makes the update of both, and keeps no gradient."""
    kept = []

    def stop(state, control, **kwargs):
        if state.global_step == 1:
            setattr(control, flag, True)

    def look(model, **kwargs):
        kept.append(any(p.grad is not None and p.grad.any() for p in model.parameters()))

    callbacks = [on("on_substep_end", stop), on("on_epoch_end", look)]
    trainer = make_trained(18, num_train_epochs=2, gradient_accumulation_steps=2, callbacks=callbacks)
    assert not any(kept)
    assert training_entries(trainer)[1]["step"] == 2
    assert trainer.state.global_step == (2 if flag == "should_training_stop" else 5)


def test_a_stop_that_is_asked_for_before_the_first_step_is_heeded(make_trainer):
    recorder = Recorder()
    stop = on("on_train_begin", lambda control, **_: setattr(control, "should_training_stop", True))
    assert make_trainer(callbacks=[stop, recorder]).train().global_step == 0
    assert recorder.events == ["init_end", "train_begin", "log", "train_end"]


def test_the_order_of_the_data_follows_the_arguments_and_not_what_seeded_torch_last(make_trainer):
    orders = []
    for seed in (1, 2):
        data = MapStyle(samples(18))
        trainer = make_trainer(train_dataset=data)
        torch.manual_seed(seed)
        trainer.train()
        orders.append(data.asked)
    assert orders[0] == orders[1] != sorted(orders[0])


def test_arguments_that_a_grouped_setter_changed_can_be_trained_with(make_trainer):
    trainer = make_trainer(18, num_train_epochs=2, eval_dataset=samples(9))
    trainer.args.set_evaluate(strategy="steps", steps=5, batch_size=4)
    assert trainer.train().global_step == 10
    assert steps_with(trainer, "eval_loss") == [5, 10]


def test_a_generator_that_cannot_begin_again_says_so(make_trainer):
    class Once(IterableDataset):
        def __init__(self):
            self.rows = iter(samples(8))

        def __iter__(self):
            return self.rows

    with pytest.raises(ValueError, match="epoch 1 of the training data gave no batch, at step 2 of 9"):
        make_trainer(train_dataset=Once(), max_steps=9).train()


# Events


def test_the_events_of_accumulation_two_over_five_batches_are_the_documented_ones(make_trainer):
    events, _ = events_of(
        make_trainer, 20, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=samples(8)
    )
    step = "step_begin substep_end pre_optimizer_step optimizer_step step_end log"
    last = "step_begin pre_optimizer_step optimizer_step step_end log prediction_step log evaluate"
    expected = (
        f"init_end train_begin epoch_begin {step} {step} prediction_step log evaluate {last} epoch_end log train_end"
    )
    assert " ".join(events) == expected


def test_a_callback_may_answer_with_a_dict_of_flags(make_trainer):
    class StopsByDict(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return {"should_training_stop": True} if state.global_step >= 2 else {}

    stopped = make_trainer(callbacks=[StopsByDict()])
    assert stopped.train().global_step == 2


def test_an_unknown_flag_is_an_error_that_lists_the_flags(make_trainer):
    class Wrong(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return {"should_stop": True}

    with pytest.raises(ValueError, match=r"Wrong.on_step_end returned unknown flags \['should_stop'\]; flags are"):
        make_trainer(callbacks=[Wrong()]).train()


def test_an_answer_that_is_no_flags_is_an_error(make_trainer):
    class Wrong(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            return True

    with pytest.raises(TypeError, match="an event returns None, the control object, or a dict of its flags"):
        make_trainer(callbacks=[Wrong()]).train()


def test_training_ends_with_its_event_after_an_exception_and_after_ctrl_c(make_trainer):
    for error in (RuntimeError("broken"), KeyboardInterrupt()):
        seen = []

        class Fails(TrainerCallback):
            def on_step_begin(self, args, state, control, _error=error, **kwargs):
                if state.global_step == 1:
                    raise _error

            def on_train_end(self, args, state, control, error=None, _seen=seen, **kwargs):
                _seen.append(error)

        trainer = make_trainer(callbacks=[Fails()])
        with pytest.raises(type(error)):
            trainer.train()
        assert seen == [error]
        assert not trainer.is_in_train


def test_callback_is_another_name_for_callbacks(make_trainer):
    recorder = Recorder()
    make_trainer(callback=[recorder]).train()
    assert recorder.events[0] == "init_end"


def test_only_defined_events_are_dispatched(make_trainer):
    class OnlyLog(TrainerCallback):
        def on_log(self, args, state, control, **kwargs): ...

    handler = make_trainer(callbacks=[OnlyLog()]).callback_handler
    assert not any(type(m.__self__) is OnlyLog for m in handler._listeners["on_step_end"])
    assert any(type(m.__self__) is OnlyLog for m in handler._listeners["on_log"])


def test_an_object_without_events_is_no_callback(make_trainer):
    with pytest.raises(TypeError, match="is not a callback: it defines none of the events"):
        make_trainer(callbacks=[object()])


# Logs


def test_the_logged_learning_rate_is_the_one_the_step_used(make_trained):
    trainer = make_trained(16, warmup_steps=2, learning_rate=1.0, optim="sgd")
    assert [entry["learning_rate"] for entry in training_entries(trainer)] == [0.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"num_train_epochs": 2}, 40),
        ({"num_train_epochs": 1.5}, 30),
        ({"max_steps": 3}, 12),
        ({"per_device_train_batch_size": 8, "dataloader_drop_last": True}, 16),
    ],
)
def test_the_rate_of_a_run_is_of_all_samples_that_it_used(make_trained, options, samples):
    last = make_trained(20, **options).state.log_history[-1]
    assert last["train_samples_per_second"] * last["train_runtime"] == pytest.approx(samples, rel=0.02)


# Models, data and precision


@pytest.mark.parametrize("model_class", [Classifier, ReturnsTuple, ReturnsDataclass])
def test_models_that_return_dicts_tuples_or_dataclasses_train_and_evaluate(make_trained, model_class):
    trainer = make_trained(
        8, model=model_class(), eval_dataset=samples(5), compute_metrics=lambda p: {"rows": len(p.predictions)}
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 5
    assert metrics["eval_loss"] > 0


def test_tuples_of_tensors_train_with_a_loss_function(make_trained):
    data = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.arange(12) % 3)
    trainer = make_trained(
        model=nn.Linear(8, 3),
        train_dataset=data,
        eval_dataset=data,
        compute_loss_func=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels),
        compute_metrics=lambda p: {"shape": list(p.predictions.shape), "labels": p.label_ids.tolist()},
    )
    assert trainer.evaluate()["eval_shape"] == [12, 3]
    assert trainer.evaluate()["eval_labels"] == [i % 3 for i in range(12)]


def test_a_loader_that_ends_before_its_length_says_so(make_trainer):
    class Short(list):
        def __len__(self):
            return 4

    class Own(Trainer):
        def get_train_dataloader(self):
            return Short(DataLoader(samples(6), batch_size=2))

    with pytest.raises(ValueError, match="the training data loader ended 1 batches before its length"):
        make_trainer(2, Own).train()


def test_a_schedule_on_a_plateau_follows_the_evaluations_but_the_one_before_the_first_step(make_trained, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    seen = []
    schedule.step = lambda metric: seen.append(metric)
    trainer = make_trained(
        8,
        optimizers=(optimizer, schedule),
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_dataset=samples(4),
        metric_for_best_model="loss",
    )
    assert steps_with(trainer, "eval_loss") == [0, 1, 2]
    assert seen == log_of(trainer, "eval_loss")[1:]


def test_every_train_call_begins_a_run_of_its_own(make_trained):
    trainer = make_trained(8)
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(training_entries(trainer)) == 2


def test_model_init_makes_the_same_model_for_every_run(make_trainer):
    trainer = make_trainer(8, model_init=Classifier)
    first = trainer.train().training_loss
    assert trainer.train().training_loss == first


def test_early_stopping_without_anything_to_watch_says_what_to_set(make_trainer):
    trainer = make_trainer(callbacks=[EarlyStoppingCallback()])
    with pytest.raises(ValueError, match="nothing to watch: metric_for_best_model=None, eval_strategy='no'"):
        trainer.train()


def test_building_a_trainer_changes_no_random_number(make_trainer):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    make_trainer(model_init=Classifier)
    assert torch.equal(torch.rand(2), expected)


def test_without_a_usable_evaluation_the_last_weights_stay_and_the_log_says_so(make_trainer, heard):
    errors = heard("error")
    trainer = make_trainer(
        8,
        eval_strategy="steps",
        eval_steps=1,
        eval_delay=100,
        eval_dataset=samples(4),
        load_best_model_at_end=True,
        save_strategy="best",
        checkpointer=SimpleNamespace(steps=list),
    )
    assert trainer.train().global_step == 2
    assert errors == [
        "load_best_model_at_end=True, but no evaluation of this run gave a 'loss' that is a number; the weights are "
        "those of step 2. Lower eval_steps or eval_delay if no evaluation was made"
    ]
