"""Trainers of more libraries, one or two each, train and resume here as on transformers' Trainer, unedited."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from compared import DROP_IN, logged, run

PROGRAMS = Path(__file__).with_name("more_programs.py")
# Program -> the package that it needs.
NEEDS = {
    "orpo": "trl", "cpo": "trl", "tpo": "trl", "gkd": "trl", "online_dpo": "trl", "bema": "trl",
    "sparse_encoder": "sentence_transformers", "gliner": "gliner", "flag_embedder": "FlagEmbedding",
    "flag_reranker": "FlagEmbedding", "gliclass": "gliclass", "chronos": "chronos", "tsfm": "tsfm_public",
    "great": "be_great", "colpali": "colpali_engine", "colpali_of_two_sets": "colpali_engine",
    "realtabformer": "realtabformer", "packed_samples": "cehrgpt", "adaptive": "adaptive_trainer",
    "drafted_blocks": "unsloth_zoo", "axolotl": "axolotl", "axolotl_packed": "axolotl",
}  # fmt: skip
# What a resume there does not restore either: the reference model that the callback moves, and the two weights of its
# loss that `AdaptiveTrainer` learns.
NOT_IN_A_CHECKPOINT = {"bema", "adaptive"}
# There, a run that goes on has the weights of the whole run, and the model's files have the names of the model.
RESUMES_THERE = [
    "orpo", "cpo", "tpo", "gkd", "online_dpo", "sparse_encoder", "gliner", "gliclass", "tsfm", "colpali",
    "colpali_of_two_sets", "realtabformer", "packed_samples", "drafted_blocks", "axolotl",
]  # fmt: skip


def programs(names):
    missing = "needs a library that the session `ecosystem` installs"
    return [pytest.param(name, marks=pytest.mark.skipif(not find_spec(NEEDS[name]), reason=missing)) for name in names]


@pytest.mark.parametrize("name", programs(NEEDS))
def test_one_more_library_trains_to_the_same_numbers_and_resumes_to_the_bit(tmp_path, name):
    theirs = run([sys.executable], PROGRAMS, tmp_path / "theirs", name)
    ours = run(DROP_IN, PROGRAMS, tmp_path / "ours", name)
    assert theirs["base"] == "transformers.trainer"
    assert ours["base"] == "tr_core.trainer"
    assert logged(ours) == logged(theirs)
    assert ours["weights"] == theirs["weights"]
    assert set(theirs["final"]) - set(ours["final"]) <= {"training_args.bin"}
    if name not in NOT_IN_A_CHECKPOINT:
        resumed = run(DROP_IN, PROGRAMS, tmp_path / "resumed", name, str(tmp_path / "ours" / "checkpoint-2"))
        assert resumed["weights"] == ours["weights"]


@pytest.mark.parametrize("name", programs(RESUMES_THERE))
def test_one_more_librarys_run_goes_on_here_from_a_checkpoint_of_transformers(tmp_path, name):
    theirs = run([sys.executable], PROGRAMS, tmp_path / "theirs", name)
    ours = run(DROP_IN, PROGRAMS, tmp_path / "ours", name, str(tmp_path / "theirs" / "checkpoint-2"))
    assert ours["weights"] == theirs["weights"]
