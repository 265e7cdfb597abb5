"""States become JSON and tensors, and come back as they were."""

import json
import math
import os
import random
import warnings
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum, StrEnum

import pytest
import torch
from ckpt_parts import same

from tr_ckpt import CheckpointError, codec, untrusted
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.testing import write_part


def through_a_file(state, folder):
    write_part(folder, "optimizer", state)
    untrusted.parse_json((folder / "optimizer.json").read_text())
    return read(folder)


def read(folder):
    with CheckpointReader(folder, {"optimizer": os.listdir(folder)}) as opened:
        return opened.state("optimizer")


LEAVES = [
    None, True, False, 0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 0.1, -0.0, 5e-324, 1.7976931348623157e308,
    math.inf, -math.inf, math.nan, "", "text", "\ud800 lone surrogate", "line\nbreak", b"", b"\x00\xff", torch.float32,
    torch.bfloat16, torch.device("cuda", 3), torch.device("cpu"), torch.Size([2, 3]), torch.Size([]),
]  # fmt: skip


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: repr(value)[:30])
def test_a_leaf_comes_back_as_it_was(value, tmp_path):
    assert same(through_a_file({"at": [value]}, tmp_path), {"at": [value]})


def test_an_integer_of_thousands_of_digits_comes_back_as_it_was(tmp_path):
    assert through_a_file({"at": 7**6000}, tmp_path) == {"at": 7**6000}


CONTAINERS = [
    {}, [], (), {"a": {"b": [1, (2, 3), {}]}}, {0: "int", "0": "string", (1, "x"): "tuple", None: 1, 2.5: 2, True: 3},
    {"$tensor": "a name of ours"}, {"$": 1}, Counter({3: 2, 5: 1}), OrderedDict([("z", 1), ("a", (2,))]),
    [[[[]]]], {"betas": (0.9, 0.999)}, ((),), {"b": 1, "a": 2, "t": (1,)},
]  # fmt: skip


@pytest.mark.parametrize("value", CONTAINERS, ids=repr)
def test_a_container_comes_back_as_it_was(value, tmp_path):
    assert same(through_a_file(value, tmp_path), value)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_as_it_was(dtype, shape, tmp_path):
    value = (torch.randn(shape) * 3).to(dtype)
    assert same(through_a_file([value], tmp_path), [value])


def test_tensors_of_odd_layout_keep_their_numbers(tmp_path):
    base = torch.randn(4, 6)
    views = [base.t(), base[:, 1:4], base[::2], base.expand(2, 4, 6), torch.randn(3, dtype=torch.complex64).conj()]
    back = through_a_file(views, tmp_path)
    assert all(torch.equal(view, one) for view, one in zip(views, back, strict=True))
    assert all(one.is_contiguous() for one in back)


def test_a_parameter_comes_back_as_a_plain_tensor(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(3))
    [back] = through_a_file([parameter], tmp_path)
    assert type(back) is torch.Tensor
    assert torch.equal(back, parameter)
    assert not back.requires_grad


def test_a_shared_tensor_is_stored_once_and_shared_again(tmp_path):
    tied = torch.randn(100, 100)
    back = through_a_file({"encoder": tied, "decoder": [tied, tied.t()]}, tmp_path)
    assert back["encoder"] is back["decoder"][0]
    assert torch.equal(back["decoder"][1], tied.t())
    assert 2 * 40_000 < (tmp_path / "optimizer.safetensors").stat().st_size < 2 * 40_000 + 1000


def test_equal_tensors_of_their_own_stay_apart(tmp_path):
    back = through_a_file([torch.zeros(3), torch.zeros(3), torch.zeros(0), torch.zeros(0)], tmp_path)
    back[0][0] = 1
    assert back[1][0] == 0
    assert back[2] is not back[3]


def test_names_that_collide_are_told_apart(tmp_path):
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: {"x": torch.ones(2)}, "1": {"x": torch.zeros(2)}}
    assert same(through_a_file(state, tmp_path), state)
    four = {"x.y.z": 1, "x": {"y.z": 2, "y": {"z": 3}}, "x.y": {"z": 4}}
    state = {key: tensors_of(value) for key, value in four.items()}
    (tmp_path / "of-four").mkdir()
    assert same(through_a_file(state, tmp_path / "of-four"), state)


