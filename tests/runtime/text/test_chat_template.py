"""Chat templates are rendered as in transformers, inside a sandbox with limits."""

import pytest

from llmcli.errors import UserError
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
        "{%- for m in messages -%}{%- if loop.first -%}{%- continue -%}{%- endif -%}{{ m.content }}{%- endfor -%}"
        "{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source).render([*HELLO, Message("user", "second")]) == "second4"


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
        ("{{ 'a'.ljust(10**10) }}", "SecurityError"),
        ("{{ 'a' | center(10**10) }}", "center"),
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
        ("{{ [1] | batch(10**9, 0) | list }}", "batch"),
        ("{{ [1] | slice(10**9) | list }}", "slice"),
        ("{{ 1.5 | round(10**8, 'ceil') }}", "round"),
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
        "llmcli.runtime.text.jinja_sandbox.MAX_SECONDS",
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


def test_each_rendering_has_its_own_time_limit(monkeypatch):
    template = ChatTemplate("{% for i in range(3) %}{{ i }}{% endfor %}")
    template.render(HELLO)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    assert template.render(HELLO) == "012"


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
