"""A run on a part of its data: `overfit_batches`, and `fast_dev_run`, which leaves nothing behind."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import MapStyle, Stream, samples
from support.models import Classifier
from support.ranks import Alike
from support.runs import log_of
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tr_core import EarlyStoppingCallback, PluginError, Trainer, TrainerCallback
from tr_core.data.short_runs import FirstBatches, training_batches


def chunks(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


@pytest.mark.parametrize("strategy", ["random", "sequential"])
@pytest.mark.parametrize(("value", "number"), [(1, 1), (2, 2), (0.25, 2), (0.01, 1), (0.999, 5), (100, 5)])
def test_every_epoch_is_the_beginning_of_the_first_one(make_trainer, make_trained, strategy, value, number):
    whole, part = MapStyle(samples(20)), MapStyle(samples(20))
    make_trainer(train_dataset=whole, train_sampling_strategy=strategy).train()
    trainer = make_trained(
        train_dataset=part, train_sampling_strategy=strategy, overfit_batches=value, num_train_epochs=3
    )
    assert chunks(part.asked, 4 * number) == [whole.asked[: 4 * number]] * 3
    assert (trainer.state.global_step, trainer.state.epoch) == (3 * number, 3.0)


def test_the_last_micro_batch_of_the_data_may_be_short(make_trained):
    part = MapStyle(samples(18))
    trainer = make_trained(train_dataset=part, overfit_batches=5, num_train_epochs=2)
    assert chunks(part.asked, 18)[0] == chunks(part.asked, 18)[1]
    assert len(part.asked) == 36
    assert trainer.state.epoch == 2.0


def test_steps_may_take_fewer_micro_batches_than_accumulation_says(make_trained):
    part = MapStyle(samples(20))
    trainer = make_trained(
        train_dataset=part, overfit_batches=3, gradient_accumulation_steps=2, max_steps=5, eval_strategy="no"
    )
    assert len(part.asked) == (3 + 3 + 2) * 4
    assert trainer.state.epoch == pytest.approx(2 + 2 / 3)


def rows_of(prediction):
    return {"rows": len(prediction.inputs), "sum": float(prediction.inputs.sum())}


@pytest.fixture
def overfitting(make_trainer):
    def build(**changes):
        model = Classifier()
        model.main_input_name = "x"
        seen = MapStyle(samples(20))
        options = {"overfit_batches": 2, "eval_strategy": "epoch", "include_for_metrics": ["inputs"]}
        trainer = make_trainer(model=model, train_dataset=seen, compute_metrics=rows_of, **{**options, **changes})
        return trainer, seen

    return build


def expected_of(dataset, indices):
    return {
        "rows": len(indices),
        "sum": pytest.approx(float(sum(dataset.rows[i]["x"].sum() for i in indices)), abs=1e-4),
    }


@pytest.mark.parametrize("eval_batch_size", [4, 3])
@pytest.mark.parametrize("own", [None, "one", "several"])
def test_evaluations_while_training_use_the_same_samples_whatever_the_evaluation_data(
    overfitting, own, eval_batch_size
):
    datasets = {None: None, "one": samples(9, seed=3), "several": {"a": samples(9, seed=3), "b": samples(5, seed=4)}}
    trainer, seen = overfitting(eval_dataset=datasets[own], per_device_eval_batch_size=eval_batch_size)
    trainer.train()
    used = seen.asked[:8]
    metrics = trainer.evaluate()
    names = ["eval_a_", "eval_b_"] if own == "several" else ["eval_"]
    for name in names:
        assert {key: metrics[name + key] for key in ("rows", "sum")} == expected_of(seen, used)
    logged = [entry for entry in trainer.state.log_history if f"{names[0]}rows" in entry]
    assert len(logged) == 2
    assert logged[0][f"{names[0]}rows"] == 8
    assert set(seen.asked) == set(used)


def test_data_that_is_passed_to_an_evaluation_or_prediction_is_used(overfitting):
    trainer, _ = overfitting()
    trainer.train()
    assert trainer.evaluate(samples(9, seed=3))["eval_rows"] == 9
    assert len(trainer.predict(samples(7, seed=3)).predictions) == 7


def test_without_evaluations_while_training_the_evaluation_data_is_itself(overfitting):
    trainer, _ = overfitting(eval_strategy="no", eval_dataset=samples(9, seed=3))
    trainer.train()
    assert trainer.evaluate()["eval_rows"] == 9


def test_the_loss_of_an_evaluation_is_that_of_the_batches_it_was_trained_on(make_trained):
    trainer = make_trained(overfit_batches=2, eval_strategy="epoch", learning_rate=0.0, num_train_epochs=1)
    losses = log_of(trainer, "loss")
    evaluated = log_of(trainer, "eval_loss")
    assert evaluated == [pytest.approx(sum(losses) / 2, rel=1e-6)]


def collate_at_random(rows):
    features = torch.stack([row["x"] for row in rows])
    return {"x": features + torch.randn_like(features), "labels": torch.stack([row["labels"] for row in rows])}


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7, 8])
def test_a_resumed_run_ends_as_one_that_was_left_alone(make_trainer, kind, stop):
    ends = []

    def run(memory, resume=None, callbacks=()):
        torch.manual_seed(0)
        trainer = make_trainer(
            model=Classifier(dropout=0.3),
            train_dataset=MapStyle(samples(20)) if kind == "map" else Stream(samples(20)),
            data_collator=collate_at_random,
            checkpointer=memory,
            callbacks=list(callbacks),
            overfit_batches=3,
            max_steps=9,
            learning_rate=0.1,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="epoch",
        )
        trainer.train(resume_from_checkpoint=resume)
        ends.append((trainer.model.state_dict(), trainer.state.epoch))

    run(MemoryCheckpointer())
    memory = MemoryCheckpointer()
    with pytest.raises(Stop):
        run(memory, callbacks=[StopAt(stop)])
    run(memory, resume=True)
    (alone, epoch), (resumed, epoch_again) = ends
    assert all(torch.equal(alone[name], resumed[name]) for name in alone)
    assert epoch == epoch_again


def test_a_run_that_continues_with_smaller_batches_uses_no_sample_beyond_its_first_ones(make_trainer):
    memory, whole = MemoryCheckpointer(), MapStyle(samples(20))
    make_trainer(train_dataset=whole).train()
    options = {"overfit_batches": 3, "save_strategy": "steps", "save_steps": 1, "checkpointer": memory}
    with pytest.raises(Stop):
        make_trainer(callbacks=[StopAt(1)], **options).train()
    rest = MapStyle(samples(20))
    make_trainer(train_dataset=rest, per_device_train_batch_size=3, **options).train(resume_from_checkpoint=True)
    assert rest.asked == whole.asked[4:7], "three batches of 3, of which the 4 samples that are used up fill two"


def test_what_is_drawn_while_loading_is_the_same_in_every_epoch(make_trainer):
    batches = []

    def collate(rows):
        batches.append(collate_at_random(rows))
        return batches[-1]

    make_trainer(overfit_batches=2, num_train_epochs=2, data_collator=collate).train()
    assert torch.equal(batches[0]["x"], batches[2]["x"])
    assert not torch.equal(batches[0]["x"], batches[1]["x"])


def test_a_stream_is_read_no_further_than_its_first_batches(make_trainer):
    read = []

    class Watched(IterableDataset):
        def __iter__(self):
            for number, row in enumerate(samples(20)):
                read.append(number)
                yield row

    trainer = make_trainer(train_dataset=Watched(), overfit_batches=2, max_steps=6)
    assert trainer.train().global_step == 6
    assert read == list(range(8)) * 3


def test_a_share_of_a_stream_is_refused(make_trainer):
    trainer = make_trainer(train_dataset=Stream(samples(20)), overfit_batches=0.5, max_steps=2)
    with pytest.raises(ValueError, match=r"overfit_batches=0.5 is a share of the training data, which has no length"):
        trainer.train()


def test_a_loader_of_the_users_own_is_shortened_too(make_trained):
    seen = MapStyle(samples(20))

    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(seen, batch_size=5)

    trainer = make_trained(2, Own, overfit_batches=2, num_train_epochs=2, eval_strategy="epoch")
    assert set(seen.asked) == set(range(10))
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"overfit_batches": 0.25, "eval_strategy": "epoch"},
            "overfit_batches=0.25: every epoch is the first 2 micro-batches of the training data, in the same order; "
            "evaluations use them too",
        ),
        (
            {"overfit_batches": 3},
            "overfit_batches=3: every epoch is the first 3 micro-batches of the training data, in the same order",
        ),
    ],
)
def test_the_log_says_so_once(make_trainer, heard, changes, line):
    lines = heard("info", name="tr_core.data.short_runs")
    make_trainer(**changes).train()
    assert lines == [line]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": RandomSampler(range(40), replacement=True, num_samples=60, generator=torch.Generator())},
    ],
    ids=["global generator", "own generator", "an order drawn in parts"],
)
def test_every_epoch_over_the_first_batches_is_the_same_one(make_args, options):
    loader = DataLoader(range(40), batch_size=4, **options)
    batches = training_batches(loader, make_args(overfit_batches=9, eval_strategy="no"), Alike())
    first, second, third = ([batch.inputs.tolist() for batch in batches.iterate(epoch, 0)] for epoch in range(3))
    assert first == second == third
    assert len(first) == 9


def first_batches(number, samples=22, per=4):
    whole = None if samples is None else -(-samples // per)

    def remaining(position):
        return None if samples is None else -(-(samples - position) // per)

    batches = SimpleNamespace(num_batches=whole, num_samples=samples, samples_per_micro_batch=per, remaining=remaining)
    batches.iterate = lambda epoch, position: ((epoch, start) for start in range(position, samples or 99, per))
    return FirstBatches(batches, number)


@pytest.mark.parametrize(("number", "batches", "samples"), [(1, 1, 4), (3, 3, 12), (5, 5, 20), (6, 6, 22), (9, 6, 22)])
def test_lengths_are_those_of_the_first_batches_or_of_all(number, batches, samples):
    found = first_batches(number)
    assert (found.num_batches, found.num_samples, len(found), found.samples_per_micro_batch) == (
        batches,
        samples,
        batches,
        4,
    )
    assert [found.remaining(position) for position in (0, 4, 8)] == [max(batches - n, 0) for n in range(3)]
    assert list(found.iterate(7, 0)) == [(0, 4 * n) for n in range(batches)]
    assert list(found.iterate(7, 4)) == [(0, 4 * n) for n in range(1, batches)]


def test_data_without_a_length_has_none():
    found = first_batches(3, None)
    assert (found.num_batches, found.num_samples, found.remaining(0)) == (None, None, None)
    with pytest.raises(TypeError, match="no length"):
        len(found)


# Try a script out


class Counter(TrainerCallback):
    def __init__(self):
        self.batches, self.evaluations, self.logged = 0, [], []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.batches += 1

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluations.append(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.logged.append(state.global_step)


@pytest.fixture
def trial(make_trainer):
    def build(**changes):
        counter = Counter()
        changes.setdefault("eval_dataset", samples(40))
        trainer = make_trainer(
            80, callbacks=[counter, *changes.pop("callbacks", [])], **{"fast_dev_run": True, **changes}
        )
        return trainer, counter

    return build


@pytest.mark.parametrize(("value", "number"), [(True, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("strategy", ["steps", "epoch", "2h"])
def test_so_many_steps_and_batches_of_an_evaluation_and_of_a_prediction_are_made(trial, value, number, strategy):
    trainer, counter = trial(
        fast_dev_run=value, eval_strategy=strategy, eval_delay=2, num_train_epochs=5, logging_steps=500
    )
    assert trainer.train().global_step == number
    assert (counter.evaluations, counter.batches) == ([number], number)
    assert counter.logged == list(range(1, number + 1))
    assert len(trainer.predict(samples(40)).predictions) == 8 * number
    assert counter.batches == 2 * number


def test_fewer_steps_that_were_asked_for_anyway_stay_fewer(trial):
    assert trial(fast_dev_run=3, max_steps=2)[0].train().global_step == 2
    assert trial(fast_dev_run=3, max_steps=20)[0].train().global_step == 3


def test_data_without_a_length_needs_no_number_of_steps(trial):
    assert trial(train_dataset=Stream(samples(40)), fast_dev_run=2)[0].train().global_step == 2


def test_no_checkpoint_is_written_and_none_read_and_the_last_weights_stay(trial, tmp_path):
    memory = MemoryCheckpointer(tmp_path)
    trainer, _ = trial(
        checkpointer=memory,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        resume_from_checkpoint="true",
        fast_dev_run=2,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    assert trainer.train().global_step == 2
    assert trainer.train(resume_from_checkpoint=True).global_step == 2
    assert memory.saves == []


def test_no_tracker_is_loaded_and_nothing_is_pushed(trial):
    trainer, _ = trial(report_to=["no such tracker"], push_to_hub=True)
    trainer.train()
    assert trainer.push_to_hub() is None
    with pytest.raises(PluginError):
        trial(report_to=["no such tracker"], fast_dev_run=False)


def test_what_a_script_saves_goes_to_a_folder_that_vanishes(trial, tmp_path):
    trainer, _ = trial(logging_dir=str(tmp_path / "logs"))
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", output.metrics)
    folder = Path(trainer.args.output_dir)
    assert {"model.safetensors", "trainer_state.json", "train_results.json"} <= {p.name for p in folder.iterdir()}
    assert list(tmp_path.iterdir()) == []
    del trainer

    gc.collect()
    assert not folder.exists()


def test_the_arguments_that_were_passed_stay_as_they_are(make_args, model):
    args = make_args(fast_dev_run=2, save_strategy="steps", report_to=["x"])
    before = args.to_dict()
    trainer = Trainer(model, args, train_dataset=samples(20))
    assert args.to_dict() == before
    assert trainer.args.fast_dev_run == 2
    without = make_args()
    assert Trainer(Classifier(), without, train_dataset=samples(20)).args is without


def test_the_trial_is_the_beginning_of_the_run_it_stands_for(make_trained):
    """With a learning rate that does not depend on the run's length."""
    ends = []
    for changes in ({"max_steps": 3}, {"fast_dev_run": 3}):
        torch.manual_seed(0)
        trainer = make_trained(80, model=Classifier(), lr_scheduler_type="constant", **changes)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_log_says_so_in_one_line(trial, heard, tmp_path):
    lines = heard("info", name="tr_core.data.short_runs")
    trial(fast_dev_run=2)[0].train()
    assert lines == [
        "fast_dev_run=2: 2 training steps, and as many batches of every evaluation and prediction; no checkpoints, "
        f"trackers, Hub or best model. {tmp_path / 'out'} is not touched: what is saved goes to a temporary folder"
    ]
