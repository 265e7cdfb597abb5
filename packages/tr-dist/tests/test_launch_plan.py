"""What `trainer launch` would start, from its command line and from Accelerate's files; nothing is started here."""

import json
import sys

import pytest
import torch

from tr_dist.launching import command
from tr_dist.launching.command import main
from tr_dist.launching.launch import Launch, LaunchError, visible_devices

SCRIPT = __file__


@pytest.fixture(autouse=True)
def _gpus_are_hidden(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")  # or several processes are told, where there is none


def planned(*words):
    options = command._parser().parse_args([*map(str, words), SCRIPT, "--lr", "1"])
    return command.plan(options)


def file(folder, **content):
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return "--config_file", path


def test_without_options_one_process_runs_as_it_is():
    launch, notes = planned()
    assert (launch.nproc, launch.is_plain, launch.command, notes) == (1, True, (SCRIPT, "--lr", "1"), [])


def test_the_visible_gpus_are_the_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert planned()[0].nproc == 4
    launch, _ = planned("--devices", "2,0")
    assert (launch.nproc, launch.variables["CUDA_VISIBLE_DEVICES"]) == (2, "2,0")
    with pytest.raises(LaunchError, match=r"--nproc 3 on a machine with 2 visible GPU\(s\)"):
        planned("--devices", "2,0", "--nproc", 3)
    assert planned("--devices", "", "--nproc", 3)[0].nproc == 3  # on the CPU


@pytest.mark.parametrize(
    ("devices", "now", "message"),
    [("0,0", None, "names a device twice"), ("0,3", "2,3", "leaves no device 0; choose among")],
)
def test_devices_that_cannot_be_had_are_refused(devices, now, message):
    environ = {} if now is None else {"CUDA_VISIBLE_DEVICES": now}
    with pytest.raises(LaunchError, match=message):
        visible_devices(devices, environ)


def test_devices_are_named_as_the_scheduler_names_them():
    assert visible_devices("3", {"CUDA_VISIBLE_DEVICES": "2,3"}) == "3"
    assert visible_devices(" 2, 0 ", {}) == "2,0"


def test_machines_with_numbers_meet_at_the_first():
    launch, _ = planned("--nnodes", 2, "--node_rank", 1, "--master_addr", "a", "--master_port", 5)
    found = (launch.min_nodes, launch.max_nodes, launch.node_rank, launch.endpoint)
    assert found == (2, 2, 1, "a:5")


def test_machines_that_come_and_go_are_numbered_as_they_come():
    launch, _ = planned(
        "--nnodes=1:4", "--rdzv-endpoint", "a:5", "--rdzv_id", "x", "--rdzv_conf", "last_call_timeout=3"
    )
    assert (launch.min_nodes, launch.max_nodes, launch.node_rank, launch.rdzv_id) == (1, 4, None, "x")
    assert launch.rdzv_conf == {"last_call_timeout": "3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", "2"), "need a place to meet: --node_rank R --master_addr HOST"),
        (("--nnodes", "two"), "--nnodes two is neither a number of machines nor MIN:MAX"),
        (("--nnodes", "3:2", "--rdzv_endpoint", "a:1", "--rdzv_id", "x"), "MIN <= MAX"),
        (("--nnodes", "2", "--rdzv_endpoint", "a:1"), "go together; give both"),
        (("--rdzv_endpoint", "a:1", "--rdzv_id", "x", "--node_rank", "0"), "give one kind"),
        (("--nnodes", "1:2", "--node_rank", "0", "--master_addr", "a", "--master_port", "1"), "machines come and go"),
        (
            ("--nnodes", "2", "--node_rank", "2", "--master_addr", "a", "--master_port", "1"),
            "node_rank=2 does not exist",
        ),
        (("--node_rank", "1"), "machine 1 of 1 does not exist"),
        (("--nproc", "few"), "--nproc few is neither a number"),
        (("--nproc", "0"), "nproc=0 must be at least 1"),
        (("--max_restarts", "-1"), "max_restarts=-1 must be at least 0"),
        (("--rdzv_conf", "timeout"), "'timeout' is not NAME=VALUE"),
    ],
)
def test_a_command_line_that_contradicts_itself_is_refused(words, message):
    with pytest.raises(LaunchError) as caught:
        planned(*words)
    assert message in str(caught.value)


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["nowhere.py"]) == 2
    assert capsys.readouterr().err == (
        "trainer launch: there is no script nowhere.py here; for a module's name give -m before it\n"
    )


