"""Chat templates are rendered as in transformers, inside a sandbox with limits."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace

import pytest

from llmcli.errors import UserError
from llmcli.runtime.text import template_budget
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Message

# A loop that makes a value longer in each iteration, and a macro that repeats its argument.
GROWING = (
    "{% macro both(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(s='aaaa') %}"
    "{% for i in range(60) %}{% set ns.s = MORE %}{% endfor %}"
)
HELLO = [Message("user", "hi")]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chatml_template():
    text = ChatTemplate(CHATML).render([Message("system", "be kind"), *HELLO])
    assert (
        text
        == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_json_in_a_template_is_not_escaped_for_html():
    assert (
        ChatTemplate("{{ messages[0].content | tojson }}").render([Message("user", "<a> & é")])
        == '"<a> & é"'
    )


def test_functions_and_extensions_of_transformers_are_available():
    source = (
        "{%- for m in messages -%}{{ m.content }}{%- if loop.first -%}{%- continue -%}{%- endif -%}.{%- endfor -%}"
        "{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source).render([*HELLO, Message("user", "second")]) == "hisecond.4"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in %}", "line 1"),
        ("{% generation %}a", "line 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ missing.thing }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10**8) %}{% endfor %}", "asks for too much"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "asks for too much",
        ),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ [0] * 10**9 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ '%999999999d' % 1 }}", "padded"),
        ("{{ messages[0].content.spans[0] }}", "SecurityError"),
        ("{{ 'a'.ljust(10**10) }}", "too large"),
        ("{{ messages[0].content.zfill(10**10) }}", "too large"),
        ("{{ 'a' | center(10**10) }}", "too large"),
        ("{{ 'a' | indent(10**10, true) }}", "too large"),
        ("{{ '{:>9999999999}'.format(1) }}", "padded"),
        ("{{ '{:{}}'.format(1, 9999999999) }}", "padded"),
        ("{{ '%999999999d' | format(1) }}", "padded"),
        ("{% set x = 1e999 %}{{ x }}", "leaves out message 1"),
        ("{% set l = [1] %}{% for i in l %}{{ l.append(i) }}{% endfor %}", "asks for too much"),
        ("{{ [[1] * 100000] * 1000 | sum(start=[]) }}", "TypeError"),
        ("{{ ([[1] * 100000] * 1000) | sum(start=[]) }}", "asks for too much"),
        ("{{ ('a ' * 10000000) | list }}", "asks for too much"),
        ("{{ ('a ' * 10000000).split(' ') }}", "too large"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        (
            "{% set l = 'a' * 999999 %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
            "asks for too much",
        ),
        (
            "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            "asks for too much",
        ),
        (
            "{% for a in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
            "asks for too much",
        ),
        (GROWING.replace("MORE", "ns.s ~ ns.s"), "too large"),
        (GROWING.replace("MORE", "[ns.s] | string ~ [ns.s]"), "too large"),
        (GROWING.replace("MORE", "[ns.s, ns.s]") + "{{ ns.s | tojson }}", "asks for too much"),
        (GROWING.replace("MORE", "[ns.s, ns.s]") + "{{ ns.s }}", "asks for too much"),
        (GROWING.replace("MORE", "[ns.s, ns.s]") + "{{ ns }}", "asks for too much"),
        (GROWING.replace("MORE", "both(ns.s)"), "too large"),
        ("{{ range(10**9) | list }}", "asks for too much"),
        ("{{ (['a' * 1000000] * 3000) | join }}", "too large"),
        ("{{ ''.join(['a' * 1000000] * 3000) }}", "too large"),
        ("{% set l = 'a' * 100000 %}{{ l | replace('a', l) }}", "too large"),
        ("{% set l = 'a' * 100000 %}{{ l.replace('a', l) }}", "too large"),
        ("{{ ('\\n' * 1000000) | indent(64, true, true) }}", "too large"),
        ("{{ '%*d' % (10**9, 1) }}", "padded"),
        ("{{ '%(a)999999999d' % {'a': 1} }}", "padded"),
        ("{{ 'a'.encode().ljust(10**9) }}", "SecurityError"),
        ("{{ (1).to_bytes(10**9, 'big') }}", "SecurityError"),
        ("{{ [1] | batch(10**9, 0) | list }}", "too large"),
        ("{{ [1] | slice(10**9) | list }}", "asks for too much"),
        ("{{ 1.5 | round(10**8, 'ceil') }}", "too large"),
        ("{{ lipsum(n=10**6) }}", "lipsum"),
        ("{% for i in [1] %}" * 150 + "{% endfor %}" * 150, "Error"),
        (
            "{% for i in range(100000) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
            "too long",
        ),
    ],
)
def test_hostile_or_broken_template_is_an_error(source, message, monkeypatch):
    # a template that is refused for its size must not reach the time limit on a slow machine
    monkeypatch.setattr(
        "llmcli.runtime.text.template_budget.MAX_SECONDS",
        0.3 if message == "asks for too much" else 600,
    )
    with pytest.raises(UserError, match="template") as caught:
        ChatTemplate(source).render(HELLO)
    assert message in str(caught.value)
    assert "--raw" in caught.value.hint


GENERATION = {
    "an answer": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}<e>\n"
        "{% endgeneration %}{% else %}<u>{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    ),
    "whitespace": (
        "{%- for m in messages %}\n  {%- generation -%}\n {{ m.content }}\n {% endgeneration %}\n\n{% endfor %}"
    ),
    "names": (
        "{% set x = 'out' %}{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}{% set x = 'in' %}"
        "{% set ns.n = ns.n + loop.index %}{{ x }}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}{{ ns.n }}"
    ),
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation_blocks_are_rendered_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        Message("user", "hi"),
        Message("assistant", "<hello> & you"),
        Message("user", "more"),
    ]
    dictionaries = [[{"role": message.role, "content": message.content} for message in messages]]
    (expected,), _ = render_jinja_template(
        dictionaries, chat_template=GENERATION[name], add_generation_prompt=True
    )
    assert ChatTemplate(GENERATION[name]).render(messages) == expected


def test_long_conversation_may_be_built_in_small_steps():
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ m.role + m.content %}"
        "{% endfor %}{{ ns.text | replace('user', 'U') | trim }}{{ messages | map(attribute='role') | unique | join }}"
    )
    messages = [Message("user", "word " * 1000)] * 60
    assert (
        ChatTemplate(source).render(messages)
        == ("U" + "word " * 1000) * 59 + "U" + ("word " * 1000).strip() + "user"
    )


def test_template_that_drops_the_system_message_is_detected():
    assert ChatTemplate(CHATML).accepts_system()
    assert not ChatTemplate("{{ messages[-1].content }}").accepts_system()
    assert not ChatTemplate(
        "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    ).accepts_system()


def calling(*arguments: str, text: str = "") -> Message:
    """Return an assistant's message with a call of `clock` for each of `arguments`."""
    calls = [
        {
            "id": f"call{number}",
            "type": "function",
            "function": {"name": "clock", "arguments": argument},
        }
        for number, argument in enumerate(arguments)
    ]
    return Message("assistant", text, {"tool_calls": calls})


