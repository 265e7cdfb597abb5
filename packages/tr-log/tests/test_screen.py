import io

from tr_log.progress import TerminalBar
from tr_log.terminal import Screen


class Lost(io.StringIO):
    """A terminal whose connection breaks after some writes."""

    encoding = "utf-8"

    def __init__(self, writes):
        super().__init__()
        self.left = writes

    def isatty(self):
        return True

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_line_for_a_screen_without_bars_is_simply_written():
    stream = io.StringIO()
    Screen(stream).write("text")
    assert stream.getvalue() == "text\n"


def test_a_terminal_that_is_lost_ends_the_bars_and_not_the_work():
    for writes in range(8):
        bar = TerminalBar(Screen(Lost(writes)), "working", 10)
        for _ in range(3):
            bar.advance()
            bar.write("text")
        bar.close()
        assert bar.completed == 3


def test_a_bar_that_was_closed_can_be_closed_again():
    bar = TerminalBar(Screen(Lost(100)), "working", 10)
    bar.close()
    bar.close()
