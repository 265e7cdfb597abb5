"""`trainer config`: questions, flags, and the file, which `trainer launch` reads."""

import json

import pytest

from tr_dist.launching.accelerate_file import interpret
from tr_dist.launching.config_command import answered, main
from tr_dist.launching.launch import LaunchError


def test_answers_are_asked_until_they_fit(capsys):
    typed = iter(["fdsp", "fsdp", "", "2", "bf16", "", "", "BertLayer", "yes"])
    shown = []

    def ask(text):
        shown.append(text)
        return next(typed)

    content = answered({}, asks=True, ask=ask)
    assert "--distributed_type fdsp is not one of NO, MULTI_CPU" in capsys.readouterr().out
    assert shown[0].startswith("How shall processes share the work (NO, MULTI_CPU, MULTI_GPU, FSDP")
    assert content["fsdp_config"] == {
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_offload_params": True,
    }
    assert (content["num_processes"], content["mixed_precision"]) == (2, "bf16")
    assert interpret(content, "answers").variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "BertLayer"


def test_flags_alone_write_a_file(tmp_path, capsys):
    path = tmp_path / "new" / "config.json"
    flags = ["--distributed_type", "DEEPSPEED", "--zero_stage", "3", "--num_processes", "4"]
    assert main(["--defaults", "--config_file", str(path), *flags]) == 0
    content = json.loads(path.read_text())
    assert content["deepspeed_config"] == {"zero_stage": 3, "gradient_accumulation_steps": 1}
    assert interpret(content, "file").nproc == 4
    assert "start with: trainer launch --config_file" in capsys.readouterr().out


def test_a_file_that_exists_is_replaced_only_if_asked(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("mine")
    assert main(["--defaults", "--config_file", str(path)]) == 2
    assert (path.read_text(), "say --overwrite" in capsys.readouterr().err) == ("mine", True)
    assert main(["--defaults", "--overwrite", "--config_file", str(path)]) == 0
    assert 'mixed_precision: "no"\n' in path.read_text()  # a bare no would be false


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distributed_type": "NO", "gpu_ids": "0"}, "--gpu_ids has no effect with distributed_type: NO"),
        ({"num_processes": "two"}, "--num_processes two is not a whole number"),
        ({"distributed_type": "FSDP", "fsdp_offload_params": "maybe"}, "answer yes or no"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given, message):
    with pytest.raises(LaunchError, match=message):
        answered(given, asks=False)


def test_one_process_is_the_default_of_one():
    assert answered({"distributed_type": "NO"}, asks=False)["num_processes"] == 1


def test_answers_that_contradict_each_other_are_refused(tmp_path, capsys):
    flags = ["--num_machines", "2", "--num_processes", "3"]
    assert main(["--defaults", "--config_file", str(tmp_path / "c.json"), *flags]) == 2
    assert "give a multiple of 2" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()
