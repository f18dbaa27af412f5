"""Templates that try to run forever, or to fill the memory, end soon and stay small.

All of them are rendered in one child process, whose memory and computing time are limited.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.hardware import limited_process
from llmcli.hardware.limited_process import ProcessLimits, run_limited
from llmcli.runtime.text import chat_template
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.runtime.text.template_budget import TemplateBudget
from llmcli.types import Message

MAX_DATA_BYTES = 1 << 30
# A harmless template of nearly the largest size. No bomb may take longer than it takes to compile,
# on any machine. The limit of time of a rendering is reduced to 0.1 s.
HARMLESS, HARMLESS_SOURCE = "harmless", "{{ a }}" * 35_000

BIG = "{% set s = 'x' * 16000000 %}"
# Two lists that are equal, and have 2 ** 40 entries if they are followed along every path.
SHARED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
TUPLE = "{% set ns = namespace(a=(1,)) %}{% for i in range(40) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
DEEP = "{% set ns = namespace(a=(1,)) %}{% for i in range(20000) %}{% set ns.a = (ns.a,) %}{% endfor %}"
KEEP = "{% set ns = namespace(l=[]) %}{% for i in range(500) %}{% set ns.l = ns.l + [MORE] %}{% endfor %}"
HEX = "0x" + "f" * 100_000

BOMBS = {
    # long lists of small objects
    "characters": "{% set s = '\U0001f600' * 16000000 %}{{ (s | list) | length }}",
    "split": "{{ ('x ' * 8000000).split() | length }}",
    "split at": "{{ ('xy' * 8000000).split('y') | length }}",
    "rsplit": "{{ ('xy' * 8000000).rsplit(sep='y') | length }}",
    "splitlines": "{{ ('x\\n' * 8000000).splitlines() | length }}",
    "wordcount": "{{ ('x ' * 8000000) | wordcount }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "range": "{{ range(1000000000) | list | length }}",
    "extend": "{% set l = [1] %}{% for i in range(60) %}{{ l.extend(l) or '' }}{% endfor %}",
    "append": "{% set l = [] %}{% for i in range(99999) %}{% for j in range(99999) %}{{ l.append(1) or '' }}{% endfor %}{% endfor %}",
    "dict": "{% set ns = namespace(d={}) %}{% for i in range(99999) %}{% set ns.d = dict(ns.d, **{'k' ~ i: i}) %}{% endfor %}",
    "fromkeys": "{{ dict.fromkeys('x' * 8000000) | length }}",
    "varargs": "{% macro m() %}{{ varargs | length }}{% endmacro %}{% set l = [1] * 4000000 %}{% for i in range(5000) %}{{ m(*l) }}{% endfor %}",
    "cycle": "{% set l = [1] * 4000000 %}{% for x in [1] * 999 %}{{ loop.cycle(*l) }}{% endfor %}",
    # many copies of a long text or list
    "slices of a text": BIG + KEEP.replace("MORE", "s[i:]"),
    "slices of a list": "{% set s = [1] * 2000000 %}" + KEEP.replace("MORE", "s[i:]"),
    "upper": BIG + KEEP.replace("MORE", "s | upper"),
    "swapcase": BIG + KEEP.replace("MORE", "s.swapcase()"),
    "removeprefix": BIG + KEEP.replace("MORE", "s.removeprefix('x')"),
    "strip": BIG + KEEP.replace("MORE", "s.strip('y' ~ i)"),
    "set block": "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    # texts that grow
    "escape": "{{ ('&' * 16000000) | e | string | e | length }}",
    "markup": "{{ ('x' | safe).join(['&' * 1000000] * 99) | length }}",
    "tojson": "{{ ('\U0001f600' * 16000000) | tojson(true) | length }}",
    "tojson separators": "{{ ([1] * 1000000) | tojson(separators=('x' * 1000000, ':')) | length }}",
    "urlencode": "{{ ('\u20ac' * 8000000) | urlencode | length }}",
    "xmlattr": "{% set s = '&' * 8000000 %}{{ {'a': s, 'b': s} | xmlattr | length }}",
    "center": "{{ 'a' | center(2000000000) | length }}",
    "ljust": "{{ 'a'.ljust(2000000000) | length }}",
    "expandtabs": "{{ ('\\t' * 1000000).expandtabs(tabsize=100000) | length }}",
    "indent": "{{ ('x\\n' * 100000) | indent('y' * 100000) | length }}",
    "join": "{{ ('x' * 1000000).join((['a'] * 1000000) | map('string')) | length }}",
    "replace": "{% set s = 'x' * 1000000 %}{{ s | replace(old='', new=s) | length }}",
    "replace method": "{% set s = 'x' * 1000000 %}{{ s.replace('', s) | length }}",
    "format": "{% set s = 'x' * 4000000 %}{{ ('%(a)s' * 100000) % {'a': s} }}",
    "format filter": "{% set s = 'x' * 4000000 %}{{ ('%(a)s' * 100000) | format(a=s) }}",
    "format method": "{% set s = 'x' * 4000000 %}{{ ('{0}' * 100000).format(s) }}",
    "format map": "{% set s = 'x' * 4000000 %}{{ ('{a}' * 100000).format_map({'a': s}) }}",
    "format width": "{{ ('%99d' * 1000000) % ((1,) * 1000000) }}",
    "format nested width": "{{ '{:{}}'.format(1, 999999999) }}",
    "even": "{{ '%9999999999d' is even }}",
    "divisibleby": "{% set s = 'x' * 4000000 %}{{ ('%(a)s' * 100000) is divisibleby({'a': s}) }}",
    "strftime": "{{ strftime_now('%Y' * 4000000) | length }}",
    "sum": "{{ ([[1] * 10000] * 10000) | sum(start=[]) | length }}",
    # lists that contain one another
    **{
        f"shared {name}": SHARED + expression
        for name, expression in {
            "==": "{{ ns.a == ns.b }}",
            "<": "{{ ns.a < ns.b }}",
            "in": "{{ ns.a in [ns.b] }}",
            "is eq": "{{ ns.a is eq ns.b }}",
            "is in": "{{ ns.a is in [ns.b] }}",
            "is lower": "{{ ns.a is lower }}",
            "upper": "{{ ns.a | upper }}",
            "trim": "{{ ns.a | trim | length }}",
            "replace": "{{ ns.a | replace('1', '2') | length }}",
            "join": "{{ ns.a | join | length }}",
            "changed": "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
            "index": "{{ [ns.b].index(ns.a) }}",
            "sort": "{{ [ns.a, ns.b] | sort | length }}",
            "max": "{{ [ns.a, ns.b] | max | length }}",
            "select": "{{ [ns.a] | select('equalto', ns.b) | list | length }}",
            "selectattr": "{{ [{'x': ns.a}] | selectattr('x', 'in', [ns.b]) | list | length }}",
            "unique": "{{ [ns.a, ns.b] | unique | list | length }}",
            "groupby": "{{ [{'x': ns.a}, {'x': ns.b}] | groupby('x') | list | length }}",
            "dictsort": "{{ {'a': ns.a, 'b': ns.b} | dictsort(by='value') | length }}",
            "pprint": "{{ ns.a | pprint }}",
            "output": "{{ ns.a }}",
            "view": "{{ {'a': ns.a}.items() }}",
            "~": "{{ ns.a ~ 'x' }}",
            "%": "{{ '%s' % (ns.a,) }}",
            "format": "{{ '{}'.format(ns.a) }}",
            "tojson": "{{ ns.a | tojson }}",
            "raise": "{{ raise_exception(ns.a) }}",
        }.items()
    },
    "list in itself": "{% set l = [] %}{{ l.append(l) }}{{ l }}",
    # keys of dictionaries, whose hash follows tuples
    **{
        f"{size} tuple {name}": source + expression
        for size, source in {"shared": TUPLE, "deep": DEEP}.items()
        for name, expression in {
            "literal": "{{ {ns.a: 1} | length }}",
            "item": "{{ {1: 1}[ns.a] }}",
            "get": "{{ {1: 1}.get(ns.a) }}",
            "in": "{{ ns.a in {1: 1} }}",
            "dict": "{{ dict([(ns.a, 1)]) | length }}",
            "unique": "{{ [ns.a] | unique | list | length }}",
            "map": "{{ [1] | map(ns.a) | list }}",
            "filter": "{{ ns.a is filter }}",
            "attribute": "{{ [{}] | map(attribute=ns.a) | list }}",
        }.items()
    },
    "tuple of items": "{% set ns = namespace(a=1) %}{% for i in range(20000) %}{% set ns.a = {'x': ns.a}.items() | first %}{% endfor %}{{ {ns.a: 1} | length }}",
    "chained iterators": "{% set ns = namespace(a=[1]) %}{% for i in range(99999) %}{% set ns.a = ns.a | map('string') %}{% endfor %}done",
    # long numbers
    "long //": f"{{% set a = {HEX} %}}{{{{ a // {HEX[:5000]} }}}}",
    "int": "{% set a = ('f' * 4000000) | int(0, 16) %}{{ a % (('e' * 2000000) | int(0, 16)) }}",
    "growing number": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "round": "{{ 1 | round(100000000, 'ceil') }}",
    # long texts that are compared and searched
    "sort": "{% set s = 'x' * 1000000 %}{{ ([s] * 1000000) | sort | length }}",
    "sort with case": "{% set s = 'x' * 4000000 %}{{ ([s ~ 'a', s ~ 'b'] * 100000) | sort(case_sensitive=true) | length }}",
    "in": "{% set s = 'x' * 4000000 %}{{ (s ~ 'a') in [s ~ 'b'] * 1000000 }}",
    "index": "{% set s = 'x' * 4000000 %}{{ ([s ~ 'b'] * 1000000).index(s ~ 'a') }}",
    "startswith": "{% set s = 'x' * 4000000 %}{{ s.startswith((s ~ 'b',) * 1000000) }}",
    "find": BIG + "{{ s.find('y') }}" * 2000,
    "isalpha": BIG + "{{ s.isalpha() }}" * 2000,
    "equal": BIG + "{% set t = s ~ '' %}" + "{{ s == t }}" * 2000,
    "path": "{{ ([{'a': 1}] * 1000000) | map(attribute='a."
    + "a." * 50000
    + "a') | list | length }}",
    "reject": "{% set l = [1] * 2000000 %}" + "{{ l | reject('equalto', 1) | list }}" * 20,
    "wordwrap": "{{ ('x' * 2000000) | wordwrap(1) | length }}",
    "striptags": "{{ ('<!-- -->' * 300000) | striptags | length }}",
    "urlize": "{{ ('(' * 200000 ~ ')' * 200000) | urlize | length }}",
    # loops and calls
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "statements": "{% for i in range(99999) %}" + "{% set a = 1 %}" * 3000 + "{% endfor %}",
    "recursive loop": "{% set l = [1] * 4000000 %}{% for x in [1] recursive %}{% if loop.depth == 1 %}{{ loop(l) }}{% endif %}"
    + "{% set q = x %}" * 2000
    + "{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "caller": "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{{ caller() }}{{ caller() }}{% endcall %}{% endif %}{% endmacro %}{% call m(40) %}x{% endcall %}",
    # templates that take long to compile
    "long template": "x" * 30_000_000,
    "many tags": "{{ 1 }}" * 1_000_000,
    "parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "not": "{{ " + "not " * 50000 + "1 }}",
    "sum of ones": "{{ " + "1+" * 50000 + "1 }}",
    "filters": "{{ 'x'" + "|upper" * 30000 + " }}",
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 15000 + "{% endif %}",
    "names": "".join(f"{{% set a{i} = 1 %}}" for i in range(10000)),
    "nested loops": "{% for a in b if a %}" * 15 + "{% endfor %}" * 15,
    "nested macros": "{% macro m(a) %}" * 30 + "{% endmacro %}" * 30,
    "nested conditions": "{% if a %}x{% else %}" * 200 + "{% endif %}" * 200,
    "open comments": "{#" * 100_000,
    "open braces": "{" * 250_000,
    "open text": "{{ '" + "\\x" * 100_000,
    "spaces": "{%-" + " " * 250_000,
}
RENDER_ALL = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from llmcli.hardware.limited_process import ProcessLimits, apply_limits
from llmcli.errors import UserError
from llmcli.runtime.text import template_budget
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Message
import resource
apply_limits(ProcessLimits(int(sys.argv[2]), 600, 0))
template_budget.MAX_SECONDS = 0.1
for name, source in json.load(sys.stdin).items():
    print(json.dumps([name, None, 0]), flush=True)
    begin = time.process_time()
    try:
        ending = "result " + ChatTemplate(source).render_as_sent([Message("user", "hi")])[:40]
    except UserError as error:
        ending = str(error)[:100]
    print(json.dumps([name, ending, time.process_time() - begin]), flush=True)
"""


