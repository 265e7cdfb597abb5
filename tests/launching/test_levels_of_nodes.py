"""Two nodes with two processes each: what every rank shows at which level, what it prints, and where files lie.

Ranks 0 and 1 are of the first node, 2 and 3 of the second. The same settings run under transformers' Trainer too.
"""

import json
import re
import sys
from dataclasses import dataclass

import pytest
from launched_jobs import HERE, TRAINER, end_of, free_port, start

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

SCRIPT = HERE / "leveled_run.py"
NUMBERS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
OURS = ("tr_args", "tr_log", "tr_core", "tr_ckpt", "tr_optim", "tr_dist")


@dataclass
class Setting:
    """Attributes:
    words: training arguments.
    levels: the level that the documentation gives each rank.
    block: the script sets levels by the documentation's lines, before it builds the Trainer.
    passive: ranks whose level is left to the defaults, and so to the user for loggers of transformers.
    verbosity: the user's own level: TR_VERBOSITY; for transformers its `set_verbosity`.
    shown: the levels that our packages show, if not `levels`.
    trains: two steps, a checkpoint, and all ways to save.
    out: the output folder; NODE is the node's number.
    """

    words: str
    levels: str
    block: bool = False
    passive: tuple = ()
    verbosity: str = ""
    shown: str = ""
    trains: bool = False
    out: str = "out"


MAIN = "--log_level warning --log_level_replica error"
QUIET = "--log_level error --log_level_replica error --log_on_each_node 0"
SETTINGS = {
    "the defaults": Setting("", "INFO WARNING INFO WARNING", passive=(0, 2)),
    "the defaults, documented lines": Setting("", "INFO WARNING INFO WARNING", passive=(0, 2), block=True),
    "one node": Setting(MAIN, "WARNING ERROR WARNING ERROR", trains=True),
    "one node, documented lines": Setting(MAIN, "WARNING ERROR WARNING ERROR", block=True),
    "several nodes": Setting(f"{MAIN} --log_on_each_node 0", "WARNING ERROR ERROR ERROR"),
    "several nodes, documented lines": Setting(f"{MAIN} --log_on_each_node 0", "WARNING ERROR ERROR ERROR", block=True),
    "errors only": Setting(QUIET, "ERROR ERROR ERROR ERROR"),
    "errors only, documented lines": Setting(QUIET, "ERROR ERROR ERROR ERROR", block=True),
    "more of replicas": Setting("--log_level critical --log_level_replica debug", "CRITICAL DEBUG CRITICAL DEBUG"),
    "the defaults of one main process": Setting("--log_on_each_node 0", "INFO WARNING WARNING WARNING", passive=(0,)),
    "passive replicas": Setting(
        "--log_level_replica passive --log_on_each_node 0", "INFO WARNING WARNING WARNING", passive=(0, 1, 2, 3)
    ),
    "a user's own level": Setting(
        "", "INFO WARNING INFO WARNING", passive=(0, 2), verbosity="ERROR", shown="ERROR WARNING ERROR WARNING"
    ),
    "a user's own level, passive replicas": Setting(
        "--log_level_replica passive",
        "INFO WARNING INFO WARNING",
        passive=(0, 1, 2, 3),
        verbosity="DEBUG",
        shown="DEBUG DEBUG DEBUG DEBUG",
    ),
    "arguments over a user's own level": Setting(MAIN, "WARNING ERROR WARNING ERROR", verbosity="DEBUG"),
    "no bars": Setting("--disable_tqdm 1 --log_level info", "INFO WARNING INFO WARNING", trains=True),
    "folders of their own": Setting(
        "--log_level debug --log_level_replica info", "DEBUG INFO DEBUG INFO", trains=True, out="node-NODE"
    ),
    "each node saves": Setting(
        "--log_level info --log_on_each_node 0 --save_on_each_node 1",
        "INFO WARNING WARNING WARNING",
        trains=True,
        out="node-NODE",
    ),
}
NAMES = list(SETTINGS)
TRAINING = [name for name in NAMES if SETTINGS[name].trains]


@dataclass
class Rank:
    """What a rank printed in a setting, and found out."""

    out: str
    err: str
    facts: dict

    def said(self, library):
        """Return the levels that a library's logger shows, in order, wherever."""
        return re.findall(rf"{library} says (\w+)$", self.out + self.err, re.MULTILINE)


