"""The live page in a real browser, beside a real deployment: it draws what is there, follows a loss, and chats.

Needs Debian's chromium and playwright (`pip install playwright`); skipped where either is missing. With
AFSERVE_PICTURES=FOLDER it leaves the pictures that docs/pictures has.
"""

import asyncio
import os
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from afserve.server.access.key_file import KeyLimits, KeyRole, add_key
from bench.faults_deployment import Deployment
from bench.faults_load import Load
from bench.served import served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]
SECONDS = 60_000.0  # of a wait, in ms
VIEWS = {
    "light": {"viewport": {"width": 1500, "height": 1880}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1500, "height": 1880}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 420, "height": 900}, "color_scheme": "light"},
    "tablet": {"viewport": {"width": 900, "height": 1400}, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=options) as browser:
            yield browser


def test_the_page_shows_what_happens(browser):
    flags = ("--attention", "2", "--experts", "3", "--expert-copies", "2")
    pilot = ("--pilot", "advise", "--pilot-hold", "5", "--pilot-ttft", "60", "--pilot-tpot", "60")
    with served(*flags, *pilot) as up, Deployment(up) as here, _busy(up.url):
        page, said = _opened(browser, up, "light")
        page.wait_for_selector("#flow path")
        assert page.locator("#flow .node").count() == 5 and page.locator("#flow path").count() == 6
        sync_api.expect(page.locator("#state")).to_have_text("ready", timeout=SECONDS)
        sync_api.expect(page.locator("#flow .attention text").nth(1)).not_to_have_text(
            "0 tok/s", timeout=SECONDS
        )
        _chat(page)
        page.locator("#heat").focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator("#cell")).to_contain_text("copies", timeout=SECONDS)
        assert page.locator("#cell .chip").count() == 2
        _timeline(page)
        _judged(page, up)
        here.break_one("expert-1", None)
        page.wait_for_selector("#events .bad", timeout=SECONDS)
        assert "expert-1" in (page.text_content("#events .bad") or "")
        sync_api.expect(page.locator("#flow .away")).to_have_count(0, timeout=SECONDS)
        _picture(page, "light")
        assert said == []
        for view in ("dark", "phone"):
            other, wrong = _opened(browser, up, view)
            other.wait_for_selector("#flow path", state="attached", timeout=SECONDS)
            _fits(other, view)
            _picture(other, view)
            assert wrong == []


HEIGHTS = [(1280, 420), (1280, 720), (1500, 1900), (390, 844), (390, 480)]


def test_the_chat_is_in_reach_and_nothing_is_empty(browser):
    """On every screen, before and after the first question; charts begin before the page was opened."""
    with served("--prefill", "1", "--decode", "1", "--experts", "1") as up:
        for wide, high in HEIGHTS:
            VIEWS["sized"] = {"viewport": {"width": wide, "height": high}}
            page, wrong = _opened(browser, up, "sized")
            page.wait_for_selector("#flow path", state="attached")
            assert (
                page.is_visible("#quiet") and not page.is_visible("#rate") and not page.is_visible("#lanes")
            )
            box = page.locator("#go").bounding_box()
            assert box is not None and box["y"] + box["height"] <= high and page.is_visible("#offers button")
            _fits(page, f"{wide} x {high}")
            phone = wide < 500
            said = page.locator("#flow .attention text").nth(2).text_content() or ""
            assert said.startswith("prefill") and (phone or "0 requests" in said)
            assert wrong == []
        page.click("#offers button >> nth=0")
        sync_api.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=SECONDS)
        assert page.locator("#said .user").count() == 1 and not page.is_visible("#offers")
        sync_api.expect(page.locator("#quiet")).to_be_hidden(timeout=SECONDS)
        assert page.locator("#go").bounding_box()["y"] < HEIGHTS[-1][1]
        later, wrong = _opened(browser, up, "light")
        later.wait_for_selector("#rate canvas[role=img]", timeout=SECONDS)
        drawn = later.locator("#first canvas")
        sync_api.expect(drawn).to_have_attribute("aria-label", re.compile(r"p50 \d"), timeout=SECONDS)
        figures = later.locator("#figures")
        sync_api.expect(figures).to_contain_text(re.compile(r"First token, p50\d"), timeout=SECONDS)
        assert wrong == []


