"""The chat page, in a browser if one is installed: it works, shows its figures, and runs no foreign
code.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.fixtures.browser import BROWSER, Browser, Tab, run_browser
from tests.fixtures.server import Served

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
WRITTEN = "!controller && document.querySelectorAll('.assistant').length === {}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder: Path = tmp_path_factory.mktemp("browser")
    with run_browser(folder) as running_browser:
        yield running_browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as open_tab:
        yield open_tab


def ask(tab: Tab, text: str, turns: int = 1) -> None:
    tab.js(f"byId('text').value = {text!r}; byId('send').click()")
    tab.until(WRITTEN.format(turns))


def test_the_policy_lists_the_hashes_of_script_and_style(serve: Callable[..., Served]) -> None:
    answer = httpx.get(serve(keys=("secret-key-1",)).url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        entry.split(" ", 1) for entry in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    for name in ("script", "style"):
        (text,) = re.findall(f"<{name}>(.*?)</{name}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert not re.search(
        r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", answer.text
    )


@needs_browser
def test_a_conversation_is_shown_with_figures_and_cache_cells(
    serve: Callable[..., Served], tab: Tab
) -> None:
    served = serve(b"hello world")
    tab.go(served.url)
    tab.until("byId('state').textContent === 'ready'")
    assert tab.js("document.title") == "tiny"
    ask(tab, "Hi there")
    ask(tab, "Again", 2)
    assert tab.js("[...document.querySelectorAll('.turn .text')].map(one => one.textContent)") == [
        "Hi there",
        "hello world",
        "Again",
        "hello world",
    ]
    figures = tab.js("document.querySelector('.turn:last-child .figures').textContent")
    assert re.search(
        r"^11 tokens · .*tokens/s · first after \d+ ms · prompt \d+, [1-9]\d* cached$", figures
    ), figures
    assert tab.js("byId('count').textContent") == "11"
    tab.until("cacheReport && cacheReport.used_cells > 0")
    assert re.match(
        r"\d+ of 512 cells · \d+ sequences?", tab.js("byId('cacheSummary').textContent")
    )
    pixels = "byId('cells').getContext('2d').getImageData(0, 0, byId('cells').width, byId('cells').height)"
    assert (
        tab.js(f"new Set(new Uint32Array({pixels}.data.buffer)).size") > 2
    )  # the background, free cells and used cells
    tab.js("byId('newChat').click()")
    assert tab.js("document.querySelectorAll('.turn').length") == 0
    requested_paths = {
        address.removeprefix(served.url)
        for address in tab.requested_urls
        if not address.startswith("data:")
    }
    assert requested_paths == {"/", "/v1/models", "/v1/kv", "/v1/chat/completions"}
    assert tab.console_messages == []


@needs_browser
def test_answers_are_never_markup(serve: Callable[..., Served], tab: Tab) -> None:
    evil = (
        "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script><b>&amp;"
    )
    tab.go(serve(evil.encode(), names=("<i>tiny</i>",)).url)
    ask(tab, evil)
    assert tab.js("[...document.querySelectorAll('.turn .text')].map(one => one.textContent)") == [
        evil,
        evil,
    ]
    assert tab.js("document.querySelectorAll('#log img, #log script, #log b, h1 i').length") == 0
    assert tab.js("document.title") == "<i>tiny</i>"
    # even markup would not run, because of the Content-Security-Policy
    tab.js("document.body.innerHTML += '<img src=x onerror=\"document.title=1\">'")
    tab.until("document.querySelector('body > img').complete")
    assert tab.js("document.title") == "<i>tiny</i>"
    assert any("Content Security Policy" in entry for entry in tab.console_messages)


@needs_browser
def test_a_conversation_continues_after_a_stopped_answer(
    serve: Callable[..., Served], tab: Tab
) -> None:
    served = serve(b"x" * 400)
    tab.go(served.url)
    tab.js("byId('text').value = 'go'; byId('send').click()")
    tab.until("tokenTimes.length > 0")
    tab.js("byId('stop').click()")
    tab.until(WRITTEN.format(1))
    answer = tab.js("document.querySelector('.assistant .text').textContent")
    assert set(answer) <= {"x"}
    assert tab.js("conversation.map(one => one.role)") == ["user", "assistant"]
    tab.js("byId('max_tokens').value = '3'")
    ask(tab, "and", 2)
    assert tab.js("document.querySelector('.turn:last-child .text').textContent") == "xxx"
    assert "reached the token limit" in tab.js(
        "document.querySelector('.turn:last-child .figures').textContent"
    )


@needs_browser
def test_the_key_is_stored_only_for_the_tab(serve: Callable[..., Served], tab: Tab) -> None:
    tab.go(serve(keys=("secret-key-1",)).url)
    tab.until("byId('keyDialog').open")
    tab.js("byId('key').value = 'wrong-key-1'; document.querySelector('#keyDialog button').click()")
    tab.until("byId('keyDialog').open && byId('key').value === ''")
    tab.js(
        "byId('key').value = 'secret-key-1'; document.querySelector('#keyDialog button').click()"
    )
    tab.until("byId('state').textContent === 'ready' && byId('model').textContent === 'tiny'")
    ask(tab, "Hi")
    assert tab.js("document.querySelector('.assistant .text').textContent") == "hello"
    assert "secret-key-1" not in tab.js("JSON.stringify(localStorage)")


@needs_browser
def test_an_error_is_shown_and_the_input_is_restored(
    serve: Callable[..., Served], tab: Tab
) -> None:
    tab.go(serve(n_ctx=256).url)
    ask(tab, "y" * 400)
    assert "the context holds 256" in tab.js("document.querySelector('.turn .error').textContent")
    assert tab.js("byId('text').value") == "y" * 400


@needs_browser
def test_a_base_model_continues_the_text(serve: Callable[..., Served], tab: Tab) -> None:
    tab.go(serve(b"upon a time", template=None).url)
    tab.until("byId('state').textContent === 'ready' && !isChat")
    ask(tab, "Once ")
    assert tab.js("document.querySelector('.assistant .text').textContent") == "upon a time"
    assert any(entry.endswith("/v1/completions") for entry in tab.requested_urls)
    assert tab.console_messages == []


@needs_browser
def test_thinking_is_shown_separately(serve: Callable[..., Served], tab: Tab) -> None:
    tab.go(serve(b"<think>let me see</think>It is <i>so</i>.").url)
    ask(tab, "Why?")
    assert (
        tab.js("document.querySelector('.assistant .thinking').textContent.trim()") == "let me see"
    )
    assert (
        tab.js("document.querySelector('.assistant .text:not(.thinking)').textContent")
        == "It is <i>so</i>."
    )


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [800, 375])
def test_the_page_fits_small_and_large_screens(
    serve: Callable[..., Served], tab: Tab, width: int, dark: bool
) -> None:
    tab.size(width, 700, dark)
    tab.go(serve(b"a long " + b"word" * 60).url)
    tab.until("byId('state').textContent === 'ready'")
    ask(tab, "wide" * 100)
    for open_script in ("", "document.querySelectorAll('details').forEach(one => one.open = true)"):
        tab.js(open_script or "0")
        assert tab.js("document.documentElement.scrollWidth") <= width
        right_edge = "Math.max(...[...document.querySelectorAll('body *')].map(one => one.getBoundingClientRect().right))"
        assert tab.js(right_edge) <= width + 1
        box = tab.js("byId('send').getBoundingClientRect().toJSON()")
        assert box["top"] >= 0 and box["bottom"] <= 700 and box["right"] <= width
        assert tab.js("byId('log').clientHeight") >= 120
    background, foreground = (
        sum(map(int, re.findall(r"\d+", tab.js(f"getComputedStyle(document.body).{name}"))[:3]))
        for name in ("backgroundColor", "color")
    )
    assert (background < 150) == dark and abs(background - foreground) > 450