def tensors_of(value):
    return {k: tensors_of(v) for k, v in value.items()} if isinstance(value, dict) else torch.full((2,), value)


def test_the_name_that_the_format_reserves_can_be_a_key(tmp_path):
    state = {"__metadata__": torch.ones(1)}
    assert same(through_a_file(state, tmp_path), state)


def test_numpy_values_come_back_as_they_were(tmp_path):
    numpy = pytest.importorskip("numpy")
    state = {
        "scalars": [numpy.float64(0.1), numpy.float32("nan"), numpy.int64(-3), numpy.bool_(True), numpy.str_("x")],
        "arrays": [
            numpy.arange(6.0).reshape(2, 3).T,
            numpy.array([], dtype=numpy.uint16),
            numpy.array(7, dtype=">i4"),
            numpy.array(["text", "s"]),
            numpy.array(["2020-01-02"], dtype="datetime64[D]"),
            numpy.array([1 + 2j]),
        ],
    }
    back = through_a_file(state, tmp_path)
    assert [type(value) for value in back["scalars"]] == [type(value) for value in state["scalars"]]
    assert all(a == b or a != a for a, b in zip(back["scalars"], state["scalars"], strict=True))
    assert same(back["arrays"], state["arrays"])
    assert back["arrays"][0].flags.writeable


def test_a_modules_state_keeps_its_versions(tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    back = through_a_file(state, tmp_path)
    assert list(back) == list(state)
    assert back._metadata == state._metadata


def test_plain_state_is_plain_readable_json_with_sorted_keys(tmp_path):
    state = {"step": 3, "best": None, "log_history": [{"loss": 0.5, "epoch": 1.0}]}
    write_part(tmp_path, "trainer_state", state)
    assert (tmp_path / "trainer_state.json").read_text() == json.dumps(state, indent=2, sort_keys=True) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]


def test_numbers_that_other_readers_would_round_are_no_plain_numbers():
    assert [codec.encode_leaf(number) for number in (2**63 - 1, -(2**63 - 1))] == [2**63 - 1, -(2**63 - 1)]
    for number in (2**63, -(2**63) - 1, 2**64):
        assert not isinstance(codec.encode_leaf(number), int), number


def test_nan_does_not_make_the_json_lax(tmp_path):
    write_part(tmp_path, "trainer_state", {"loss": math.nan})
    text = (tmp_path / "trainer_state.json").read_text()
    assert "NaN" not in text
    assert untrusted.parse_json(text) == {"loss": {"$float": "nan"}}


class MyClass:
    pass


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


def contains_itself():
    state = {"list": []}
    state["list"].append(state)
    return state


def nested(depth):
    state = []
    for _ in range(depth):
        state = [state]
    return state


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


REFUSED = [
    ({"state": {3: {"foo": MyClass()}}}, r"optimizer\.state\[3\]\.foo is a .*MyClass; a state may hold .* — give"),
    ({"a b": [len]}, r"optimizer\['a b'\]\[0\] is a builtin_function_or_method; "),
    ([Colour.RED], r"optimizer\[0\] is a .*Colour; "),
    ([Point(1, 2)], r"optimizer\[0\] is a .*Point; "),
    ([{1, 2}], r"optimizer\[0\] is a set; "),
    ({"keys": {MyClass: 1}}, r"optimizer\.keys has the key <class .*, a type; keys may be strings, numbers"),
    ({"keys": {(1, (2,)): 1}}, r"optimizer\.keys has the key \(1, \(2,\)\), a tuple; keys may be"),
    ([torch.randn(2, 2).to_sparse()], r"optimizer\[0\] is a sparse_coo tensor; only dense ones are saved — give"),
    ([torch.empty(2, device="meta")], r"optimizer\[0\] is a tensor on the meta device, which has no numbers"),
    ([torch.zeros(1, dtype=torch.complex128)], r"\[0\] is a tensor of torch.complex128; safetensors holds .*float32"),
    ([contains_itself()], r"optimizer\[0\]\.list\[0\] contains itself; a state must be a tree"),
    (nested(100_000), "optimizer is nested too deeply to be saved"),
    ([quantized()], r"optimizer\[0\] is a quantized tensor; only dense ones are saved"),
    ([torch.nn.UninitializedParameter()], r"\[0\] is a UninitializedParameter, a kind of tensor that is more than"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "message"), REFUSED, ids=lambda value: None if not isinstance(value, str) else value[:30]
)
def test_what_cannot_be_saved_is_named_with_its_place(state, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        write_part(tmp_path, "optimizer", state)
    assert not list(tmp_path.iterdir())


def test_an_array_of_objects_is_refused(tmp_path):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match=r"optimizer\[0\] is a numpy.ndarray; "):
        write_part(tmp_path, "optimizer", [numpy.array([MyClass()])])


