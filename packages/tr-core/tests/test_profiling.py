"""Record what some steps spend their time on: which steps, in which files, and what cannot end a training."""

import gzip
import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.callbacks import At, Stop, StopAt, on
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from support.runs import assert_same_weights
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tr_core.runtime import profiling
from tr_core.runtime.profiling import dearest_operators, profiled_steps


@pytest.fixture
def recording(make_trainer, tmp_path, caplog):
    """Build a Trainer of ten steps that records some; its warnings are in `caplog`."""
    caplog.set_level(logging.INFO, "tr_core")

    def build(steps, *callbacks, **changes):
        torch.manual_seed(0)
        options = {"model": Classifier(), "profile_steps": steps, "log_level": "info", **changes}
        return make_trainer(options.pop("number", 40), callbacks=list(callbacks), **options)

    return build


def trace_of(folder, name):
    with gzip.open(folder / "out" / "profile" / f"{name}.trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def labels(folder, name):
    found = {event["name"] for event in trace_of(folder, name) if event.get("cat") == "user_annotation"}
    return sorted((label for label in found if label.startswith("step ")), key=lambda label: int(label[5:]))


def files(folder):
    made = folder / "out" / "profile"
    return sorted(path.name for path in made.iterdir()) if made.exists() else []


def profiles(folder):
    lines = (folder / "out" / "events.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "profile"]


def test_the_named_steps_and_no_others_are_in_the_trace(recording, tmp_path, caplog):
    recording("4:7").train()
    assert files(tmp_path) == ["steps-4-7.trace.json.gz"]
    assert labels(tmp_path, "steps-4-7") == ["step 4", "step 5", "step 6", "step 7"]
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in trace_of(tmp_path, "steps-4-7")) == 4
    assert "memory   no snapshot: torch records one on CUDA only, and this is cpu" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_one_step_may_be_named(recording, tmp_path):
    recording(3).train()
    assert labels(tmp_path, "step-3") == ["step 3"]


def test_the_event_has_the_dearest_operators_and_names_the_steps(recording, tmp_path):
    recording("4:7").train()
    (event,) = profiles(tmp_path)
    assert (event["first"], event["last"], event["step"], event["complete"]) == (4, 7, 7, True)
    assert (event["trace"], event["device"]) == ("profile/steps-4-7.trace.json.gz", "cpu")
    rows = event["operators"]
    assert len(rows) == 10
    assert [row["cpu_ms"] for row in rows] == sorted((row["cpu_ms"] for row in rows), reverse=True)
    assert not [row for row in rows if row["name"].startswith("step ")]
    assert 0 < sum(row["share"] for row in rows) <= 1
    assert {row["name"]: row["calls"] for row in rows}["Optimizer.step#AdamW.step"] == 4


def test_writing_the_files_is_a_phase_of_its_own(recording, tmp_path):
    recording("4:7").train()
    lines = (tmp_path / "out" / "events.jsonl").read_text("utf-8").splitlines()
    times = [event["phases"] for event in map(json.loads, lines) if event["event"] == "time"]
    assert sum(phases.get("profile", 0.0) for phases in times) > 0


def test_a_run_that_is_recorded_learns_the_same(recording, tmp_path):
    plain, recorded = recording(None), recording("2:4")
    plain.train()
    assert files(tmp_path) == []
    recorded.train()
    assert_same_weights(plain.model, recorded.model)


def test_nothing_listens_without_the_argument_and_after_the_last_step(recording):
    seen = []

    def train(trainer):
        trainer.add_callback(on("on_pre_optimizer_step", lambda state, **more: seen.append(listening(trainer))))
        trainer.train()

    train(recording(None))
    train(recording("2:3"))
    assert seen == [False] * 10 + [True] * 3 + [False] * 7


def listening(trainer):
    return any(trainer.callback_handler._last.values())


def test_the_argument_acts_when_it_is_set_after_the_trainer_was_built_and_is_refused_within_a_run(recording, tmp_path):
    trainer = recording(None)
    trainer.args.profile_steps = "2:3"
    trainer.train()
    assert labels(tmp_path, "steps-2-3") == ["step 2", "step 3"]
    later = recording(None, At(2, lambda args: setattr(args, "profile_steps", 5)))
    with pytest.raises(ValueError, match=r"args.profile_steps was changed from None to '5' .* set it before train\(\)"):
        later.train()


def test_steps_are_optimizer_steps(recording, tmp_path):
    recording("2:3", gradient_accumulation_steps=4, number=48).train()
    assert labels(tmp_path, "steps-2-3") == ["step 2", "step 3"]
    events = trace_of(tmp_path, "steps-2-3")
    assert sum(event["name"] == "autograd::engine::evaluate_function: NllLossBackward0" for event in events) == 8


def test_a_step_that_is_made_again_for_lack_of_memory_is_recorded_too(recording, tmp_path):
    failures = [MemoryError("out of memory")]

    class Large(Classifier):
        def forward(self, x, labels=None):
            if len(x) == 4 and failures and torch.autograd._profiler_enabled():
                raise failures.pop()
            return super().forward(x, labels)

    trainer = recording("3:4", auto_find_batch_size=True, model=Large())
    assert trainer.train().global_step == 10
    assert not failures
    assert labels(tmp_path, "steps-3-4") == ["step 3", "step 4"]


def test_a_compiled_model_is_recorded(recording, tmp_path):
    recording("4:5", torch_compile_backend="eager").train()
    assert labels(tmp_path, "steps-4-5") == ["step 4", "step 5"]


@pytest.mark.parametrize(
    ("steps", "message", "made"),
    [
        ("11:12", "profile_steps=11:12 lies after the last step, 10: nothing is recorded", []),
        ("9:12", "profile_steps=9:12: this run makes steps 9 to 10 of them", ["steps-9-10.trace.json.gz"]),
    ],
)
def test_steps_beyond_the_last_one_are_a_warning(recording, tmp_path, caplog, steps, message, made):
    recording(steps).train()
    assert message in caplog.text
    assert files(tmp_path) == made


@pytest.mark.parametrize(
    ("steps", "message", "made"),
    [
        ("2:6", "profile_steps=2:6 lies before step 6, at which this run resumes: nothing is recorded", []),
        ("5:8", "profile_steps=5:8: this run makes steps 7 to 8 of them", ["steps-7-8.trace.json.gz"]),
    ],
)
def test_a_resumed_run_records_the_steps_that_are_left(recording, tmp_path, caplog, steps, message, made):
    keeper = MemoryCheckpointer(tmp_path)
    options = {"checkpointer": keeper, "save_strategy": "steps", "save_steps": 3}
    with pytest.raises(Stop):
        recording(None, StopAt(7), **options).train()
    assert recording(steps, **options).train(resume_from_checkpoint=True).global_step == 10
    assert message in caplog.text
    assert files(tmp_path) == made


def test_a_training_that_ends_before_the_steps_says_so(recording, tmp_path, caplog):
    with pytest.raises(Stop):
        recording("8:9", StopAt(4)).train()
    assert "profile_steps=8:9: training ended before, and no step was recorded" in caplog.text
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_what_was_recorded_before_an_exception_is_written(recording, tmp_path, caplog, kind):
    def fail(state, **more):
        if state.global_step == 5:
            raise kind

    with pytest.raises(kind):
        recording("4:9", on("on_pre_optimizer_step", fail)).train()
    assert labels(tmp_path, "steps-4-6") == ["step 4", "step 5", "step 6"]
    (event,) = profiles(tmp_path)
    assert (event["step"], event["last"], event["complete"]) == (5, 6, False)
    assert "profile_steps=4:9: training ended in or after step 6" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_a_signal_that_ends_the_run_does_not_lose_the_trace(recording, tmp_path):
    def ask(state, **more):
        if state.global_step == 4:
            signal.raise_signal(signal.SIGTERM)

    options = {"checkpointer": MemoryCheckpointer(tmp_path), "save_strategy": "steps", "save_steps": 100}
    with pytest.raises(SystemExit):
        recording("4:9", on("on_step_begin", ask), **options).train()
    assert labels(tmp_path, "steps-4-5") == ["step 4", "step 5"]


def test_beside_a_profiler_of_the_users_nothing_is_recorded(recording, tmp_path, caplog):
    with profile(activities=[ProfilerActivity.CPU]) as own:
        assert recording("4:5").train().global_step == 10
    assert "another profiler is active, and torch has one at a time; nothing is recorded" in caplog.text
    assert files(tmp_path) == []
    assert any(row.key == "aten::addmm" for row in own.key_averages())


def test_a_recording_ends_when_it_has_many_batches(recording, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(profiling, "MOST_BATCHES", 6)
    options = {"eval_dataset": samples(40), "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
    assert recording("2:9", **options).train().global_step == 10
    assert "profile_steps=2:9 ends in or after step 3, at 6 batches" in caplog.text
    assert labels(tmp_path, "steps-2-3") == ["step 2", "step 3"]


def nothing_written(self, path, *more):
    """Do what torch does on a full disk: nothing, without an error."""


def half_written(self, path, *more):
    Path(path).write_text('{"traceEvents": [{"name": "aten::a', "utf-8")


@pytest.mark.parametrize("export", [nothing_written, half_written])
def test_a_trace_that_torch_could_not_write_is_a_warning_and_leaves_no_half_of_it(
    recording, tmp_path, caplog, monkeypatch, export
):
    monkeypatch.setattr(profile, "export_chrome_trace", export)
    assert recording("4:5").train().global_step == 10
    assert "the trace was not made: OSError: torch did not write the whole of it to" in caplog.text
    assert files(tmp_path) == []
    (event,) = profiles(tmp_path)
    assert "trace" not in event
    assert len(event["operators"]) == 10


def test_a_file_that_torch_failed_to_write_and_keeps_open_does_not_go_on_filling_the_disk(recording, monkeypatch):
    held = []

    def fail(self, path, *more):
        held.append(os.open(f"{path}.tmp", os.O_CREAT | os.O_WRONLY))
        os.write(held[0], bytes(5000))

    monkeypatch.setattr(profile, "export_chrome_trace", fail)
    recording("4:5").train()
    size = os.fstat(held[0]).st_size
    os.close(held[0])
    assert size == 0


def test_a_folder_that_cannot_be_made_is_a_warning(recording, tmp_path, caplog):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile").write_text("a file")
    assert recording("4:5").train().global_step == 10
    assert "profile_steps=4:5: the trace was not made: FileExistsError" in caplog.text
    assert "training continues" in caplog.text


@pytest.mark.parametrize("method", ["start", "stop", "key_averages"])
def test_a_profiler_that_fails_does_not_end_the_training(recording, caplog, monkeypatch, method):
    real = getattr(profile, method)

    def fail(self, *more):
        if method == "stop":
            real(self)  # or the next test would begin inside a recording
        raise RuntimeError("CUPTI is not available")

    monkeypatch.setattr(profile, method, fail)
    assert recording("4:5").train().global_step == 10
    assert "was not made: RuntimeError: CUPTI is not available; training continues" in caplog.text


def test_a_trace_of_great_size_has_no_table(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "MOST_BYTES_FOR_A_TABLE", 1000)
    recording("4:5").train()
    assert profiles(tmp_path)[0]["operators"] == []
    assert files(tmp_path) == ["steps-4-5.trace.json.gz"]


def test_only_the_main_process_records(make_args):
    args, callbacks = make_args(profile_steps="1:2"), SimpleNamespace()  # which has no `listen`
    with profiled_steps(args, None, SimpleNamespace(rank=1), callbacks):
        pass


def row(name, cpu_us=0.0, device_us=0.0, kind=DeviceType.CPU, annotation=False):
    return SimpleNamespace(
        key=name, count=2, self_cpu_time_total=cpu_us, self_device_time_total=device_us, device_type=kind,
        is_user_annotation=annotation,
    )  # fmt: skip


def test_where_a_device_worked_its_time_orders_the_operators():
    rows = [
        row("aten::mm", 10.0, 3000.0),
        row("aten::add", 900.0, 1000.0),
        row("cudaLaunchKernel", 5000.0),
        row("step 4", 9000.0, 9000.0),
        row("gemm_kernel", 0.0, 3000.0, DeviceType.CUDA),
        row("add_kernel", 0.0, 1000.0, DeviceType.CUDA),
        row("step 4", 0.0, 4000.0, DeviceType.CUDA, annotation=True),
    ]
    found = dearest_operators(rows)
    assert found[0] == {"name": "aten::mm", "calls": 2, "cpu_ms": 0.01, "device_ms": 3.0, "share": 0.75}
    assert [each["name"] for each in found] == ["aten::mm", "aten::add", "cudaLaunchKernel"]


class Cuda:
    """Stands for torch's record of a device's memory."""

    def __init__(self, monkeypatch, recorded=False):
        self.calls, self.recorded = [], recorded
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recorded, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: self.calls.append("wait"))

    def record(self, enabled="all", **options):
        self.calls.append(enabled)

    def dump(self, filename):
        self.calls.append("dump")
        Path(filename).write_bytes(b"pickle")


@pytest.mark.parametrize(
    ("recorded", "calls"), [(False, ["wait", "all", "dump", None]), (True, ["wait", "dump"])], ids=["ours", "theirs"]
)
def test_a_cuda_device_has_a_snapshot_of_its_memory_too(make_args, tmp_path, monkeypatch, recorded, calls):
    cuda, listeners = Cuda(monkeypatch, recorded), {}
    callbacks = SimpleNamespace(listen=listeners.__setitem__, unlisten=lambda event, method: listeners.pop(event))
    args, state = make_args(profile_steps=1), SimpleNamespace(global_step=0, max_steps=3)
    with profiled_steps(args, state, SimpleNamespace(rank=0, device=torch.device("cuda")), callbacks):
        listeners["on_step_begin"](args, state, None)
        state.global_step = 1
        listeners["on_step_end"](args, state, None)
    assert cuda.calls == calls
    assert files(tmp_path) == ["step-1.memory.pickle", "step-1.trace.json.gz"]
    assert listeners == {}


@pytest.mark.cuda
def test_kernels_and_memory_of_a_cuda_device_are_recorded(recording, tmp_path):
    recording("4:5", use_cpu=False).train()
    assert files(tmp_path) == ["steps-4-5.memory.pickle", "steps-4-5.trace.json.gz"]
    assert any(event.get("cat") == "kernel" for event in trace_of(tmp_path, "steps-4-5"))
    assert profiles(tmp_path)[0]["operators"][0]["device_ms"] > 0
    assert not torch._C._cuda_isHistoryEnabled()