def test_a_files_total_is_divided_over_its_machines(tmp_path):
    launch, _ = planned(
        *file(
            tmp_path,
            distributed_type="MULTI_GPU",
            num_processes=8,
            num_machines=2,
            machine_rank=1,
            main_process_ip="192.168.20.1",
            main_process_port=9898,
            mixed_precision="fp16",
            gpu_ids="all",
            downcast_bf16="no",
            tpu_env=[],
            use_cpu=False,
        )
    )
    assert (launch.nproc, launch.max_nodes, launch.node_rank) == (4, 2, 1)
    assert launch.endpoint == "192.168.20.1:9898"
    assert launch.variables == {"ACCELERATE_MIXED_PRECISION": "fp16"}


def test_the_command_line_goes_before_the_file(tmp_path):
    path = file(tmp_path, distributed_type="MULTI_GPU", num_processes=4, gpu_ids="0,1")
    launch, _ = planned(*path, "--nproc", 1, "--devices", "3")
    assert (launch.nproc, launch.variables["CUDA_VISIBLE_DEVICES"]) == (1, "3")


def test_processes_on_the_cpu_are_started_where_accelerate_starts_one(tmp_path):
    launch, _ = planned(*file(tmp_path, distributed_type="MULTI_CPU", num_processes=3))
    assert (launch.nproc, launch.variables) == (3, {"ACCELERATE_USE_CPU": "true"})


def test_machines_of_a_file_may_come_as_they_like(tmp_path):
    place = {"main_process_ip": "a", "main_process_port": 1, "rdzv_backend": "c10d"}
    launch, _ = planned(*file(tmp_path, distributed_type="MULTI_GPU", num_machines=2, num_processes=2, **place))
    assert (launch.node_rank, launch.endpoint) == (None, "a:1")


def test_sharding_is_handed_on_as_accelerate_does(tmp_path):
    config = {
        "fsdp_sharding_strategy": 1,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
    }
    launch, _ = planned(*file(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config=config))
    assert launch.variables == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_SHARDING_STRATEGY": "1",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_USE_ORIG_PARAMS": "true",
    }


@pytest.mark.parametrize("prefix", ["", "parallelism_config_"])
def test_replicas_and_shards_are_handed_on_as_accelerate_does(tmp_path, prefix):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1, "cp_size": None, "cp_comm_strategy": "allgather"}
    config = {prefix + key: value for key, value in sizes.items()}
    launch, _ = planned(*file(tmp_path, distributed_type="FSDP", num_processes=8, parallelism_config=config))
    assert launch.variables == {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    }


