"""Dataclasses that add to training arguments."""

import copy
import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments


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


def test_what_follows_from_others_follows_in_a_subclass_with_its_own_constructor():
    args = Fixed("out", eval_strategy="epoch", logging_steps=7)
    assert (args.do_eval, args.eval_steps) == (True, 7)
    assert [args.origin(name) for name in ("eval_strategy", "do_eval", "seed")] == ["call", "default", "default"]
    assert args.num_assignments == 0


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


@pytest.mark.parametrize("former", ["gradient_checkpointing_kwargs", "warmup_ratio", "no_cuda", "evaluation_strategy"])
@pytest.mark.parametrize("default", ["factory", "bare", "value"])
def test_a_field_with_a_former_name_is_that_field_whatever_its_default(caplog, former, default):
    declared = {
        "factory": {former: field(default_factory=lambda: [7])},
        "bare": {},
        "value": {former: field(default=None)},
    }[default]
    body = {"__annotations__": {former: list[int]}, **declared}
    own = dataclass(kw_only=True)(type("Own", (TrainingArguments,), body))
    given = own(**{former: "1, 2"})
    assert getattr(given, former) == [1, 2]
    setattr(given, former, [3])
    assert getattr(given, former) == given.to_dict()[former] == [3]
    plain = TrainingArguments()
    for name in ("eval_strategy", "activation_checkpointing_kwargs", "warmup_steps", "use_cpu"):
        assert getattr(given, name) == getattr(plain, name)
    if default == "bare":
        with pytest.raises(ArgumentsError, match=f"{former} is missing"):
            own()
    else:
        assert getattr(own(), former) == ([7] if default == "factory" else None)
    assert caplog.text == ""


def test_a_field_with_a_former_name_on_the_command_line_is_that_field():
    @dataclass
    class Own(TrainingArguments):
        gradient_checkpointing_kwargs: list[str] = field(default_factory=list)

    (args,) = ArgumentParser(Own).parse_args_into_dataclasses(["--gradient_checkpointing_kwargs", "a"])
    assert args.gradient_checkpointing_kwargs == ["a"]
    assert not args.activation_checkpointing_kwargs
    assert copy.deepcopy(args).gradient_checkpointing_kwargs == ["a"]
    assert Own(**args.to_dict()).gradient_checkpointing_kwargs == ["a"]


@dataclass
class Switched:
    name: str
    flag: bool
    other: bool = field(metadata={"help": "another one"})
    maybe: bool | None = None


@pytest.mark.parametrize(("words", "flag"), [([], False), (["--flag"], True), (["--flag", "true"], True)])
def test_a_switch_without_a_default_is_off(words, flag):
    parser = ArgumentParser(Switched)
    (given,) = parser.parse_args_into_dataclasses(["--name", "a", *words])
    assert (given.flag, given.other, given.maybe) == (flag, False, None)
    assert parser.parse_args(["--name", "a", *words]).flag is flag
    assert parser.format_help().count("(required)") == 1
    with pytest.raises(ArgumentsError, match="name is missing"):
        parser.parse_args_into_dataclasses([])


def test_a_switch_of_a_subclass_without_a_default_is_off_on_the_command_line():
    @dataclass(kw_only=True)
    class Own(TrainingArguments):
        flag: bool

    (args,) = ArgumentParser(Own).parse_args_into_dataclasses(["--output_dir", "out"])
    assert args.flag is False
    with pytest.raises(ArgumentsError, match="flag is missing"):
        Own(output_dir="out")


def test_no_output_folder_is_the_usual_one():
    args = TrainingArguments(output_dir=None)
    assert args.output_dir == TrainingArguments().output_dir
    args.output_dir = None
    assert args.output_dir == TrainingArguments().output_dir


class Dtype:
    """Stands for a value that no declared type here takes."""


@dataclass
class Preferring(TrainingArguments):
    """What libraries' classes do: shorten a list, resolve a name, unset a switch, leave values for later."""

    beta: list[float] = field(default_factory=lambda: [0.1])
    dtype: Literal["float32", "bfloat16", None] = None
    packed: bool = True
    folder: str = "a"
    dataloader_num_workers: int | None = None
    dataloader_persistent_workers: bool = True

    def __post_init__(self):
        super().__post_init__()
        if len(self.beta) == 1:
            self.beta = self.beta[0]
        self.dtype = Dtype()
        self.packed = None
        self.folder = (self.folder,)


class Constructed(Preferring):
    def __init__(self, output_dir, **rest):
        super().__init__(output_dir, **rest)


class Mixin:
    def __post_init__(self):
        super().__post_init__()
        self.weights = 2.0


@dataclass
class Mixed(Mixin, TrainingArguments):
    weights: list[float] = field(default_factory=list)