@dataclass(frozen=True)
class Ending:
    """How a rendering ended, and its computing time. `message`: "" if it ended the process."""

    message: str
    cpu_seconds: float


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    """How each bomb ended. The process is started again after one that ends it."""
    root = str(Path(limited_process.__file__).parents[2])
    limits = ProcessLimits(MAX_DATA_BYTES, 600, 3000.0)
    results: dict[str, Ending] = {}
    sources = {HARMLESS: HARMLESS_SOURCE} | BOMBS
    while remaining := {name: text for name, text in sources.items() if name not in results}:
        outcome = run_limited(
            [sys.executable, "-c", RENDER_ALL, root, str(MAX_DATA_BYTES)],
            json.dumps(remaining).encode(),
            limits,
            dict(os.environ),
        )
        assert outcome.output, outcome.errors
        for line in outcome.output.splitlines():
            name, message, cpu_seconds = json.loads(line)
            results[name] = Ending(message or "", cpu_seconds)
    return results


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_bomb_ends_within_its_limits(name: str, endings: dict[str, Ending]) -> None:
    ending = endings[name]
    assert ending.message.startswith(("the chat template ", "result ")), "the process ended"
    assert "MemoryError" not in ending.message
    assert ending.cpu_seconds < endings[HARMLESS].cpu_seconds


