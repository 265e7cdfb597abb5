"""What processes that come and go refuse; tests/launching kills some."""

from types import SimpleNamespace

import pytest

from tr_dist.elastic import of_arguments
from tr_dist.environment import LaunchEnvironment
from tr_dist.launching.launch import Launch, LaunchError
from tr_dist.members import Members


def test_a_second_run_of_a_process_is_refused():
    members = Members(None, None, LaunchEnvironment(), 1.0)
    members.is_over = True
    with pytest.raises(RuntimeError, match="start each run by itself"):
        members.meet()


def test_several_machines_are_refused():
    with pytest.raises(LaunchError, match="--elastic keeps a job on one machine going"):
        Launch(("train.py",), goes_on=True, min_nodes=2, max_nodes=2, endpoint="localhost:1", node_rank=0)


def test_settings_of_a_rendezvous_are_refused():
    with pytest.raises(LaunchError, match=r"leave out --rdzv_"):
        Launch(("train.py",), goes_on=True, rdzv_conf={"timeout": "3"})


@pytest.mark.parametrize(
    ("options", "words"), [({"virtual_shards": 2}, "start at most 2"), ({"hang_timeout": 0}, "watch for hangs")]
)
def test_what_cannot_go_on_is_refused_when_the_strategy_is_built(options, words, monkeypatch):
    launched = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TR_ELASTIC_RUN", "run")
    given = {"virtual_shards": 4, "use_cpu": True, "fsdp": [], "bf16": False, "fp16": False, "ddp_backend": None}
    with pytest.raises(ValueError, match=words):
        of_arguments(SimpleNamespace(**given | {"ddp_timeout": 60, "hang_timeout": None} | options))