RESULTS = [Message("tool", f"r{number}", {"tool_call_id": f"call{number}"}) for number in range(2)]
ROME, OSLO = '{"city": "Rome"}', '{"city":"Oslo"}'
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
EACH = "{% for m in messages %}[{{ m.role }}]BODY{% endfor %}"
CALLS = EACH.replace(
    "BODY",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} ARGUMENTS>{% endfor %}",
)
WITH_JSON = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        # the content is a list of parts, for users and for the system
        (
            EACH.replace("BODY", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
            [Message("system", "be kind"), *HELLO],
            "[system]be kind[user]hi",
        ),
        (
            EACH.replace(
                "BODY",
                "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}",
            ),
            [Message("system", "be kind"), *HELLO, Message("assistant", "yes")],
            "[system]be kind[user]hi[assistant]yes",
        ),
        # arguments as an object, as text, and as Python would write an object
        (WITH_JSON, [*HELLO, calling(OSLO)], '[user]hi[assistant]<clock {"city": "Oslo"}>'),
        (
            CALLS.replace("ARGUMENTS", "{{ '' + c.function.arguments }}"),
            [*HELLO, calling(OSLO)],
            '[user]hi[assistant]<clock {"city":"Oslo"}>',
        ),
        (
            CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}"),
            [*HELLO, calling(OSLO)],
            '[user]hi[assistant]<clock {"city":"Oslo"}>',
        ),
        # calls only where the content is null, and arguments as text
        (
            EACH.replace(
                "BODY",
                "{% if m.content is none %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments }}"
                "{{ c.function.name }}{% endfor %}{% else %}{{ m.content }}{% endif %}",
            ),
            [*HELLO, calling(OSLO)],
            '[user]hi[assistant]<{"city":"Oslo"}clock',
        ),
        # a text beside calls that the template would leave out
        (
            EACH.replace(
                "BODY",
                "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}",
            ),
            [*HELLO, calling(OSLO, text="look")],
            '[user]hi[assistant]look[assistant][{"id": "call0", "type": "function", '
            '"function": {"name": "clock", "arguments": {"city": "Oslo"}}}]',
        ),
        # one call a message
        (
            EACH.replace(
                "BODY",
                "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
                "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
                "<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}",
            ),
            [*HELLO, calling(ROME, OSLO), *RESULTS],
            "[user]hi[assistant]<clock Rome>[tool]r0[assistant]<clock Oslo>[tool]r1",
        ),
        # roles that take turns
        (
            EACH.replace(
                "BODY",
                "{% if loop.previtem is defined and loop.previtem.role == m.role %}"
                "{{ raise_exception('take turns') }}{% endif %}{{ m.content }}",
            ),
            [*HELLO, *HELLO, Message("assistant", "a"), Message("assistant", "b"), *HELLO],
            "[user]hi\n\nhi[assistant]a\n\nb[user]hi",
        ),
        # no system role
        (
            EACH.replace(
                "BODY",
                "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}",
            ),
            [Message("system", "be kind"), *HELLO],
            "[user]be kind\n\nhi",
        ),
        # functions are expected although there are none
        ("{% for t in tools %}{% endfor %}{{ messages[0].content }}", HELLO, "hi"),
        ("{{ '' + functions }}{{ messages[0].content }}", HELLO, "hi"),
        # a byte-order mark at the beginning
        ("\ufeff" + EACH.replace("BODY", "{{ m.content }}"), HELLO, "[user]hi"),
        # lists that the template makes itself may be changed
        (
            "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set _ = ns.l.append(m.content) %}"
            "{% endfor %}{{ ns.l.pop(0) }}",
            HELLO,
            "hi",
        ),
        # the thinking of earlier answers has two names
        (
            EACH.replace("BODY", "{{ m.thinking }}{{ m.content }}"),
            [*HELLO, Message("assistant", "yes", {"reasoning_content": "hm "})],
            "[user]hi[assistant]hm yes",
        ),
    ],
)
def test_a_conversation_is_given_in_the_form_that_the_template_expects(
    source, messages, prompt
) -> None:
    template = ChatTemplate(source)
    for _ in range(2):  # the form is remembered
        assert template.render(messages) == prompt


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{% if false %}{% endif %}A:", HELLO, "leaves out message 1 (user)"),
        ("{{ messages[-1].content }}", [*HELLO, Message("assistant", "a"), *HELLO], "message 1"),
        (
            EACH.replace("BODY", "{{ m.content }}"),
            [*HELLO, calling(ROME)],
            "leaves out the call of clock in message 2 (assistant)",
        ),
        (
            EACH.replace(
                "BODY",
                "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
            ),
            [*HELLO, calling(ROME)],
            "leaves out the arguments of the call of clock",
        ),
        (
            EACH.replace("BODY", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"),
            [*HELLO, Message("assistant", "a"), RESULTS[0]],
            "leaves out message 3 (tool)",
        ),
        ("{{ messages[0].content | length }}", HELLO, "leaves out message 1"),
        ("{{ [messages[0].content] }}", HELLO, "leaves out message 1"),
    ],
)
def test_a_prompt_without_a_text_of_the_conversation_is_refused(source, messages, message) -> None:
    with pytest.raises(UserError, match="chat template") as caught:
        ChatTemplate(source).render(messages)
    assert message in str(caught.value)
    assert "--chat-template" in caught.value.hint


