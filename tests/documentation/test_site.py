"""Open the built site from the disk, as a reader without a network does: links, search, and the width of a phone."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

SITE = Path(__file__).resolve().parents[2] / "build/site"
FOUND = "return [...document.querySelectorAll('#search-results li > a')].map(link => link.textContent)"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="nox -s docs builds the site")
PAGES = (
    "packages/tr-all/docs/index.html",
    "packages/tr-all/docs/tutorial.html",
    "packages/tr-all/docs/how-to/migrating.html",
    "packages/tr-all/docs/how-to/csv.html",
    "packages/tr-all/docs/how-to/troubleshooting.html",
    "packages/tr-all/docs/matrix.html",
    "packages/tr-args/docs/arguments.html",
    "packages/tr-core/docs/differences.html",
    "packages/tr-dist/README.html",
    "tools/site/reference/tr_ckpt.html",
)


class Links(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets, self.sidebar, self.depth = set(), [], [], 0
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]
        if tag == "div" and (self.depth or "sidebar-tree" in given.get("class", "")):
            self.depth += 1
        if tag == "a" and self.depth:
            self.sidebar.append(given["href"])

    def handle_endtag(self, tag):
        self.depth -= tag == "div" and self.depth > 0


@pytest.fixture(scope="module")
def found():
    return {path: Links(path) for path in SITE.rglob("*.html")}


def test_the_sidebar_has_at_most_forty_links(found):
    pages = [links for path, links in found.items() if path.parent != SITE]
    assert {len(links.sidebar) <= 40 for links in pages} == {True}
    assert min(len(links.sidebar) for links in pages) > 20


def test_every_page_is_two_clicks_from_the_home_page(found):
    reached = {SITE / PAGES[0]}
    for _ in range(2):
        for page in list(reached):
            targets = {urlsplit(target).path for target in found[page].targets}
            reached |= {path for target in targets if (path := (page.parent / unquote(target)).resolve()) in found}
    assert {path for path in found if path.parent != SITE} <= reached


def test_no_link_of_the_site_is_dead(found, capsys):
    assert len(found) > 50
    dead, inside, outside = [], 0, set()
    for path, links in found.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                outside |= {target} if parts.scheme.startswith("http") else set()
                continue
            inside += 1
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = found[file].anchors if file in found else None
            if not file.exists() or (parts.fragment and anchors and unquote(parts.fragment) not in anchors):
                dead.append(f"{path.relative_to(SITE)}: {target}")
    assert dead == []
    with capsys.disabled():
        print(
            f"\n{len(found)} pages, {inside} links inside of the site, of which none is dead; outside: {len(outside)}"
        )


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def show(browser, address, width=1280):
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(address)


@pytest.mark.parametrize("width", [1400, 1280, 390], ids=["wide", "desktop", "phone"])
def test_pages_have_the_width_of_the_screen_and_ask_nobody_for_anything(browser, width):
    for page in PAGES:
        show(browser, (SITE / page).as_uri(), width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [entry["params"]["request"]["url"] for entry in asked if entry["method"] == "Network.requestWillBeSent"]
    assert {urlsplit(url).scheme for url in urls} <= {"file", "data"}
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("save_total_limit", "All training arguments"),
        ("Lightning", "Coming from another trainer"),
        ("Checkpointer", "tr_ckpt"),
    ],
)
def test_search_works_without_a_network(browser, words, page):
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    show(browser, f"{(SITE / 'search.html').as_uri()}?q={words}")
    wait(browser, 60).until(lambda driver: page in driver.execute_script(FOUND))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("early stopping", "Early stopping and the best model"),
        ("resume", "Save, resume, and survive preemption"),
        ("csv", "From a CSV file to served predictions"),
        ("out of memory", "Out of memory: large models on one GPU"),
        ("class weights", "Class weights for unequal classes"),
        ("callback", "Callbacks: six to copy"),
        ("lora", "Fine-tune with TRL and LoRA"),
        ("packing", "Packing: texts of unequal length without padding"),
        ("device-side assert", "Troubleshooting by symptom"),
        ("several machines", "Train on several processes and machines"),
    ],
)
def test_search_finds_the_page_that_shows_how_first(browser, words, page):
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    show(browser, f"{(SITE / 'search.html').as_uri()}?q={quote(words)}")
    done = "return document.querySelector('#search-results p.search-summary')?.textContent ?? ''"
    wait(browser, 60).until(lambda driver: "found" in driver.execute_script(done))
    wait(browser, 60).until(lambda driver: driver.execute_script(FOUND))
    assert browser.execute_script(FOUND)[0] == page


def test_code_is_not_cut_off(browser):
    for page in PAGES:
        show(browser, (SITE / page).as_uri(), 1400)
        cut = (
            "return [...document.querySelectorAll('article pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert browser.execute_script(cut) == 0, page


@pytest.mark.parametrize("width", [1400, 420])
def test_no_table_is_made_high_by_narrow_columns(browser, width):
    """A row is one line or a few: not the height of a screen."""
    for page in PAGES:
        show(browser, (SITE / page).as_uri(), width)
        rows = "return Math.max(0, ...[...document.querySelectorAll('article table tr')].map(row => row.offsetHeight))"
        assert browser.execute_script(rows) < 330, page
