# SPDX-License-Identifier: Apache-2.0
"""The page of `report` in a real browser: sort, filter, open a kernel, mark a line, compare,
without the network.
"""

import json
import re
import shutil
from itertools import pairwise

import pytest

import bundler

selenium = pytest.importorskip(
    "selenium.webdriver", reason="needs selenium: pip install 'triton-bundler[test]'"
)
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver"
    ),
]
WIDTH, HEIGHT = 1280, 900


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium that may fetch nothing."""
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={WIDTH},{HEIGHT}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    driver.implicitly_wait(10)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, cli, packed, tmp_path):
    """The page of two bundles, opened from disk; afterwards the browser has complained of
    nothing.
    """
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "old.tbundle")
    assert cli("report", packed, tmp_path / "old.tbundle", "-o", tmp_path / "r.html").exit_code == 0
    browser.get((tmp_path / "r.html").as_uri())
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def go(browser, place):
    browser.find_element("link text", place).click()


def rows(browser):
    return [
        [cell.text for cell in row.find_elements("css selector", "td")]
        for row in browser.find_elements("css selector", "#kernels tbody tr")
    ]


def test_overview(opened, packed):
    """The first thing to see: figures, and sizes by kind as areas."""
    with bundler.Bundle.load(packed) as bundle:
        assert opened.find_element("css selector", ".cards").text.startswith(
            f"kernels\n{len(bundle)}\n"
        )
    assert len(opened.find_elements("css selector", "svg .kind")) >= 6
    assert opened.find_element("css selector", "nav [aria-current]").text == "Overview"


def test_sort_and_filter(opened, packed):
    """A heading sorts, and sorts the other way when pressed again; words filter by name, target and
    constants.
    """
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
    """A kernel opens from the table; a line marks the lines of the same source line in every other
    text, by mouse and by keys.
    """
    from selenium.webdriver.common.keys import Keys

    go(opened, "Kernels")
    opened.find_element("id", "filter").send_keys("cuda")
    opened.find_element("css selector", "#kernels tbody a").click()
    assert "registers" in opened.find_element("css selector", ".facts").text
    for box in opened.find_elements("css selector", "fieldset input"):
        if not box.is_selected():
            box.click()
    kinds = {
        code.get_attribute("data-kind") for code in opened.find_elements("css selector", ".code")
    }
    assert {"source", "ttir", "ttgir", "llir", "ptx"} == kinds
    store = opened.find_element("xpath", "//*[@data-kind='ttgir']/div[contains(., 'tt.store')]")
    store.click()
    for kind in ("ttir", "llir", "ptx"):
        linked = opened.find_elements("css selector", f"[data-kind={kind}] .linked")
        assert linked, kind
    assert any(
        "st.global" in line.text
        for line in opened.find_elements("css selector", "[data-kind=ptx] .linked")
    )
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
    assert (
        opened.find_element("tag name", "body").value_of_css_property("background-color") != before
    )


def test_no_button_or_field_lacks_a_name(opened):
    """A screen reader has a name for everything that can be used."""
    for place in ("Overview", "Kernels"):
        go(opened, place)
        for one in opened.find_elements("css selector", "button, input, select, a[href]"):
            assert one.accessible_name, one.get_attribute("outerHTML")


LONG = "triton_per_fused__native_batch_norm_legit_functional_add_convolution_relu_threshold_backward_mean_pow_rsqrt_{}"
KINDS = ("source", "ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco", "json")


@pytest.fixture
def crowded(browser, cli, packed, tmp_path):
    """A page whose kernels have the names that Inductor gives, constants in the order of none, and
    a program; shown in a window of some width.
    """
    assert cli("report", packed, "-o", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()

    def changed(found):
        facts = json.loads(found[1])
        some = facts["kernels"][0]
        facts["kernels"] = [
            some
            | {
                "key": f"K{number}",
                "name": LONG.format(number // 8),
                "stages_us": {"ttir": 5, "a_stage_of_a_long_name": 7},
                "compile_us": 12,
                "options": {"extern_libs": [["libdevice", "x" * 200]]},
                "constants": {
                    "YBLOCK": 2 ** (number * 5 % 8),
                    "A_CONSTANT_WHOSE_NAME_IS_VERY_LONG_TOO": "y" * 90,
                },
            }
            for number in range(24)
        ]
        area = {"x": 0, "y": 0, "width": 90, "height": 90}
        facts["treemap"] = [
            {
                "kind": kind,
                "bytes": 9,
                "box": [*area.values()],
                "cells": [{"key": "K0", "bytes": 9, "box": [*area.values()]}],
            }
            for kind in KINDS
        ]
        value = "float32[16, 32]"
        facts["programs"] = [
            {
                "name": "n" * 90,
                "inputs": [value] * 30,
                "results": [value],
                "constants": ["c" * 90],
                "sizes": {"s0": "dimension 0 of input 0"},
                "memory": "1 KB",
                "kernels": 1,
                "launches": 1,
                "operators": ["aten.mm.default"] * 9,
                "random": True,
                "code": True,
                "targets": ["cuda:90"],
                "problem": None,
            }
        ]
        facts["misses"] = [{"sentence": "z" * 300, "source_diff": "+" + "w" * 300}]
        return found[0].replace(found[1], json.dumps(facts).replace("<", "\\u003c"))

    pattern = r'<script type="application/json" id="facts">(.*?)</script>'
    (tmp_path / "r.html").write_text(re.sub(pattern, changed, page, flags=re.DOTALL))

    def show(width):
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((tmp_path / "r.html").as_uri())
        return browser

    yield show
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [WIDTH, 500])
def test_nothing_leaves_the_window(crowded, width):
    """With names of 110 characters every part of every page ends within the window, and no table
    has to be scrolled sideways.
    """
    page = crowded(width)
    for place in ("overview", "kernels", "kernel/K0", "programs", "misses"):
        page.execute_script(f"location.hash = '#/{place}'")
        page.find_element("css selector", "main h2")
        beyond = page.execute_script(
            "return [...document.querySelectorAll('body *')].filter((one) => !one.closest('.code,"
            " pre, .skip, #status') && one.getBoundingClientRect().right >"
            " document.documentElement.clientWidth + 1).map((one) => one.outerHTML.slice(0, 90))"
        )
        assert beyond == [], place
        wide = page.execute_script(
            "return [...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth -"
            " one.clientWidth)"
        )
        assert not any(wide), place


def test_rows_of_one_name_are_ordered_and_long_names_are_whole_in_the_title(crowded):
    """Rows of one name come by their constants, 2 before 16; what is shortened has all of it as its
    title.
    """
    page = crowded(WIDTH)
    go(page, "Kernels")
    links = page.find_elements("css selector", "#kernels td.name a")
    assert [link.get_attribute("title") for link in links] == [
        LONG.format(number // 8) for number in range(24)
    ]
    assert all(link.get_property("textContent").count("…") == 1 for link in links)
    sizes = [int(re.match(r"YBLOCK=(\d+)", row[2])[1]) for row in rows(page)]
    assert all(one < two for begin in (0, 8, 16) for one, two in pairwise(sizes[begin : begin + 8]))


def test_nine_kinds_have_nine_colours(crowded):
    """No two kinds of files are drawn in one colour, in either scheme."""
    page = crowded(WIDTH)
    for _ in ("light", "dark"):
        spots = page.find_elements("css selector", ".legend span")
        colours = {spot.value_of_css_property("background-color") for spot in spots}
        assert (len(spots), len(colours)) == (9, 9)
        page.find_element("id", "theme").click()
