"""Show the page of runs in the browser of this machine, live; nothing is written to the runs."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from tr_log.report.page import page, page_data
from tr_log.report.run_folder import RunFolder, files_of, read_runs, run_folders
from tr_log.streams import write_text

HOST = "127.0.0.1"
KEEP_ALIVE_S = 15.0


class Server(ThreadingHTTPServer):
    """Serve the page of the runs in some folders on the loopback interface.

    Args:
        folders: of runs, or of folders of runs; they may still be empty, and runs may come and go.
        port: where to listen; 0 takes a free one.
        every_s: seconds between two looks at the files.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere two servers could get one port

    def __init__(self, folders: Sequence[Path], port: int, every_s: float) -> None:
        super().__init__((HOST, port), _Handler)
        self.folders, self.every_s = list(folders), every_s
        self._lock, self._next_s = threading.Lock(), 0.0
        self._runs: list[RunFolder] = []
        self._seen: object = None
        self._version = 0
        self._data = ""

    def runs(self) -> list[RunFolder]:
        """Return the runs as they are now; the files are read again only if they changed."""
        with self._lock:
            self._look()
            return self._runs

    def news(self) -> tuple[int, str]:
        """Return what the page shows, as JSON, and a number that changes with it."""
        with self._lock:
            self._look()
            if not self._data:
                self._data = json.dumps(page_data(self._runs), allow_nan=False, separators=(",", ":"))
            return self._version, self._data

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing where a reader has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(cast("socket.socket", request), client_address)

    def _look(self) -> None:
        if time.monotonic() < self._next_s:
            return
        began_s = time.thread_time()
        folders = []
        for folder in self.folders:
            with suppress(OSError):  # removed meanwhile
                folders += run_folders(folder)
        seen = ([(folder, files_of(folder)) for folder in folders], [run.status for run in self._runs])
        if seen != self._seen:
            with suppress(OSError):  # a file cannot be read just now
                self._runs = read_runs(folders)
            self._seen = (seen[0], [run.status for run in self._runs])
            self._version, self._data = self._version + 1, ""
        # Reading long files takes time that the run needs: a tenth of a core at most.
        self._next_s = time.monotonic() + max(self.every_s, 10 * (time.thread_time() - began_s))


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds for a request to arrive

    def do_GET(self) -> None:
        """Answer with the page, or with the stream of its data."""
        # Another page in the same browser may send requests here under a name that leads to this machine.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send(page(self._owner.runs(), live=True))
        elif self.path == "/events":
            self._stream()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    @property
    def _owner(self) -> Server:
        return cast("Server", self.server)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""

    def _send(self, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        """Send the data as server-sent events, each time it has changed, until the reader leaves."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        sent: int | None = None
        spoke_s = time.monotonic()
        try:
            while True:
                version, text = self._owner.news()
                if version != sent:
                    self.wfile.write(f"data: {text}\n\n".encode())
                    sent, spoke_s = version, time.monotonic()
                elif time.monotonic() - spoke_s > KEEP_ALIVE_S:  # a write is how one learns that the reader has left
                    self.wfile.write(b": nothing new\n\n")
                    spoke_s = time.monotonic()
                self.wfile.flush()
                time.sleep(self._owner.every_s)
        except OSError:  # the reader has left
            self.close_connection = True


def serve(folders: Sequence[Path], port: int, every_s: float, *, opens: bool = False) -> None:
    """Serve until interrupted, and print the address.

    Args:
        folders: of runs, or of folders of runs.
        port: where to listen; 0 takes a free one.
        every_s: seconds between two looks at the files.
        opens: show the page in the browser.

    Raises:
        OSError: the port is taken.
    """
    try:
        made = Server(folders, port, every_s)
    except OSError as error:
        raise OSError(
            f"port {port} of this machine cannot be listened on: {error.strerror}; give another one, or none"
        ) from None
    with made as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        write_text(sys.stdout, f"watching at {address}; Ctrl-C ends it\n")
        sys.stdout.flush()
        if opens:
            webbrowser.open(address)
        server.serve_forever()


def main(argv: Sequence[str]) -> int:
    """Serve the page of one or several runs on this machine until it is interrupted; it changes by itself.

    Returns:
        0, or 1 if there is no such run or the port is taken.
    """
    parser = argparse.ArgumentParser(
        prog="trainer watch",
        description="Show the page of a run, or of all runs in a folder, in the browser while they train. It listens "
        "on this machine only, reads the files of the runs, and writes nothing. Runs may begin, resume and be removed "
        "while it shows them. From another machine: ssh -L PORT:127.0.0.1:PORT, with --port PORT.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUTPUT_DIR", help="of a run, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="look for news every so often (default 2)"
    )
    options = parser.parse_args(argv)
    if not 0 <= options.port < 65536 or options.every <= 0:
        parser.error(f"--port {options.port} must be from 0 to 65535, and --every {options.every} above 0")
    try:
        for folder in options.folders:
            run_folders(folder)
        serve(options.folders, options.port, options.every, opens=options.open)
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0
