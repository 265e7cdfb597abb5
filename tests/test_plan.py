"""`trainer plan`: its estimate against what is held and what a check counts, and its lines against what takes them."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tr_args import ArgumentParser
from tr_core import Trainer, TrainingArguments
from tr_core.preflight import check
from tr_core.preflight.resource_checks import state_bytes
from tr_dist.fake_ranks import fake_rank
from tr_dist.mesh.estimate import STATES, Plan, Subject, Work
from tr_dist.plan import candidates, main
from tr_dist.testing import run_ranks

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | HEADS | {"dtype": "float32"} | changes)))


def rows():
    return [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(1, 8), {"parallelism_config": "dp_shard=8"}),
        (Plan(2, 2, tp=2), {"parallelism_config": "dp_replicate=2,dp_shard=2,tp=2"}),
        (Plan(2, 1, tp=4), {"parallelism_config": "dp_replicate=2,tp=4"}),
    ],
)
def test_the_estimate_is_what_a_device_of_eight_holds_and_what_a_check_counts(plan, options, tmp_path):
    with fake_rank(3, 8):
        fixed = {"use_cpu": True, "report_to": "none", "max_steps": 1, "save_strategy": "no", "log_level": "error"}
        args = TrainingArguments(str(tmp_path), fsdp="full_shard auto_wrap", **fixed, **options)
        trainer = Trainer(llama(), args, train_dataset=rows())
        figures = check(trainer).figures
        found = Subject(llama()).estimate(plan, Work())
        held = sum(parameter.to_local().nbytes for parameter in trainer.model.parameters())
        trainer.strategy.close()
    assert found["parameters"] == held == figures["parameter_bytes_of_a_device"]
    assert found["gradients"] == figures["gradient_bytes_of_a_device"]
    assert found["optimizer"] == pytest.approx(figures["optimizer_bytes_of_a_device"], rel=0.01)  # it counts steps
    assert figures["parameter_bytes"] == sum(parameter.nbytes for parameter in llama().parameters())


@pytest.mark.parametrize("name", STATES)
def test_the_numbers_of_an_optimizer_are_those_that_it_keeps(name):
    kinds = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    model = llama()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    held = state_bytes(kinds.get(name, torch.optim.AdamW)(model.parameters(), lr=0.1))
    assert held == pytest.approx(STATES[name] * whole, rel=0.01)


def kept(model, work):
    """Return the bytes of all tensors that a backward pass needs, but parameters."""
    own, seen = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no address is used twice
        return tensor

    words = torch.zeros(work.batch, work.length, dtype=torch.int64)
    half = torch.autocast("cpu", torch.bfloat16, enabled=work.bf16, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), half:
        model.model(input_ids=words, use_cache=False)
    weights = {p.numel() for p in model.parameters()}  # and copies of them in bfloat16
    return sum(t.untyped_storage().nbytes() for k, t in seen.items() if k not in own and t.numel() not in weights)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_formula_of_activations_is_close_to_what_a_backward_pass_keeps(bf16):
    work = Work(batch=2, length=96, bf16=bf16)
    found = Subject(model := llama(num_hidden_layers=4)).estimate(Plan(), work)["activations"]
    assert kept(model, work) == pytest.approx(found, rel=0.12)


def test_pieces_of_a_sequence_experts_and_stages_divide_what_they_hold():
    config = MixtralConfig(**SMALL, **HEADS, num_local_experts=4, num_experts_per_tok=2, dtype="float32")
    with torch.device("meta"):
        subject = Subject(model := MixtralForCausalLM(config))
    whole, work = subject.estimate(Plan(), Work()), Work()
    of_experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert subject.estimate(Plan(shards=2, sp=2), work)["activations"] == whole["activations"] / 2
    assert subject.estimate(Plan(shards=2, sp=2), work)["parameters"] == whole["parameters"] / 4
    assert subject.estimate(Plan(ep=4), work)["parameters"] == whole["parameters"] - of_experts * 3 / 4
    assert subject.refusal(Plan(ep=3), 96) == "3 does not divide 4 experts"
    assert subject.refusal(Plan(sp=4), 94) == "4 does not divide 94 positions"
    assert "3 does not divide 2 layers" in subject.refusal(Plan(pp=3), 96)


def test_plans_are_tried_from_the_fewest_exchanges():
    plans = candidates(4, 2, long=False, experts=False)
    assert plans[:3] == [Plan(4, 1), Plan(2, 2), Plan(1, 4)]
    assert [plan.sizes for plan in plans[3:5]] == [{"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}]
    assert {plan.tp * plan.sp for plan in plans} == {1, 2}  # no more than a machine has
    assert candidates(4, 2, long=True, experts=False)[3] == Plan(2, 1, sp=2)
    assert not [plan for plan in plans if plan.pp > 1 and plan.sp * plan.ep > 1]  # which are refused


def config_file(folder, **changes):
    path = folder / "config.json"
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    path.write_text(json.dumps(values | SMALL | HEADS | changes))
    return str(path)


def proposed(capsys, *words):
    """Return the exit code, what was printed, and the arguments of the proposed line."""
    code = main([str(word) for word in words])
    printed = capsys.readouterr().out
    line = printed.strip().splitlines()[-1]
    return code, printed, shlex.split(line.partition("train.py")[2]) if code == 0 else []


BATCH = ("--per_device_train_batch_size", 1, "--length", 8)


def memory_for(plan):
    """Return the GiB with which this plan just fits."""
    bytes_ = sum(Subject(llama()).estimate(plan, Work(batch=1, length=8)).values())
    return bytes_ / 0.9 / 2**30 * 1.0001


def arguments(words):
    alone = [
        "--output_dir",
        "out",
        "--use_cpu",
        "true",
        "--report_to",
        "none",
        "--max_steps",
        "1",
        "--log_level",
        "error",
    ]
    return ArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words, *alone, "--save_strategy", "no"])[0]


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (Plan(8), "train.py --per_device_train_batch_size 1"),
        (Plan(4, 2), "train.py --parallelism_config dp_replicate=4,dp_shard=2 --fsdp 'full_shard auto_wrap'"),
        (Plan(1, 8), "train.py --parallelism_config dp_shard=8 --fsdp 'full_shard auto_wrap'"),
        (Plan(1, 4, tp=2), "train.py --parallelism_config dp_shard=4,tp=2 --fsdp 'full_shard auto_wrap'"),
        (Plan(1, 2, tp=4), "train.py --parallelism_config dp_shard=2,tp=4 --fsdp 'full_shard auto_wrap'"),
    ],
)
def test_a_proposed_line_is_taken_by_the_arguments_and_the_strategy(plan, line, capsys, tmp_path, monkeypatch):
    options = (*BATCH, "--devices", 8, "--memory", memory_for(plan))
    code, printed, words = proposed(capsys, config_file(tmp_path), *options)
    assert (code, printed.count("fits")) == (0, 1)
    assert f"trainer launch --nproc 8 {line}" in printed
    monkeypatch.chdir(tmp_path)
    with fake_rank(0, 8):
        trainer = Trainer(llama(), arguments(words), train_dataset=rows())
        trainer.prepare()
        trainer.strategy.close()


def trained(folder, words):
    os.chdir(folder)
    trainer = Trainer(llama(), arguments(words), train_dataset=rows())
    trainer.train()
    trainer.strategy.close()
    return trainer.state.global_step


@pytest.mark.parametrize("plan", [Plan(1, 2), Plan(1, 1, tp=2)])
def test_a_proposed_line_for_two_devices_trains_on_two_processes(plan, capsys, tmp_path):
    options = (*BATCH, "--devices", 2, "--memory", memory_for(plan))
    _, printed, words = proposed(capsys, config_file(tmp_path), *options)
    assert "--parallelism_config " + ",".join(f"{k}={v}" for k, v in plan.sizes.items()) in printed
    assert run_ranks(trained, 2, str(tmp_path), words, timeout_s=200) == [1, 1]


def test_what_does_not_fit_is_said_with_what_would(capsys, tmp_path):
    code, printed, _ = proposed(capsys, config_file(tmp_path), "--devices", 2, "--memory", 0.001)
    assert code == 1
    assert "nothing fits 2 devices of 0.001 GiB; 2 devices need " in printed
    assert "GiB no number of devices does: lower --per_device_train_batch_size or --length" in printed
    needed = float(printed.partition("2 devices need ")[2].split()[0])
    assert proposed(capsys, config_file(tmp_path), "--devices", 2, "--memory", needed * 1.001)[0] == 0
    few = (config_file(tmp_path), *BATCH, "--memory", memory_for(Plan(1, 8)))
    devices = int(proposed(capsys, *few, "--devices", 1)[1].partition("it takes ")[2].split()[0])
    assert proposed(capsys, *few, "--devices", devices)[0] == 0
    assert proposed(capsys, *few, "--devices", devices // 2)[0] == 1


def test_sizes_that_do_not_divide_are_skipped_with_the_reason(capsys, tmp_path):
    code, printed, _ = proposed(capsys, config_file(tmp_path), *BATCH, "--devices", 6, "--memory", 0.00001)
    assert code == 1
    assert "not possible: tp_size=3 does not divide num_attention_heads=8; 2, 4, 8 do" in printed


def build():
    return torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 2000))


def test_a_function_of_ones_own_gives_the_model(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    code, printed, words = proposed(capsys, "test_plan:build", "--devices", 2, "--memory", 0.14)
    assert code == 0
    assert "activations and logits are not counted: the model has no config with hidden_size" in printed
    assert words[-2:] == ["--fsdp_config", '{"min_num_params": 1000000}']
    plan = '{"0": "colwise", "2": "rowwise"}'
    code, printed, words = proposed(capsys, "test_plan:build", "--devices", 2, "--memory", 0.095, "--tp_plan", plan)
    assert words[words.index("--tp_plan") + 1] == plan
    assert arguments(words).tp_plan == {"0": "colwise", "2": "rowwise"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["nowhere", "--devices", "8", "--memory", "80"],
            "there is no such folder or file; your own code is given as",
        ),
        (["test_plan:rows", "--devices", "8", "--memory", "80"], "it gave a list, and a plan is for a torch.nn.Module"),
        (["x", "--devices", "0", "--memory", "80"], "argument --devices: '0' is no whole number from 1"),
        (["x", "--devices", "12", "--memory", "80"], "--devices 12 is no multiple of --per_machine 8"),
        (["x", "--devices", "8", "--memory", "80", "--optim", "lomo"], "argument --optim: invalid choice: 'lomo'"),
    ],
)
def test_wrong_words_are_refused(words, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err
