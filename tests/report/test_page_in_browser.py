"""Open the page of runs in a browser: what it draws, how it answers, and that it asks nobody for anything."""

import json
import math
import os
import shutil
import threading
from pathlib import Path

import pytest

from tr_log import ConfusionMatrix, Table
from tr_log.report.command import main as report
from tr_log.testing import ALIVE, KILLED_ONCE, checkpoint_event, end_event, start_event, time_event, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="nox -s report installs selenium")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

SCREENSHOTS = os.environ.get("REPORT_SCREENSHOTS")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


PROFILE = {
    "event": "profile",
    "time_s": 5.0,
    "first": 10,
    "last": 15,
    "trace": "profile/steps-10-15.trace.json.gz",
    "operators": [
        {"name": name, "calls": 12, "cpu_ms": 3.25, "device_ms": 12.5, "share": 0.25}
        for name in ("aten::mm", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    ],
}


def entries(number, rate=0.01, every=20):
    for step in range(1, number + 1):
        loss = 2 * math.exp(-rate * step) + 0.1 * math.sin(step * 7)
        yield {"step": step, "loss": loss, "grad_norm": 1 + math.cos(step), "learning_rate": 1e-3, "epoch": step / 50}
        if step % every == 0:
            yield {"step": step, "eval_loss": loss + 0.1, "eval_f1": 1 - loss / 3, "epoch": step / 50}


def two_kills():
    events = [*KILLED_ONCE[:-2]]
    events += [time_event(1026.0, 75, compute=4.0, evaluation=1.0), checkpoint_event(1026.0, 75)]
    events += [{"event": "updates", "time_s": 1026.5, "step": 78, "skipped": 2}]
    events += [{"event": "evaluation", "time_s": 1026.2, "step": 75}]
    events += [{"event": "warning", "time_s": 1027.0, "level": "WARNING", "text": "a value was not finite"}]
    events += [time_event(1029.0, 82, compute=3.0), start_event(1033.0, 75, arguments={"seed": 1})]
    return [*events, time_event(1040.0, 100, start=1.0, data=2.0, compute=4.0), end_event(1040.0, 100)]


def drawings():
    for step in (50, 100):
        matrix = ConfusionMatrix([[step, 5, 0], [9, 30, 1], [0, 7, 20]], ["a cat", "a dog", "something else"])
        many = ConfusionMatrix([[7 if i == j else (i + 2 * j) % 3 for j in range(25)] for i in range(25)])
        rows = [(f"sample {i}, a text that goes on for some words", "a cat", "a dog", 0.5) for i in range(60)]
        table = Table(["text", "label", "predicted", "score"], rows)
        for name, drawing in (("eval_confusion", matrix), ("eval_many_classes", many), ("eval_wrong_ones", table)):
            yield {"event": "drawing", "time_s": 1.0 + step / 20, "step": step, "name": name, **drawing.content()}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of six kinds of runs, by name."""
    top = tmp_path_factory.mktemp("runs")
    changed = {
        "arguments": {"learning_rate": 1e-3, "seed": 7, "bf16": False, "eval_steps": 20},
        "changed": ["learning_rate", "eval_steps"],
        "origins": {"learning_rate": "command line", "seed": "file run.yaml"},
    }
    runs = {
        "finished": (
            [start_event(0.0, **changed), PROFILE, time_event(9.0, 100, compute=9.0), end_event(9.0, 100)],
            entries(100),
        ),
        "killed_twice": (two_kills(), entries(100, 0.02)),
        "running": ([start_event(5.0, **ALIVE), time_event(6.0, 40, compute=1.0)], entries(40)),
        "failed": ([start_event(0.0), end_event(2.0, 0, "failed", error="ValueError: no data")], []),
        "drawn": ([start_event(0.0), *drawings(), end_event(9.0, 100)], entries(100)),
        "long": ([start_event(0.0), time_event(1e5, 100_000, compute=1e5), end_event(1e5, 100_000)], entries(100_000)),
    }
    for name, (events, logged) in runs.items():
        write_run(top / name, events, list(logged))
    made = {name: top / f"{name}.html" for name in [*runs, "three"]}
    for name in runs:
        assert report([str(top / name), "-o", str(made[name])]) == 0
    three = [str(top / name) for name in ("finished", "killed_twice", "running")]
    assert report([*three, "-o", str(made["three"])]) == 0
    return made


@pytest.fixture
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def show(browser, page, size="desktop", scheme="light"):
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get(page if isinstance(page, str) else page.as_uri())


def requests_of(browser):
    """Return the addresses that the browser asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


def text_of(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["finished", "killed_twice", "running", "failed", "drawn", "long", "three"])
def test_the_page_shows_without_an_error_a_request_or_a_sideways_scroll(browser, pages, name, size, scheme):
    show(browser, pages[name], size, scheme)
    assert browser.get_log("browser") == []
    assert requests_of(browser) == [pages[name].as_uri()]
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= SIZES[size][0]
    curves = browser.execute_script("return document.querySelectorAll('figure canvas').length")
    assert (curves > 0) == (name != "failed")
    for figure in browser.find_elements("css selector", "figure"):
        assert figure.text.split()  # a title and numbers, for who does not see the curve
    if SCREENSHOTS:
        save(browser, size, Path(SCREENSHOTS) / f"{name}-{size}-{scheme}.png")


def save(browser, size, path):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    metrics = {"width": SIZES[size][0], "height": min(height, 6000), "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(path))


def loss_plot(browser):
    return browser.find_element("css selector", "figure[data-curve=loss] .u-over")


def test_a_hovered_point_tells_its_values(browser, pages):
    show(browser, pages["three"])
    before = text_of(browser, "figure[data-curve=loss] .readout")
    webdriver.ActionChains(browser).move_to_element(loss_plot(browser)).perform()
    after = text_of(browser, "figure[data-curve=loss] .readout")
    assert before != after
    assert after.startswith("at ")
    assert "finished" in after
    assert "killed_twice" in after


def test_a_dragged_range_is_zoomed_in_all_curves_and_shown_whole_again(browser, pages):
    show(browser, pages["finished"])
    drag = webdriver.ActionChains(browser).move_to_element(loss_plot(browser)).click_and_hold()
    drag.move_by_offset(80, 0).release().perform()
    ranges = browser.execute_script(
        "return [...plots.values()].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
    )
    assert all(45 < low < 55 and low < high < 90 for low, high in ranges), ranges
    browser.find_element("id", "all").click()
    low, high = browser.execute_script(
        "const {plot} = plots.get('loss'); return [plot.scales.x.min, plot.scales.x.max]"
    )
    assert low <= 1
    assert high >= 100


def test_the_range_can_be_typed(browser, pages):
    show(browser, pages["finished"])
    for name, value in (("from", "10"), ("to", "20\n")):
        browser.find_element("id", name).send_keys(value)
    assert browser.execute_script("return plots.get('loss').plot.scales.x.max") == 20


def test_a_run_is_hidden_and_shown_by_the_keyboard(browser, pages):
    show(browser, pages["three"])
    shown = "return plots.get('loss').plot.series.slice(1).map((one) => one.show)"
    assert browser.execute_script(shown) == [True, True, True]
    browser.find_element("css selector", "[data-run=killed_twice] .name").send_keys(" ")
    assert browser.execute_script(shown) == [True, False, True]
    toggle = browser.switch_to.active_element  # the focus stays in the table, which is made again
    assert toggle.get_attribute("aria-pressed") == "false"
    toggle.send_keys("\n")
    assert browser.execute_script(shown) == [True, True, True]


def test_all_runs_can_be_hidden(browser, pages):
    show(browser, pages["three"])
    for number in range(3):
        browser.find_elements("css selector", ".name")[number].send_keys(" ")
    assert browser.execute_script("const {x} = plots.get('loss').plot.scales; return [x.min, x.max]") == [0, 1]
    assert browser.get_log("browser") == []


def names_of(browser):
    return [row.get_attribute("data-run") for row in browser.find_elements("css selector", "[data-run]")]


def test_the_table_of_runs_is_sorted_filtered_pinned_and_grouped(browser, pages):
    show(browser, pages["three"])
    shown = "return plots.get('loss').plot.series.slice(1).map((one) => one.show)"
    assert names_of(browser) == ["killed_twice", "finished", "running"]  # the best one first
    browser.find_element("css selector", ".of-runs thead button").send_keys("\n")
    assert names_of(browser) == ["finished", "killed_twice", "running"]
    browser.switch_to.active_element.send_keys("\n")
    assert names_of(browser) == ["running", "killed_twice", "finished"]
    assert browser.switch_to.active_element.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
    browser.find_element("css selector", "[data-run=finished] .pin").send_keys(" ")
    assert names_of(browser) == ["finished", "running", "killed_twice"]
    browser.find_element("id", "filter").send_keys("state=run")
    assert names_of(browser) == ["finished", "running"]
    assert browser.execute_script(shown) == [True, False, True]
    assert text_of(browser, "#count") == "2 of 3 runs"
    browser.find_element("id", "filter").send_keys(Keys.BACKSPACE * 9)
    browser.find_element("xpath", "//select[@id='group']/option[text()='state']").click()
    groups = [row.text for row in browser.find_elements("css selector", ".of-runs .group")]
    assert [text.split(",")[0] for text in groups] == ["state finished: 2 runs", "state running: 1 run"]
    assert browser.get_log("browser") == []


def test_a_chart_is_saved_as_numbers_and_as_a_picture(browser, pages, tmp_path):
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    show(browser, pages["three"])
    for button in browser.find_elements("css selector", "figure[data-curve=eval_loss] figcaption button"):
        button.click()
    names = [tmp_path / "eval_loss.csv", tmp_path / "eval_loss.png"]
    WebDriverWait(browser, 30).until(lambda _: all(name.exists() and name.stat().st_size for name in names))
    head, first, *_ = names[0].read_text().splitlines()
    assert (head, first[:32]) == ("run,curve,step,value", '"finished","eval_loss",20,1.8354')
    assert names[1].read_bytes().startswith(b"\x89PNG")


def test_pages_of_many_runs_are_short(browser, tmp_path):
    for number in range(35):
        arguments = {
            "seed": number,
            "learning_rate": 0.1 / (1 + number),
            "output_dir": str(tmp_path / "runs" / f"{number}"),
        }
        events = [start_event(0.0, arguments=arguments), time_event(9.0, 100, compute=9.0), end_event(9.0, 100)]
        write_run(tmp_path / "runs" / f"{number}", events, list(entries(100, 0.01 + number / 1000)))
    six = [str(tmp_path / "runs" / f"{number}") for number in range(6)]
    for folders, screens in ((six, 2), ([str(tmp_path / "runs")], 3)):
        page = tmp_path / f"{screens}.html"
        assert report([*folders, "-o", str(page)]) == 0
        assert page.stat().st_size < 500_000
        show(browser, page)
        assert browser.execute_script("return document.documentElement.scrollHeight") <= screens * SIZES["desktop"][1]
        assert len(browser.find_elements("css selector", "figure[data-curve=loss] .readout tbody tr")) == 6
        lines = browser.find_elements("css selector", ".coordinates polyline")
        assert len(lines) == (0 if screens == 2 else 35)  # a search has a line for each run through its arguments
        assert browser.get_log("browser") == []


def test_numbers_may_be_logged_under_any_name(browser, tmp_path):
    logged = [{"step": step, "constructor": 1.0 / step, "__proto__": step} for step in (1, 2, 3)]
    write_run(tmp_path / "a", [start_event(0.0), end_event(1.0, 3)], logged)
    write_run(tmp_path / "b", [start_event(0.0), end_event(1.0, 3)], list(entries(3)))
    page = tmp_path / "page.html"
    assert report([str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    show(browser, page)
    titles = browser.execute_script(
        "return [...document.querySelectorAll('figcaption span')].map((e) => e.textContent)"
    )
    assert {"constructor", "__proto__", "training loss"} <= set(titles)
    assert browser.get_log("browser") == []


def test_arrow_keys_do_nothing_where_the_range_holds_no_point(browser, pages):
    show(browser, pages["finished"])
    browser.execute_script("zoom(2.25, 2.75)")
    browser.find_element("css selector", "figure[data-curve=loss] .plot").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    head = browser.execute_script("return document.querySelector('figure[data-curve=loss] .readout thead').textContent")
    assert head.startswith("last")
    assert browser.get_log("browser") == []


def test_smoothing_axis_and_logarithm_act_on_the_curves(browser, pages):
    show(browser, pages["killed_twice"])
    browser.execute_script(
        "byId('smoothing').value = 0.9; byId('smoothing').dispatchEvent(new Event('input'));"
        "byId('logarithmic').click(); byId('axis').value = 'time'; byId('axis').dispatchEvent(new Event('change'));"
    )
    state = browser.execute_script(
        "const {plot} = plots.get('eval_loss'); return [plot.series.length, plot.axes[0].label, plot.scales.y.distr]"
    )
    assert state == [3, "seconds since the start", 3]  # x, the curve in faint, and its mean
    assert browser.get_log("browser") == []


def test_the_time_of_a_run_that_was_killed_twice_is_split(browser, pages):
    show(browser, pages["killed_twice"])
    split = text_of(browser, ".split")
    for word in ("computing", "lost, and done again", "between two calls of train", "total40.0 s"):
        assert word in split
    assert "a value was not finite" in text_of(browser, "#tables")


def test_restarts_checkpoints_evaluations_and_skipped_updates_are_told_apart(browser, pages):
    show(browser, pages["killed_twice"])
    assert text_of(browser, "#key") == "restartupdates skipped or not finite"
    assert text_of(browser, ".when .key") == "evaluationcheckpointupdates skipped or not finiterestart"
    shapes = "return [...document.querySelectorAll('.mark')].map((mark) => mark.getAttribute('d')[1])"
    assert sorted(browser.execute_script(shapes)) == ["-", "-", "-", "0"]  # two squares, a circle, a triangle
    browser.find_element("css selector", ".when summary").click()
    happened = text_of(browser, ".when table")
    for words in (
        "restarted at step 50",
        "killed at step 82",
        "updates 2 skipped: loss or gradient norm was not finite",
    ):
        assert words in happened


def test_where_arguments_were_set_is_shown(browser, pages):
    show(browser, pages["finished"])
    rows = [row.text for row in browser.find_elements("css selector", "#tables details[open]:first-of-type tbody tr")]
    assert rows == [
        "learning_rate 0.001 command line",
        "seed 7 file run.yaml",
        "eval_steps 20 follows from others",
    ]


def test_a_curve_is_read_by_the_keyboard_and_drawn_with_another(browser, pages):
    show(browser, pages["finished"])
    heads = "return document.querySelector('figure[data-curve=loss] .readout thead').textContent"
    plot = browser.find_element("css selector", "figure[data-curve=loss] .plot")
    plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.execute_script(heads).startswith("at 3")
    plot.send_keys(Keys.END)
    assert browser.execute_script(heads).startswith("at 100")
    labels = (
        "return [...document.querySelectorAll('figure[data-curve=loss] .readout tbody th')].map((e) => e.textContent)"
    )
    assert browser.execute_script(labels) == [
        "training loss",
        "evaluation loss",
    ]  # the loss comes with that of evaluations
    choice = browser.find_element("css selector", "figure[data-curve=loss] select")
    choice.find_element("css selector", "option[value=grad_norm]").click()
    assert browser.execute_script(labels) == ["training loss", "gradient norm"]
    choice.find_element("css selector", "option[value='']").click()
    assert browser.execute_script(labels) == [""]


def test_on_paper_a_dark_page_is_light(browser, pages):
    show(browser, pages["three"], scheme="dark")
    colour = "return plots.get('loss').plot.series[1].stroke()"
    dark = browser.execute_script(colour)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(colour) != dark
    assert browser.get_log("browser") == []


def test_what_was_logged_to_be_drawn_is_that_of_the_newest_step_or_of_one_that_is_chosen(browser, pages):
    show(browser, pages["drawn"])
    first = "return [...document.querySelectorAll('.matrix tbody tr')[0].cells].map((cell) => cell.textContent)"
    assert browser.execute_script(first) == ["a cat", "100", "5", "", "95 %"]
    browser.find_element(
        "xpath", "//select[@aria-label='Step of evaluation confusion']/option[text()='step 50']"
    ).click()
    assert browser.execute_script(first) == ["a cat", "50", "5", "", "91 %"]
    precision = "return [...document.querySelectorAll('.matrix .told')[0].cells].map((cell) => cell.textContent)"
    assert browser.execute_script(precision) == ["precision", "85 %", "71 %", "95 %", ""]
    assert len(browser.find_elements("css selector", ".matrix.wide tbody tr")) == 25
    assert "the first 50 of 60 rows" in text_of(browser, ".drawings")
    assert browser.get_log("browser") == []


def test_a_run_that_failed_says_with_what(browser, pages):
    show(browser, pages["failed"])
    assert "ValueError: no data" in text_of(browser, ".error")
    assert "Nothing has been logged" in text_of(browser, "#curves")


def test_a_live_page_grows_with_its_run(browser, tmp_path):
    from tr_log.report.watch import Server

    write_run(tmp_path / "run", [start_event(0.0, **ALIVE)], [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    with Server([tmp_path], 0, 0.05) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            show(browser, f"http://127.0.0.1:{server.server_address[1]}/", "phone")
            with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "loss": 0.25}\n')
            browser.execute_async_script(
                "const done = arguments[0]; const look = () => "
                "document.querySelector('.readout').textContent.includes('0.25') "
                "? done() : setTimeout(look, 50);"
                "look();"
            )
            browser.execute_script("document.querySelector('.plot').focus(); scrollTo(0, 100)")
            with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "loss": 0.125}\n')
            browser.execute_async_script(
                "const done = arguments[0]; const look = () => "
                "document.querySelector('.readout').textContent.includes('0.125') ? done() : setTimeout(look, 50);"
                "look();"
            )
            assert browser.execute_async_script("requestAnimationFrame(() => arguments[0](scrollY))") == 100
            assert browser.execute_script("return document.activeElement.className") == "plot"
            opened = "return [...document.querySelectorAll('details')].filter((one) => one.open).map((one) => "
            opened += "one.querySelector('summary').textContent.replace(/ \\(\\d+\\)$/, ''))"
            before = browser.execute_script(opened)
            files = browser.find_elements("css selector", "summary")[-1]
            browser.execute_script("arguments[0].click()", files)
            warning = {"event": "warning", "time_s": 1.0, "level": "WARNING", "text": "new"}
            with (tmp_path / "run" / "events.jsonl").open("a") as file:
                file.write(json.dumps(warning) + "\n")
            browser.execute_async_script(
                "const done = arguments[0]; const look = () => "
                "document.querySelector('#tables').textContent.includes('Warnings') ? done() : setTimeout(look, 50);"
                "look();"
            )
            assert set(browser.execute_script(opened)) == {*before, "Warnings", "Files"}
            assert browser.get_log("browser") == []
        finally:
            browser.get("about:blank")
            server.shutdown()
            thread.join(20)