def test_the_page_shows_where_kv_was_found(browser, tmp_path):
    """Prompts are handed over, leave the cache, and come back from the tiers below it. One key finds more."""
    keys = {name: add_key(tmp_path / "keys", name, KeyRole.USER, KeyLimits()) for name in ("alice", "bob")}
    flags = ("--prefill", "1", "--decode", "1", "--experts", "1", "--kv-tokens", "2048", "--ttft", "60")
    flags += ("--api-keys", str(tmp_path / "keys"))
    tiers = ("--kv-host", "2MiB", "--kv-ssd", str(tmp_path / "kv"), "--kv-ssd-size", "64MiB")
    with served(*flags, *tiers) as up, httpx.Client(base_url=up.url, timeout=60) as client:
        page, wrong = _opened(browser, up, "light")
        assert page.is_hidden("#refused") and page.is_hidden("#key-card")
        prompts = [f"# file {number}\n" + "import os\nimport sys\n" * 150 for number in range(8)]
        asks = [(prompt, "alice") for prompt in [*prompts, *prompts, *reversed(prompts)]]
        for prompt, key in [*asks, (prompts[0], "bob")]:  # from far away at first, then from near by
            asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            by = {"authorization": f"Bearer {keys[key]}"}
            assert client.post("/v1/completions", json=asked, headers=by).status_code == 200
        for tier in ("host memory", "disk"):
            row = page.locator("#found tbody tr", has_text=tier)
            sync_api.expect(row.locator("td").nth(0)).to_have_text(re.compile(r"^[1-9]"), timeout=SECONDS)
        names = page.locator("#found tbody th").all_text_contents()
        assert names == ["cache", "other nodes", "host memory", "disk"]
        rows = page.locator("#by-key tbody tr")
        sync_api.expect(rows.nth(1).locator("td").nth(0)).to_have_text(re.compile(r"^[1-9]"), timeout=SECONDS)
        assert page.locator("#by-key tbody th").all_text_contents() == ["alice", "bob"]
        sync_api.expect(rows.nth(0).locator("td").nth(2)).to_have_text(re.compile(r"^[1-9][\d.]* %$"))
        for chart, names in (("#hits", ["cache", "disk"]), ("#shares", ["alice", "bob"])):
            drawn = page.locator(f"{chart} canvas")
            for name in names:
                sync_api.expect(drawn).to_have_attribute("aria-label", re.compile(name), timeout=SECONDS)
            assert page.locator(f"{chart} .values").count() == 1
        moved = page.locator("#found tbody tr", has_text="other nodes").locator("td").nth(3)
        sync_api.expect(moved).to_have_text(re.compile(r"^\d+\.\d MB$"))
        sync_api.expect(page.locator("#handed")).to_contain_text(re.compile(r"handed over: [1-9]"))
        sync_api.expect(page.locator("#leased")).to_contain_text("blocks are held for other nodes")
        sync_api.expect(page.locator("#kept")).to_contain_text(
            re.compile("Made room in the cache: [1-9].* ordinary")
        )
        sync_api.expect(page.locator("#flow .attention text").nth(2)).to_contain_text("prefill, ")
        sync_api.expect(page.locator("#flow .attention text").nth(5)).to_contain_text("decode, ")
        _card(page, "found-card")
        _card(page, "key-card")
        assert wrong == []
        later, wrong = _opened(browser, up, "dark")
        sync_api.expect(later.locator("#shares canvas")).to_have_attribute(
            "aria-label", re.compile(r"alice \d"), timeout=SECONDS
        )
        _card(later, "found-card", "-dark")
        assert wrong == []
        for view in ("tablet", "phone"):
            other, wrong = _opened(browser, up, view)
            sync_api.expect(other.locator("#phases tbody tr")).to_have_count(2, timeout=SECONDS)
            sync_api.expect(other.locator("#phases")).to_contain_text("100 % of", timeout=SECONDS)
            _fits(other, view)
            assert wrong == []


