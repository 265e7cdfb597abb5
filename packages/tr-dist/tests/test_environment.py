import pytest

from tr_dist import LaunchEnvironment, read_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_no_variables_mean_one_process():
    assert read_environment({}) == LaunchEnvironment()
    assert read_environment({"MASTER_ADDR": "somewhere"}).world_size == 1


def test_variables_of_torchrun_are_read():
    assert read_environment(TORCHRUN) == LaunchEnvironment(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        master_addr="localhost",
        master_port=29500,
        restart_count=2,
        agent_store=True,
    )


def test_accelerate_is_recognised_over_torchrun():
    assert read_environment({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate launch"


def test_variables_of_deepspeed_are_read():
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    found = read_environment({**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert (found.launcher, found.local_world_size, found.node_rank) == ("deepspeed", 2, 0)


def test_a_rendezvous_file_takes_the_place_of_an_address():
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TR_RENDEZVOUS_FILE": "/shared/meet"}
    assert read_environment(given).rendezvous_file == "/shared/meet"


def test_a_job_of_one_process_needs_no_address():
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_the_clusters_node_number_may_differ_from_the_launchers():
    assert read_environment({**TORCHRUN, "NODE_RANK": "0"}).node_rank == 1
    assert read_environment({**TORCHRUN, "NODE_RANK": "node-a"}).node_rank == 1


SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-009]-ib,login[1,2]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
}


def test_processes_of_srun_need_no_other_launcher():
    found = read_environment(SRUN)
    assert (found.launcher, found.rank, found.world_size) == ("srun", 4, 8)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
    assert (found.master_addr, found.master_port) == ("gpu007-ib", 15000 + (1234 * 31 + 2) % 17000)


def test_an_address_that_is_set_goes_before_sruns():
    found = read_environment({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "7"})
    assert (found.master_addr, found.master_port) == ("head", 7)


def test_torchrun_under_srun_goes_before_it():
    assert read_environment({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_one_machine_of_srun_meets_at_home():
    alone = {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_LOCALID": "4"}
    assert read_environment({**SRUN, **alone}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_LOCALID": "0"},  # spread cyclically: rank 4 would be the first of its machine
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_JOB_ID": ""},
        {"SLURM_NODEID": "9"},
    ],
)
def test_what_srun_says_is_taken_only_if_it_fits(change):
    with pytest.raises(ValueError, match="srun started 8 processes"):
        read_environment({**SRUN, **change})


def test_one_task_of_srun_is_alone():
    assert read_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}).launcher == "none"


BROKEN = [
    ({"RANK": "0"}, "WORLD_SIZE not set beside RANK=0; start with a launcher such as torchrun"),
    ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set beside WORLD_SIZE=2"),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but RANK and WORLD_SIZE are not"),
    ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT='' is not a number; needs a whole number from 1 to 65535"),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is out of range; needs a whole number from 1 to 65535"),
    ({**TORCHRUN, "RANK": "first"}, "RANK='first' is not a number; needs a whole number from 0"),
    ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is out of range; needs a whole number from 0"),
    ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is out of range; needs a whole number from 1"),
    ({**TORCHRUN, "RANK": "4"}, "RANK=4 does not exist among WORLD_SIZE=4 processes; ranks count from 0"),
    ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not exist among the 2 processes of this machine"),
    ({**TORCHRUN, "RANK": "0"}, "LOCAL_RANK=1 is greater than RANK=0; ranks count machine by machine"),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=4, which counts all machines"),
    (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"},
        "RANK=3 and LOCAL_RANK=1 differ, though all 4 processes are on this machine",
    ),
    ({**TORCHRUN, "LOCAL_SIZE": "4"}, "LOCAL_WORLD_SIZE=2 and LOCAL_SIZE=4 contradict each other"),
    (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
        "srun started 4 processes (SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=2), but RANK and WORLD_SIZE are not set, so "
        "each would train a model of its own",
    ),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes (OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=unset)"),
]


@pytest.mark.parametrize(("environ", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_broken_environment_is_refused_in_words(environ, message):
    with pytest.raises(ValueError) as caught:
        read_environment(environ)
    assert message in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError) as caught:
        read_environment({**TORCHRUN, "RANK": "x", "MASTER_PORT": "y", "LOCAL_SIZE": "3"})
    assert [line.strip().split()[0] for line in str(caught.value).splitlines()[1:]] == [
        "RANK='x'",
        "LOCAL_WORLD_SIZE=2",
        "MASTER_PORT='y'",
    ]
