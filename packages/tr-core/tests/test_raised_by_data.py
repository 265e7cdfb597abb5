"""What a data set or a collator raises names the samples, and never shortens the data in silence."""

import traceback

import pytest
from small_data_sets import Failing, FailingCollator, FailingStream, FailingTogether
from small_models import samples

from tr_core.data.fetch import StreamFetch

WORKERS = pytest.mark.parametrize("workers", [0, 1])


def raised_in_training(make_trainer, dataset, **options):
    trainer = make_trainer(train_dataset=dataset, train_sampling_strategy="sequential", **options)
    with pytest.raises(Exception) as caught:
        trainer.train()
    return caught.value


def text(error):
    return "".join(traceback.format_exception(error))


@WORKERS
@pytest.mark.parametrize(("kind", "where"), [(Failing, "sample 11"), (FailingTogether, r"samples [8, 9, 10, 11]")])
@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit()])
def test_an_error_that_ends_loops_is_another_one_that_names_the_sample(make_trainer, kind, where, error, workers):
    if workers and isinstance(error, GeneratorExit):
        error = StopIteration("with a value")
    caught = raised_in_training(make_trainer, kind(error), dataloader_num_workers=workers)
    assert type(caught) is RuntimeError
    assert f"the data set {kind.__name__} raised {type(error).__name__} for {where}, which ends a loop" in text(caught)
    assert f"{type(error).__name__}" in text(caught)


@WORKERS
def test_any_other_error_keeps_its_type_and_traceback_and_names_the_sample(make_trainer, workers):
    caught = raised_in_training(make_trainer, Failing(KeyError("text")), dataloader_num_workers=workers)
    assert type(caught) is KeyError
    assert "raised by the data set Failing for sample 11" in text(caught)
    assert "raise self.error" in text(caught)


@WORKERS
@pytest.mark.parametrize(("error", "kind"), [(StopIteration(), RuntimeError), (ValueError("odd"), ValueError)])
def test_an_error_of_the_collator_names_the_samples_of_its_batch(make_trainer, error, kind, workers):
    data = samples(20)
    collate = FailingCollator(error, data[11]["x"])
    caught = raised_in_training(make_trainer, data, data_collator=collate, dataloader_num_workers=workers)
    assert type(caught) is kind
    assert "the data collator FailingCollator" in text(caught)
    assert "for samples [8, 9, 10, 11]" in text(caught)


@WORKERS
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_evaluation_and_prediction_name_the_sample_too(make_trainer, name, workers):
    trainer = make_trainer(dataloader_num_workers=workers)
    with pytest.raises(RuntimeError, match="raised StopIteration for sample 11"):
        getattr(trainer, name)(Failing(StopIteration()))


@WORKERS
def test_an_error_of_a_stream_names_the_position(make_trainer, workers):
    stream = FailingStream(OSError("gone"))
    caught = raised_in_training(make_trainer, stream, dataloader_num_workers=workers, max_steps=9)
    assert type(caught) is OSError
    own = " of worker 0's own part" if workers else ""
    assert f"raised by the data set FailingStream for sample 11 of the stream{own}" in text(caught)


@WORKERS
def test_an_error_of_the_collator_of_a_stream_names_the_positions(make_trainer, workers):
    data = samples(20)
    collate = FailingCollator(StopIteration(), data[11]["x"])
    caught = raised_in_training(
        make_trainer,
        FailingStream(OSError(), bad=99),
        data_collator=collate,
        dataloader_num_workers=workers,
        max_steps=9,
        remove_unused_columns=False,
    )
    assert type(caught) is RuntimeError
    assert "FailingCollator raised StopIteration for samples 8 to 11 of the stream" in text(caught)


def test_an_error_while_the_skipped_samples_of_a_stream_are_read_names_the_position():
    fetch = StreamFetch(FailingStream(OSError("gone"), bad=2), list, 4, seed=0)
    fetch.seek(0, 3)
    with pytest.raises(OSError, match="gone") as caught:
        list(fetch)
    assert caught.value.__notes__ == ["raised by the data set FailingStream for sample 2 of the stream"]
