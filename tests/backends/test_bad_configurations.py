"""What cannot be trained as it was asked for: one clear message, from rank 0 or the rank in fault, no hang.

Each case is a script in real processes, as a launcher starts them; what they print is what a user sees.
"""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from scripts_in_ranks import End, run_script, tracebacks
from shared.commands import TRAINER, command

from tr_args import HfArgumentParser
from tr_core import Trainer, TrainingArguments
from tr_dist import DDP, rank_device, read_environment

pytestmark = [pytest.mark.column("ddp"), pytest.mark.row("refused")]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block())

    def forward(self, x):
        return {"loss": self.blocks(x).square().mean()}


def train(folder, arguments, model="Network"):
    """Be a script that reads its command line and trains."""
    sys.argv = ["train.py", "--output_dir", f"{folder}/out", "--max_steps", "2", *arguments]
    sys.argv += ["--save_strategy", "no", "--disable_tqdm", "true", "--log_level", "error"]
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    network = Network()
    if model == "frozen":
        network.requires_grad_(False)
    if model == "wrapped":
        network = torch.nn.DataParallel(network)
    rows = [{"x": torch.ones(4)}] * 16
    trainer = Trainer(network, args, train_dataset=rows)
    trainer.train()
    trainer.end()


def ranks_of(folder, size=2, **changes):
    """Return the variables of a job's ranks; a change may be a list, of one value for each rank, None for none."""
    each = []
    for rank in range(size):
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        given = {**place, "TR_RENDEZVOUS_FILE": f"{folder}/meet", **changes}
        chosen = {name: value[rank] if isinstance(value, list) else value for name, value in given.items()}
        each.append({name: str(value) for name, value in chosen.items() if value is not None})
    return each


@dataclass(frozen=True)
class Case:
    """A command line of a job of two ranks, and what it says."""

    name: str
    arguments: tuple[str, ...]
    said: str
    files: dict = field(default_factory=dict)
    model: str = "Network"
    uses_cpu: bool = True


