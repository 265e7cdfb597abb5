import io
import logging
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from tr_log import configure, get_logger, get_verbosity, set_verbosity
from tr_log.loggers import ROOTS, configure_process


@pytest.fixture
def stream():
    return io.StringIO()


def test_all_packages_get_the_level_and_the_rank_in_front_of_each_line(stream):
    configure("info", rank=1, world_size=4, stream=stream)
    for name in ROOTS:
        logging.getLogger(f"{name}.somewhere").info("saved")
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(ROOTS)
    for name, line in zip(ROOTS, lines, strict=True):
        prefix, _, rest = line.partition("] ")
        assert prefix == "[rank 1/4"
        assert rest.partition(" ")[2] == f"INFO {name}.somewhere: saved"


def test_a_single_process_has_no_prefix(stream):
    configure("info", rank=0, world_size=1, stream=stream)
    logging.getLogger("tr_core").info("saved")
    assert "rank" not in stream.getvalue()
    assert stream.getvalue().endswith(" INFO tr_core: saved\n")


def test_every_line_of_a_traceback_carries_the_rank(stream):
    configure("info", rank=3, world_size=4, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("tr_ckpt").exception("could not save")
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 4
    assert all(line.startswith("[rank 3/4] ") for line in lines)


def test_records_below_the_level_are_not_written(stream):
    configure("error", stream=stream)
    logging.getLogger("tr_core").warning("careful")
    assert stream.getvalue() == ""


def test_the_root_logger_and_other_libraries_are_left_alone(stream):
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("somebody").level)
    configure("debug", stream=stream)
    assert (root.level, list(root.handlers), logging.getLogger("somebody").level) == before
    logging.getLogger("somebody").error("theirs")
    assert stream.getvalue() == ""


def test_configuring_twice_writes_once_and_keeps_what_is_not_given(stream):
    configure("info", rank=1, world_size=2, stream=stream)
    configure("warning")
    logging.getLogger("tr_core").warning("careful")
    assert stream.getvalue().count("careful") == 1
    assert stream.getvalue().startswith("[rank 1/2] ")


def test_records_reach_the_root_loggers_handlers_as_well(stream, caplog):
    configure("info", stream=stream)
    logging.getLogger("tr_core").info("saved")
    assert [record.getMessage() for record in caplog.records] == ["saved"]


def test_a_stream_that_the_root_logger_writes_to_gets_a_line_once(stream):
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        configure("info", stream=stream)
        logging.getLogger("tr_core").info("saved")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "saved\n"


def test_a_logger_that_does_not_reach_the_root_is_written_all_the_same(stream):
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        configure("info", stream=stream)
        logging.getLogger("tr_core").propagate = False
        logging.getLogger("tr_core.deep").info("saved")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue().endswith("INFO tr_core.deep: saved\n")


