"""The chat page, in a browser if one is installed: it works, shows its figures, keeps conversations,
and runs no foreign code.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.serve.http.routes.page import PAGE_FOLDER
from tests.fixtures.browser import BROWSER, Browser, Tab, run_browser
from tests.fixtures.fakes import fake_runner
from tests.fixtures.server import CHAT, Served, serving

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


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Tab]:
    """A tab with the page, for tests that call functions of its scripts."""
    with serving(fake_runner(b"hello", template=CHAT)) as served, browser.tab() as open_tab:
        open_page(open_tab, served)
        yield open_tab


def open_page(tab: Tab, served: Served) -> None:
    tab.go(served.url)
    tab.until("byId('state').textContent === 'ready'")


def texts(tab: Tab, selector: str = ".turn .text") -> list[str]:
    """Return the texts of the elements, without white space around them."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    shown: list[str] = tab.js(f"{found}.map(one => one.textContent.trim())")
    return shown


def press(tab: Tab, label: str, number: int = -1) -> None:
    """Press the button with this label; if there are several, the one with this number."""
    buttons = f"""[...document.querySelectorAll('[aria-label="{label}"]')]"""
    tab.js(f"{buttons}.at({number}).click()")


def sent_bodies(tab: Tab) -> None:
    """Make the page record the bodies of its requests in `bodies`."""
    tab.js(
        "globalThis.bodies = []; globalThis.realFetch = fetch;"
        "fetch = (path, options) => { if (options?.body) bodies.push(JSON.parse(options.body));"
        " return realFetch(path, options); }; 0"
    )