FSDP = ("--fsdp", "full_shard")
ZERO = {"zero.json": {"zero_optimization": {"stage": 2}}}
DEEPSPEED = ("--deepspeed", "zero.json")
CASES = [
    Case("unknown fsdp key", (*FSDP, "--fsdp_config", "c.json"), "unknown key fsdp_min_num_parms; did you mean min_num",
         {"c.json": {"fsdp_min_num_parms": 3}}),
    Case("unknown fsdp option", ("--fsdp", "full_shrd"), "full_shrd"),
    Case("layer class not found", ("--fsdp", "full_shard auto_wrap", "--fsdp_config", "c.json"),
         "names Blok, and Network has no module of that class; it has Block",
         {"c.json": {"transformer_layer_cls_to_wrap": ["Blok"]}}),
    Case("no layers known", ("--fsdp", "full_shard auto_wrap"), "does not know the layers of Network"),
    Case("sizes and classes", (*FSDP, "--fsdp_config", "c.json"), "not both",
         {"c.json": {"min_num_params": 5, "transformer_layer_cls_to_wrap": ["Block"]}}),
    Case("size without a number", (*FSDP, "--fsdp_config", "c.json"), "wrap by size needs min_num_params",
         {"c.json": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}),
    Case("two words of fsdp", ("--fsdp", "full_shard no_shard"), "no_shard"),
    Case("two shardings", (*FSDP, "--fsdp_config", "c.json"), "differ; give one of them",
         {"c.json": {"sharding_strategy": "no_shard"}}),
    Case("weights nowhere", (*FSDP, "--fsdp_config", "c.json"), "has rank 0 alone hold the weights",
         {"c.json": {"cpu_ram_efficient_loading": True, "sync_module_states": False}}),
    Case("fsdp_config alone", ("--fsdp_config", "c.json"), "has no effect alone; set fsdp",
         {"c.json": {"min_num_params": 5}}),
    Case("fsdp_config is missing", (*FSDP, "--fsdp_config", "nowhere.json"), "nowhere.json"),
    Case("fsdp_config is no JSON", (*FSDP, "--fsdp_config", "c.json"), "c.json", {"c.json": "{"}),
    Case("fsdp and ddp", (*FSDP, "--strategy", "ddp"), "needs strategy='fsdp' or 'auto'"),
    Case("fsdp and deepspeed", (*FSDP, *DEEPSPEED), "only one can shard the model; leave the other out", ZERO),
    Case("ZeRO with LOMO", (*DEEPSPEED, "--optim", "lomo"), "optim='lomo'", ZERO),
    Case("ZeRO with GaLore", (*DEEPSPEED, "--optim", "galore_adamw", "--optim_target_modules", "all-linear"),
         "optim='galore_adamw'", ZERO),
    Case("a batch that does not divide", (*DEEPSPEED, "--per_device_train_batch_size", "4"),
         "train_batch_size=9, and per_device_train_batch_size x gradient_accumulation_steps x 2 processes gives 8",
         {"zero.json": {"train_batch_size": 9}}),
    Case("DeepSpeed with another rate", (*DEEPSPEED, "--learning_rate", "0.1"), "optimizer.params.lr=0.01",
         {"zero.json": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}}),
    Case("a stage that does not exist", DEEPSPEED, "stage=4: it is 0, 1, 2 or 3",
         {"zero.json": {"zero_optimization": {"stage": 4}}}),
    Case("DeepSpeed's file is missing", ("--deepspeed", "nowhere.json"), "nowhere.json"),
    Case("DeepSpeed's file is no JSON", DEEPSPEED, "zero.json", {"zero.json": "{"}),
    Case("DeepSpeed without a configuration", ("--strategy", "deepspeed"), "needs a configuration"),
    Case("unknown strategy", ("--strategy", "dpp"), "dpp"),
    Case("single in one of two", ("--strategy", "single"), "would train 2 unrelated models"),
    Case("mps in one of two", ("--strategy", "mps"), "neither gloo nor nccl carries tensors of the mps device",
         uses_cpu=False),
    Case("nccl without CUDA", ("--ddp_backend", "nccl"), "nccl"),
    Case("unknown backend", ("--ddp_backend", "smoke"), "smoke"),
    Case("float16 on the CPU", ("--fp16",), "fp16"),
    Case("no time to wait", ("--ddp_timeout", "0"), "ddp_timeout"),
    Case("nothing to train", (), "Network has no trainable parameter (total 4, frozen 4)", model="frozen"),
    Case("wrapped already", (), "wrapped in DataParallel already", model="wrapped"),
]  # fmt: skip


def column_of(case):
    """Return the backends that a case is about."""
    found = {name for name in ("fsdp", "deepspeed", "ddp", "mps") if any(name in word for word in case.arguments)}
    return pytest.mark.column(*sorted(found or {"ddp"}))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=column_of(case)) for case in CASES])
def test_what_all_ranks_are_asked_for_wrongly_is_refused_in_words_that_say_it(case, tmp_path, monkeypatch):
    for name, content in case.files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.chdir(tmp_path)
    arguments = [str(tmp_path / word) if word.endswith(".json") else word for word in case.arguments]
    arguments += ["--use_cpu"] if case.uses_cpu else []
    # Each rank finds it by itself: on a busy machine the first of them seconds after the second.
    first, second = run_script(train, ranks_of(tmp_path), str(tmp_path), arguments, case.model, grace_s=15.0)
    assert case.said in first.said, first.said
    for end in (first, second):  # the second may be ended before it says the same
        assert end.code in (1, 2) or (end is second and end.code == -15)
        assert tracebacks(end.said) <= 1, end.said


