"""What a process imports before its first step, and that a collection of garbage does not fall into it."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest
from support.data import samples
from support.runs import TORCH

import tr_core
from tr_core import Trainer, TrainingArguments, start
from tr_core.start import FIRST_BATCH, STAGES, begin_run, log_at_first, on_first_use, stage, without_collection

HEAVY = """
accelerate asyncio html http multiprocessing.managers rich sympy tensorboard tr_core.preflight.checks
tr_core.preflight.diagnosis tr_log.notebook tr_log.report.page tr_log.screen torch._dynamo torch._inductor
torch.distributed.checkpoint torch.distributed.elastic torch.distributed.fsdp torch.distributed.tensor
torch.nn.parallel.distributed torch.onnx torch.testing transformers unittest wandb yaml
"""
STARTED = """
import sys, torch
def report():
    added = set(sys.modules) - known
    print(len(added), *sorted(added & set(sys.argv[2:])))
known = set(sys.modules)
from tr_core import *
report()
model = torch.nn.Linear(4, 2)
before = set(sys.modules)
torch.optim.AdamW(model.parameters()).step()  # torch's own optimizers import torch._dynamo
known |= set(sys.modules) - before
class Model(torch.nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt
args = TrainingArguments(sys.argv[1], use_cpu=True, max_steps=1, save_strategy="no")
try:
    Trainer(Model(4, 2), args, train_dataset=[{"x": torch.zeros(4)}] * 8).train()
except KeyboardInterrupt:
    pass
report()
"""


def test_importing_the_package_imports_no_torch_and_its_public_modules_need_no_import_of_their_own():
    code = "import sys, tr_core; dir(tr_core); from tr_core import TrainingArguments; assert 'torch' not in sys.modules"
    code += "; tr_core.preflight.check; tr_core.collators.default_data_collator"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(TORCH < (2, 8), reason="an older torch imports more itself")
def test_import_and_training_up_to_the_first_step_load_few_modules_and_no_heavy_one(tmp_path):
    command = [sys.executable, "-c", STARTED, str(tmp_path / "out"), *HEAVY.split()]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    (imported, *heavy), (trained, *more) = (line.split() for line in shown)
    assert (int(imported) <= 176, heavy) == (True, [])
    assert (int(trained) <= 230, more) == (True, ["html", "tr_log.report.page"])  # of the report at the end


def test_every_public_name_is_that_of_its_module_and_type_checkers_see_the_same():
    tree = ast.parse(Path(tr_core.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.name: node.module for node in block.body for alias in node.names}
    assert shown == tr_core._ORIGINS
    assert sorted(shown) == sorted(tr_core.__all__)
    assert all(getattr(tr_core, name) is getattr(sys.modules[shown[name]], name) for name in shown)
    assert set(shown) <= set(dir(tr_core))


def test_a_wrong_name_is_refused_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'Trianer'; it has .*Trainer, "):
        _ = tr_core.Trianer


def test_a_name_is_kept_after_its_first_use():
    get, names = on_first_use(__name__, {"sqrt": "math"})
    assert {"sqrt", "HEAVY"} <= set(names())
    assert get("sqrt")(4.0) == 2.0
    assert globals().pop("sqrt")(9.0) == 3.0


@pytest.fixture
def thawed():
    """Makes ordinary ones of the objects that are kept frozen while tests run."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_no_collection_falls_into_imports_nor_comes_because_of_them():
    gc.collect()
    with without_collection():
        made = [[] for _ in range(50_000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_count()[0] < 5_000
    assert gc.get_freeze_count() < 2_000  # the immortal objects, with Python 3.12
    del made


@pytest.mark.usefixtures("thawed")
def test_a_collector_that_is_off_or_keeps_objects_frozen_stays_so():
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with without_collection():
            pass
        assert gc.get_freeze_count() >= frozen - 10 > 0
    finally:
        gc.unfreeze()


def test_the_stages_of_a_start_are_logged_at_the_level_debug(tmp_path, model, caplog):
    def train(level, **options):
        caplog.clear()
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=3, save_strategy="no", log_level=level, **options
        )
        with caplog.at_level(level.upper(), "tr_core.trainer"):
            Trainer(model, args, train_dataset=samples(8)).train()
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("start: ")]

    (line,) = train("debug", per_device_train_batch_size=2, num_train_epochs=2)  # two epochs, one start
    names = [part.rsplit(" ", 2)[0] for part in line.removeprefix("start: ").partition(";")[0].split(", ")]
    assert names == [*STAGES, FIRST_BATCH]
    assert line.endswith(" s from train() to the first batch")
    assert train("info") == []


def test_the_time_of_a_stage_does_not_count_a_stage_inside(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("tr_core.start.perf_counter", lambda: next(now))
    monkeypatch.setattr("tr_core.start._start.seconds", {})
    with stage("outer"), stage("inner"):
        pass
    assert start._start.seconds == {"inner": 3.0, "outer": 7.0}


def test_batches_are_taken_one_at_a_time_also_where_the_first_is_measured(caplog):
    taken = []
    begin_run(0.5)
    with caplog.at_level("DEBUG", "tr_core.trainer"):
        batches = log_at_first(taken.append(n) or n for n in range(3))
        assert taken == []
        assert next(batches) == 0
        assert taken == [0]
        assert list(batches) == [1, 2]
        begin_run(0.5)
        assert list(log_at_first(iter(()))) == []
    assert sum("arguments 0.500 s" in record.getMessage() for record in caplog.records) == 1
    begin_run(0.0)
    assert next(log_at_first(iter([1]))) == 1
