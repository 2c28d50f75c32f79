"""The catalog in real Chromium: from file://, with keyboard, phone, dark mode and without a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import catalog_site as samples
import pytest
from chromium import Browser, Scheme
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from trainyard.catalog import build

#: A page of each kind: the table; tested, failed, differing, untested and not built images.
PAGES = (
    "index",
    "images/cpu-pt213",
    "images/cu121-pt29",
    "images/cu130-pt213",
    "images/cu124-pt26",
    "images/cu130-pt213-devel",
)
WIDTHS = (1280, 390)
SCHEMES: tuple[Scheme, ...] = ("light", "dark")

SHOWN = """return [...document.querySelectorAll("#images tbody tr")]
    .filter((row) => row.offsetParent !== null)
    .map((row) => row.querySelector("a").textContent)"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: The element that has the focus: what it is, whether its outline is drawn, where it is.
FOCUS = """const one = document.activeElement;
const style = getComputedStyle(one), box = one.getBoundingClientRect();
const across = box.right > 0 && box.left < innerWidth, down = box.bottom > 0 && box.top < innerHeight;
return {name: one.id || one.getAttribute("aria-label") || one.textContent.trim().slice(0, 40) || one.tagName,
        tag: one.tagName, outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
        seen: box.width > 0 && across && down}"""


def shown(browser: Browser) -> list[str]:
    found: list[str] = browser.js(SHOWN)
    return found


def element(browser: Browser, id_: str) -> WebElement:
    found: WebElement = browser.driver.find_element(By.ID, id_)
    return found


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        browser.driver.switch_to.active_element.send_keys(key)


def text(browser: Browser, id_: str) -> str:
    return element(browser, id_).text


def header(browser: Browser, name: str) -> WebElement:
    path = f"//table[@id='images']//th[button[text()='{name}']]"
    found: WebElement = browser.driver.find_element(By.XPATH, path)
    return found


# -- the table -----------------------------------------------------------------------------


def test_it_opens_from_a_file_with_every_image(browser: Browser) -> None:
    browser.open()
    assert browser.driver.title == "Images - Trainyard catalog"
    assert shown(browser) == [row.id for row in samples.ROWS]
    assert text(browser, "count") == "12 of 12 shown"


def test_without_a_script_the_table_is_whole_and_nothing_pretends_to_work(browser: Browser) -> None:
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    browser.open()
    rows = browser.driver.find_elements(By.CSS_SELECTOR, "#images tbody tr")
    assert [row.is_displayed() for row in rows] == [True] * 12
    assert not element(browser, "filters").is_displayed()
    assert not element(browser, "ask").is_displayed()
    buttons = browser.driver.find_elements(By.TAG_NAME, "button")
    assert not [button for button in buttons if button.is_displayed()]
    assert "CUDA Version: 12.1" in browser.driver.find_element(By.TAG_NAME, "main").text


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("cpu-pt213-base", ["cpu-pt213-base"]),
        ("2.9.1 JUPYTER", ["cu121-pt29", "cu121-pt29-devel"]),
        ("failed", ["cu121-pt29"]),
        ("10.0 devel", ["cu130-pt213-devel"]),
        ("no such thing", []),
    ],
)
def test_searchedfinds_all_words_in_any_column(browser: Browser, words: str, ids: list[str]) -> None:
    browser.open()
    element(browser, "search").send_keys(words)
    assert shown(browser) == ids
    assert text(browser, "count") == f"{len(ids)} of 12 shown"
    assert element(browser, "nothing").is_displayed() == (not ids)


def test_filters_work_together_and_can_be_taken_back(browser: Browser) -> None:
    browser.open()
    choose(browser, "cuda", "12.1")
    assert shown(browser) == ["cu121-pt29", "cu121-pt29-base", "cu121-pt29-devel"]
    choose(browser, "variant", "-base")
    assert shown(browser) == ["cu121-pt29-base"]
    choose(browser, "status", "tested")
    assert shown(browser) == []
    browser.driver.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
    wait_for(lambda: len(shown(browser)) == 12)
    choose(browser, "cuda", "")
    assert shown(browser) == ["cpu-pt213", "cpu-pt213-base", "cpu-pt213-devel"]
    choose(browser, "variant", "")
    assert shown(browser) == ["cpu-pt213"]


def choose(browser: Browser, id_: str, value: str) -> None:
    element(browser, id_).find_element(By.CSS_SELECTOR, f'option[value="{value}"]').click()