def test_replicas_alone_need_no_sharding_and_an_empty_section_says_nothing(tmp_path):
    given = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    launch, _ = planned(*file(tmp_path, **given, parallelism_config={"dp_replicate_size": 2}))
    assert launch.variables["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    launch, _ = planned(*file(tmp_path, **given, parallelism_config={"tp_size": 2}))
    assert launch.variables["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    ring = {"cp_size": 2, "cp_comm_strategy": "alltoall"}
    launch, _ = planned(*file(tmp_path, **given, parallelism_config=ring))
    assert launch.variables["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "alltoall"
    launch, _ = planned(*file(tmp_path, **given, parallelism_config={}))
    assert launch.variables == {}


def test_deepspeed_and_compilation_are_handed_on_as_accelerate_does(tmp_path):
    config = {"zero_stage": 2, "offload_optimizer_device": "cpu", "zero3_init_flag": True}
    more = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}, "debug": True}
    launch, _ = planned(*file(tmp_path, distributed_type="DEEPSPEED", num_processes=1, deepspeed_config=config, **more))
    assert launch.variables == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DEBUG_MODE": "true",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_proceses": 2}, "num_proceses: is not a key of Accelerate's files"),
        ({"mixed_precison": "fp16"}, "did you mean mixed_precision?"),
        ({"fp16": True}, "fp16: is a key of former versions; write mixed_precision: fp16"),
        ({"dynamo_backend": "INDUCTOR"}, "dynamo_backend: is a key of former versions; write it into dynamo_config"),
        ({"dynamo_config": {"dynamo_backend": "INDUKTOR"}}, "INDUKTOR is not known; did you mean INDUCTOR?"),
        ({"dynamo_backends": "INDUCTOR"}, "dynamo_backends: is not a key"),
        ({"distributed_type": "MULTI_XPUS"}, "distributed_type: MULTI_XPUS cannot be started here; "),
        ({"distributed_type": "MULTI_XPU"}, "accelerate launch starts processes on other devices, for which there is"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "AMAZON_SAGEMAKER is started by its own tools"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM cannot be started here"),
        ({"megatron_lm_config": {"tp": 2}}, "Megatron-LM has a training loop of its own"),
        ({"fp8_config": {"backend": "TE"}}, "there is no training in 8 bits"),
        ({"mixed_precision": "fp8"}, "mixed_precision: fp8 is not supported; it is one of no, fp16, bf16"),
        ({"distributed_type": "NO", "num_processes": 2}, "which is one process; use MULTI_GPU or MULTI_CPU"),
        ({"distributed_type": "TPU", "num_processes": 8}, "torch_xla.launch in the script"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 3, "num_machines": 2}, "give a multiple of 2"),
        ({"distributed_type": "MULTI_GPU", "num_machines": 2}, "needs main_process_ip and main_process_port"),
        ({"num_processes": "many"}, "num_processes: 'many' is not a whole number"),
        ({"main_process_port": 70000}, "main_process_port: 70000 is out of range; it must be 0 to 65535"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend: etcd is not static"),
        ({"use_cpu": "perhaps"}, "use_cpu: 'perhaps' is neither true nor false"),
        ({"fsdp_config": {"fsdp_version": 2}}, "needs distributed_type: FSDP, not NO"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_ofload_params": 1}}, "did you mean offload_params?"),
        ({"distributed_type": "FSDP", "fsdp_config": [1]}, "it must hold indented `key: value` lines"),
        ({"parallelism_config": {"dp_shards": 2}}, "parallelism_config: dp_shards is not known; did you mean dp_shard"),
        ({"parallelism_config": {"dp_shard_size": 0}}, "dp_shard_size: 0 is not a number of processes, from 1"),
        ({"parallelism_config": {"dp_shard_size": True}}, "dp_shard_size: True is not a number of processes"),
        ({"parallelism_config": {"dp_shard_size": 2}}, "a model with distributed_type: FSDP, not NO"),
        (
            {"distributed_type": "DEEPSPEED", "parallelism_config": {"dp_replicate_size": 2}},
            "parallelism_config: is not read with ZeRO",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 4, "parallelism_config": {"dp_shard_size": 2}},
            "spreads the work over dp_shard_size: 2, and num_processes is 4; it must be their product",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_hostfile": "x"}},
            "start `trainer launch` on each of them",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"}},
            "pdsh is DeepSpeed's own launcher",
        ),
    ],
)
def test_what_a_file_cannot_have_is_refused_in_words(content, message, tmp_path):
    with pytest.raises(LaunchError) as caught:
        planned(*file(tmp_path, **content))
    assert message in str(caught.value)


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path):
    with pytest.raises(LaunchError) as caught:
        planned(*file(tmp_path, mixed_precision="fp4", num_processes="x", colour="red"))
    assert len(str(caught.value).splitlines()) == 4


def test_keys_without_effect_are_named(tmp_path):
    more = {"tpu_name": "pod", "downcast_bf16": "yes", "enable_cpu_affinity": True}
    _, notes = planned(*file(tmp_path, distributed_type="NO", **more))
    assert [note.split()[0] for note in notes] == ["tpu_name", "enable_cpu_affinity", "downcast_bf16"]


@pytest.mark.parametrize("version", [1, "1"])
def test_a_file_that_asks_for_the_former_fsdp_shards_by_fsdp2_and_says_so(tmp_path, version):
    launch, notes = planned(
        *file(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config={"fsdp_version": version})
    )
    assert notes == ["fsdp_version: 1, torch's former FSDP, is not offered; the job shards by FSDP2"]
    assert launch.variables["ACCELERATE_USE_FSDP"] == "true"


def test_downcasting_is_for_xla(tmp_path):
    launch, notes = planned(*file(tmp_path, distributed_type="TPU", num_processes=1, downcast_bf16=True))
    assert (launch.variables, notes) == ({"XLA_DOWNCAST_BF16": "1"}, [])


def test_regions_are_compiled_as_a_file_says(tmp_path):
    section = {"dynamo_backend": "inductor", "dynamo_use_regional_compilation": True}
    launch, notes = planned(*file(tmp_path, distributed_type="NO", fp16=False, dynamo_config=section))
    assert launch.variables == {
        "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    }
    assert notes == []


def test_yaml_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "c.yaml").write_text("num_processes: 2\n")
    with pytest.raises(LaunchError, match=r"pip install 'tr-dist\[yaml\]', or write the file as JSON"):
        planned("--config_file", tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist"), ("[1]", "holds list"), ("{", "not valid JSON")]
)
def test_a_file_that_cannot_be_read_is_named(text, message, tmp_path):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=message):
        planned("--config_file", path)


def test_help_shows_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "trainer launch --devices 2,0 train.py" in shown
    assert "then it is 130, 143" in shown


def test_a_place_without_a_port_is_refused(tmp_path):
    from tr_dist.launching.agent import run

    with pytest.raises(LaunchError, match="must be HOST:PORT, not 'somewhere'"):
        run(Launch(("x",), nproc=2, endpoint="somewhere"))
