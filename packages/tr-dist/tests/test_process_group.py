import re
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from meetings import free_port, wait_for

from tr_dist import DDP, LaunchEnvironment, ProcessGroup, rendezvous
from tr_dist.testing import run_ranks

CPU = torch.device("cpu")


def test_the_group_is_left_when_the_last_object_leaves():
    first, second = DDP(use_cpu=True), DDP(use_cpu=True)
    first.close()
    first.close()
    assert dist.is_initialized()
    assert second.gather_objects(1) == [1]
    second.close(failed=True)
    assert not dist.is_initialized()


def test_a_group_that_somebody_else_made_is_not_destroyed():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with DDP(use_cpu=True) as strategy:
            assert strategy.world_size == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def _join_again():
    totals = []
    for _ in range(3):
        with DDP(use_cpu=True) as strategy:
            totals.append(int(strategy.sum(torch.tensor(strategy.rank + 1))))
    return totals


def test_ranks_can_join_again_after_leaving():
    assert run_ranks(_join_again, 2) == [[3, 3, 3]] * 2


def _leave(left, failed):
    strategy = DDP(use_cpu=True)
    if strategy.rank == 0:
        strategy.close(failed=failed)
        left.touch()
    elif failed:
        wait_for(left)
    else:
        time.sleep(0.5)
        assert not left.exists()
        strategy.close()


def test_a_failed_rank_waits_for_nobody_and_a_sound_one_for_all(tmp_path):
    run_ranks(_leave, 2, tmp_path / "failed", True)
    run_ranks(_leave, 2, tmp_path / "sound", False)


def test_a_backend_that_cannot_be_left_is_abandoned(monkeypatch):
    from tr_dist import process_group

    release = threading.Event()
    destroy = dist.destroy_process_group
    strategy = DDP(use_cpu=True)
    monkeypatch.setattr(process_group, "_FAILED_DESTROY_S", 0.1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (release.wait(30), destroy()))
    strategy.close(failed=True)
    assert process_group.here.is_stuck
    release.set()
    deadline = time.monotonic() + 60
    while dist.is_initialized() and time.monotonic() < deadline:
        time.sleep(0.01)
    process_group.here.is_stuck = (
        False  # not by monkeypatch, which would put True back: this process would then end with 1
    )
    assert not dist.is_initialized()


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = LaunchEnvironment(world_size=2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConnectionError, match=f"rank 0 of 2 cannot serve 127.0.0.1:{port}: the port is taken"):
            ProcessGroup(environment, CPU)


def test_a_missing_rank_is_named(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_SAY_S", 0.1)
    port = free_port()
    environment = LaunchEnvironment(world_size=2, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(ConnectionError, match=rf"rank 0 of 2 waited 3 s at 127.0.0.1:{port}, and rank 1 did not"):
        ProcessGroup(environment, CPU, timeout_s=3)  # it connects to its own store in this time
    said = rf"rank 0 of 2 has waited \d+ s at 127.0.0.1:{port} for rank 1 to come; it gives up after 3 s\n"
    assert re.search(said, capsys.readouterr().err)


def test_a_rank_0_that_does_not_come_is_named(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_SAY_S", 0.1)
    port = free_port()
    environment = LaunchEnvironment(rank=1, local_rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(ConnectionError, match=rf"rank 1 of 2 waited 1 s at 127.0.0.1:{port}, and rank 0 did not come"):
        ProcessGroup(environment, CPU, timeout_s=1)
    said = rf"rank 1 of 2 has waited \d+ s at 127.0.0.1:{port} for rank 0 to come; it gives up after 1 s\n"
    assert re.search(said, capsys.readouterr().err)


def test_a_rank_that_does_not_come_to_a_meeting_by_file_is_named(tmp_path):
    environment = LaunchEnvironment(world_size=2, rendezvous_file=str(tmp_path / "meet"))
    with pytest.raises(ConnectionError, match=r"rank 0 of 2 waited 1 s at file .*meet, and rank 1 did not come"):
        ProcessGroup(environment, CPU, timeout_s=1)