def answer_with(tab: Tab, *events: object, end: str = "data: [DONE]\n\n") -> None:
    """Let the next answers be these events instead of the server's."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    tab.js(
        f"fetch = async (path) => new Response(path.includes('completions') ? {json.dumps(stream)} : '{{}}'); 0"
    )


def ask(tab: Tab, text: str, turns: int = 1) -> None:
    tab.js(f"byId('text').value = {json.dumps(text)}; byId('send').click()")
    tab.until(WRITTEN.format(turns))


def test_the_policy_lists_the_hashes_of_scripts_and_style(serve: Callable[..., Served]) -> None:
    answer = httpx.get(serve(keys=("secret-key-1",)).url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        entry.split(" ", 1) for entry in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    assert policy["trusted-types"] == "dompurify"
    for name in ("script", "style"):
        found = re.findall(f"<{name}>(.*?)</{name}>", answer.text, re.DOTALL)
        assert found
        digests = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found
        ]
        assert policy[f"{name}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    markup = re.sub("<script>.*?</script>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"https?://|\son\w+=|\sstyle=", markup)
    own = "".join(path.read_text() for path in PAGE_FOLDER.glob("*.js"))
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", own)


@needs_browser
def test_a_conversation_is_shown_with_figures_and_cache_cells(
    serve: Callable[..., Served], tab: Tab
) -> None:
    served = serve(b"hello world")
    open_page(tab, served)
    assert tab.js("document.title") == "tiny"
    ask(tab, "Hi there")
    ask(tab, "Again", 2)
    assert texts(tab) == ["Hi there", "hello world", "Again", "hello world"]
    figures = texts(tab, ".turn:last-child .figures")[0]
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
def test_markdown_is_shown_as_elements(serve: Callable[..., Served], tab: Tab) -> None:
    reply = (
        "# Head\n\nA **bold** [link](https://example.com/a) and `code`.\n\n- one\n- two\n\n"
        "|a|b|\n|-|-|\n|1|2|\n\n```python\nprint('<b>')\n```\n"
    )
    open_page(tab, serve(reply.encode()))
    ask(tab, "Show **all**")
    assert texts(tab, ".user .text") == ["Show **all**"]
    for selector, expected in {
        "h1": ["Head"],
        "strong": ["bold"],
        "p code": ["code"],
        "li": ["one", "two"],
        "td": ["1", "2"],
        "figcaption span": ["python"],
        "pre code": ["print('<b>')"],
    }.items():
        assert texts(tab, f".assistant .text {selector}") == expected
    link = tab.js(
        "(({href, target, rel}) => [href, target, rel])(document.querySelector('.text a'))"
    )
    assert link == ["https://example.com/a", "_blank", "noopener noreferrer nofollow"]
    tab.js(
        "globalThis.copied = []; copyText = async (text) => { copied.push(text); return true; }; 0"
    )
    press(tab, "Copy code")
    press(tab, "Copy message")
    assert tab.js("copied") == ["print('<b>')", reply]


@needs_browser
def test_code_is_copied_where_the_clipboard_is_closed(
    serve: Callable[..., Served], tab: Tab
) -> None:
    open_page(tab, serve(b"```\nlet me copy\n```"))
    ask(tab, "Code")
    # as on an address without TLS
    tab.js("navigator.clipboard.writeText = async () => { throw new Error('closed'); }; 0")
    tab.js(
        "document.addEventListener('copy', () => { globalThis.copied = document.activeElement.value; })"
    )
    press_copy = "document.querySelector('[aria-label=\"Copy code\"]').click()"
    tab.do("Runtime.evaluate", expression=press_copy, userGesture=True)
    tab.until("byId('announcement').textContent === 'Copied.'")
    assert tab.js("copied") == "let me copy"


@needs_browser
def test_answers_are_never_markup(serve: Callable[..., Served], tab: Tab) -> None:
    lines = [
        "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script><b>b</b>",
        "[a](javascript:document.title='ran') [b](data:text/html,x) [c](/v1/models) <javascript:x>",
        '![pixel](http://127.0.0.1:1/pixel.png "t") ![x](x"onerror=alert)',
        "<svg onload=alert(1)><a href=javascript:x>d</a>",
    ]
    evil = "\n\n".join(lines)
    served = serve(evil.encode(), names=("<i>tiny</i>",), n_ctx=2048)
    open_page(tab, served)
    ask(tab, evil)
    assert texts(tab, ".user .text") == [evil]
    (shown,) = texts(tab, ".assistant .text")
    assert lines[0] in shown and lines[3] in shown  # HTML is text
    assert tab.js("document.querySelectorAll('#log :is(img, script, b, svg), h1 i').length") == 0
    links = tab.js(
        "[...document.querySelectorAll('#log a')].map(one => [one.href, one.textContent])"
    )
    assert links == [["http://127.0.0.1:1/pixel.png", "image: pixel"]]
    assert not any("pixel" in address for address in tab.requested_urls)
    assert tab.js("document.title") == "<i>tiny</i>"
    assert tab.console_messages == []
    # Text does not become markup by mistake, and markup would not run.
    assert (
        tab.js(
            "(() => { try { document.body.innerHTML = '<b>'; return 'set'; } catch { return 'refused'; } })()"
        )
        == "refused"
    )


@needs_browser
def test_a_conversation_continues_after_a_stopped_answer(
    serve: Callable[..., Served], tab: Tab
) -> None:
    served = serve(b"x" * 400)
    open_page(tab, served)
    tab.js("byId('text').value = 'go'; byId('send').click()")
    tab.until("tokenTimes.length > 0")
    tab.js("byId('stop').click()")
    tab.until(WRITTEN.format(1))
    assert set(texts(tab, ".assistant .text")[0]) <= {"x"}
    assert tab.js("talk.nodes.map(one => one.role)") == ["user", "assistant"]
    tab.js("byId('max_tokens').value = '3'")
    ask(tab, "and", 2)
    assert texts(tab, ".turn:last-child .text") == ["xxx"]
    assert "reached the token limit" in texts(tab, ".turn:last-child .figures")[0]


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
    assert texts(tab, ".assistant .text") == ["hello"]
    stored = tab.js("allConversations().then(all => JSON.stringify([localStorage, all]))")
    assert "Hi" in stored and "secret-key-1" not in stored


@needs_browser
def test_an_error_is_shown_and_the_message_can_be_changed(
    serve: Callable[..., Served], tab: Tab
) -> None:
    open_page(tab, serve(n_ctx=256))
    tab.js(f"byId('text').value = '{'y' * 400}'; byId('send').click()")
    tab.until("!controller && document.querySelector('.turn .error')")
    assert "the context holds 256" in texts(tab, ".turn .error")[0]
    press(tab, "Ask for an answer again")
    tab.until("!controller && document.querySelector('.turn .error')")
    press(tab, "Edit message")
    tab.js(
        "document.querySelector('.edit textarea').value = 'short'; document.querySelector('.edit').requestSubmit()"
    )
    tab.until(WRITTEN.format(1))
    assert texts(tab) == ["short", "hello"]


@needs_browser
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("", "The connection ended before the answer was complete."),
        ("data: {]\n\n", "The server sent a part of an answer that is not JSON."),
        ('data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
    ],
)
def test_a_stream_that_fails_keeps_the_text_and_says_why(
    serve: Callable[..., Served], tab: Tab, end: str, message: str
) -> None:
    open_page(tab, serve())
    answer_with(tab, {"choices": [{"delta": {"content": "partial"}}]}, end=end)
    ask(tab, "Hi")
    assert texts(tab) == ["Hi", "partial"]
    assert texts(tab, ".turn .error") == [message]


@needs_browser
def test_a_server_that_is_gone_is_reported_in_words(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    tab.js("fetch = async () => { throw new TypeError('Failed to fetch'); }; 0")
    tab.js("byId('text').value = 'Hi'; byId('send').click()")
    tab.until("!controller && document.querySelector('.turn .error')")
    assert texts(tab, ".turn .error")[0].startswith("The server cannot be reached.")


@needs_browser
def test_a_base_model_continues_the_text(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve(b"upon *a* time", template=None))
    tab.until("!isChat")
    ask(tab, "Once ")
    assert texts(tab, ".assistant .text") == ["upon *a* time"]
    assert any(entry.endswith("/v1/completions") for entry in tab.requested_urls)
    assert tab.console_messages == []


@needs_browser
def test_thinking_is_folded(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve(b"<think>let me see</think>It is <i>so</i>."))
    ask(tab, "Why?")
    assert texts(tab, ".assistant .thinking > div") == ["let me see"]
    assert tab.js("document.querySelector('.assistant .thinking').open") is False
    assert texts(tab, ".assistant .text") == ["It is <i>so</i>."]
    assert "answer after" in texts(tab, ".assistant .figures")[0]


@needs_browser
def test_calls_of_tools_are_shown_and_not_run(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    tab.js("byId('tools').value = '[{]'")
    tab.js("byId('text').value = 'Weather?'; byId('send').click()")
    tab.until("!controller && document.querySelector('.turn .error')")
    assert "not JSON" in texts(tab, ".turn .error")[0]
    tab.js("byId('tools').value = ''")

    def part(**call: Any) -> dict[str, Any]:
        return {"choices": [{"delta": {"tool_calls": [{"index": 0, **call}]}}]}

    answer_with(
        tab,
        part(id="c1", function={"name": "weather", "arguments": ""}),
        part(function={"arguments": '{"city": '}),
        part(function={"arguments": '"<b>Ulm"}'}),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    )
    press(tab, "Ask for an answer again")
    tab.until(WRITTEN.format(1))
    assert texts(tab, ".call summary") == ["Calls weather (not run)"]
    assert json.loads(texts(tab, ".call pre")[0]) == {"city": "<b>Ulm"}
    messages = tab.js("asMessages(talk)")
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "<b>Ulm"}',
    }
    assert messages[2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "This tool was not run.",
    }


@needs_browser
def test_a_conversation_goes_on_after_a_call(serve: Callable[..., Served], tab: Tab) -> None:
    reply = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    open_page(tab, serve(reply, n_ctx=2048, template=CHAT + "{# <tool_call> #}"))
    tab.js(
        "byId('tools').value = JSON.stringify([{type: 'function', function: {name: 'weather', parameters: {type: 'object'}}}])"
    )
    ask(tab, "Weather?")
    ask(tab, "And now?", 2)
    assert texts(tab, ".call summary") == ["Calls weather (not run)"] * 2
    assert texts(tab, ".turn .error") == []


@needs_browser
def test_another_answer_and_an_edit_are_branches(serve: Callable[..., Served], tab: Tab) -> None:
    served = serve()
    open_page(tab, served)
    sent_bodies(tab)
    ask(tab, "first")
    ask(tab, "second", 2)
    press(tab, "Another answer", 0)
    tab.until("!controller && talk.nodes.length === 5")
    assert texts(tab) == ["first", "hello"] and texts(tab, ".turn .tools .small") == ["2/2"]
    press(tab, "Edit message", 0)
    tab.js(
        "document.querySelector('.edit textarea').value = 'changed'; document.querySelector('.edit').requestSubmit()"
    )
    tab.until("!controller && talk.nodes.length === 7")
    assert texts(tab) == ["changed", "hello"]
    assert tab.js("bodies.at(-1).messages") == [{"role": "user", "content": "changed"}]
    press(tab, "Earlier version")
    press(tab, "Earlier version")
    assert texts(tab) == ["first", "hello", "second", "hello"]
    tab.js("saving")
    open_page(tab, served)
    tab.js("openChat([...kept.keys()][0])")
    assert texts(tab) == ["first", "hello", "second", "hello"]


@needs_browser
def test_conversations_are_kept_renamed_exported_imported_and_deleted(
    serve: Callable[..., Served], tab: Tab
) -> None:
    served = serve()
    open_page(tab, served)
    ask(tab, "alpha")
    tab.js("byId('newChat').click()")
    ask(tab, "beta")
    tab.js("saving")
    open_page(tab, served)
    assert sorted(texts(tab, "#chatList > li > button")) == ["alpha", "beta"]
    tab.js("document.querySelector('#chatList > li > button').click()")
    tab.until("talk.nodes.length === 2")
    assert texts(tab) == ["beta", "hello"]
    press(tab, "Rename this conversation")
    tab.js(
        "byId('newTitle').value = 'gamma'; document.querySelector('#renameDialog button').click()"
    )
    tab.until("talk.title === 'gamma'")
    tab.js("saving")
    assert texts(tab, "[aria-current]") == ["gamma"]
    tab.js("allConversations().then(all => { globalThis.exported = exportText(all); })")
    press(tab, "Delete this conversation")
    tab.js("document.querySelector('#deleteDialog button').click()")
    tab.until("kept.size === 1")
    assert texts(tab, "#chatList > li > button") == ["alpha"] and texts(tab) == []
    tab.js("importChats(new File([exported], 'x.json'))")
    assert sorted(texts(tab, "#chatList > li > button")) == ["alpha", "alpha", "gamma"]
    assert tab.console_messages == []


@needs_browser
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("[1", "This file is not JSON."),
        ({"format": "other"}, "This file has no conversations of this page."),
        ({"version": 9}, "This file has version 9; this page reads version 1."),
        ({"leaf": 7}, "The file is damaged: conversation 1 has no last message."),
        (
            {"nodes": [{"parent": 0}]},
            "The file is damaged: conversation 1 has a message without a place.",
        ),
        (
            {"nodes": [{"parent": -1, "role": "system", "content": ""}]},
            "The file is damaged: conversation 1 has a message without text.",
        ),
        (
            {"nodes": [{"parent": -1, "role": "user", "content": "", "calls": [{}]}]},
            "The file is damaged: conversation 1 has a wrong call of a tool.",
        ),
    ],
)
def test_a_wrong_file_of_conversations_is_refused(page: Tab, changes: Any, message: str) -> None:
    talk = {"title": "t", "nodes": [], "leaf": -1}
    text = changes
    if isinstance(changes, dict):
        talk.update({name: value for name, value in changes.items() if name in ("leaf", "nodes")})
        file = {"format": "llmcli conversations", "version": 1, "conversations": [talk], **changes}
        text = json.dumps(file)
    page.js(f"importChats(new File([{json.dumps(text)}], 'x.json'))")
    assert texts(page, "#problem") == [message]
    assert page.js("allConversations()") == []


@needs_browser
def test_a_damaged_stream_ends_the_request(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    tab.js(
        "globalThis.isClosed = false; fetch = async (path) => new Response(path.includes('completions')"
        " ? new ReadableStream({ start(stream) { stream.enqueue(new TextEncoder().encode('data: {]\\n\\n')); },"
        " cancel() { isClosed = true; } }) : '{}'); 0"
    )
    tab.js("byId('text').value = 'Hi'; byId('send').click()")
    tab.until("!controller && document.querySelector('.turn .error')")
    assert tab.js("isClosed")


@needs_browser
def test_a_message_sent_while_a_conversation_opens_stays_in_its_own(
    serve: Callable[..., Served], tab: Tab
) -> None:
    open_page(tab, serve())
    ask(tab, "alpha")
    tab.js("saving")
    tab.js("byId('newChat').click(); byId('text').value = 'beta'; 0")
    tab.js("{ const opened = openChat([...kept.keys()][0]); byId('send').click(); opened }")
    tab.until(WRITTEN.format(1))
    assert texts(tab) == ["beta", "hello"]
    tab.js("saving")
    stored = tab.js("allConversations().then(all => all.map(one => one.nodes.length))")
    assert stored == [2, 2]


@needs_browser
def test_the_list_follows_other_tabs(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    ask(tab, "one")
    tab.js("saving")
    expression = "globalThis.other = open('/'); 0"
    tab.do("Runtime.evaluate", expression=expression, userGesture=True)
    tab.js("globalThis.theirs = (id) => other.document.getElementById(id); 0")
    tab.until("theirs('state')?.textContent === 'ready'")
    tab.js("theirs('text').value = 'two'; theirs('send').click(); 0")
    titles = "[...document.querySelectorAll('#chatList > li > button')].map(one => one.textContent)"
    tab.until(f"{titles}.sort().join() === 'one,two'")
    tab.js("other.deleteConversation([...kept.values()].find(one => one.title === 'one').id)")
    tab.until(f"{titles}.join() === 'two'")
    tab.js("other.close()")


@needs_browser
def test_two_tabs_lose_nothing(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    ask(tab, "one")
    tab.js("saving")
    # Another tab saves the conversation in the meantime.
    tab.js(
        "(async () => { const other = await loadConversation(talk.id); other.title = 'other'; await saveConversation(other); })()"
    )
    ask(tab, "two", 2)
    tab.js("saving")
    titles = tab.js("allConversations().then(all => all.map(one => one.title).sort())")
    assert titles == ["one (copy)", "other"]


@needs_browser
def test_the_number_of_conversations_is_limited(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    tab.js(
        "for (let n = 0; n < MAX_CONVERSATIONS; n++) kept.set('x' + n, {id: 'x' + n, title: 'x', updated: 0, size: 1})"
    )
    ask(tab, "one")
    tab.js("saving")
    assert texts(tab) == ["one", "hello"]
    assert texts(tab, "#problem")[0].startswith("This browser keeps at most 200 conversations.")


@needs_browser
def test_text_files_are_sent_as_text(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve())
    sent_bodies(tab)
    tab.js("attachFiles([new File(['a ```` fence\\n'], 'notes.md'), new File(['x'], 'gone.txt')])")
    press(tab, "Remove gone.txt")
    assert texts(tab, "#attached .name") == ["notes.md"]
    ask(tab, "Read this")
    assert texts(tab, ".user .files .name") == ["notes.md"] and texts(tab, "#attached .chip") == []
    assert tab.js("bodies.at(-1).messages[0].content") == (
        "Read this\n\nFile notes.md:\n`````\na ```` fence\n`````"
    )


@needs_browser
@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "new File([new Uint8Array([255, 254, 0])], 'a.bin')",
            "a.bin is not a text file in UTF-8.",
        ),
        ("new File(['a\\0b'], 'a.dat')", "a.dat is not a text file in UTF-8."),
        ("new File(['x'], 'a.png')", "a.png is an image; this server's models read text only."),
        ("new File(['x'.repeat(600000)], 'a.txt')", "a.txt is larger than 512 KiB."),
        (
            "...Array.from({length: 11}, (_, n) => new File(['x'], n + '.txt'))",
            "10.txt: a message takes at most 10 files.",
        ),
        (
            "...Array.from({length: 3}, (_, n) => new File(['x'.repeat(500000)], n + '.txt'))",
            "2.txt: the files of a message may have 1024 KiB together.",
        ),
    ],
    ids=["bytes", "nul", "image", "large", "many", "large-together"],
)
def test_files_that_cannot_be_sent_are_named(page: Tab, file: str, message: str) -> None:
    page.js("attached = []")
    page.js(f"attachFiles([{file}])")
    assert texts(page, "#problem") == [message]


@needs_browser
def test_a_model_is_chosen_among_several(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve(names=("tiny", "small")))
    sent_bodies(tab)
    assert tab.js("[byId('model').hidden, byId('models').hidden]") == [True, False]
    assert texts(tab, "#models option") == ["tiny", "small"]
    tab.js("byId('models').value = 'small'; byId('models').dispatchEvent(new Event('change'))")
    ask(tab, "Hi")
    assert tab.js("bodies.at(-1).model") == "small" and tab.js("talk.model") == "small"


STREAMED = (
    "# Head\n\npara\nwith [ref] and *marks*\n\n- a\n\n- b\n  - c\n\n      code\n\ntext\n---\n\n1. x\n2. y\n\n"
    "```py\nx = '``'\n``\n\n```\nafter\n\n~~~~\n~~~\n~~~~\n\n|a|b|\n|-|-|\n|1|2|\n\n> q\n> r\n\n* * *\n\n"
    "- list\n  ```\n  in list\n  ```\n\nend\n\n[ref]: https://example.com/\n"
)
PARAGRAPHS = "A paragraph of **words**, [links](https://example.com) and `code`.\n\n"


@needs_browser
def test_a_streamed_text_is_shown_as_the_whole_text(page: Tab) -> None:
    differences = page.js(
        "(() => { const differences = [], text = " + json.dumps(STREAMED) + ";"
        "for (let end = 0; end >= 0; end = text.indexOf('\\n', end + 1)) {"
        " const parts = document.createElement('div'), whole = document.createElement('div'), view = new MarkdownView(parts);"
        " for (const one of text.slice(0, end)) { view.source += one; view.update(); }"
        " view.finish(); showMarkdown(whole, text.slice(0, end));"
        " const [one, other] = [parts, whole].map(box => box.innerHTML.replace(/>\\s+</g, '><').trim());"
        " if (one !== other) differences.push([end, one, other]); }"
        "return differences; })()"
    )
    assert differences == []


@needs_browser
def test_an_open_block_of_code_is_shown_while_it_is_written(page: Tab) -> None:
    shown = page.js(
        "(() => { const box = document.createElement('div'), view = new MarkdownView(box);"
        "return ['```py\\nx =', ' 1\\n``', '`\\nend'].map(part => { view.source += part; view.update();"
        " return [box.querySelector('pre').textContent, box.querySelector('p')?.textContent]; }); })()"
    )
    assert shown == [["x =", None], ["x = 1\n", None], ["x = 1", "end"]]


@needs_browser
@pytest.mark.parametrize(
    "text", [PARAGRAPHS * 300, "```\n" + "a line of code\n" * 2000], ids=["paragraphs", "code"]
)
def test_each_part_of_a_long_answer_is_read_a_few_times_only(page: Tab, text: str) -> None:
    read, renderings = page.js(
        "(async () => { let read = 0; const original = readBlocks; readBlocks = (text) => { read += text.length; return original(text); };"
        f"const text = {json.dumps(text)}, view = new MarkdownView(document.createElement('div'));"
        "for (let at = 0; at < text.length; at += 40) { view.source += text.slice(at, at + 40); view.update(); }"
        "readBlocks = original; const first = read; view.clear(); view.source = '';"
        "for (let n = 0; n < 1000; n++) view.append('word ');"
        "await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);"
        "return [first, view.renderings]; })()"
    )
    assert read <= 6 * len(text)
    assert renderings == 1  # of a thousand words that came within a frame


@needs_browser
@pytest.mark.parametrize(
    "text",
    ["> " * 9000 + "x", "[" * 150_000, "_a__" * 40_000, "word " * 60_000, "- " * 9000],
    ids=["quotes", "brackets", "emphasis", "long", "lists"],
)
def test_odd_texts_are_shown_whole_and_soon(page: Tab, text: str) -> None:
    shown, milliseconds = page.js(
        "(() => { const box = document.createElement('div'), start = performance.now();"
        f"showMarkdown(box, {json.dumps(text)}); return [box.textContent, performance.now() - start]; }})()"
    )
    assert re.sub(r"\s|>|-", "", shown) == re.sub(r"\s|>|-", "", text)
    assert milliseconds < 10_000  # marked alone needs minutes for some of them


@needs_browser
def test_every_control_has_a_name(serve: Callable[..., Served], tab: Tab) -> None:
    open_page(tab, serve(b"```\nx\n```", names=("a", "b")))
    tab.js("attachFiles([new File(['x'], 'a.txt')])")
    ask(tab, "Hi")
    ask(tab, "Again", 2)
    nodes = tab.do("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "textbox", "combobox", "spinbutton", "log")
    roles = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in controls
    ]
    assert len(roles) > 12 and [role for role, name in roles if not name] == []
    assert tab.js("byId('announcement').getAttribute('aria-live')") == "polite"
    assert tab.js("byId('announcement').textContent.trim()").startswith("```")


@needs_browser
def test_the_keyboard_sends_stops_and_closes(serve: Callable[..., Served], tab: Tab) -> None:
    tab.size(375, 700)
    open_page(tab, serve(b"x" * 400))
    press(tab, "Conversations", 0)
    assert (
        tab.js(
            "byId('chats').contains(document.activeElement) && byId('showChats').getAttribute('aria-expanded')"
        )
        == "true"
    )
    escape = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    tab.js(escape)
    assert tab.js("document.activeElement.id") == "showChats"
    assert tab.js("getComputedStyle(byId('chats')).display") == "none"
    tab.js("byId('text').value = 'go'; byId('text').focus()")
    tab.do(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
    )
    tab.until("tokenTimes.length > 0")
    tab.js(escape)
    tab.until(WRITTEN.format(1))
    assert tab.js("document.querySelectorAll('.turn').length") == 2


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 375])
def test_the_page_fits_small_and_large_screens(
    serve: Callable[..., Served], tab: Tab, width: int, dark: bool
) -> None:
    tab.size(width, 700, dark)
    wide = "word" * 60
    reply = f"a long {wide}\n\n```\n{wide}\n```\n\n|{wide}|{wide}|\n|-|-|\n|1|2|\n\n`{wide}` https://example.com/{wide}"
    open_page(tab, serve(names=("tiny", "a-long-name" * 20)))
    answer_with(tab, {"choices": [{"delta": {"content": reply}}]})
    tab.js(f"attachFiles([new File(['x'], 'name{wide}.txt')])")
    ask(tab, "wide" * 100)
    tab.js(f"attachFiles([new File(['x'], 'name{wide}.txt')])")
    drawers = ("", "toggleDrawer('chats')", "toggleDrawer('panel')", "toggleDrawer('panel')")
    for number, drawer in enumerate(drawers):
        tab.js(drawer or "0")
        if number:
            tab.js("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.js("document.documentElement.scrollWidth") <= width
        # Tables and code scroll in frames of their own.
        right_edge = "Math.max(...[...document.querySelectorAll('body *:not(.wide *)')].map(one => one.getBoundingClientRect().right))"
        assert tab.js(right_edge) <= width + 1
        assert tab.js("byId('log').scrollWidth <= byId('log').clientWidth")
        box = tab.js("byId('send').getBoundingClientRect().toJSON()")
        assert box["top"] >= 0 and box["bottom"] <= 700 and box["right"] <= width
        assert tab.js("byId('log').clientHeight") >= 120
    background, foreground = (
        sum(map(int, re.findall(r"\d+", tab.js(f"getComputedStyle(document.body).{name}"))[:3]))
        for name in ("backgroundColor", "color")
    )
    assert (background < 150) == dark and abs(background - foreground) > 450
