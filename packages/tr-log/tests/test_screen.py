import io
import re
import sys
from functools import partial

from tr_log.progress import DrawnBar
from tr_log.screen import Screen
from tr_log.terminal import without_library_bars, write_at_once


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
    Screen(stream).write("words " * 20)
    assert stream.getvalue() == "text\n" + "words " * 12 + "words\n" + "words " * 6 + "words\n"


def test_a_terminal_that_is_lost_ends_the_bars_and_not_the_work():
    for writes in range(8):
        screen = Screen(Lost(writes))
        bar = DrawnBar(screen, "working", 10)
        for _ in range(3):
            bar.advance()
            screen.write("text")
        bar.close()
        assert bar.completed == 3


def test_a_bar_that_was_closed_can_be_closed_again():
    bar = DrawnBar(Screen(Lost(100)), "working", 10)
    bar.close()
    bar.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def count_drawings(monkeypatch):
    from rich.live import Live

    drawings, refresh = [], Live.refresh
    monkeypatch.setattr(Live, "refresh", lambda live: (drawings.append(1), refresh(live)))
    return drawings


def test_a_bar_that_advances_is_drawn_five_times_a_second_and_not_at_every_step(monkeypatch, clock):
    drawings = count_drawings(monkeypatch)
    bar = DrawnBar(Screen(Terminal(), clock), "many")
    for _ in range(1000):
        clock.now += 0.001
        bar.advance()
    assert len(drawings) == 1 + 5  # one as it opened


def test_at_most_ten_drawings_a_second_are_made_whatever_changes(monkeypatch, clock):
    drawings = count_drawings(monkeypatch)
    bar = DrawnBar(Screen(Terminal(), clock), "many")
    for name in range(1000):
        clock.now += 0.01
        bar.rename(str(name))
        bar.advance()
    assert 80 <= len(drawings) <= 101


def test_a_slow_terminal_is_drawn_on_less_often(monkeypatch, clock):
    from rich.live import Live

    drawings, refresh = [], Live.refresh

    def slow(live):
        drawings.append(1)
        clock.now += 0.01
        refresh(live)

    monkeypatch.setattr(Live, "refresh", slow)
    bar = DrawnBar(Screen(Terminal(), clock), "slow")
    for _ in range(10_000):
        clock.now += 0.001
        bar.advance()
    assert 10 <= len(drawings) <= 12  # each takes a hundredth of the time until the next


def test_a_window_that_became_narrower_loses_no_line_above_and_keeps_nothing_of_the_bar(monkeypatch, clock):
    stream, size = Terminal(), [(80, 24)]
    monkeypatch.setattr("tr_log.screen._window", lambda stream: size[0])
    for name in ("XTERM_VERSION", "STY", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    bar = DrawnBar(Screen(stream, clock), "n" * 60)
    written = len(stream.getvalue())
    size[0], clock.now = (25, 24), clock.now + 1
    bar.advance()
    up = stream.getvalue()[written:].partition("n")[0]
    assert up.count("\x1b[1A") == 2  # 60 characters are three rows of 25 now
    written, size[0], clock.now = len(stream.getvalue()), (100, 24), clock.now + 1
    bar.advance()
    assert "\x1b[1A" not in stream.getvalue()[written:].partition("n")[0]
    monkeypatch.setenv("XTERM_VERSION", "XTerm(390)")  # which cuts lines off instead
    written, size[0], clock.now = len(stream.getvalue()), (25, 24), clock.now + 1
    bar.advance()
    assert "\x1b[1A" not in stream.getvalue()[written:].partition("n")[0]


def test_an_open_bar_of_tqdm_keeps_its_line(monkeypatch):
    open_bars = type("tqdm", (), {"_instances": [type("bar", (), {"disable": False})()]})
    module = type(sys)("tqdm")
    module.tqdm = open_bars
    monkeypatch.setitem(sys.modules, "tqdm", module)
    stream = Terminal()
    screen = Screen(stream)
    screen.write("first")
    screen.write("second")
    assert stream.getvalue() == "\nfirst\nsecond\n"


def test_a_message_of_a_signal_handler_moves_above_the_bar(monkeypatch, clock):
    stream = Terminal()
    monkeypatch.setattr("tr_log.screen._is_same_terminal", lambda stream: True)
    monkeypatch.setattr("os.write", lambda descriptor, content: None)
    bar = DrawnBar(Screen(stream, clock), "work")
    written, clock.now = len(stream.getvalue()), clock.now + 1
    write_at_once("SIGINT: stopping " + "x" * 80)
    bar.advance()
    news = stream.getvalue()[written:]
    assert news.partition("work")[0].count("\x1b[1A") == 3  # two line breaks, and a message of two rows
    assert "SIGINT: stopping" in news
    written = len(stream.getvalue())
    bar.close()
    assert "SIGINT" not in stream.getvalue()[written:]


def test_a_long_line_is_wrapped_at_words_and_a_path_is_left_whole(monkeypatch, clock):
    monkeypatch.setattr("tr_log.screen._window", lambda stream: (40, 24))
    stream, path = Terminal(), "/folder" * 9
    screen = Screen(stream, clock)
    bar = DrawnBar(screen, "working", 10)
    screen.write(f"\x1b[31mloading weights that are not\x1b[0m of this model, from {path}")
    bar.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in stream.getvalue().splitlines()]
    assert [line for line in lines if not line.startswith("working") and line] == [
        "loading weights that are not of this",
        "model, from",
        path,
    ]


def test_bars_of_libraries_are_off_in_a_block_and_then_as_they_were(monkeypatch):
    class Bars:
        def __init__(self, *others):
            self.is_on, self.all = True, (self, *others)

        def switch(self, on):
            for bars in self.all:
                bars.is_on = on

    hub = Bars()
    library = Bars(hub)  # which switches those of the hub too
    hub.are_progress_bars_disabled, library.is_progress_bar_enabled = lambda: not hub.is_on, lambda: library.is_on
    hub.disable_progress_bars, library.disable_progress_bar = partial(hub.switch, False), partial(library.switch, False)
    hub.enable_progress_bars, library.enable_progress_bar = partial(hub.switch, True), partial(library.switch, True)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", hub)
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", library)
    for shown in ((True, True), (True, False), (False, True), (False, False)):
        hub.is_on, library.is_on = shown
        with without_library_bars():
            assert not hub.is_on
            assert not library.is_on
        assert (hub.is_on, library.is_on) == shown
