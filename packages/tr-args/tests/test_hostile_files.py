"""What a configuration file may come to: its size, depth, numbers, aliases and kind."""

import json
import os
import subprocess
import sys

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments
from tr_args.files import read_mapping
from tr_args.flags import FlagTable
from tr_args.types.optimizer_options import parse_optim_args

LIMIT_S = 120

MERGES = "\n".join(
    ["a0: &a0 {" + ", ".join(f"k{i}: {i}" for i in range(9)) + "}"]
    + [f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n  own{i}: 1" for i in range(1, 12)]
)
LAUGHS = "\n".join(["b0: &b0 [lol]"] + [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 12)])

HOSTILE = {
    "merges.yaml": (MERGES, "repeat what it holds"),
    "laughs.yaml": (LAUGHS, "repeat what it holds"),
    "itself.yaml": ("a: &a [*a]", "within what it stands for"),
    "itself_merged.yaml": ("a: &a\n  <<: *a", "within what it stands for"),
    "brackets.yaml": ("a: " + "[" * 100_000, "levels deep, on line 1"),
    "closed.yaml": ("seed: 1\na: " + "[" * 70 + "]" * 70, "levels deep, on line 2"),
    "braces.yaml": ("a: " + "{a: " * 5_000, "levels deep"),
    "indents.yaml": ("\n".join(" " * i + "a:" for i in range(1_000)), "levels deep"),
    "dashes.yaml": ("- " * 100_000, "levels deep"),
    "chain.yaml": ("a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 90)), "levels deep"),
    "digits.yaml": ("seed: 1\nmax_steps: " + "9" * 100_000, "100,000 characters, 99999999999999999999..., on line 2"),
    "hex.yaml": ("seed: 0x" + "f" * 900_000, "a number of 900,002 characters"),
    "large.yaml": ("x: " + "y" * (1 << 20), "more than 1,048,576 bytes"),
    "infinite.yaml": ("max_grad_norm: 1e400", "too large"),
    "tag.yaml": (
        "seed: 1\noutput_dir: !!python/object/apply:os.system [x]",
        "the tag !!python/object/apply:os.system on line 2",
    ),
    "own_tag.yaml": ("seed: !mine 1", "the tag !mine on line 1"),
    "binary.yaml": ("seed: !!binary aGFsbG8=", "the tag !!binary"),
    "set.yaml": ("seed: !!set {a}", "the tag !!set"),
    "date.yaml": ("seed: !!timestamp 2020-01-01", "the tag !!timestamp"),
    "truth.yaml": ("bf16: !!bool maybe", "needs true or false"),
    "list_key.yaml": ("? [a, b]\n: 1", "not valid YAML"),
    "nul.yaml": ("seed: 1\0", "not valid YAML"),
    "brackets.json": ('{"a": ' + "[" * 100_000, "levels deep, on line 1"),
    "braces.json": ('{"a": ' * 100_000, "levels deep"),
    "strings.json": ("[" * 65 + '"' + '\\"' * 100_000, "levels deep"),
    "digits.json": ('{"seed": ' + "9" * 5_000 + "}", "a number of 5,000 characters"),
    "infinite.json": ('{"max_grad_norm": 1e400}', "the number 1e400, which is too large"),
    "zero.json": ('{"learning_rate": 1e-400}', "too small"),
    "inner_twice.json": ('{"lr_scheduler_kwargs": {"a": 1, "a": 2}}', "the key a twice"),
    "digits.toml": ("seed = " + "9" * 5_000, "not valid TOML"),
    "infinite.toml": ("max_grad_norm = 1e400", "too large"),
    "brackets.toml": ("a = " + "[" * 100_000, "levels deep"),
    "closed.toml": ("a = " + "[" * 70 + "]" * 70, "levels deep"),
    "dots.toml": ("seed = 1\n" + "a." * 500_000 + "a = 1", "levels deep, on line 2"),
    "table.toml": ("[" + "a ." * 100_000 + "a]", "levels deep"),
    "names.json": (json.dumps({f"learning_rat{i}": i for i in range(200_000)}), "and 199,900 more"),
    "name.json": (json.dumps({"learning_rate" * 10_000: 1}), "(130,017 characters)"),
    "merge.yaml": ("a: 1\nb: {<<: [{c: 1}, 2]}", "merges what is not a mapping, on line 2"),
    "folder.yaml": (None, "is a folder"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_may_not_come_to_is_refused_in_words(tmp_path, name):
    text, expected = HOSTILE[name]
    path = tmp_path / name
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    with pytest.raises(ArgumentsError) as caught:
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--config", str(path)])
    message = str(caught.value)
    assert expected in message
    assert len(message) < 40_000


def test_what_real_files_hold_is_far_from_the_limits(tmp_path):
    base = "\n".join(f"k{i}: &k{i} {{a: 1, b: [1, 2]}}" for i in range(100))
    many = "\n".join(f"m{i}: {{<<: *k{i % 100}, c: *k{i % 7}}}" for i in range(5_000))
    (tmp_path / "x.yaml").write_text(base + "\n" + many)
    assert len(read_mapping(tmp_path / "x.yaml")) == 5_100
    (tmp_path / "x.json").write_text('{"a": ' + "[" * 63 + "1.5e300" + "]" * 63 + "}")
    assert str(read_mapping(tmp_path / "x.json")["a"]).count("[") == 63
    (tmp_path / "x.toml").write_text(f"[a.'b.c'.d]\ne.f = 1\ntext = '{'a,b.c ' * 200}'")
    assert read_mapping(tmp_path / "x.toml")["a"]["b.c"]["d"]["e"] == {"f": 1}


def test_a_key_that_is_overridden_beside_a_merge_is_not_there_twice(tmp_path):
    text = "b: &b {a: 1}\nfirst: {x: &m {<<: *b, a: 2}}\ntop: {<<: *m}\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_mapping(tmp_path / "x.yaml")["top"] == {"a": 2}


def test_of_merged_mappings_the_own_keys_win_and_then_the_first_that_is_named(tmp_path):
    text = "b: &b {rate: 1, decay: 1, seed: 1}\nc: &c {rate: 2, decay: 2, more: 2}\ntop: {<<: [*b, *c], rate: 3}\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_mapping(tmp_path / "x.yaml")["top"] == {"rate": 3, "decay": 1, "seed": 1, "more": 2}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_a_shell_gives_as_a_pipe_is_read(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"--seed 7")
    os.close(writer)
    try:
        words = ArgumentParser(TrainingArguments).parse_args_into_dataclasses([], args_filename=f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    assert words[0].seed == 7


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_device_is_refused_and_the_null_device_is_empty(tmp_path):
    os.symlink("/dev/zero", tmp_path / "x.json")
    os.symlink(os.devnull, tmp_path / "x.yaml")
    with pytest.raises(ArgumentsError, match="is a device"):
        read_mapping(tmp_path / "x.json")
    assert read_mapping(tmp_path / "x.yaml") == {}


@pytest.mark.parametrize("path", ["a\0b.yaml", "~nobody-of-this-name/x.yaml"])
def test_a_path_that_cannot_be_opened_is_refused_in_words(path):
    with pytest.raises(ArgumentsError, match="cannot be read"):
        read_mapping(path)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"seed: 1\nrun_name: \xff\n")
    with pytest.raises(ArgumentsError, match="is not UTF-8 text: line 2 has the byte 0xff"):
        read_mapping(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr_scheduler_kwargs", '{"a": ' + "[" * 5_000, "levels deep"),
        ("lr_scheduler_kwargs", '{"a": 1, "a": 2}', "the key a twice"),
        ("lr_scheduler_kwargs", '{"a": ' + "9" * 5_000 + "}", "5,000 characters"),
        ("label_names", "[" * 5_000, "levels deep"),
        ("max_steps", "9" * 5_000, "needs a whole number"),
        ("max_steps", "1" + "0" * 30, "at most 64 bits"),
        ("max_steps", 10**30, "at most 64 bits"),
        ("max_steps", "²", "needs a whole number"),
        ("max_grad_norm", "1e400", "too large"),
        ("optim_args", "a=" + "(" * 5_000, "brackets within each other"),
        ("optim_args", "a=" + "9" * 5_000, "needs numbers"),
        ("optim_args", "," * 1_000_000, "at most 10,000 characters"),
        ("output_dir", "a\0b", "needs a path"),
        ("output_dir", "a\ud800b", "needs a path"),
    ],
)
def test_what_a_value_may_not_come_to_is_refused_in_words(name, value, expected):
    with pytest.raises(ArgumentsError, match=expected):
        TrainingArguments(**{name: value})


def test_optimizer_options_that_are_text_or_numbers_stay_what_they_were():
    assert parse_optim_args("a=1, b=1e-30, c=inf, d='x', e=(1, 2.5)") == {
        "a": 1, "b": 1e-30, "c": float("inf"), "d": "x", "e": [1, 2.5],
    }  # fmt: skip


def test_a_message_does_not_steer_the_terminal(tmp_path):
    (tmp_path / "x.json").write_text(
        '{"seed\\u001b[2Jx": 1, "run\\u202ename": 2, "max_steps": "\\u001b]0;title\\u0007"}'
    )
    with pytest.raises(ArgumentsError) as caught:
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--config", str(tmp_path / "x.json")])
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)
    assert "\\x1b[2J" in str(caught.value)


def test_a_thread_with_a_small_stack_refuses_too(tmp_path):
    (tmp_path / "x.json").write_text('{"a": ' + "[" * 200_000)
    code = (
        "import sys, threading; from tr_args.files import read_mapping; threading.stack_size(262144)\n"
        "def read():\n"
        "    try: read_mapping(sys.argv[1])\n"
        "    except ValueError as error: print(error)\n"
        "thread = threading.Thread(target=read); thread.start(); thread.join()"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "x.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "levels deep" in done.stdout


@pytest.mark.parametrize("from_file", [False, True])
def test_flags_without_number_are_refused_before_each_is_compared_with_all(tmp_path, from_file):
    words = [f"--leaut_dir{number}" for number in range(40_000)]
    (tmp_path / "x.args").write_text("\n".join(words))
    given = {"args": [], "args_filename": tmp_path / "x.args"} if from_file else {"args": words}
    with pytest.raises(ArgumentsError, match="40,000 flags are none of the arguments', from --leaut_dir0 on"):
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(**given)


def test_an_unknown_flag_shows_how_it_differs():
    with pytest.raises(ArgumentsError, match=r"unknown argument '--seed '; did you mean --seed\?"):
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--seed ", "1"])


@pytest.mark.parametrize("flags", [["--output_dir"], ["--output_dir", "out"]])
def test_a_long_command_line_costs_time_in_its_length_alone(monkeypatch, flags):
    def looked_up(words):
        calls.clear()
        with pytest.raises(ArgumentsError, match="unexpected 'x'"):
            ArgumentParser(TrainingArguments).parse_args_into_dataclasses([*flags, *["x"] * words])
        return len(calls)

    calls, flag = [], FlagTable.flag
    monkeypatch.setattr(FlagTable, "flag", lambda *given: calls.append(1) or flag(*given))
    assert looked_up(400) < 2.5 * looked_up(200)
