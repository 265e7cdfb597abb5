import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from tr_log.report import watch as watch_module
from tr_log.report.run_folder import read_runs
from tr_log.report.watch import Server
from tr_log.report.watch import main as watch
from tr_log.testing import KILLED_ONCE, write_run

LIMIT_S = 20


@pytest.fixture
def address(tmp_path):
    """The address of a server that watches `tmp_path / "run"`."""
    write_run(tmp_path / "run", KILLED_ONCE[:3], [{"step": 50, "loss": 1.0}])
    with Server([tmp_path], 0, 0.05) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(LIMIT_S)


def test_the_page_is_served_and_news_are_pushed(address, tmp_path):
    with urllib.request.urlopen(f"{address}/", timeout=LIMIT_S) as answer:
        assert b"const LIVE = true" in answer.read()
    with urllib.request.urlopen(f"{address}/events", timeout=LIMIT_S) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
        assert first["runs"][0]["curves"]["loss"] == {"x": [50], "y": [1.0]}
        stream.readline()
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 60, "loss": 0.5}\n')
        second = json.loads(stream.readline().removeprefix(b"data: "))
        assert second["runs"][0]["curves"]["loss"]["y"] == [1.0, 0.5]


def test_watching_writes_nothing_to_the_run(address, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    urllib.request.urlopen(f"{address}/", timeout=LIMIT_S).close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("path", "host", "status"), [("/other", "127.0.0.1:1", 404), ("/", "evil.example:1", 403)])
def test_other_paths_and_other_names_of_this_machine_are_refused(address, path, host, status):
    request = urllib.request.Request(f"{address}{path}", headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    assert refused.value.code == status
    refused.value.close()


def test_runs_may_begin_and_be_removed_while_they_are_watched(address, tmp_path):
    def names(stream):
        line = stream.readline()
        while not line.startswith(b"data: "):
            line = stream.readline()
        return [run["name"] for run in json.loads(line.removeprefix(b"data: "))["runs"]]

    with urllib.request.urlopen(f"{address}/events", timeout=LIMIT_S) as stream:
        assert names(stream) == ["run"]
        write_run(tmp_path / "new", [{**KILLED_ONCE[0], "time_s": 2000.0}])
        while names(stream) != ["run", "new"]:
            pass
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "new")
        while names(stream):
            pass
    with urllib.request.urlopen(f"{address}/", timeout=LIMIT_S) as answer:
        assert b"no run yet" in answer.read()


def test_files_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    write_run(tmp_path, KILLED_ONCE)
    reads = []
    monkeypatch.setattr(watch_module, "read_runs", lambda folders: reads.append(1) or read_runs(folders))
    with Server([tmp_path], 0, 1e-6) as server:
        first = server.news()
        assert server.news() == first
        assert server.runs()[0].name == tmp_path.name
    assert len(reads) == 1


def test_an_interrupt_ends_the_server_at_once(tmp_path):
    write_run(tmp_path, KILLED_ONCE)
    code = "import sys; from tr_log.report.watch import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("watching at http://127.0.0.1:")
            with urllib.request.urlopen(line.split()[2].rstrip(";") + "events", timeout=LIMIT_S) as stream:
                stream.readline()
                process.send_signal(signal.SIGINT)
                assert process.wait(LIMIT_S) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    with Server([tmp_path], 0, 1.0) as server:
        port = server.server_address[1]
        assert watch([str(tmp_path), "--port", str(port)]) == 1
    assert f"port {port} of this machine cannot be listened on" in capsys.readouterr().err
    assert watch([str(tmp_path / "nowhere")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        watch([str(tmp_path), "--port", "70000"])
