"""Open the built site from the disk, as a reader without a network does: links, search, and the width of a phone."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).resolve().parents[2] / "build/site"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="nox -s docs builds the site")
PAGES = (
    "packages/tr-all/docs/index.html",
    "packages/tr-all/docs/tutorial.html",
    "packages/tr-all/docs/how-to/migrating.html",
    "packages/tr-args/docs/arguments.html",
    "packages/tr-core/docs/differences.html",
    "packages/tr-dist/README.html",
    "tools/site/reference/tr_ckpt.html",
)


class Links(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets = set(), []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]


def test_no_link_of_the_site_is_dead():
    found = {path: Links(path) for path in SITE.rglob("*.html")}
    assert len(found) > 50
    dead = []
    for path, links in found.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = found[file].anchors if file in found else None
            if not file.exists() or (parts.fragment and anchors and unquote(parts.fragment) not in anchors):
                dead.append(f"{path.relative_to(SITE)}: {target}")
    assert dead == []


@pytest.fixture
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


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
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
    found = "return [...document.querySelectorAll('#search-results li a')].map(link => link.textContent)"
    wait(browser, 60).until(lambda driver: page in driver.execute_script(found))