def test_a_broken_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request for an answer renders it again, and a large one takes seconds."""
    n_compiled = 0
    make_environment = chat_template.make_environment

    def count(budget: TemplateBudget) -> Any:
        nonlocal n_compiled
        n_compiled += 1
        return make_environment(budget)

    monkeypatch.setattr(chat_template, "make_environment", count)
    for source in ("{% if a %}", "{{ " + "1+" * 5000 + "1 }}", "{{ " + "(" * 5000):
        template, n_compiled = ChatTemplate(source), 0
        for _ in range(3):
            with pytest.raises(UserError, match="the chat template is broken"):
                template.render([Message("user", "hi")])
            with pytest.raises(UserError, match="the chat template is broken"):
                template.check()
        assert n_compiled == 2  # one of them finds the variables


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 3 > 2 > 1 }}", "TrueFalseTrue"),
        ("{{ 'a' in 'cat' }}{{ 2 not in [1, 3] }}{{ 'k' in {'k': 1} }}", "TrueTrueTrue"),
        ("{{ [1, [2, 3]] == [1, [2, 3]] }}{{ (1, 2) != (1, 2) }}", "TrueFalse"),
        ("{{ [1, 2, 3, 4][1:3] }}{{ 'hello'[::-1] }}{{ (1, 2, 3)[:2] }}", "[2, 3]olleh(1, 2)"),
        ("{{ {'a': 1, 2: 'b', (1, 2): 'c'}[(1, 2)] }}", "c"),
        ("{{ dict([('a', 1)], b=2) }}{{ dict({'c': 3}) }}", "{'a': 1, 'b': 2}{'c': 3}"),
        ("{% set ns = namespace({'x': 1}, y=2) %}{{ ns.x + ns.y }}", "3"),
        ("{{ range(3) | list }}{{ range(5)[2] }}{{ range(4) | length }}", "[0, 1, 2]24"),
        ("{{ 5 in range(9) }}{% for i in range(3, 0, -1) %}{{ i }}{% endfor %}", "True321"),
        ("{{ 1e999 }}{{ -1e999 }}{{ 5 if 1e999 > 3 else 2 }}", "inf-inf5"),
        ("{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 - 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}", "33.5531024"),
        (
            "{% for x in [{'n': 'a', 'c': [{'n': 'b', 'c': []}]}] recursive %}"
            "{{ x.n }}{{ loop(x.c) }}{% endfor %}",
            "ab",
        ),
        ("{{ ['b', 'A'] | sort | join }}{{ [3, 1] | max }}", "Ab3"),
        ("{{ [1, 2, 3] | select('gt', 1) | map('string') | join('-') }}", "2-3"),
        ("{{ {'b': 1, 'a': 2}.keys() | sort | join }}", "ab"),
        ("{% for x in ['a', 'a', 'b'] %}{{ x if loop.changed(x) }}{% endfor %}", "ab"),
        ("{{ '%5.1f|%-4s|%03d' % (2.25, 'a', 7) }}", "  2.2|a   |007"),
    ],
)
def test_expressions_mean_what_they_mean_in_transformers(expression: str, expected: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    assert ChatTemplate(expression).render_as_sent([Message("user", "hi")]) == expected
    if "1e999" not in expression:  # transformers has no name for infinity
        assert _compile_jinja_template(expression).render() == expected
