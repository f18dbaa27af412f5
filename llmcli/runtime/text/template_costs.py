"""What the filters, tests and methods of chat templates cost. Each is charged before it is computed
(template_budget.py). A filter, test or method that has no cost here is not available.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from llmcli.runtime.text.template_budget import (
    ENTRY_COST,
    ITEM_COST,
    SCAN_RATE,
    LazyItems,
    TemplateBudget,
    TemplateBudgetExceeded,
    check_integer,
    is_container,
    text_size,
)

MAX_NUMBER_CHARACTERS = 4096  # longest text that is read as a number
MAX_ATTRIBUTE_CHARACTERS = 1000  # longest path of attributes, such as "function.name"
MAX_PADDED_WIDTH = 99  # of a field in a format
# A printf format with `*`, or a number of three digits, as its width or precision. It could build a
# text of any length.
PADDED_FORMAT = re.compile(r"[%)][-+ #0]*(?:[*]|\d{3})|[.](?:[*]|\d{3})")

# Charges the budget for a value and the further arguments of a filter, test or method.
Cost = Callable[..., None]


def charge_nothing(budget: TemplateBudget, *args: Any, **options: Any) -> None:
    """Check only the time, for an operation whose time and memory do not depend on the values."""
    budget.check_time()


def text_cost(factor: int) -> Cost:
    """Return a cost of `factor` times the characters of the value and of the arguments as text."""

    def charge(budget: TemplateBudget, *args: Any, **options: Any) -> None:
        budget.charge_text_of(*args, *options.values(), factor=factor)

    return charge


def charge_scan(budget: TemplateBudget, value: str, *args: Any, **options: Any) -> None:
    """Charge a method that reads a text and builds none."""
    budget.charge(len(value) // SCAN_RATE)
    budget.charge_text_of(*args, *options.values())


def charge_entries(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge a new list of the entries of the value: of the characters, if it is a text."""
    budget.charge_text_of(*args, *options.values())
    if isinstance(value, str):
        budget.charge(len(value) * (ITEM_COST + text_size(value) - len(value)))
    elif hasattr(value, "__len__"):
        budget.charge((ITEM_COST if isinstance(value, range) else ENTRY_COST) * len(value))


def charge_attribute(
    budget: TemplateBudget, value: Any, *args: Any, attribute: Any = None, **options: Any
) -> None:
    """Charge a filter that looks up an attribute of every entry, or applies a filter or test to it.
    The entries are charged when they are read.
    """
    for name in (attribute, *args):
        budget.check_key(name)
    for name in (attribute, *args[:1]):
        if isinstance(name, str) and len(name) > MAX_ATTRIBUTE_CHARACTERS:
            raise TemplateBudgetExceeded("the name of an attribute is too long")
    budget.charge_text_of(*args, *options.values())


def charge_compared_entries(
    budget: TemplateBudget, value: Any, *args: Any, attribute: Any = None, **options: Any
) -> None:
    """Charge a filter that compares the entries of the value with one another. Texts are compared
    in lower case, so all of them may be copied.
    """
    charge_attribute(budget, value, *args, attribute=attribute, **options)
    budget.check_entries(value)
    budget.charge_text_of(value, factor=16)
    charge_entries(budget, value)


