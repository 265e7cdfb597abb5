"""Reading configuration files: what waits for a pipe. What files may hold is in tr-args' test_hostile_files.py."""

import os
import threading

import pytest

from tr_log import bounded_text
from tr_log.bounded_text import ContentError, read_text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_read_and_one_that_nobody_writes_to_is_given_up(tmp_path, monkeypatch):
    pipe = tmp_path / "x.yaml"
    os.mkfifo(pipe)
    monkeypatch.setattr(bounded_text, "PIPE_PATIENCE_S", 0.2)
    with pytest.raises(ContentError, match=r"is a pipe to whose end nothing came within 0\.2 s"):
        read_text(pipe)
    monkeypatch.setattr(bounded_text, "PIPE_PATIENCE_S", 60.0)
    writer = threading.Thread(target=pipe.write_text, args=("seed: 7\n",), daemon=True)
    writer.start()
    assert read_text(pipe) == "seed: 7\n"
