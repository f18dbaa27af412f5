"""The filters, tests and methods of templates give what transformers gives, and their results keep
the sources of texts.
"""

import re
from typing import Any

import jinja2.filters
import jinja2.tests
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from llmcli.runtime.text.jinja_sandbox import TEXT_METHODS, make_environment
from llmcli.runtime.text.template_budget import TemplateBudget
from llmcli.runtime.text.tracked_text import TrackedText, join_texts, track_value

# The client's texts have capital letters, the expressions have none.
VALUES: dict[str, Any] = {
    "t": "HELLO <B>\nWORLD",
    "w": "ÉCOLE & STRASSE",
    "l": ["B", "A", "C", "A"],
    "d": {"K": "V", "A": ["X", 1, None, 2.5]},
    "ds": [{"N": "X", "k": 2}, {"N": "Y", "k": 1}, {"N": "X", "k": 3}],
    "n": [3, 1, 2],
}
# words with capital letters that Jinja writes
OWN_WORDS = re.compile("True|False|None|MB")
EXPRESSIONS = """
-3 | abs
d | attr('missing') is defined
l | batch(3, 'z') | list
t | capitalize
'a' | center(5) ~ (t | center(40))
t | count
missing | d(t)
t | default('x')
d | dictsort
{'b': t, 'a': w} | dictsort(false, 'value', true)
t | e
t | escape | upper
1234567 | filesizeformat
l | first ~ (t | first)
'1.5' | float
w | forceescape
'%s-%s' | format(t, w)
'%(a)s' | format(a=t)
t | format
ds | groupby('k') | map(attribute='grouper') | list
t | indent
t | indent(2, true, true)
t | indent('> ')
'42' | int
l | join(', ')
ds | join('+', attribute='N')
l | last ~ (t | last)
t | length
t | list | join('.')
t | lower
d | items | list
ds | map(attribute='N') | list
l | map('lower') | join
n | min ~ (n | max) ~ (l | min) ~ (l | max)
d | pprint
n | reject('odd') | list
ds | rejectattr('N', 'equalto', 'X') | list
t | replace('L', 'll')
'axb' | replace('x', t)
t | replace('L', w, 1)
t | reverse ~ (l | reverse | join)
2.567 | round(1) ~ (2.5 | round) ~ (2.1 | round(method='ceil'))
t | safe
n | select('odd') | list
ds | selectattr('N', 'in', ['X']) | map(attribute='k') | join(',')
n | slice(2) | list
n | sort ~ (l | sort(reverse=true) | join) ~ (ds | sort(attribute='k') | map(attribute='N') | join)
d | string
t | striptags
n | sum ~ (ds | sum(attribute='k')) ~ ([[1], [2]] | sum(start=[]))
w | title
d | tojson ~ (ds | tojson(indent=2)) ~ (t | tojson)
'  a ' | trim ~ (('-' ~ t ~ '-') | trim('-'))
t | truncate(8, true, '..') ~ (w | truncate(9))
l | unique | join
t | upper
w | urlencode
'see http://example.org ' ~ t | urlize
t | wordcount
w | wordwrap(6)
t | wordwrap(6, wrapstring='|')
'<a' ~ ({'class': w} | xmlattr) ~ '>'
t.split('\\n')[0] ~ t.split() | join('+') ~ t.rsplit(' ', 1)[1]
t.splitlines(true) | join('|')
t.partition('<') | join('|') ~ t.rpartition('O') | join('|')
t.strip('HD') ~ t.lstrip('H') ~ t.rstrip('D')
t.removeprefix('HELLO') ~ t.removesuffix('WORLD')
t.replace('L', 'l', 1) ~ 'x'.replace('x', t)
', '.join(l) ~ t.join(['a', 'b'])
t.title() ~ t.capitalize() ~ t.swapcase() ~ t.casefold() ~ w.lower() ~ t.upper()
'a'.center(5) ~ t.ljust(20) ~ t.rjust(20) ~ '7'.zfill(3) ~ t.expandtabs(4)
t.find('L') ~ t.rfind('L') ~ t.index('L') ~ t.count('L') ~ t.startswith('H') ~ t.endswith('D')
t.isupper() ~ t.isalpha() ~ '1'.isdigit() ~ 'a'.isidentifier() ~ 'a'.isprintable()
'{} and {}'.format(t, w) ~ '{0}{1!r}{0:>3}'.format('a', t) ~ '{a[K]}'.format(a=d)
'{a}'.format_map({'a': t}) ~ '{:>{}}'.format('a', 5)
'%s: %r %d%%' % (t, w, 5)
'%(a)s %(b)5.1f' % {'a': t, 'b': 2}
t + w ~ t * 2 ~ [1] + [2] ~ t[1:4] ~ t[-1] ~ t[::-1] ~ t[0:9:2]
d ~ l ~ {'a': t} ~ (1, 2) ~ none ~ true ~ missing
d.A[0] ~ d['A'] ~ d.get('K') ~ d.keys() | list ~ d.values() | list | string
'E' in t and t is string and d is mapping and l is sequence and l is iterable and 1 is number
t is upper or t is lower or t is none or 3 is odd or 4 is divisibleby(2) or t is sameas t
1 is integer and 1.5 is float and true is boolean and l is not string and 2 is gt(1)
namespace(a=t).a ~ dict(a=t)['a'] ~ cycler('a', t).next()
""".strip().splitlines()


def render(expression: str) -> str:
    """Return the value of an expression as our environment writes it."""
    budget = TemplateBudget()
    budget.start_prompt()
    budget.start_rendering(10_000)
    template = make_environment(budget).from_string("{{ " + expression + " }}")
    return join_texts(list(template.generate(track_value(VALUES, 1))))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_have_the_value_that_transformers_gives(expression: str) -> None:
    expected = _compile_jinja_template("{{ " + expression + " }}").render(**VALUES)
    result = render(expression)
    assert result == expected
    spans = result.spans if isinstance(result, TrackedText) else ()
    inside = {index for start, end, _ in spans for index in range(start, end)}
    own = "".join(letter for index, letter in enumerate(result) if index not in inside)
    assert not [letter for letter in OWN_WORDS.sub("", own) if letter.isupper()]


def test_all_filters_and_tests_of_jinja_exist() -> None:
    environment = make_environment(TemplateBudget())
    assert set(environment.filters) == set(jinja2.filters.FILTERS)
    assert set(environment.tests) == set(jinja2.tests.TESTS)
    used = " ".join(EXPRESSIONS)
    assert not [
        name
        for name in jinja2.filters.FILTERS
        if name not in ("random", "safe") and f"| {name}" not in used
    ]


METHOD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), (3,)),
    **dict.fromkeys(("count", "endswith", "find", "index", "rfind", "rindex"), ("a",)),
    **dict.fromkeys(("partition", "rpartition", "removeprefix", "removesuffix"), ("a",)),
    "startswith": ("a",),
    "join": (("a",),),
    "replace": ("a", "b"),
}


def test_all_methods_that_return_text_are_those_of_tracked_text() -> None:
    results = {name: getattr("a", name)(*METHOD_ARGUMENTS.get(name, ())) for name in TEXT_METHODS}
    returning_text = {
        name for name, result in results.items() if isinstance(result, (str, list, tuple))
    }
    assert returning_text <= set(vars(TrackedText))