def wait_for(true: Callable[[], object], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_sorting_by_keyboard(browser: Browser) -> None:
    browser.open()
    element(browser, "filters").find_element(By.CSS_SELECTOR, "button[type=reset]").send_keys(Keys.TAB)
    names = []
    for _ in range(10):
        assert browser.js(FOCUS)["tag"] == "BUTTON"
        names.append(browser.js(FOCUS)["name"])
        if names[-1] == "torch":
            break
        press(browser, Keys.TAB)
    assert names == ["Image", "Status", "CUDA", "Driver", "torch"]
    press(browser, Keys.ENTER)
    assert header(browser, "torch").get_attribute("aria-sort") == "ascending"
    assert [id_.split("-")[1] for id_ in shown(browser)] == ["pt26"] * 3 + ["pt29"] * 3 + ["pt213"] * 6
    press(browser, Keys.SPACE)
    assert header(browser, "torch").get_attribute("aria-sort") == "descending"
    assert [id_.split("-")[1] for id_ in shown(browser)] == ["pt213"] * 6 + ["pt29"] * 3 + ["pt26"] * 3
    sorted_by = browser.driver.find_elements(By.CSS_SELECTOR, "#images th[aria-sort]")
    assert len(sorted_by) == 1


@pytest.mark.parametrize("descending", [False, True])
def test_what_is_not_there_comes_last_in_both_directions(browser: Browser, descending: bool) -> None:
    browser.open()
    button = header(browser, "Size").find_element(By.TAG_NAME, "button")
    button.click()
    if descending:
        button.click()
    built = shown(browser)[:5]
    assert set(built) == {"cpu-pt213", "cu121-pt29", "cu124-pt26", "cu124-pt26-base", "cu130-pt213"}
    assert built[-1 if descending else 0] == "cpu-pt213"


# -- the driver question -------------------------------------------------------------------


def test_the_page_answers_as_the_rules_in_python_do(browser: Browser) -> None:
    browser.open()
    facts = [(samples.BY_ID[id_].cuda_level, samples.BY_ID[id_].driver_floor) for id_ in samples.ANSWERING]
    script = """const asked = parseAsked(arguments[0]);
        return arguments[1].map(([level, floor]) => answerFor(level, floor, asked))"""
    for said, *answers in samples.CASES:
        assert browser.js(script, said, facts) == answers, said
        assert browser.js(script, said, [("", "")]) == ["runs"], said
    for said in samples.NONSENSE:
        assert browser.js("return parseAsked(arguments[0])", said) is None, said


def test_which_images_run_by_cuda_version_and_by_driver(browser: Browser) -> None:
    browser.open()
    element(browser, "smi").send_keys("12.2", Keys.ENTER)
    assert text(browser, "answer") == (
        "With CUDA 12.2, 6 images run; built so far: 2. 3 more, marked “check driver”, need the Driver "
        "Version in their column Driver. 3 do not run and are hidden."
    )
    assert [id_ for id_ in shown(browser) if id_.startswith("cu13")] == []
    marked = browser.driver.find_elements(By.CSS_SELECTOR, "#images tr.floor a")
    assert [one.text for one in marked] == ["cu124-pt26", "cu124-pt26-base", "cu124-pt26-devel"]
    browser.shoot("index-1280-light-asked", 1280)

    element(browser, "smi").clear()
    element(browser, "smi").send_keys("535.104", Keys.ENTER)
    assert text(browser, "answer") == (
        "With driver 535.104, 9 images run; built so far: 4. 3 do not run and are hidden."
    )
    element(browser, "search").send_keys("base")
    assert shown(browser) == ["cpu-pt213-base", "cu124-pt26-base", "cu121-pt29-base"]

    element(browser, "forget").click()
    assert browser.js(FOCUS)["name"] == "smi"
    assert text(browser, "answer") == ""
    assert "cu130-pt213-base" in shown(browser)


def test_an_answer_that_is_no_version_is_refused_in_words(browser: Browser) -> None:
    browser.open()
    element(browser, "smi").send_keys("<b>H100", Keys.ENTER)
    assert text(browser, "answer").startswith("“<b>H100” is no CUDA version like 12.2")
    assert element(browser, "smi").get_attribute("aria-invalid") == "true"
    assert len(shown(browser)) == 12


# -- everybody -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_and_nothing_is_cut_off(
    browser: Browser, page: str, width: int, scheme: Scheme
) -> None:
    browser.open(page, width, scheme)
    assert browser.violations() == []
    browser.js("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert browser.violations() == []
    assert browser.js(OVERFLOW) == 0
    browser.open(page, width, scheme)
    browser.shoot(f"{page.rpartition('/')[2]}-{width}-{scheme}", width)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_after_a_question_and_a_wrong_one(browser: Browser, scheme: Scheme) -> None:
    browser.open(width=390, scheme=scheme)
    element(browser, "smi").send_keys("12.2", Keys.ENTER)
    header(browser, "torch").find_element(By.TAG_NAME, "button").click()
    assert browser.violations() == []
    assert browser.js(OVERFLOW) == 0
    browser.shoot(f"index-390-{scheme}-asked", 390)
    element(browser, "smi").send_keys("x", Keys.ENTER)
    assert browser.violations() == []


@pytest.mark.parametrize("page", PAGES)
def test_the_narrowest_phone_needs_no_sideways_scrolling(browser: Browser, page: str) -> None:
    """WCAG 2.2, 1.4.10: 320 CSS pixels."""
    browser.open(page, 320)
    assert browser.js(OVERFLOW) == 0
    browser.open(page, 768)
    assert browser.js(OVERFLOW) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_no_column_is_squeezed_until_its_words_stand_on_end(browser: Browser, width: int) -> None:
    browser.open("images/cu121-pt29", width)
    tallest = browser.js(
        """return Math.max(...[...document.querySelectorAll("table:not(.changelog table) tbody tr")]
            .map((row) => row.offsetHeight))"""
    )
    assert tallest < 200


def test_axe_does_object_to_what_is_wrong(browser: Browser) -> None:
    """The control: without it the tests above could pass because axe-core looked at nothing."""
    browser.open()
    browser.js(
        "document.querySelector('.help').style.color = '#bbb'; document.getElementById('smi').id = 'x'"
    )
    found = {one.split(":")[0] for one in browser.violations()}
    assert {"color-contrast", "label-title-only"} <= found


def test_dark_and_light_follow_the_system(browser: Browser) -> None:
    found = {}
    for scheme in SCHEMES:
        browser.open(scheme=scheme)
        found[scheme] = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert found == {"light": "rgb(247, 248, 249)", "dark": "rgb(15, 20, 24)"}


def test_cards_on_a_phone_are_still_a_table_for_a_screen_reader(browser: Browser) -> None:
    browser.open(width=390)
    assert browser.js("return getComputedStyle(document.querySelector('#images tbody tr')).display") == "flex"
    nodes = browser.cdp("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert roles.count("table") == 2
    assert roles.count("row") == 13 + 7
    assert roles.count("rowheader") == 12 + 6


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", ["index", "images/cu121-pt29"])
def test_every_stop_of_the_tab_key_is_visible_and_none_is_a_trap(
    browser: Browser, page: str, width: int
) -> None:
    browser.open(page, width)
    stops = []
    for _ in range(200):
        press(browser, Keys.TAB)
        found = browser.js(FOCUS)
        if found["tag"] == "BODY":
            break
        assert found["outline"], found
        assert found["seen"], found
        stops.append(found["name"])
    else:
        pytest.fail("the Tab key does not come to an end")
    assert stops[:2] == ["Skip to content", "Trainyard"]
    wanted = ["smi", "search", "Image", "cu130-pt213-devel"] if page == "index" else ["Tests", "Dockerfile"]
    assert [name for name in wanted if name not in stops] == []


def test_the_skip_link_skips(browser: Browser) -> None:
    browser.open("images/cu121-pt29")
    press(browser, Keys.TAB, Keys.ENTER)
    press(browser, Keys.TAB)
    assert browser.js(FOCUS)["name"] == "Images"


def test_a_command_can_be_copied_by_keyboard(browser: Browser) -> None:
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.open("images/cpu-pt213")
    button = browser.driver.find_element(By.CSS_SELECTOR, "button.copy")
    assert button.get_attribute("aria-label") == "Copy: Pull this build"
    button.send_keys(Keys.ENTER)
    wait_for(lambda: button.text == "Copied")
    copied = browser.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == f"docker pull {samples.REGISTRY}:cpu-pt213"


def test_only_what_scrolls_is_a_stop_for_the_keyboard(browser: Browser) -> None:
    browser.open("images/cu121-pt29", 1280)
    assert browser.driver.find_elements(By.CSS_SELECTOR, ".scroll[tabindex]") == []
    browser.open("images/cu121-pt29", 390)
    wait_for(lambda: browser.driver.find_elements(By.CSS_SELECTOR, ".scroll[tabindex]"))
    for one in browser.driver.find_elements(By.CSS_SELECTOR, ".scroll[tabindex]"):
        assert one.get_attribute("role") == "region"
        assert one.get_attribute("aria-label")


# -- size ----------------------------------------------------------------------------------

#: Milliseconds for each thing that a user does, with the layout that follows.
TIMES = """const time = (work) => {
    const began = performance.now(); work(); document.body.offsetHeight; return performance.now() - began;
};
const search = document.getElementById("search");
const type = (text) => { search.value = text; search.dispatchEvent(new Event("input", {bubbles: true})); };
const torch = document.querySelectorAll("#images thead button")[4];
const [searched, clear, sort] = [() => type("devel 12.1"), () => type(""), () => torch.click()].map(time);
return {search: searched, clear, sort};"""


def test_a_thousand_images_can_be_searched_and_sorted_without_waiting(
    browser: Browser, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    big = build(samples.many(tmp_path, 1000), tmp_path / "site").parent
    began = time.monotonic()
    browser.open(site=big)
    opened = time.monotonic() - began
    measured = browser.js(TIMES)
    record_property("opened in seconds", round(opened, 2))
    record_property("milliseconds", measured)
    assert opened < 20
    assert max(measured.values()) < 3000, measured
    assert len(shown(browser)) == 1000
    browser.open(width=390, site=big)
    assert browser.js(OVERFLOW) == 0