def job(kind, folder):
    """Run all settings on two nodes, each with a launcher of its own; return a function of setting and rank."""
    settings = [
        {"words": s.words, "block": s.block, "trains": s.trains, "out": s.out, "verbosity": s.verbosity}
        for s in SETTINGS.values()
    ]
    port = free_port()
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    if kind == "ours":
        launcher = [TRAINER, "launch"]
        place = [str(word).replace("-per-node", "").replace("master-", "master_") for word in place]
    rank = "--node_rank" if kind == "ours" else "--node-rank"
    script = [SCRIPT, kind, folder, json.dumps(settings)]
    nodes = [start([*launcher, *place, rank, node, *script]) for node in range(2)]
    ends = [end_of(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], "\n".join(errors[-4000:] for _, _, errors in ends)

    def read(name, rank):
        base = folder / str(NAMES.index(name)) / f"rank-{rank}"
        out, err = (base.with_suffix(suffix).read_text("utf-8") for suffix in (".out", ".err"))
        return Rank(out, err, json.loads(base.with_suffix(".json").read_text("utf-8")))

    return read


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return {kind: tmp_path_factory.mktemp(kind) for kind in ("ours", "transformers")}


@pytest.fixture(scope="module")
def ours(places):
    return job("ours", places["ours"])


@pytest.fixture(scope="module")
def theirs(places):
    return job("transformers", places["transformers"])


def from_level(level):
    return [name.lower() for name, number in NUMBERS.items() if number >= NUMBERS[level]]


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_shows_what_the_documentation_says_once(name, ours):
    setting = SETTINGS[name]
    for rank, level in enumerate(setting.levels.split()):
        found = ours(name, rank)
        assert found.facts["level"] == NUMBERS[level], rank
        shown = (setting.shown or setting.levels).split()[rank]
        for library in OURS:
            assert found.said(library) == from_level(shown), (rank, library)
        if setting.block:
            assert found.said("my_app") == from_level(level), rank
            assert re.search(rf"^\d\d/\d\d/\d{{4}} [\d:]+ - {shown} - tr_core.part - tr_core", found.out, re.MULTILINE)
            assert "tr_core" not in found.err
        else:
            assert re.search(rf"^\[rank {rank}/4\] [\d:]+ {shown} tr_core.part: tr_core", found.err, re.MULTILINE)
            assert "tr_core" not in found.out


@pytest.mark.parametrize("name", NAMES)
def test_loggers_of_transformers_and_datasets_have_the_levels_that_transformers_trainer_gives_them(name, ours, theirs):
    setting = SETTINGS[name]
    for rank, level in enumerate(setting.levels.split()):
        found, expected = ours(name, rank), theirs(name, rank)
        left = setting.verbosity or "WARNING"
        usual = level if setting.block or rank not in setting.passive else left
        assert found.said("transformers") == from_level(usual), rank
        if not (setting.block and rank in setting.passive):
            assert expected.said("transformers") == found.said("transformers"), rank
            assert expected.said("datasets") == found.said("datasets"), rank
        # Only passive differs: the documentation's INFO of main processes here, there what the user has set.
        assert expected.facts["level"] == NUMBERS[left if rank in setting.passive else level], rank
        for fact in set(found.facts) - {"level", "disable_tqdm"}:
            assert found.facts[fact] == expected.facts[fact], (rank, fact)
        assert found.facts["disable_tqdm"] == ("disable_tqdm" in setting.words or "--log_level error" in setting.words
                                               or "critical" in setting.words)  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_is_announced_at_info_and_its_entries_and_metrics_by_the_first_rank_alone(name, ours, theirs):
    setting = SETTINGS[name]
    for rank, level in enumerate(setting.levels.split()):
        found, expected = ours(name, rank), theirs(name, rank)
        informs = NUMBERS[level] <= NUMBERS["INFO"]
        assert len(re.findall(r"INFO tr_core.*: training begins", found.err)) == informs, rank
        assert ("***** Running training *****" in expected.err) == informs, rank
        assert (
            ("***** train metrics *****" in found.out) == ("***** train metrics *****" in expected.out) == (rank == 0)
        )
        has_bars = "disable_tqdm" not in setting.words
        assert len(re.findall(r"^step [12]/2 ", found.err, re.MULTILINE)) == (2 if rank == 0 and has_bars else 0), rank
        printed = len(re.findall(r"^{'loss': ", found.out, re.MULTILINE))
        assert printed == (2 if rank == 0 and not has_bars else 0), rank
        # transformers' PrinterCallback prints on the second node too.
        assert ("{'loss': " in expected.out) == (rank == 0 or (rank == 2 and not has_bars)), rank
        if rank > 0:
            assert found.out == "", rank


def files(folder, *names):
    return {str(path.relative_to(folder)) for name in names for path in folder.rglob(name)}


@pytest.mark.parametrize("name", TRAINING)
def test_files_lie_where_those_of_transformers_do_and_the_log_in_the_first_ranks_folder(name, places, ours, theirs):
    here, there = (places[kind] / str(NAMES.index(name)) for kind in ("ours", "transformers"))
    both = ("model.safetensors", "trainer_state.json", "train_results.json", "all_results.json")
    assert files(here, *both) == files(there, *both) != set()
    first = SETTINGS[name].out.replace("NODE", "0")
    logs = ("metrics.jsonl", "events.jsonl", "report.html")
    assert files(here, *logs) == {f"{first}/{log}" for log in logs}
    entries = [json.loads(line) for line in (here / first / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 2]
    saving = ["node-0", "node-1"] if "save_on_each_node" in SETTINGS[name].words else [first]
    assert files(here, "manifest.json") == {f"{folder}/checkpoint-2/manifest.json" for folder in saving}
    ranks = [(0, 1), (2, 3)] if len(saving) == 2 else [(0, 1, 2, 3)]
    expected = {f"{folder}/checkpoint-2/rng-{n}.json" for folder, own in zip(saving, ranks, strict=True) for n in own}
    assert files(here, "rng-*.json") == expected
    assert {path.name for path in here.iterdir() if path.is_dir()} == set(saving)
