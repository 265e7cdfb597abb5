"""What TensorBoard, MLflow and Weights & Biases have of a run, read back by the libraries, is what metrics.jsonl has.

The runs are programs of their own: one that ends, one that is killed and resumed, with new runs of the trackers and
with the first ones, and those that fail or are stopped.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mlflow", exc_type=ImportError)
pytest.importorskip("wandb", exc_type=ImportError)
pytest.importorskip("tensorboard")

pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of other projects
LIMIT_S = 240
LARGEST = 1.7976931348623157e308  # what MLflow's database has for infinity
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
WORDS = (
    "--max_steps 8 --per_device_train_batch_size 2 --learning_rate 1e-3 --logging_steps 1 --eval_strategy steps "
    "--eval_steps 2 --save_steps 4 --use_cpu --disable_tqdm --report_to tensorboard,mlflow,wandb"
)


class Job:
    """A folder with a run and what its trackers wrote."""

    def __init__(self, folder, beginning):
        """Take what is in the folder `beginning` for a beginning."""
        self.folder = folder
        shutil.copytree(beginning, folder, symlinks=True)
        self.variables = {
            "HOME": str(folder / "home"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/runs.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, ending, *words, code=0, **variables):
        """Start a training, and return what it printed as errors when it has ended with an exit code."""
        script = Path(__file__).with_name("reported_run.py")
        places = ["--output_dir", str(self.folder / "out"), "--logging_dir", str(self.folder / "curves")]
        ended = subprocess.run(
            [sys.executable, str(script), ending, *places, *WORDS.split(), *words], cwd=self.folder / "work",
            env={**os.environ, **self.variables, **variables}, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert ended.returncode == code, ended.stderr
        return ended.stderr

    def entries(self):
        """Return the entries of metrics.jsonl."""
        lines = (self.folder / "out" / "metrics.jsonl").read_text("utf-8").splitlines()
        return [{name: NUMBERS.get(value, value) for name, value in json.loads(line).items()} for line in lines]

    def curves(self, *, after=0, until=8):
        """Return the curves of metrics.jsonl, under their names in a tracker: lists of step and value."""
        found = defaultdict(list)
        for entry in self.entries():
            for key, value in entry.items():
                if key != "step" and not isinstance(value, str) and after < entry["step"] <= until:
                    name = f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
                    found[name].append((entry["step"], float(value)))
        return dict(found)

    def of_tensorboard(self):
        """Return the curves, without gaps, by TensorBoard's own reader."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(self.folder / "curves"), size_guidance={"scalars": 0})
        reader.Reload()
        return {name: [(e.step, e.value) for e in reader.Scalars(name)] for name in reader.Tags()["scalars"]}

    def runs_of_mlflow(self):
        """Return MLflow's runs, in order."""
        experiments = [experiment.experiment_id for experiment in self._client().search_experiments()]
        return self._client().search_runs(experiments, order_by=["start_time ASC"])

    def of_mlflow(self):
        """Return status and curves of each run, in order, by MLflow's client."""
        return [(run.info.status, self._curves_of(run)) for run in self.runs_of_mlflow()]

    def _client(self):
        import mlflow

        return mlflow.MlflowClient(self.variables["MLFLOW_TRACKING_URI"])

    def _curves_of(self, run):
        histories = {name: self._client().get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return {name: [(metric.step, metric.value) for metric in histories[name]] for name in histories}

    def of_wandb(self):
        """Return exit code and curves of each run, in order, as `wandb sync` reads and uploads them."""
        return [self._synchronized(run) for run in sorted((self.folder / "wandb").glob("offline-run-*"))]

    def _synchronized(self, run):
        with Server() as server:
            online = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.address, "WANDB_API_KEY": "0" * 40}
            command = [sys.executable, "-m", "wandb", "sync", str(run)]
            ended = subprocess.run(
                command, env={**os.environ, **self.variables, **online}, cwd=self.folder / "work",
                capture_output=True, text=True, timeout=LIMIT_S,
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
        curves = defaultdict(list)
        for row in server.history:
            for name, value in row.items():
                if not name.startswith("_") and name != "train/global_step":
                    curves[name].append((row["train/global_step"], value))
        return server.exit_code, dict(curves)


class Server:
    """As much of a server of Weights & Biases as an upload of a run needs; keeps the history."""

    def __init__(self):
        kept = self.kept = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = {}
                if self.path.endswith("/file_stream"):
                    kept.append(json.loads(body))
                elif self.path.endswith("/graphql"):
                    answer = {"data": graphql_answer(json.loads(body), f"http://{self.headers['Host']}/file")}
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    @property
    def history(self):
        lines = {}
        for request in self.kept:
            chunk = request.get("files", {}).get("wandb-history.jsonl")
            for number, line in enumerate(chunk["content"] if chunk else ()):
                lines[chunk["offset"] + number] = json.loads(line)  # a repeated request counts once
        return [lines[number] for number in sorted(lines)]

    @property
    def exit_code(self):
        """None of a run whose end was never written."""
        return next((request["exitcode"] for request in self.kept if request.get("complete")), None)


def graphql_answer(request, upload):
    """Answer the two questions of an upload: which run this is, and where its files go."""
    if "createRunFiles" in request["query"]:
        names = request["variables"]["files"]
        files = [{"name": name, "uploadUrl": f"{upload}/{name}"} for name in names]
        return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
    if "upsertBucket" in request["query"]:
        project = {"id": "project", "name": "project", "entity": {"id": "someone", "name": "someone"}}
        run = {"id": "run", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0}
        return {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": True}}
    return {}


def in_single(curves):
    """Round to what TensorBoard's scalars hold."""
    import numpy

    return {name: [(step, float(numpy.float32(value))) for step, value in curves[name]] for name in curves}


def in_mlflow(curves):
    """Rename and bound as MLflow needs it."""
    bounded = {
        name: [(step, math.copysign(LARGEST, value) if math.isinf(value) else value) for step, value in points]
        for name, points in curves.items()
    }
    return {re.sub(r"[^\w\-. :/]", "_", name): points for name, points in bounded.items()}


def shown(curves):
    """Return curves in a form in which NaN equals NaN."""
    return {name: [(step, repr(float(value))) for step, value in points] for name, points in sorted(curves.items())}


@pytest.fixture(scope="session")
def empty(tmp_path_factory):
    """A folder with a database of MLflow: making its tables takes long."""
    import mlflow

    folder = tmp_path_factory.mktemp("empty")
    mlflow.MlflowClient(f"sqlite:///{folder}/runs.db").search_experiments()
    (folder / "work").mkdir()
    (folder / "home").mkdir()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, empty):
    job = Job(tmp_path_factory.mktemp("whole") / "job", empty)
    job.printed = job.run("whole")
    return job


@pytest.fixture(scope="module")
def killed(tmp_path_factory, empty):
    job = Job(tmp_path_factory.mktemp("killed") / "job", empty)
    job.run("killed", code=-signal.SIGKILL, WANDB_RUN_ID="first")
    return job


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, killed):
    job = Job(tmp_path_factory.mktemp("resumed") / "job", killed.folder)
    job.run("whole", "--resume_from_checkpoint", "auto")
    return job


