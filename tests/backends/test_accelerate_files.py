"""Configuration files mean here what they mean to accelerate, and what it passes over by a typing error is refused."""

import dataclasses

import pytest

from tr_dist.launching.accelerate_file import TYPES, interpret, read_file
from tr_dist.launching.launch import LaunchError

accelerate = pytest.importorskip("accelerate")
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file  # noqa: E402
from accelerate.commands.launch import launch_command_parser  # noqa: E402
from accelerate.utils import DynamoBackend  # noqa: E402

pytestmark = pytest.mark.column("accelerate")
FILES = {
    "today": "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\ngpu_ids: all\nuse_cpu: false\n",
    "compiled": "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
    "machines": "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 1\n"
    "main_process_ip: host\nmain_process_port: 29501\n",
    "shards": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
    "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_means_what_it_means_to_accelerate(name, tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(FILES[name])
    theirs, ours = load_config_from_file(str(path)), interpret(read_file(str(path)), name)
    assert ours.variables.get("ACCELERATE_MIXED_PRECISION") == theirs.mixed_precision
    assert ours.variables.get("ACCELERATE_DYNAMO_BACKEND") == (theirs.dynamo_config or {}).get("dynamo_backend")
    assert ours.nproc == (theirs.num_processes // theirs.num_machines)
    assert (ours.nnodes, ours.node_rank, ours.host) == (
        theirs.num_machines,
        theirs.machine_rank,
        theirs.main_process_ip,
    )


def refusal(content):
    """Return what is said against a file's content; empty if nothing is."""
    try:
        interpret(content, "file")
    except LaunchError as error:
        return str(error)
    return ""


def test_every_key_of_accelerate_is_known():
    """Those of its newest version too: a key that is added there fails here."""
    for field in dataclasses.fields(ClusterConfig):
        said = refusal({"distributed_type": "NO", field.name: None})
        assert "is not a key" not in said, said
    options = {action.dest for action in launch_command_parser()._actions}
    sections = {"fsdp_": ("fsdp_config", "FSDP"), "dynamo_": ("dynamo_config", "NO")}
    for prefix, (section, kind) in sections.items():
        named = [option for option in options if option.startswith(prefix)]
        assert len(named) > 3
        for option in named:
            assert refusal({"distributed_type": kind, "num_processes": 1, section: {option: None}}) == "", option


@pytest.mark.parametrize("kind", [kind.value for kind in accelerate.DistributedType])
def test_every_kind_of_accelerate_is_started_or_refused(kind):
    said = refusal({"distributed_type": kind, "num_processes": 1})
    assert said == "" if kind in (*TYPES, "MPS") else "for which there is strategy='accelerate'" in said


@pytest.mark.parametrize("compiler", [compiler.value for compiler in DynamoBackend])
def test_every_compiler_of_accelerate_is_known(compiler):
    assert refusal({"distributed_type": "NO", "dynamo_config": {"dynamo_backend": compiler}}) == ""


@pytest.mark.row("refused")
def test_a_typing_error_that_accelerate_passes_over_is_refused(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_sharding_stratgy: FULL_SHARD}\n")
    assert load_config_from_file(str(path)).fsdp_config == {"fsdp_sharding_stratgy": "FULL_SHARD"}
    assert "did you mean sharding_strategy?" in refusal(read_file(str(path)))