def test_functions_that_the_template_does_not_show_are_refused() -> None:
    shown = "{{ messages[0].content }}{% if tools %}BODY{% endif %}"
    for body in ("{{ tools | tojson }}", "{{ tools }}", "{{ tools[0].function.name }}"):
        assert "clock" in ChatTemplate(shown.replace("BODY", body)).render(HELLO, {"tools": TOOLS})
    with pytest.raises(UserError, match="leaves out the function clock"):
        ChatTemplate(shown.replace("BODY", "{{ tools | length }}")).render(HELLO, {"tools": TOOLS})


def test_white_space_and_earlier_thinking_may_be_left_out() -> None:
    messages = [
        Message("user", " \n"),
        Message("assistant", "yes", {"reasoning_content": "hm"}),
        Message("user", ""),
    ]
    source = EACH.replace("BODY", "{{ m.content | trim }}")
    assert ChatTemplate(source).render(messages) == "[user][assistant]yes[user]"


def test_the_spans_of_a_prompt_are_the_words_of_the_client() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<e>{% endfor %}"
        "{{ tools | tojson }}{{ extra }}"
    )
    prompt = ChatTemplate(source, bos="<s>").render(
        [Message("user", " <e> ")], {"tools": [{"name": "<s>"}], "extra": "<e>"}
    )
    assert prompt == '<s><|user|><e><e>[{"name": "<s>"}]<e>'
    assert [prompt.plain[start:end] for start, end, _ in prompt.spans] == [
        "<e>",
        '{"name": "<s>"}',
        "<e>",
    ]


