"""Dataclasses that add to training arguments."""

import inspect
from dataclasses import dataclass, field

import pytest

from tr_args import ArgumentsError, TrainingArguments


@dataclass
class Distillation(TrainingArguments):
    temperature: float = 2.0
    layers: list[int] = field(default_factory=list)
    teacher: str = field(default=None, metadata={"help": "The teacher."})

    def __post_init__(self):
        super().__post_init__()
        self.squared = self.temperature**2


@dataclass
class Loose(TrainingArguments):
    learning_rate: float = 1e-3
    report_to: str | list[str] = "none"

    def __post_init__(self):
        pass


class Fixed(TrainingArguments):
    def __init__(self, output_dir, **rest):
        super().__init__(output_dir, **{"learning_rate": 1.0, **rest})


def test_a_subclass_has_its_own_fields_checked_with_the_others():
    args = Distillation("out", temperature="4", layers="1, 2", evaluation_strategy="epoch")
    assert (args.temperature, args.layers, args.squared, args.eval_strategy) == (4.0, [1, 2], 16.0, "epoch")
    with pytest.raises(ArgumentsError) as caught:
        Distillation("out", temperatur=1, layers="x", seed="y")
    assert len(caught.value.problems) == 3
    assert "did you mean temperature?" in str(caught.value)


def test_a_field_whose_default_is_none_may_be_none():
    assert Distillation(teacher=None).teacher is None


def test_a_field_declared_again_keeps_its_constraints():
    assert Loose().learning_rate == 1e-3
    assert Loose(report_to="a,b").report_to == ["a", "b"]
    with pytest.raises(ArgumentsError, match="needs at least 0"):
        Loose(learning_rate=-1)


def test_a_subclass_that_forgets_to_call_post_init_is_completed_all_the_same():
    assert Loose(eval_strategy="epoch").do_eval


def test_a_subclass_with_its_own_constructor_is_checked():
    assert Fixed("out", seed="3").seed == 3
    with pytest.raises(ArgumentsError, match="only one can be on"):
        Fixed("out", bf16=True, fp16=True)


def test_an_error_of_a_subclass_s_own_is_not_swallowed():
    @dataclass
    class Picky(TrainingArguments):
        def __post_init__(self):
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        Picky()
    with pytest.raises(ArgumentsError, match="needs a number"):
        Picky(learning_rate="x")


def test_editors_see_the_fields_as_parameters():
    parameters = inspect.signature(Distillation).parameters
    assert next(iter(parameters)) == "output_dir"
    assert parameters["temperature"].default == 2.0


def test_a_field_that_the_constructor_does_not_take_can_be_set():
    @dataclass
    class Counting(TrainingArguments):
        save_stepz: int = field(init=False)

        def __post_init__(self):
            super().__post_init__()
            self.save_stepz = 3

    assert Counting().save_stepz == 3
    with pytest.raises(ArgumentsError, match="unknown argument save_stepz"):
        Counting(save_stepz=1)


def test_a_required_field_that_is_missing_is_named():
    @dataclass(kw_only=True)
    class Needy(TrainingArguments):
        teacher: str

    with pytest.raises(ArgumentsError) as caught:
        Needy(seed="x")
    assert [problem.field for problem in caught.value.problems] == ["seed", "teacher"]
    assert "teacher is missing; Needy needs it" in str(caught.value)
