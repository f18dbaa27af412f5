"""The formatting of texts in chat templates: `"%s" % value` and `"{}".format(value)`. Values keep
their sources, and the text around them stays the template's own.
"""

import itertools
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmcli.runtime.text.template_budget import (
    ITEM_COST,
    TemplateBudget,
    TemplateBudgetExceeded,
)
from llmcli.runtime.text.template_costs import MAX_PADDED_WIDTH, charge_format
from llmcli.runtime.text.tracked_text import attribute_all, join_texts, sources_in
from llmcli.runtime.text.value_text import write_text

# A width or precision of three digits could build a text of any length.
PADDED_LAYOUT = re.compile(r"\d{3}")
PERCENT_FIELD = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<layout>[#0\- +]*\d*(?:\.\d*)?)[hlL]?(?P<type>.)", re.DOTALL
)
FieldReader = Callable[[str, Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]


def format_percent(text: str, values: Any, budget: TemplateBudget) -> str:
    """Return `text % values`. Raises TemplateBudgetExceeded for a padded format."""
    charge_format(budget, text, *(values if isinstance(values, tuple) else (values,)))
    result = str.__mod__(str.__str__(text), values)
    joined = join_texts(list(_percent_pieces(text, values)))
    return joined if joined == result else attribute_all(result, sources_in([text, values]))


def _percent_pieces(text: str, values: Any) -> Iterator[str]:
    """Yield the pieces of `text % values`: the text between fields, and the fields' values."""
    remaining = iter(values if isinstance(values, tuple) else [values])
    position = 0
    for match in PERCENT_FIELD.finditer(text):
        yield text[position : match.start()]
        position = match.end()
        if match["type"] == "%":
            yield "%"
            continue
        value = next(remaining) if match["key"] is None else values[match["key"]]
        written = write_text(value)
        if match["type"] == "s" and not match["layout"]:
            yield written
        else:
            field = str.__mod__(f"%{match['layout']}{match['type']}", (value,))
            yield attribute_all(field, sources_in(written))
    yield text[position:]


class TrackedFormatter(string.Formatter):
    """Formats as str.format does. `read_field` is Jinja's safe access to the fields' values."""

    def __init__(self, read_field: FieldReader, budget: TemplateBudget) -> None:
        self._read_field, self._budget = read_field, budget

    def format_text(self, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return `text.format(*args, **kwargs)`. Raises TemplateBudgetExceeded for a padded
        format.
        """
        fields = text.count("{")
        self._budget.charge(fields * (MAX_PADDED_WIDTH + ITEM_COST))
        # a value may be used by any number of fields
        self._budget.charge_text_of([text, *args, *kwargs.values()], factor=max(1, fields))
        result = join_texts(list(self._pieces(text, args, kwargs, itertools.count())))
        own_sources = sources_in(text)
        return attribute_all(result, own_sources + sources_in(result)) if own_sources else result

    def _pieces(
        self,
        text: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        numbers: Iterator[int],
    ) -> Iterator[str]:
        """Yield the pieces of a formatted text. `numbers`: those of fields without a number."""
        for literal, name, layout, conversion in self.parse(str.__str__(text)):
            yield literal
            if name is None:
                continue
            if re.match(r"$|[.\[]", name):
                name = f"{next(numbers)}{name}"
            value, _ = self._read_field(name, args, kwargs)
            layout = str.__str__(
                join_texts(list(self._pieces(layout or "", args, kwargs, numbers)))
            )
            if PADDED_LAYOUT.search(layout):
                raise TemplateBudgetExceeded("a padded format string")
            written = write_text(value)
            if not layout and conversion in (None, "s"):
                yield written
            else:
                field = self.format_field(self.convert_field(value, conversion), layout)
                yield attribute_all(field, sources_in(written))


def format_method(
    text: str, name: str, read_field: FieldReader, budget: TemplateBudget
) -> Callable[..., str]:
    """Return the method `name` of a text: format or format_map."""
    formatter = TrackedFormatter(read_field, budget)

    def format(*args: Any, **kwargs: Any) -> str:
        return formatter.format_text(text, args, kwargs)

    def format_map(values: Mapping[str, Any], /) -> str:
        return formatter.format_text(text, (), values)

    return format_map if name == "format_map" else format