def test_the_run_logs_all_kinds_of_entries_and_each_tracker_leaves_out_the_text_only(whole):
    entries = whole.entries()
    assert [entry["step"] for entry in entries] == [1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8]
    names = {name for entry in entries for name in entry}
    assert {"loss", "grad_norm", "learning_rate", "bias", "eval_loss", "eval_precision@1", "train_runtime"} <= names
    assert len(re.findall("takes numbers only: 'note' of the log is left out", whole.printed)) == 3
    assert "not recorded" not in whole.printed
    assert "could not record" not in whole.printed


def test_tensorboard_has_every_number_of_metrics_jsonl_in_single_precision(whole):
    assert shown(whole.of_tensorboard()) == shown(in_single(whole.curves()))


def test_mlflow_has_every_number_of_metrics_jsonl(whole):
    [(status, curves)] = whole.of_mlflow()
    assert status == "FINISHED"
    assert shown(curves) == shown(in_mlflow(whole.curves()))


def test_wandb_uploads_every_number_of_metrics_jsonl(whole):
    [(exit_code, curves)] = whole.of_wandb()
    assert exit_code == 0
    assert shown(curves) == shown(whole.curves())


def test_a_resumed_run_has_each_step_once_in_the_curves_of_tensorboard(resumed):
    assert [entry["step"] for entry in resumed.entries()] == [1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8]
    assert shown(resumed.of_tensorboard()) == shown(in_single(resumed.curves()))


def test_a_resumed_run_is_a_new_run_of_mlflow_with_what_came_after_the_checkpoint(resumed):
    (status_of_killed, first), (status, second) = resumed.of_mlflow()
    assert (status_of_killed, status) == ("RUNNING", "FINISHED")  # nobody could say that it was killed
    assert [step for step, _ in first["train/loss"]] == [1, 2, 3, 4, 5]
    until = {name: [point for point in points if point[0] <= 4] for name, points in first.items()}
    assert shown(until) == shown(in_mlflow(resumed.curves(until=4)))
    assert shown(second) == shown(in_mlflow(resumed.curves(after=4)))


def test_a_resumed_run_is_a_new_run_of_wandb_with_what_came_after_the_checkpoint(resumed):
    # Of the killed one, wandb has what it had written at last: it does so every 15 seconds.
    (of_killed, _), (exit_code, curves) = resumed.of_wandb()
    assert (of_killed, exit_code) == (None, 0)
    assert shown(curves) == shown(resumed.curves(after=4))


def test_in_the_same_run_of_mlflow_and_wandb_the_resumed_steps_come_last(tmp_path, killed):
    job = Job(tmp_path / "job", killed.folder)
    same = {"WANDB_RUN_ID": "first", "WANDB_RESUME": "allow", "MLFLOW_RUN_ID": job.runs_of_mlflow()[0].info.run_id}
    printed = job.run("whole", "--resume_from_checkpoint", "auto", **same)
    assert re.search("the run of mlflow keeps the values that it has of .*resume_from_checkpoint", printed)
    assert "could not record" not in printed
    [(status, curves)] = job.of_mlflow()
    assert status == "FINISHED"
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    in_file = shown(in_mlflow(job.curves()))
    assert {name: dict(points) for name, points in shown(curves).items()} == {n: dict(in_file[n]) for n in in_file}
    assert [path.name.rpartition("-")[2] for path in (job.folder / "wandb").glob("offline-run-*")] == ["first"] * 2
    assert shown(job.of_wandb()[1][1]) == shown(job.curves(after=4))


@pytest.mark.parametrize(("ending", "code", "status"), [("failed", 1, "FAILED"), ("stopped", 143, "KILLED")])
def test_a_run_that_fails_or_is_stopped_is_marked_and_has_what_it_logged(tmp_path, empty, ending, code, status):
    job = Job(tmp_path / "job", empty)
    job.run(ending, code=code)
    assert job.entries()[-1]["step"] == (5 if ending == "failed" else 6)
    [(found, curves)] = job.of_mlflow()
    assert found == status
    assert shown(curves) == shown(in_mlflow(job.curves()))
    assert shown(job.of_tensorboard()) == shown(in_single(job.curves()))
    [(exit_code, curves)] = job.of_wandb()
    assert exit_code == 1
    assert shown(curves) == shown(job.curves())