@pytest.mark.parametrize("kind", [Preferring, Constructed])
def test_what_a_class_declares_or_assigns_in_its_own_post_init_is_the_class_s(kind):
    args = kind("out", seed="3").check()
    assert (args.beta, args.packed, args.folder, args.seed) == (0.1, None, ("a",), 3)
    assert isinstance(args.dtype, Dtype)
    assert (args.dataloader_num_workers, args.dataloader_persistent_workers) == (None, True)
    assert copy.deepcopy(args).beta == 0.1
    assert Mixed("out").weights == 2.0


@pytest.mark.parametrize("kind", [Preferring, Constructed])
def test_what_is_given_to_such_a_class_is_checked_before_its_own_post_init(kind, monkeypatch):
    began = []
    if kind is Constructed:
        monkeypatch.setattr(Preferring, "__post_init__", lambda self: began.append(self))
    for given, message in (
        ({"beta": "x"}, "needs a number"),
        ({"dtype": "float23"}, "did you mean float32?"),
        ({"packed": None}, "needs true or false"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            kind("out", **given)
    assert began == []


@pytest.mark.parametrize("kind", [Preferring, Constructed])
def test_what_is_assigned_to_such_a_class_later_is_checked(kind):
    args = kind("out")
    for name, value in (("beta", "x"), ("dtype", Dtype()), ("packed", None), ("folder", ("a",))):
        with pytest.raises(ArgumentsError, match=name):
            setattr(args, name, value)
    args.dtype = "float32"
    assert args.dtype == "float32"


def test_a_number_is_a_list_of_one_number():
    args = Preferring("out", beta=0.2)
    copied = replace(args, dtype=None, packed=True, folder="a", dataloader_persistent_workers=False)
    assert copied.beta == 0.2
    assert Distillation("out", layers=3).layers == [3]
    with pytest.raises(ArgumentsError, match="needs a list"):
        Distillation("out", layers=True)


def test_a_default_that_does_not_fit_is_the_class_s():
    @dataclass
    class Later(TrainingArguments):
        lengths: list[int] = field(default_factory=lambda: "none yet")

        def __post_init__(self):
            super().__post_init__()
            self.lengths = [1] if self.lengths == "none yet" else self.lengths

    class Built(Later):
        def __init__(self, **rest):
            super().__init__("out", **rest)

    assert Later("out").lengths == Built().lengths == [1]
    assert Built(lengths=[2]).lengths == [2]
    with pytest.raises(ArgumentsError, match="needs a whole number"):
        Later("out", lengths="none yet")


def test_a_value_without_effect_is_the_class_s_unless_it_was_given():
    assert Preferring("out", dataloader_num_workers=0).check().dataloader_persistent_workers
    with pytest.raises(ArgumentsError, match="needs loading processes"):
        Preferring("out", dataloader_persistent_workers=True)
    args = Preferring("out")
    args.dataloader_persistent_workers = True
    with pytest.raises(ArgumentsError, match="needs loading processes"):
        args.check()


@dataclass
class Half(TrainingArguments):
    """Prefers bfloat16, as classes of TRL do, and float16 if it is told to."""

    bf16: bool | None = None
    halved: bool = False

    def __post_init__(self):
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()
        if self.halved:
            self.fp16 = True


def test_a_contradiction_counts_if_one_side_was_given_and_otherwise_once_the_values_are_used():
    assert (Half("out").bf16, Half("out", fp16=True).bf16, Half("out", bf16=False).bf16) == (True, False, False)
    for given in ({"bf16": True, "fp16": True}, {"bf16": True, "halved": True}):
        with pytest.raises(ArgumentsError, match="only one can be on"):
            Half("out", **given)
    args = Half("out", halved=True)
    with pytest.raises(ArgumentsError, match="only one can be on"):
        args.check()
    args.bf16 = False
    args.check()


@dataclass
class Careless(TrainingArguments):
    chosen: str = "epochs"
    later: Any = None

    def __post_init__(self):
        super().__post_init__()
        self.save_strategy = self.chosen
        self.do_train = None
        self.learning_rate = "1e-3"


def test_what_a_class_assigns_to_a_field_of_its_base_fits_it_once_it_is_used():
    assert (Careless("out", chosen="no").check().learning_rate, Careless("out").do_train) == (1e-3, None)
    args = Careless("out")
    with pytest.raises(ArgumentsError) as caught:
        args.check()
    message = "save_strategy = 'epochs' (__post_init__ of Careless): needs one of no, steps, epoch, best"
    assert message in str(caught.value)
    args.save_strategy = "epoch"
    assert args.check().save_strategy == "epoch"


def test_a_launcher_s_variable_is_checked_in_such_a_class_too(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "much")
    with pytest.raises(ArgumentsError, match="max_grad_norm = 'much'"):
        Careless("out")
