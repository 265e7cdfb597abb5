"""Each training argument states at its field what it changes."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from tr_args import Seq2SeqTrainingArguments, TrainingArguments
from tr_args.constraints import GroupOption, Later, Numbers, Only
from tr_args.schema import facts, facts_of_kind, schema


@pytest.mark.parametrize("name", schema(Seq2SeqTrainingArguments))
def test_every_argument_states_what_it_changes_in_a_resumed_run(name):
    stated = [fact for fact in schema(Seq2SeqTrainingArguments)[name].facts if isinstance(fact, Numbers)]
    assert len(stated) == 1, f"{name} states {stated}; add one of Numbers to its annotation in tr_args/fields"


def test_the_names_of_arguments_with_a_fact_come_in_the_order_of_the_fields():
    assert facts(TrainingArguments, Numbers.SCHEDULE) == ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    assert facts(TrainingArguments, Numbers.METRIC) == ("metric_for_best_model", "greater_is_better")
    assert "max_time" in facts(TrainingArguments, Later.NEW_TRAINER)


def test_facts_with_values_are_found_by_the_name_of_their_field():
    options = facts_of_kind(TrainingArguments, GroupOption)
    assert options["adam_beta1"] == options["adam_beta2"] == GroupOption("betas")
    assert set(options) < set(facts(TrainingArguments, Numbers.OPTIMIZER))
    assert facts_of_kind(TrainingArguments, Only)["dataloader_in_order"].value is True


def test_a_subclass_that_declares_a_field_again_keeps_its_facts():
    @dataclass
    class Own(TrainingArguments):
        learning_rate: float = 1e-3
        warmup_steps: Annotated[float, Numbers.OTHER] = 10
        bf16: Annotated[bool, Numbers.UNCHANGED] = False
        extra: int = 0

    assert "bf16" in facts(Own, Later.NEW_TRAINER)  # a fact of another kind replaces none
    assert "bf16" not in facts(Own, Numbers.OTHER)
    assert facts(Own, Numbers.OPTIMIZER) == facts(TrainingArguments, Numbers.OPTIMIZER)
    assert "warmup_steps" not in facts(Own, Numbers.SCHEDULE)
    assert schema(Own)["extra"].facts == ()
    with pytest.raises(ValueError, match="learning_rate"):
        Own("out", learning_rate=-1)