def test_a_continued_message_ends_the_prompt() -> None:
    source = EACH.replace("BODY", "{{ m.content }}<e>")
    messages = [*HELLO, Message("assistant", "hi, a ")]
    prompt = ChatTemplate(source).render(messages, add_generation_prompt=False, continues_last=True)
    assert prompt == "[user]hi<e>[assistant]hi, a"


def test_named_templates_are_used_with_tools_and_with_documents() -> None:
    template = ChatTemplate("main", bos="<s>", named={"tool_use": "tools", "rag": "documents"})
    template.reasoning = True
    assert template.select() is template
    assert template.select(has_tools=True).source == "tools"
    assert template.select(has_tools=True, has_documents=True).source == "tools"
    documents = template.select(has_documents=True)
    assert (documents.source, documents.bos, documents.reasoning) == ("documents", "<s>", True)
    assert template.select(has_documents=True) is documents
    assert ChatTemplate("main").select(has_tools=True).source == "main"


def test_variables_with_todays_date() -> None:
    prompt = ChatTemplate("{{ date_string }} {{ messages[0].content }}").render(HELLO)
    today = datetime.now().astimezone()
    assert prompt in {f"{day:%d %b %Y} hi" for day in (today, datetime.now().astimezone())}
    given = ChatTemplate("{{ date_string }} {{ messages[0].content }}").render(
        HELLO, {"date_string": "never"}
    )
    assert given == "never hi"


def test_switches_of_thinking_have_the_values_that_templates_expect() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ thinking_option }}{{ thinking_mode }}")
    assert template.thinking_values(True) == {
        "enable_thinking": True,
        "thinking_option": "on",
        "thinking_mode": "enabled",
    }
    assert template.thinking_values(False)["thinking_mode"] == "disabled"
    assert template.thinking_values(None) == {}


