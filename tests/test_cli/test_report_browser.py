# SPDX-License-Identifier: Apache-2.0
"""The page of `report` in a real browser: sort, filter, open a kernel, mark a line, compare, without the network."""

import shutil

import pytest

import bundler

selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'triton-bundler[test]'")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver"),
]
WIDTH, HEIGHT = 1280, 900


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium that may fetch nothing."""
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={WIDTH},{HEIGHT}",
                 "--host-resolver-rules=MAP * ~NOTFOUND"):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    driver.implicitly_wait(10)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, cli, packed, tmp_path):
    """The page of two bundles, opened from disk; afterwards the browser has complained of nothing."""
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "old.tbundle")
    assert cli("report", packed, tmp_path / "old.tbundle", "-o", tmp_path / "r.html").exit_code == 0
    browser.get((tmp_path / "r.html").as_uri())
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def go(browser, place):
    browser.find_element("link text", place).click()


def rows(browser):
    return [[cell.text for cell in row.find_elements("css selector", "td")]
            for row in browser.find_elements("css selector", "#kernels tbody tr")]  # fmt: skip


def test_overview(opened, packed):
    """The first thing to see: figures, and sizes by kind as areas."""
    with bundler.Bundle.load(packed) as bundle:
        assert opened.find_element("css selector", ".cards").text.startswith(f"kernels\n{len(bundle)}\n")
    assert len(opened.find_elements("css selector", "svg .kind")) >= 6
    assert opened.find_element("css selector", "nav [aria-current]").text == "Overview"


def test_sort_and_filter(opened, packed):
    """A heading sorts, and sorts the other way when pressed again; words filter by name, target and constants."""
    go(opened, "Kernels")
    with bundler.Bundle.load(packed) as bundle:
        names, number = sorted(kernel.name for kernel in bundle.kernels), len(bundle)
    assert [row[0] for row in rows(opened)] == names
    head = opened.find_element("css selector", "[data-column=binary]")
    head.click()
    order = opened.find_element("css selector", "th[aria-sort=descending]").text
    assert order == "binary"
    largest = [row[10] for row in rows(opened)]
    head.click()
    assert [row[10] for row in rows(opened)] == largest[::-1]
    opened.find_element("id", "filter").send_keys("gfx942")
    shown = rows(opened)
    assert 0 < len(shown) < number
    assert {row[1] for row in shown} == {"hip:gfx942"}
    assert f"{len(shown)} of {number}" in opened.find_element("css selector", ".filters").text


def test_a_kernel_and_its_lines(opened):
    """A kernel opens from the table; a line marks the lines of the same source line in every other text, by mouse and by keys."""
    from selenium.webdriver.common.keys import Keys

    go(opened, "Kernels")
    opened.find_element("id", "filter").send_keys("cuda")
    opened.find_element("css selector", "#kernels tbody a").click()
    assert "registers" in opened.find_element("css selector", ".facts").text
    for box in opened.find_elements("css selector", "fieldset input"):
        if not box.is_selected():
            box.click()
    kinds = {code.get_attribute("data-kind") for code in opened.find_elements("css selector", ".code")}
    assert {"source", "ttir", "ttgir", "llir", "ptx"} == kinds
    store = opened.find_element("xpath", "//*[@data-kind='ttgir']/div[contains(., 'tt.store')]")
    store.click()
    for kind in ("ttir", "llir", "ptx"):
        linked = opened.find_elements("css selector", f"[data-kind={kind}] .linked")
        assert linked, kind
    assert any("st.global" in line.text for line in opened.find_elements("css selector", "[data-kind=ptx] .linked"))
    status = opened.find_element("id", "status").get_property("textContent")
    assert ".py:" in status
    code = opened.find_element("css selector", "[data-kind=ttgir]")
    code.send_keys(Keys.ARROW_UP, Keys.ENTER)
    assert opened.find_element("css selector", "[data-kind=ttgir] .current").text != store.text


def test_the_difference(opened):
    """What the second bundle lacks is listed."""
    go(opened, "Diff")
    text = opened.find_element("id", "main").text
    assert "Removed" in text
    assert "hip:gfx942" in text


def test_dark_and_light(opened):
    """The button changes the colours."""
    before = opened.find_element("tag name", "body").value_of_css_property("background-color")
    opened.find_element("id", "theme").click()
    assert opened.find_element("tag name", "body").value_of_css_property("background-color") != before


def test_no_button_or_field_lacks_a_name(opened):
    """A screen reader has a name for everything that can be used."""
    for place in ("Overview", "Kernels"):
        go(opened, place)
        for one in opened.find_elements("css selector", "button, input, select, a[href]"):
            assert one.accessible_name, one.get_attribute("outerHTML")
