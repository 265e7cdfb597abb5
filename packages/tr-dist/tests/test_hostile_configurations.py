"""What Accelerate's and DeepSpeed's files may come to, and that every refusal is in words."""

import os

import pytest

from tr_dist.deepspeed.configuration import read_configuration
from tr_dist.launching.accelerate_file import interpret, read_file
from tr_dist.launching.launch import LaunchError

MERGES = "\n".join(["a0: &a0 {k: 1}"] + [f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)])
HOSTILE = {
    "merges.yaml": (MERGES, "repeat what it holds"),
    "itself.yaml": ("fsdp_config: &a [*a]", "within what it stands for"),
    "brackets.yaml": ("a: " + "[" * 100_000, "levels deep"),
    "digits.yaml": ("num_processes: " + "9" * 5_000, "5,000 characters"),
    "sixties.yaml": ("num_processes: " + ":".join(["1"] * 50_000), "99,999 characters"),
    "infinite.yaml": ("num_processes: .inf", "is not a whole number"),
    "tag.yaml": ("debug: !!python/object/apply:os.system [x]", "the tag !!python"),
    "truth.yaml": ("debug: !!bool x", "a tag and its value"),
    "date.yaml": ("debug: !!timestamp x", "a tag and its value"),
    "number.yaml": ("num_processes: !!int ''", "a tag and its value"),
    "twice.yaml": ("num_processes: 1\nnum_processes: 2", "the key num_processes twice"),
    "brackets.json": ('{"a": ' * 100_000, "levels deep"),
    "digits.json": ('{"num_processes": ' + "9" * 5_000 + "}", "5,000 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_launchers_file_may_not_come_to_is_refused_in_words(tmp_path, name):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    text, expected = HOSTILE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(LaunchError, match=expected):
        interpret(read_file(str(tmp_path / name)), name)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_launchers_file_is_no_folder_and_no_device(tmp_path):
    (tmp_path / "x.yaml").mkdir()
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(LaunchError, match="is a folder"):
        read_file(str(tmp_path / "x.yaml"))
    with pytest.raises(LaunchError, match="is a device"):
        read_file(str(tmp_path / "zero.json"))


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.endswith(".json")])
def test_what_a_configuration_of_deepspeed_may_not_come_to_is_refused_in_words(tmp_path, name):
    text, expected = HOSTILE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_configuration(tmp_path / name)
