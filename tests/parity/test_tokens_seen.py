"""Input tokens: how many are counted, and which entries of the log hold them."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE, Scenario, run


@pytest.mark.parametrize("mode", ["all", "non_padding", True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_tokens_of_padded_batches_are_counted_the_same(parity, mode, accumulation):
    reference, ours = parity(
        models.llama,
        data.ragged_tokens(),
        options={"data_collator": data.pad_tokens},
        include_num_input_tokens_seen=mode,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=2,
        learning_rate=0.01,
    )
    assert ours.trainer.state.num_input_tokens_seen > 0
    entries = zip(ours.trainer.state.log_history, reference.trainer.state.log_history, strict=True)
    assert all(set(mine) == set(theirs) for mine, theirs in entries), "also the names of times and rates"


def test_the_counts_of_evaluations_between_logs_and_of_the_result_are_the_same(parity):
    _, ours = parity(
        models.llama,
        data.tokens(),
        data.tokens(6, seed=9, masked=False),
        include_num_input_tokens_seen="all",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
    )
    assert ours.output.metrics["num_input_tokens_seen"] == 2 * 10 * 8


def test_the_count_goes_on_over_a_resume(tmp_path):
    counts = []
    for side in (REFERENCE, OURS):
        options = {"include_num_input_tokens_seen": "all", "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        scenario = Scenario(models.llama, data.tokens(), arguments=options)
        whole = run(side, scenario, tmp_path / side.name)
        again = run(
            side, scenario, tmp_path / side.name, resume_from_checkpoint=str(tmp_path / side.name / "checkpoint-4")
        )
        counts.append([entry["num_input_tokens_seen"] for entry in again.trainer.state.log_history])
        assert counts[-1] == [entry["num_input_tokens_seen"] for entry in whole.trainer.state.log_history]
    assert counts[0] == counts[1]


@pytest.mark.reference_fails
def test_what_is_padding_is_not_guessed(tmp_path):
    """Without a mask or a token that fills up the reference counts all tokens, and says so in a warning."""
    scenario = Scenario(models.llama, data.tokens(), arguments={"include_num_input_tokens_seen": "non_padding"})
    assert run(REFERENCE, scenario, tmp_path / "reference").trainer.state.num_input_tokens_seen == 2 * 10 * 8
    with pytest.raises(ValueError, match="'non_padding' cannot tell what is padding"):
        run(OURS, scenario, tmp_path / "ours")


@pytest.mark.reference_fails
def test_batches_without_the_main_input_are_refused(tmp_path):
    """The reference counts nothing and warns."""
    scenario = Scenario(models.Mlp, data.classes(), arguments={"include_num_input_tokens_seen": "all"})
    assert run(REFERENCE, scenario, tmp_path / "reference").trainer.state.num_input_tokens_seen == 0
    with pytest.raises(ValueError, match="counts the elements of 'input_ids', but a batch is"):
        run(OURS, scenario, tmp_path / "ours")
