"""Run a program in a terminal that is none, and see what a person would see there."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Display:
    """What a terminal shows after some output: the handful of control codes that bars are made of."""

    def __init__(self, columns):
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self.cursor_is_shown = True
        self.frames = []  # the lines at the bottom at every return to the start of a line

    def feed(self, text):
        position = 0
        while position < len(text):
            match = SEQUENCE.match(text, position)
            if match:
                self._control(match)
                position = match.end()
            else:
                self._character(text[position])
                position += 1
        return self

    @property
    def shown(self):
        """The lines that are left, without what cannot be seen."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n").split("\n")

    def _control(self, match):
        private, number, code = match.groups()
        if private and number == "25":
            self.cursor_is_shown = code == "h"
        elif code == "A":
            self.row -= int(number or 1)
            assert self.row >= 0, "the cursor left the display at the top"
        elif code == "K":
            assert number == "2"
            self.lines[self.row] = ""
        elif code == "J":
            assert number == ""
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        else:
            assert code == "m", f"unknown sequence {match.group()!r}"

    def _character(self, character):
        if character == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        elif character == "\r":
            self.frames.extend(self.lines[max(self.row - 6, 0) : self.row + 1])
            self.column = 0
        else:
            assert self.column < self.columns, f"wrapped: {self.lines[self.row]!r}"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1


def run(script, *arguments, columns=100, environment=None):
    """Run Python code in a terminal and return what its display shows, with the exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    known = {
        k: v for k, v in os.environ.items() if k not in ("CI", "COLUMNS", "LINES", "NO_COLOR", "RANK", "WORLD_SIZE")
    }
    known |= {
        "TERM": "xterm-256color",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=known | (environment or {}),
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side was closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    code = process.wait(timeout=60)
    display = Display(columns).feed(output.decode())
    display.output, display.code = output.decode(), code
    return display