def join(kind):
    """Be a script with a loop of its own."""
    if kind == "existing group":
        rank, store = int(os.environ["RANK"]), torch.distributed.FileStore(os.environ["TR_RENDEZVOUS_FILE"], 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        store.set(f"{rank} is in", "")
        store.wait(["0 is in", "1 is in"])  # or one ends while the other connects to it
        os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    if kind == "one GPU":
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
        rank_device(read_environment())
    with DDP(use_cpu=True, timeout_s=2 if kind == "impatient" else 60) as strategy:
        strategy.sum(torch.ones(1))


def taken_port(folder):
    """Return variables of two ranks that are to meet where another program is."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    return taken, ranks_of(folder, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TR_RENDEZVOUS_FILE=None)


UNLIKE = {
    "no RANK": (dict(RANK=None), "", 0, "RANK not set beside WORLD_SIZE=2"),
    "no LOCAL_RANK": (dict(LOCAL_RANK=None, LOCAL_WORLD_SIZE=None), "", 0, "LOCAL_RANK not set beside RANK=0"),
    "no place to meet": (dict(TR_RENDEZVOUS_FILE=None), "", 0, "MASTER_ADDR, MASTER_PORT not set beside"),
    "a port that is not a number": (
        dict(TR_RENDEZVOUS_FILE=None, MASTER_ADDR="127.0.0.1", MASTER_PORT="http"), "", 0, "MASTER_PORT='http' is not"),
    "a rank that does not exist": (
        dict(RANK=[0, 2], LOCAL_RANK=[0, 1]), "", 1, "RANK=2 does not exist among WORLD_SIZE=2 processes"),
    "a missing rank": (
        dict(WORLD_SIZE=3, LOCAL_WORLD_SIZE=3), "impatient", 0, "waited 2 s at file .*meet, and rank 2 did not come"),
    "two ranks of one number": (
        dict(RANK=1, LOCAL_RANK=1), "", None, "another process with RANK=1 is already; start every process"),
    "two jobs in one": (
        dict(WORLD_SIZE=[2, 3], LOCAL_WORLD_SIZE=None), "impatient", 0, "rank 0 of 2 and rank 1 of 3 met at file"),
    "a group of another size": ({}, "existing group", 0, "has rank 0 of 2, but the launch environment says rank 0"),
    "a rank without a GPU": (
        {}, "one GPU", 1, r"LOCAL_RANK=1 has no CUDA device: 1 visible here \(CUDA_VISIBLE_DEVICES=''\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_the_rank_in_fault_says_what_is_wrong_with_it(name, tmp_path):
    changes, kind, rank, said = UNLIKE[name]
    ends = run_script(join, ranks_of(tmp_path, **changes), kind)
    if rank is None:  # whichever came second
        rank = int("another process" not in ends[0].said)
        assert ends[1 - rank] == End(-15, "")
    fault = ends[rank]
    assert fault.code == 1
    assert re.search(said, fault.said), fault.said
    assert tracebacks(fault.said) == 1, fault.said
    if rank == 1:
        assert ends[0] == End(-15, "")  # it waited, and was told to stop


def test_a_port_in_use_is_said_by_the_rank_that_was_to_serve_it(tmp_path):
    taken, ranks = taken_port(tmp_path)
    with taken:
        first, second = run_script(join, ranks, "")
    assert (first.code, second) == (1, End(-15, ""))
    assert "rank 0 of 2 cannot serve 127.0.0.1:" in first.said
    assert tracebacks(first.said) == 1, first.said


def test_a_launcher_that_started_one_of_several_processes_is_named(tmp_path):
    variables = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    [end] = run_script(train, [variables], str(tmp_path), ["--use_cpu"])
    assert end.code == 1
    assert "it started one, as it does where it finds no GPUs" in end.said


LAUNCHES = {
    "--nproc 0 SCRIPT": "nproc=0 must be at least 1",
    "--nproc many SCRIPT": "--nproc many is neither a number",
    "--devices 1,1 SCRIPT": "names a device twice",
    "--nnodes 2 SCRIPT": "2 machines need a place to meet",
    "--nnodes 1:2 --node_rank 0 --master_addr a --master_port 5 SCRIPT": "machines come and go",
    "--config_file nowhere.yaml SCRIPT": "nowhere.yaml",
    "nowhere.py": "there is no script nowhere.py here",
}


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_that_cannot_be_is_refused_in_a_line(line, capsys):
    assert command("launch")([__file__ if word == "SCRIPT" else word for word in line.split()]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("trainer launch: ")
    assert LAUNCHES[line] in said


ALIKE = """
from tr_dist.fsdp import Sharding
Sharding.from_config(["full_shard"], {"sharding_strategy": "no_shard"})
"""


@pytest.mark.slow
@pytest.mark.launcher
def test_under_our_launcher_a_refusal_by_all_ranks_is_shown_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALIKE)
    words = [sys.executable, TRAINER, "launch", "--nproc", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert tracebacks(done.stderr) == 1, done.stderr
    assert done.stderr.count("differ; give one of them") == 1
    assert "rank 0 of 2 failed first" in done.stderr or "rank 1 of 2 failed first" in done.stderr
