"""Draw the curves of runs into a PNG file, by the real matplotlib."""

import math
import sys

import pytest

from tr_log.report.command import main as report
from tr_log.testing import KILLED_ONCE, end_event, start_event, write_run

image = pytest.importorskip("matplotlib.image", reason="nox -s report installs matplotlib")
BLUE, ORANGE, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)


def entries(number=50, shift=0.0, **more):
    for step in range(1, number + 1):
        yield {"step": step, "loss": shift + 1 / step, "learning_rate": 1e-5 * step, **more}


def drawn(path):
    """Return height and width of a picture, and its colours."""
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    return pixels.shape[:2], set(map(tuple, pixels.reshape(-1, 3).tolist()))


def test_several_runs_are_laid_over_each_other(tmp_path, capsys):
    names = ("one", "two", "_three $x_1$")
    folders = [write_run(tmp_path / name, [start_event(0.0)], list(entries(shift=n))) for n, name in enumerate(names)]
    assert report([*map(str, folders), "--png", "-o", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "both.html"), str(tmp_path / "both.png")]
    (height, width), colours = drawn(tmp_path / "both.png")
    assert {BLUE, ORANGE, GREEN} <= colours
    assert width > height > 200
    assert "matplotlib.pyplot" not in sys.modules  # which has state of the process, and looks for a display


@pytest.mark.parametrize(
    "logged",
    [
        [],
        [{"step": 5, "loss": 2.5}],
        [{"step": 5, "loss": "NaN"}],
        list(entries(loss_of_nothing="Infinity")),
        [{"step": n, "loss": math.exp(n), "eval_loss": 1e-9 * n} for n in range(200)],
    ],
    ids=["nothing", "one point", "no number", "infinite", "far apart"],
)
def test_every_run_has_a_picture(tmp_path, logged):
    write_run(tmp_path, [*KILLED_ONCE[:-1], end_event(1031.0, 100)], logged)
    assert report([str(tmp_path), "--png"]) == 0
    _, colours = drawn(tmp_path / "report.png")
    assert (255, 255, 255) in colours
    assert len(colours) > 5


def test_many_curves_are_as_many_panels_and_no_more_than_thirty(tmp_path):
    sizes = []
    for number in (3, 9, 30, 90):
        logged = [{"step": step, **{f"eval_{k}": k * step for k in range(number)}} for step in (1, 2)]
        folder = write_run(tmp_path / str(number), [start_event(0.0)], logged)
        assert report([str(folder), "--png"]) == 0
        sizes.append(drawn(folder / "report.png")[0])
    heights = [height for height, _ in sizes]
    assert heights[0] < heights[1] < heights[2]
    assert heights[3] - heights[2] < 50
    assert len({width for _, width in sizes}) == 1