def test_a_template_that_never_shows_calls_is_not_tried_in_every_form_again(monkeypatch) -> None:
    template = ChatTemplate(EACH.replace("BODY", "{{ m.content }}"))
    tried = []
    render_layout = ChatTemplate._render_layout

    def counted(self, conversation, form, *others):
        tried.append(form)
        return render_layout(self, conversation, form, *others)

    monkeypatch.setattr(ChatTemplate, "_render_layout", counted)
    for _ in range(2):
        with pytest.raises(UserError):
            template.render([*HELLO, calling(ROME)], {"tools": TOOLS})
    assert len(tried) > 4
    before = len(tried)
    with pytest.raises(UserError):
        template.render([*HELLO, calling(OSLO)], {"tools": TOOLS})
    assert len(tried) == before + 1


def test_templates_are_rendered_in_several_threads_at_once() -> None:
    template = ChatTemplate(
        "{% for i in range(2000) %}{{ i }}{% endfor %}{{ messages[0].content }}"
    )
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([Message("user", f"n{n}")]), range(64)))
    assert [text.rpartition("n")[2] for text in texts] == [str(n) for n in range(64)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> itertools.count:
    """A clock that advances by a millisecond whenever a budget reads it."""
    readings = itertools.count()
    monkeypatch.setattr(
        template_budget, "time", SimpleNamespace(thread_time=lambda: next(readings) / 1000)
    )
    return readings


def test_each_rendering_has_its_own_time_limit(clock: itertools.count) -> None:
    steps = int(300 * template_budget.MAX_SECONDS)
    loop = f"{{% for i in range({steps}) %}}{{% endfor %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(loop)
    for _ in range(4):
        assert template.render(HELLO) == "hi"
    with pytest.raises(UserError, match="runs for more than"):
        ChatTemplate(loop * 4).render(HELLO)


def test_a_pause_of_the_machine_is_not_the_time_of_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = itertools.chain([0.0, 0.1], itertools.repeat(1e9))
    monkeypatch.setattr(template_budget, "time", SimpleNamespace(thread_time=readings.__next__))
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "hi"


def test_all_attempts_to_render_a_conversation_have_one_time_limit(clock: itertools.count) -> None:
    template = ChatTemplate("{% for i in range(100000) %}{% endfor %}{{ messages[0].content }}")
    messages = [Message("system", "be kind"), *HELLO, calling(ROME, text="yes"), *HELLO]
    for _ in range(2):
        before = next(clock)
        with pytest.raises(UserError, match="asks for too much"):
            template.render(messages)
        assert next(clock) - before < 1100 * template_budget.MAX_SECONDS
    assert not template.accepts_system()


def test_what_a_slow_conversation_could_not_show_is_tried_again(clock: itertools.count) -> None:
    wait = "{% for i in range(messages[0].content | length) %}{% endfor %}"
    arguments = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}"
    template = ChatTemplate(wait + CALLS.replace("ARGUMENTS", arguments))
    for size in (700, 1500):
        with pytest.raises(UserError):
            template.render([Message("user", "a" * size), calling(ROME)])
    prompt = template.render([*HELLO, calling(ROME)])
    assert prompt == f"[user]hi[assistant]<clock {ROME}>"


def test_a_template_that_had_no_time_is_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    with monkeypatch.context() as patch:
        patch.setattr(template_budget, "MAX_SECONDS", -1.0)
        with pytest.raises(UserError, match="asks for too much"):
            template.render(HELLO)
    assert template.render(HELLO) == "hi"


def test_a_chat_renders_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    render_layout = ChatTemplate._render_layout

    def counted(self, *values):
        count.append(values)
        return render_layout(self, *values)

    monkeypatch.setattr(ChatTemplate, "_render_layout", counted)
    template, messages, counts = ChatTemplate(CHATML), list[Message](), []
    for turn in range(4):
        messages.append(Message("user", f"question {turn}"))
        template.render(messages)
        counts.append(len(count))
        count.clear()
        messages.append(Message("assistant", f"answer {turn}"))
    # the first message of a role also shows in which form the template expects its content
    assert counts == [2, 2, 1, 1]


def test_the_variables_of_a_client_have_any_names() -> None:
    names = ("self", "variables", "continues_last", "deadline")
    source = "{{ messages[0].content }}{{ variables }}{{ continues_last }}{{ deadline }}"
    assert ChatTemplate(source).render(HELLO, dict.fromkeys(names, "x")) == "hixxx"
