"""Show the page of runs in the browser of this machine, live; nothing is written to the runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from tr_log.report.page import page, page_data
from tr_log.report.run_folder import find_runs
from tr_log.streams import write_text

HOST = "127.0.0.1"
KEEP_ALIVE_S = 15.0


class Server(ThreadingHTTPServer):
    """Serve the page of the runs in some folders on the loopback interface.

    Args:
        folders: of runs, or of folders of runs.
        port: where to listen; 0 takes a free one.
        every_s: seconds between two looks at the files.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int, every_s: float) -> None:
        super().__init__((HOST, port), _Handler)
        self.folders, self.every_s = list(folders), every_s


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with the page, or with the stream of its data."""
        # Another page in the same browser may send requests here under a name that leads to this machine.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send(page(find_runs(self._owner.folders), live=True))
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
        seen: object = None
        spoke_s = time.monotonic()
        try:
            while True:
                runs = find_runs(self._owner.folders)
                now = [(run.path, run.news_s, run.status) for run in runs]
                if now != seen:
                    line = json.dumps(page_data(runs), allow_nan=False, separators=(",", ":"))
                    self.wfile.write(f"data: {line}\n\n".encode())
                    seen, spoke_s = now, time.monotonic()
                elif time.monotonic() - spoke_s > KEEP_ALIVE_S:  # a write is how one learns that the reader has left
                    self.wfile.write(b": nothing new\n\n")
                    spoke_s = time.monotonic()
                self.wfile.flush()
                time.sleep(self._owner.every_s)
        except OSError:  # the reader has left, or the runs were removed
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
    with Server(folders, port, every_s) as server:
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
        "on this machine only, reads the files of the runs, and writes nothing.",
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
        find_runs(options.folders)
        serve(options.folders, options.port, options.every, opens=options.open)
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0
