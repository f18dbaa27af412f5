"""The filters of chat templates: those of Jinja, as transformers offers them, with limits. Their
results keep the sources of the texts that they are made of.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llmcli.runtime.text.template_budget import (
    ITEM_COST,
    TemplateBudget,
    TemplateBudgetExceeded,
)
from llmcli.runtime.text.template_costs import charge_filters
from llmcli.runtime.text.text_format import format_percent
from llmcli.runtime.text.tracked_text import (
    TrackedText,
    attribute_all,
    join_texts,
    sources_in,
    track,
)
from llmcli.runtime.text.value_text import json_layout, write_json, write_text

MAX_ROUND_DIGITS = 300  # of round(); floating-point numbers do not have more


def limited_filters(budget: TemplateBudget, jinja_filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters that templates may use, by name. Each charges the budget first."""
    filters = {name: _with_sources(function) for name, function in jinja_filters.items()}
    return charge_filters(budget, filters | _text_filters(budget) | _list_filters(budget))


def _with_sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose text, if Jinja's filter has lost the sources of its arguments, counts
    as text of all of them.
    """

    @functools.wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, str) or isinstance(result, TrackedText):
            return result
        sources = sources_in([args, kwargs])
        return attribute_all(str.__str__(result), sources) if sources else result

    return filter_


def _text_filters(budget: TemplateBudget) -> dict[str, Any]:
    """Return the filters that join, format, pad and write texts."""
    import jinja2.exceptions
    from jinja2 import filters, pass_environment, pass_eval_context

    def center(value: Any, width: int = 80) -> str:
        budget.charge(width)
        return write_text(value).center(width)

    def format_(value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise jinja2.exceptions.FilterArgumentError(
                "can't handle positional and keyword arguments at the same time"
            )
        return format_percent(write_text(value), kwargs or args, budget)

    def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = write_text(value)
        size = len(width) if isinstance(width, str) else width
        budget.charge(len(text) + size * (text.count("\n") + 1))
        space = width if isinstance(width, str) else " " * width
        lines = (text + "\n").splitlines()
        is_indented = [first, *(blank or bool(line) for line in lines[1:])]
        pieces = (
            join_texts([space, line]) if indented else line
            for indented, line in zip(is_indented, lines, strict=True)
        )
        return join_texts(list(pieces), "\n")

    @pass_eval_context
    def join(context: Any, items: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            items = map(filters.make_attrgetter(context.environment, attribute), items)
        values, separator = list(items), write_text(d)
        budget.charge_text_of(values)
        budget.charge(len(separator) * len(values))
        return join_texts([write_text(value) for value in values], separator)

    def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = write_text(value), write_text(old), write_text(new)
        budget.charge(len(text) + text.count(old) * len(new))
        text = track(text) if isinstance(new, TrackedText) else text
        return text.replace(old, new, -1 if count is None else count)

    def string(value: Any) -> str:
        budget.charge_text_of(value)
        return write_text(value)

    def title(value: Any) -> str:
        return track(write_text(value)).converted(filters.do_title)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes < > & ' for HTML, but models were not trained on such text.
        layout = json_layout(ensure_ascii, indent, separators, sort_keys)
        return write_json(value, layout, budget.charge)

    @pass_environment
    def wordwrap(
        environment: Any,
        value: Any,
        width: int = 79,
        break_long_words: bool = True,
        wrapstring: str | None = None,
        break_on_hyphens: bool = True,
    ) -> str:
        text = write_text(value)
        budget.charge(len(text) * (1 + len(wrapstring or "") // max(1, width)))
        return filters.do_wordwrap(
            environment, text, width, break_long_words, wrapstring, break_on_hyphens
        )

    return {
        "center": center,
        "format": format_,
        "indent": indent,
        "join": join,
        "replace": replace,
        # nothing is escaped, so a text that is marked as safe stays as it is
        "safe": string,
        "string": string,
        "title": title,
        "tojson": tojson,
        "wordwrap": _with_sources(wordwrap),
    }


def _list_filters(budget: TemplateBudget) -> dict[str, Any]:
    """Return the filters that make lists, and those of numbers."""
    from jinja2 import filters, pass_environment

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            budget.charge(ITEM_COST)
            yield item

    def list_(value: Iterable[Any]) -> list[Any]:
        return list(counted(value) if isinstance(value, str) else value)

    def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[Any]:
        if fill_with is not None:
            budget.charge(ITEM_COST * linecount)
        return counted(filters.do_batch(value, linecount, fill_with))

    def slice_(value: Iterable[Any], slices: int, fill_with: Any = None) -> Iterator[Any]:
        return counted(filters.sync_do_slice(list(value), slices, fill_with))

    def round_(value: Any, precision: int = 0, method: Any = "common") -> float:
        if abs(precision) > MAX_ROUND_DIGITS:
            raise TemplateBudgetExceeded("the precision of a number is too large")
        return filters.do_round(value, precision, method)

    @pass_environment
    def sum_(environment: Any, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            items = map(filters.make_attrgetter(environment, attribute), items)
        if isinstance(start, str):
            raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
        for item in items:
            budget.charge(len(start) if isinstance(start, (list, tuple)) else 1)
            start = start + item
        return start

    return {"list": list_, "batch": batch, "slice": slice_, "round": round_, "sum": sum_}