def charge_number(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge a filter that reads a number. Raises TemplateBudgetExceeded for a very long one."""
    check_integer(value, *args, *options.values())
    if isinstance(value, str) and len(value) > MAX_NUMBER_CHARACTERS:
        raise TemplateBudgetExceeded("a number is too long")
    budget.check_time()


def charge_wrapped(
    budget: TemplateBudget, value: Any, width: Any = 79, *args: Any, **options: Any
) -> None:
    """Charge wordwrap(). Python copies the rest of a long word for each of its lines."""
    budget.charge_text_of(value, *args, *options.values(), factor=ITEM_COST)
    if isinstance(value, str):
        longest = max(map(len, value.split()), default=0)
        budget.charge(longest * longest // max(1, width if isinstance(width, int) else 1))


def charge_groups(
    budget: TemplateBudget, value: Any, count: Any = 0, *args: Any, **options: Any
) -> None:
    """Charge batch() and slice(): the entries, and the entries that fill up a group."""
    charge_entries(budget, value)
    budget.charge(ENTRY_COST * abs(count) if isinstance(count, int) else 0)


def charge_sum(
    budget: TemplateBudget, value: Any, attribute: Any = None, start: Any = 0, **options: Any
) -> None:
    """Charge sum(). The sum of lists copies all earlier entries for each list."""
    charge_attribute(budget, value, attribute=attribute)
    check_integer(start)
    size = len(value) if hasattr(value, "__len__") else 0
    budget.charge(ENTRY_COST * size)
    if not isinstance(start, (int, float)):
        budget.charge_text_of(value, start, factor=max(1, size))


def charge_tags(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge striptags(), which copies the text for every tag."""
    budget.charge_text_of(value)
    if isinstance(value, str):
        budget.charge(len(value) * (1 + value.count("<")))


def charge_words(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge urlize(). Its time grows with the square of the length of a word."""
    budget.charge_text_of(value, *args, *options.values(), factor=ITEM_COST)
    if isinstance(value, str):
        budget.charge(sum(len(word) ** 2 for word in value.split()))


def charge_indent(
    budget: TemplateBudget, value: Any, width: Any = 4, *args: Any, **options: Any
) -> None:
    """Charge indent(): `width` characters, or the text `width`, before every line."""
    budget.charge_text_of(value)
    if isinstance(value, str):
        size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
        budget.charge((ITEM_COST + max(0, size)) * (1 + value.count("\n")))


def charge_join(
    budget: TemplateBudget, value: Any, d: Any = "", *args: Any, **options: Any
) -> None:
    """Charge join(): the entries, and the separator between them."""
    charge_attribute(budget, None, *args, **options)
    budget.charge_text_of(value, d)
    if hasattr(value, "__len__") and isinstance(d, str):
        budget.charge(len(value) * text_size(d))


def charge_replace(
    budget: TemplateBudget, value: Any, old: Any = "", new: Any = "", *args: Any, **options: Any
) -> None:
    """Charge replace(): the value, and the new text for every old one in it."""
    budget.charge_text_of(value, old, new)
    if isinstance(value, str) and isinstance(old, str):
        size = text_size(new) if isinstance(new, str) else ITEM_COST
        budget.charge(value.count(old) * (ITEM_COST // 8 + size))
    elif not isinstance(value, str):
        budget.charge_text_of(value, new, factor=ITEM_COST)


def charge_format(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge a printf format with its arguments. Raises TemplateBudgetExceeded for a padding that
    is wide, or whose width is an argument.
    """
    if not isinstance(value, str):
        budget.charge_text_of(value, *args, *options.values())
        return
    fields = value.count("%")
    budget.charge(len(value) + fields * (MAX_PADDED_WIDTH + ITEM_COST))
    if PADDED_FORMAT.search(value):
        raise TemplateBudgetExceeded("a padded format string")
    # a value of a dictionary may be used by any number of fields
    if options or any(isinstance(argument, Mapping) for argument in args):
        budget.charge_text_of([*args, *options.values()], factor=fields)
    else:
        budget.charge_text_of(list(args))


def charge_json(
    budget: TemplateBudget, value: Any, ensure_ascii: Any = False, *args: Any, **options: Any
) -> None:
    """Charge the texts of a value as JSON, with up to twelve characters for one in ASCII. The
    filter itself charges every piece that it writes.
    """
    budget.charge_text_of(value, factor=12 if ensure_ascii else 1)


def charge_comparison(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge the comparison of a value with an argument."""
    for argument in args:
        budget.charge_comparison(value, argument)


def charge_search(budget: TemplateBudget, value: Any, values: Any = (), *args: Any) -> None:
    """Charge the test `in`."""
    budget.charge_search(value, values)


def charge_remainder(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge a test that computes `value % argument`, which formats a text."""
    check_integer(value, *args)
    charge_format(budget, value, *args)


def charge_name(budget: TemplateBudget, value: Any, *args: Any, **options: Any) -> None:
    """Charge a test that looks up the value as the name of a filter or a test."""
    budget.check_key(value)
    budget.check_time()


def charge_split(
    budget: TemplateBudget, value: str, sep: Any = None, *args: Any, **options: Any
) -> None:
    """Charge a method that splits a text: its characters, and a new text for every piece."""
    budget.charge_text_of(value, sep, *args, *options.values())
    pieces = value.count(sep) if isinstance(sep, str) and sep else len(value) // 2
    budget.charge((pieces + 1) * (ITEM_COST + text_size(value) - len(value)))


def charge_padding(budget: TemplateBudget, value: str, *args: Any, **options: Any) -> None:
    """Charge a method that pads a text to a width, or each tab in it."""
    budget.charge_text_of(value, *args, *options.values())
    widths = [width for width in (*args, *options.values()) if isinstance(width, int)]
    budget.charge(max(widths, default=8) * (1 + value.count("\t")))


def charge_joined(budget: TemplateBudget, separator: str, items: Any = (), *args: Any) -> None:
    """Charge the method join() of a separator."""
    charge_join(budget, items, separator)


FILTER_COSTS: Mapping[str, Cost] = {
    "abs": charge_number,
    "attr": charge_attribute,
    "batch": charge_groups,
    "capitalize": text_cost(3),
    "center": charge_padding,
    "count": charge_nothing,
    "d": charge_nothing,
    "default": charge_nothing,
    "dictsort": text_cost(16),
    "e": text_cost(6),
    "escape": text_cost(6),
    "filesizeformat": charge_number,
    "first": charge_nothing,
    "float": charge_number,
    "forceescape": text_cost(6),
    "format": charge_format,
    "groupby": charge_compared_entries,
    "indent": charge_indent,
    "int": charge_number,
    "items": charge_nothing,
    "join": charge_join,
    "last": charge_nothing,
    "length": charge_nothing,
    "list": charge_entries,
    "lower": text_cost(3),
    "map": charge_attribute,
    "max": charge_compared_entries,
    "min": charge_compared_entries,
    "pprint": text_cost(256),
    "random": charge_nothing,
    "reject": charge_attribute,
    "rejectattr": charge_attribute,
    "replace": charge_replace,
    "reverse": charge_entries,
    "round": charge_number,
    "safe": text_cost(1),
    "select": charge_attribute,
    "selectattr": charge_attribute,
    "slice": charge_groups,
    "sort": charge_compared_entries,
    "string": text_cost(1),
    "striptags": charge_tags,
    "sum": charge_sum,
    "title": text_cost(3),
    "tojson": charge_json,
    "trim": text_cost(1),
    "truncate": text_cost(1),
    "unique": charge_compared_entries,
    "upper": text_cost(3),
    "urlencode": text_cost(12),
    "urlize": charge_words,
    "wordcount": text_cost(ITEM_COST),
    "wordwrap": charge_wrapped,
    "xmlattr": text_cost(12),
}
# filters that read the entries of their value one by one
LAZY_FILTERS = frozenset(
    {"batch", "map", "reject", "rejectattr", "select", "selectattr", "slice", "sum"}
)
# filters for which all entries are charged before, so that they must be known
EAGER_FILTERS = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique"})
TEST_COSTS: Mapping[str, Cost] = {
    **dict.fromkeys(("!=", "<", "<=", "==", ">", ">="), charge_comparison),
    **dict.fromkeys(("eq", "equalto", "ge", "greaterthan", "gt"), charge_comparison),
    **dict.fromkeys(("le", "lessthan", "lt", "ne"), charge_comparison),
    **dict.fromkeys(("divisibleby", "even", "odd"), charge_remainder),
    **dict.fromkeys(("filter", "test"), charge_name),
    **dict.fromkeys(("lower", "upper"), text_cost(1)),
    "in": charge_search,
    **dict.fromkeys(("boolean", "callable", "defined", "escaped", "false"), charge_nothing),
    **dict.fromkeys(("float", "integer", "iterable", "mapping", "none"), charge_nothing),
    **dict.fromkeys(("number", "sameas", "sequence", "string", "true"), charge_nothing),
    "undefined": charge_nothing,
}
# methods of texts; format and format_map charge themselves
METHOD_COSTS: Mapping[str, Cost] = {
    **dict.fromkeys(("center", "expandtabs", "ljust", "rjust", "zfill"), charge_padding),
    **dict.fromkeys(("partition", "rpartition", "rsplit", "split", "splitlines"), charge_split),
    **dict.fromkeys(("capitalize", "casefold", "lower"), text_cost(3)),
    **dict.fromkeys(("swapcase", "title", "upper"), text_cost(3)),
    **dict.fromkeys(("lstrip", "removeprefix", "removesuffix", "rstrip", "strip"), text_cost(1)),
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex"), charge_scan),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit"), charge_scan),
    **dict.fromkeys(("isidentifier", "islower", "isnumeric", "isprintable"), charge_scan),
    **dict.fromkeys(("isspace", "istitle", "isupper"), charge_scan),
    **dict.fromkeys(("endswith", "startswith"), charge_scan),
    "join": charge_joined,
    "replace": charge_replace,
}


def charge_filters(
    budget: TemplateBudget, filters: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the filters that have a cost, each charged to `budget` before it is called. Lists that
    are read lazily are charged entry by entry.
    """

    def charge_first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = _context_arguments(function)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            values = list(args[skipped:])
            source = values[0] if values else None
            if name in EAGER_FILTERS and isinstance(source, Iterator):
                values[0] = list(source)
            FILTER_COSTS[name](budget, *values, **options)
            if name in LAZY_FILTERS and values and _has_entries(values[0]):
                values[0] = LazyItems(budget, iter(values[0]))
            result = function(*args[:skipped], *values, **options)
            return LazyItems(budget, result, source) if isinstance(result, Iterator) else result

        return call

    return {
        name: charge_first(name, function)
        for name, function in filters.items()
        if name in FILTER_COSTS
    }


def charge_tests(
    budget: TemplateBudget, tests: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the tests that have a cost, each charged to `budget` before it is called."""

    def charge_first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = _context_arguments(function)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            TEST_COSTS[name](budget, *args[skipped:], **options)
            return function(*args, **options)

        return call

    return {
        name: charge_first(name, function) for name, function in tests.items() if name in TEST_COSTS
    }


def _has_entries(value: Any) -> bool:
    """Return whether a value is a list, or something like it, that is not empty."""
    return (isinstance(value, (str, range)) or is_container(value)) and len(value) > 0


def _context_arguments(function: Callable[..., Any]) -> int:
    """Return how many arguments Jinja passes before the value: its context, or nothing."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0
