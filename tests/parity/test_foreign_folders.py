"""Folders that the reference left: what is taken from them, what is refused, and what stays in them."""

import logging
import warnings

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_foreign import SAVING, begun, resumed
from parity_harness import OURS, REFERENCE, Scenario, run, same_tensors

from tr_ckpt.hf_import import convert

EVALUATION = data.classes(9, seed=8)


def digests(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_goes_on_in_the_folder_that_the_reference_left(tmp_path, caplog):
    """With True, from its highest step; saves are ours, older ones of ours go, and those of the reference stay."""
    arguments = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "num_train_epochs": 1}
    run(REFERENCE, Scenario(models.Mlp, data.classes(), arguments={**arguments, "save_total_limit": None}), tmp_path)
    theirs = {f"checkpoint-{step}": digests(tmp_path / f"checkpoint-{step}") for step in (2, 4, 5)}
    longer = Scenario(models.Mlp, data.classes(), arguments={**arguments, "num_train_epochs": 2})
    caplog.set_level(logging.INFO)
    again = run(OURS, longer, tmp_path, resume_from_checkpoint=True)
    assert "resuming at step 5 of 10" in caplog.text
    assert again.output.global_step == 10
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {*theirs, "checkpoint-10"}
    assert {name: digests(tmp_path / name) for name in theirs} == theirs
    once_more = run(OURS, longer, tmp_path, resume_from_checkpoint=True)
    assert once_more.batches.train == []
    assert same_tensors(once_more.weights, again.weights)


def test_a_step_that_the_reference_saved_too_keeps_its_folder_under_another_name(tmp_path):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    run(REFERENCE, scenario, tmp_path)
    theirs = digests(tmp_path / "checkpoint-7")
    run(OURS, scenario, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert (tmp_path / "checkpoint-7" / "manifest.json").exists()
    assert digests(tmp_path / "checkpoint-7.replaced-1") == theirs


def test_a_damaged_highest_checkpoint_of_the_reference_is_passed_over(tmp_path, caplog):
    scenario = Scenario(models.Mlp, data.classes(), arguments=SAVING)
    whole = run(REFERENCE, scenario, tmp_path)
    path = tmp_path / "checkpoint-10" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-300])
    again = run(OURS, scenario, tmp_path, resume_from_checkpoint=True)
    assert "skipped checkpoint-10: optimizer.pt is not a whole archive" in caplog.text
    assert len(again.batches.train) == 1
    assert same_tensors(again.weights, whole.weights)


def test_what_was_taken_over_and_what_was_not_is_in_the_log(tmp_path, caplog):
    scenario = Scenario(models.Mlp, data.classes())
    begun(scenario, tmp_path)
    caplog.set_level(logging.INFO)
    resumed(OURS, scenario, tmp_path, 3)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    [taken] = [line for line in lines if "is a checkpoint of transformers' Trainer" in line]
    assert taken == (
        "checkpoint-3 is a checkpoint of transformers' Trainer: callbacks, model, optimizer, rng, run, scheduler, "
        "trainer_state are taken over"
    )
    assert any("training_args.bin is a pickle of a class" in line for line in lines)
    assert "resuming at step 3 of 10: epoch 0, sample 12" in lines


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_missing_file_is_an_error(tmp_path, file):
    """The reference goes on in silence, as at the very beginning."""
    scenario = Scenario(models.Mlp, data.classes())
    begun(scenario, tmp_path)
    (tmp_path / "begun" / "checkpoint-4" / file).unlink()
    with pytest.raises(ValueError, match=rf"checkpoint-4: there is no {file} in it"):
        resumed(OURS, scenario, tmp_path, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "sgd"}, "the optimizer was saved with the options .*, and SGD also has dampening"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau"},
            "is not a ReduceLROnPlateau|ReduceLROnPlateau also has",
        ),
    ],
)
def test_another_optimizer_or_schedule_is_refused(tmp_path, changes, message):
    scenario = Scenario(models.Mlp, data.classes(), EVALUATION, {"eval_strategy": "steps", "eval_steps": 5})
    begun(scenario, tmp_path)
    with pytest.raises(ValueError, match=message):
        resumed(OURS, scenario, tmp_path, 4, **changes)


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_converted_checkpoint_goes_on_likewise(tmp_path, step):
    scenario = Scenario(models.gpt2, data.tokens(), arguments={"learning_rate": 0.01, "num_train_epochs": 3})
    whole = begun(scenario, tmp_path)
    folder = convert(tmp_path / "begun" / f"checkpoint-{step}", tmp_path / "converted")
    assert folder == tmp_path / "converted" / f"checkpoint-{step}"
    ours = run(OURS, scenario, tmp_path / "ours", resume_from_checkpoint=str(folder))
    assert ours.losses == whole.losses
    assert same_tensors(ours.weights, whole.weights)
    assert ours.trainer.model.lm_head.weight is ours.trainer.model.transformer.wte.weight
    assert type(whole.trainer.model).from_pretrained(folder).config.n_embd == 16


def test_another_batch_size_or_accumulation_goes_on_with_the_next_sample(tmp_path):
    """The batch size of then is in the state, and the logged share of the pass tells the accumulation."""
    scenario = Scenario(models.Linear, data.regression(), arguments={"num_train_epochs": 1})
    before = begun(scenario, tmp_path).batches.train[:2]  # two batches of 4
    for changes in ({"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 3}):
        again = resumed(OURS, scenario, tmp_path, 2, **changes)
        used = torch.cat([batch["x"] for batch in (*before, *again.batches.train)])
        assert (used.shape[0], used.unique(dim=0).shape[0]) == (18, 18)


def test_a_stream_goes_on_where_it_was_beyond_its_first_pass(tmp_path):
    """Three steps a pass, resumed in the second one: the epoch in the state tells which pass it was."""
    scenario = Scenario(models.Mlp, data.Stream(data.classes(12)), arguments={"max_steps": 8})
    whole = begun(scenario, tmp_path)
    for step in (2, 3, 5, 7):
        again = resumed(OURS, scenario, tmp_path, step)
        assert same_tensors(whole.weights, again.weights), step
        assert again.trainer.state.epoch == whole.trainer.state.epoch


def with_adapter():
    """Return a causal language model with an adapter, and a head that is trained as a whole."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft calls
        return peft.get_peft_model(models.llama(), config)


def test_an_adapter_goes_on(tmp_path):
    pytest.importorskip("peft")
    scenario = Scenario(with_adapter, data.tokens(), arguments={"learning_rate": 0.01, "num_train_epochs": 3})
    whole = begun(scenario, tmp_path)
    for step in (2, 3, 7):
        assert (tmp_path / "begun" / f"checkpoint-{step}" / "adapter_model.safetensors").exists()
        ours = resumed(OURS, scenario, tmp_path, step)
        assert ours.losses == whole.losses
        assert same_tensors(ours.weights, whole.weights)
    folder = convert(tmp_path / "begun" / "checkpoint-3", tmp_path / "converted")
    ours = run(OURS, scenario, tmp_path / "ours", resume_from_checkpoint=str(folder))
    assert same_tensors(ours.weights, whole.weights)
