import json
import threading
import urllib.error
import urllib.request

import pytest

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


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert watch([str(tmp_path / "nowhere")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        watch([str(tmp_path), "--port", "70000"])