def _fits(page, view):
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{view}: {wide} px beyond the window"


@contextmanager
def _busy(url):
    """Others ask it things meanwhile."""
    stop = threading.Event()

    async def ask():
        async with Load(url, 4.0, 64):
            while not stop.is_set():
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=asyncio.run, args=(ask(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _opened(browser, up, view):
    """A page with the admin key, and the list of everything that it complains of. Nothing else may be asked."""
    context = browser.new_context(**VIEWS[view])
    page, wrong = context.new_page(), []
    page.set_default_timeout(SECONDS)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(up.url) else wrong.append(one.url))
    page.goto(up.url)
    sync_api.expect(page.locator("#state")).not_to_have_text("connecting", timeout=SECONDS)
    if page.is_visible("#keys"):
        page.fill("#key", up.key)
        page.click("#keys button")
    return page, wrong


def _chat(page):
    page.fill("#words", "What does os.path.join do?")
    page.press("#words", "Enter")
    sync_api.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=SECONDS)
    assert page.locator("#said .user").count() == 1


def _judged(page, up):
    """Below an advice stands what came of it: what was measured at pools that stayed, and what had been expected."""
    below = page.locator("#events li.move p")
    below.first.wait_for(timeout=SECONDS)
    held = re.compile(r"\d+:\d+:\d+not followed: first token \S+ s \(expected \S+ to \S+, (held|missed)\)")
    sync_api.expect(below.first).to_have_text(held)
    above = page.locator("#events li.move", has=page.locator("p")).first
    sync_api.expect(above).to_contain_text(re.compile(r"advice \d+: 2:3 to \d:\d, since .*; expected: "))
    sync_api.expect(page.locator("#counts")).to_contain_text(
        re.compile(r"pilot: \d+ advised, 0 done, \d of ")
    )
    assert (below.first.get_attribute("class") == "missed") == ("missed)" in below.first.text_content())


def _timeline(page):
    """Every micro-batch and expert node has a lane; a held span says whose rows were where."""
    lane = page.locator("#lanes")
    # A light load may all go to the node that has its prompts in its cache.
    sync_api.expect(page.locator("#moment")).to_contain_text(
        re.compile(r"attention-\d waited"), timeout=SECONDS
    )
    sync_api.expect(lane).to_be_visible(timeout=SECONDS)
    lane.focus()
    words = set()
    for key in ("ArrowRight",) * 12 + ("ArrowDown",) * 8:
        page.keyboard.press(key)
        words.add((page.text_content("#span") or "").split(":")[0])
    assert page.get_attribute("#hold", "aria-pressed") == "true"
    assert any(re.fullmatch(r"attention-\d, micro-batch 0", word) for word in words), words
    assert any(word.startswith("expert-") for word in words), words
    before = lane.evaluate("canvas => canvas.toDataURL()")
    page.keyboard.press("+")
    sync_api.expect(page.locator("#steps")).to_have_text("1 step")
    if int(lane.get_attribute("data-steps") or 0) > 1:  # a slow machine's picture may hold no more than one
        assert lane.evaluate("canvas => canvas.toDataURL()") != before
    page.keyboard.press("Escape")
    assert page.get_attribute("#hold", "aria-pressed") == "false"


def _card(page, name, more=""):
    if folder := os.environ.get("AFSERVE_PICTURES"):
        page.locator(f"#{name}").screenshot(path=Path(folder) / f"{name}{more}.png")


def _picture(page, name):
    if folder := os.environ.get("AFSERVE_PICTURES"):
        page.wait_for_timeout(9000)
        page.screenshot(path=Path(folder) / f"live-{name}.png")