@pytest.mark.parametrize("order", ["configure('info'); basic()", "basic(); configure('info')"])
def test_after_basic_config_a_line_appears_once_and_in_the_scripts_format(order):
    code = f"""
import logging, sys
from tr_log import configure
def basic():
    logging.basicConfig(format="mine: %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
{order}
logging.getLogger("tr_core").info("saved")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("mine: saved\n", "")


def test_without_any_set_up_of_the_script_lines_go_to_standard_error():
    code = "import logging; from tr_log import configure; configure('info'); logging.getLogger('tr_all').info('saved')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.stderr.endswith("INFO tr_all: saved\n")
    assert done.stderr.count("\n") == 1


def test_verbosity_takes_names_and_numbers_and_returns_the_number():
    set_verbosity("error")
    assert get_verbosity() == logging.ERROR
    set_verbosity(15)
    assert get_verbosity() == 15
    assert logging.getLogger("tr_core").isEnabledFor(15)


def test_verbosity_that_is_no_level_is_refused():
    with pytest.raises(ValueError, match="level='chatty' is not a logging level"):
        set_verbosity("chatty")


@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (2, logging.WARNING)])
def test_without_a_level_the_first_rank_informs_and_the_others_warn(rank, level):
    configure(rank=rank, world_size=4)
    assert get_verbosity() == level


@pytest.mark.parametrize(
    ("rank", "local_rank", "level"), [(2, 0, logging.INFO), (3, 1, logging.WARNING), (0, 0, logging.INFO)]
)
def test_without_a_level_the_first_rank_of_every_machine_informs(monkeypatch, rank, local_rank, level):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    configure(rank=rank, world_size=4)
    assert get_verbosity() == level


def test_without_a_level_the_environment_decides(monkeypatch):
    monkeypatch.setenv("TR_VERBOSITY", "debug")
    configure("passive", rank=3, world_size=4)
    assert get_verbosity() == logging.DEBUG


def test_an_environment_that_is_no_level_is_named(monkeypatch):
    monkeypatch.setenv("TR_VERBOSITY", "silent")
    with pytest.raises(ValueError, match="environment variable TR_VERBOSITY='silent' is not a logging level"):
        configure()


def test_without_a_level_one_that_was_set_before_stays():
    set_verbosity("error")
    configure(rank=0)
    assert get_verbosity() == logging.ERROR


def test_a_launchers_rank_is_taken_from_the_environment(monkeypatch, stream):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    configure("info", stream=stream)
    logging.getLogger("tr_core").info("saved")
    assert stream.getvalue().startswith("[rank 2/8] ")


def test_a_variable_of_that_name_that_is_no_number_is_not_ours(monkeypatch):
    monkeypatch.setenv("RANK", "gold")
    configure()
    assert get_verbosity() == logging.INFO


def test_a_scripts_own_logger_goes_along(stream):
    logger = get_logger("my_script")
    configure("info", rank=0, world_size=2, stream=stream)
    logger.info("hello")
    assert stream.getvalue().startswith("[rank 0/2] ")
    assert stream.getvalue().endswith("INFO my_script: hello\n")
    set_verbosity("error")
    logger.warning("quiet")
    assert "quiet" not in stream.getvalue()


def test_a_level_that_a_script_gave_its_logger_stays(stream):
    logger = get_logger("my_script")
    logger.setLevel(logging.DEBUG)
    configure("error", stream=stream)
    assert get_logger("my_script").level == logging.DEBUG
    logger.debug("detail")
    assert "detail" in stream.getvalue()
    logger.setLevel(logging.NOTSET)


def test_loggers_within_each_other_write_a_line_once(stream):
    get_logger("my_script")
    inner = get_logger("my_script.part")
    configure("info", stream=stream)
    inner.info("hello")
    assert stream.getvalue().count("hello") == 1


def test_asking_for_a_packages_logger_changes_nothing():
    logger = get_logger("tr_core.loop")
    assert logger is logging.getLogger("tr_core.loop")
    assert (logger.level, logger.handlers, logging.getLogger("tr_core").handlers) == (0, [], [])


@pytest.mark.parametrize(
    ("main", "replica", "own", "levels"),
    [
        ("passive", "warning", None, "INFO WARNING"),
        ("passive", "passive", None, "INFO WARNING"),
        ("passive", "warning", "DEBUG", "DEBUG WARNING"),
        ("passive", "passive", "ERROR", "ERROR ERROR"),
        ("error", "critical", "DEBUG", "ERROR CRITICAL"),
    ],
)
@pytest.mark.parametrize("by_variable", [True, False])
def test_arguments_set_the_level_of_a_process_and_passive_leaves_a_users_own(
    monkeypatch, main, replica, own, levels, by_variable
):
    # The first process of a second machine is a replica without log_on_each_node.
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, level in ((0, levels.split()[0]), (2, levels.split()[1])):
        set_verbosity(0)  # none
        if own is not None and by_variable:
            monkeypatch.setenv("TR_VERBOSITY", own)
        elif own is not None:
            set_verbosity(own)
        chosen = logging.getLevelNamesMapping().get((replica if rank else main).upper(), 30 if rank else 20)
        args = SimpleNamespace(log_level=main, log_level_replica=replica, should_log=rank == 0)
        args.get_process_log_level = partial(int, chosen)
        configure_process(args, rank=rank, world_size=4)
        assert get_verbosity() == logging.getLevelNamesMapping()[level], rank


def test_loggers_of_transformers_get_the_level_of_the_arguments_and_keep_theirs_with_passive(monkeypatch):
    args = SimpleNamespace(log_level="error", log_level_replica="warning", should_log=True)
    args.get_process_log_level = partial(int, logging.ERROR)
    theirs = logging.getLogger("transformers")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    configure_process(args, rank=0, world_size=1)
    assert theirs.level == logging.INFO  # the script does not use it
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    configure_process(args, rank=0, world_size=1)
    assert theirs.level == logging.ERROR
    args.log_level, args.get_process_log_level = "passive", partial(int, logging.INFO)
    configure_process(args, rank=0, world_size=1)
    assert theirs.level == logging.ERROR