STRANGE = [
    ({"$future": 1}, "'\\$future' is not known to this version of tr-ckpt; a newer one wrote it"),
    ({"$tensor": "absent"}, "the tensor 'absent' is in no file of it"),
    ({"$tuple": 3}, "the content of '\\$tuple' cannot be read"),
    ({"$dict": [[1, 2, 3]]}, "the content of '\\$dict' cannot be read"),
    ({"$dict": [[[1], 2]]}, "the content of '\\$dict' cannot be read"),
    ({"$bytes": "not base64"}, "'\\$bytes': 'not base64'} cannot be read"),
    ({"$dtype": "load"}, "has no dtype 'load'"),
    ({"$numpy": {"dtype": "|O", "data": "AAAAAAAAAAA="}}, r"a NumPy value of dtype '\|O' is not read: it could hold"),
    ({"$float": "1"}, "cannot be read"),
    ({"$device": "nowhere"}, "cannot be read"),
]


@pytest.mark.parametrize(("encoded", "message"), STRANGE, ids=lambda value: str(value)[:20])
def test_json_that_no_save_wrote_is_refused(encoded, message, tmp_path):
    pytest.importorskip("numpy", reason="values are of it")
    (tmp_path / "optimizer.json").write_text(json.dumps({"at": [encoded]}))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": -Infinity}', "-Infinity is not a JSON value"),
        ('{"a": 1, "a": 2}', "the name 'a' occurs twice in one object"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        ("9" * 5000, "digits"),
    ],
    ids=["nan", "infinity", "twice", "cut", "deep", "huge"],
)
def test_json_that_is_not_strict_is_refused(text, message):
    with pytest.raises(CheckpointError, match=message):
        untrusted.parse_json(text)


def test_random_states_come_back_as_they_were(tmp_path):
    """Many nested states drawn at random, from a fixed seed."""
    draw = random.Random(0)

    def value(depth):
        kind = draw.randrange(9 if depth else 6)
        if kind < 4:
            return draw.choice(LEAVES)
        if kind < 6:
            return torch.randn([draw.randrange(3) for _ in range(draw.randrange(3))])
        if kind == 6:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        if kind == 7:
            return tuple(value(depth - 1) for _ in range(draw.randrange(4)))
        return {draw.choice(["a", "$b", 1, 2.5, None, (1, "k"), "a.b"]): value(depth - 1) for _ in range(3)}

    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        state = (value(4),)  # a tuple: never plain, so that the order of dicts counts
        assert same(through_a_file(state, folder), state)


def test_the_encoder_copies_nothing(tmp_path):
    tensor = torch.randn(3)
    encoder = codec.Encoder("model")
    assert encoder.encode({"weight": tensor}) == {"weight": {"$tensor": "weight"}}
    assert encoder.tensors["weight"] is tensor


class Written(StrEnum):
    """Texts with names."""

    LINEAR = "linear"


def test_text_of_another_type_comes_back_as_the_text_that_it_equals(tmp_path):
    state = {"schedule": Written.LINEAR, "of": [type("Name", (str,), {})("adamw")]}
    back = through_a_file(state, tmp_path)
    assert back == state
    assert [type(back["schedule"]), type(back["of"][0])] == [str, str]
