"""Jinja with limits, for the chat templates of downloaded model files.

Jinja's own sandbox protects the interpreter but does not limit time and memory. Here loops and
calls check the time, every operation that builds texts or lists first charges a budget, and only
the filters and methods that chat templates use are available.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

MAX_SECONDS, MAX_CHARACTERS = 2.0, 1 << 20
# characters of the budget per character that a template may write; templates build texts piece by
# piece
BUDGET_FACTOR = 64
RANGE_NUMBER_COST = 64  # how many characters of the budget one number of a range costs
ALLOWED_FILTERS = frozenset(
    {
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "wordcount",
    }
)
ALLOWED_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    }
)
# a format with `*` or a number of three digits as width or precision
PADDED_FORMAT = re.compile(r"[*]|\d{3}")


class TemplateError(Exception):
    """The error for a template that calls raise_exception()."""


class TemplateBudgetExceeded(Exception):
    """The error for a template that takes too long or builds too much."""


class TemplateBudget:
    """What a rendering may still use: time, and characters (or list items) that it builds."""

    def start_rendering(self, characters: int) -> None:
        """Start the rendering of a conversation that has this many characters."""
        self.deadline = time.monotonic() + MAX_SECONDS
        self.characters_left = BUDGET_FACTOR * (MAX_CHARACTERS + characters)

    def check_time(self) -> None:
        """Raise TemplateBudgetExceeded when the time is over."""
        if time.monotonic() > self.deadline:
            raise TemplateBudgetExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def charge(self, amount: int) -> None:
        """Charge `amount` characters. Called before the characters are built."""
        self.characters_left -= amount
        if self.characters_left < 0:
            raise TemplateBudgetExceeded("a loop, list or text is too large")
        self.check_time()

    def charge_text_of(self, *values: Any) -> None:
        """Charge the characters of `values`. Nested lists are included, because their text may be
        much longer than the lists.
        """
        from jinja2.utils import Namespace

        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, Namespace):
                value = object.__getattribute__(value, "_Namespace__attrs")
            if isinstance(value, str):
                self.charge(len(value))
            elif isinstance(value, Mapping):
                self.charge(len(value))
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                self.charge(len(value))
                stack += value


def make_environment(budget: TemplateBudget) -> Any:
    """Return a Jinja environment like transformers', limited by `budget`."""
    from jinja2 import sandbox

    class Bounded(sandbox.ImmutableSandboxedEnvironment):
        code_generator_class = _code_generator()
        intercepted_binops = frozenset(("*", "**", "+", "%"))

        def ticking(self, items: Iterable[Any]) -> Iterator[Any]:
            for item in items:
                budget.check_time()
                yield item

        def joined(self, *items: Any) -> str:
            budget.charge_text_of(*items)
            return "".join(map(str, items))

        def concat(self, parts: Iterable[str]) -> str:
            parts = list(parts)
            budget.charge(sum(map(len, parts)))
            return "".join(parts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _pay_for(budget, operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            budget.check_time()
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(owner, str) and name == "join" and args:
                args = (list(args[0]), *args[1:])
                budget.charge(sum(map(len, args[0])) + len(owner) * len(args[0]))
            elif isinstance(owner, str) and name == "replace" and len(args) > 1:
                budget.charge(len(owner) + owner.count(args[0]) * len(args[1]))
            return super().call(context, function, *args, **kwargs)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, (int, float, bytes)) or (
                isinstance(obj, str) and attr not in ALLOWED_METHODS
            ):
                return False
            return super().is_safe_attribute(obj, attr, value)

    def shown(value: Any) -> Any:
        budget.charge_text_of(value)
        return value

    extensions = ["jinja2.ext.loopcontrols", _generation()]
    jinja = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=shown)
    jinja.globals = _globals(budget, jinja.globals)
    jinja.filters = _filters(budget, jinja.filters)
    return jinja


def _code_generator() -> Any:
    """Return Jinja's code generator with two changes: loops call the environment's ticking(), and
    the operator `~` calls joined().
    """
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    class Bounding(CodeGenerator):
        def visit_For(self, node: nodes.For, frame: Any) -> None:
            node.iter = _call("ticking", [node.iter], node)
            super().visit_For(node, frame)

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            self.visit(_call("joined", node.nodes, node), frame)

    def _call(name: str, arguments: list[Any], node: Any) -> Any:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        return call.set_environment(node.environment).set_lineno(node.lineno)

    return Bounding


def _generation() -> Any:
    """Return an extension for the block `{% generation %}` of transformers, which marks answers for
    training (AssistantTracker). Here the content of the block is only rendered.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # as in transformers, variables that are set in the block are not visible after it
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _pay_for(budget: TemplateBudget, operator: str, left: Any, right: Any) -> None:
    if operator == "**" and (abs(left) > 1024 or abs(right) > 64):
        raise TemplateBudgetExceeded("a power is too large")
    if operator == "*":
        budget.charge(max(_length(left) * _count(right), _length(right) * _count(left)))
    if operator == "+":
        budget.charge(_length(left) + _length(right))
    if operator == "%" and isinstance(left, str):
        if PADDED_FORMAT.search(left):
            raise TemplateBudgetExceeded("a padded format string")
        budget.charge_text_of(left, right)


def _globals(budget: TemplateBudget, table: Mapping[str, Any]) -> dict[str, Any]:
    def bounded_range(*bounds: int) -> Iterator[int]:
        for number in range(*bounds):
            budget.charge(RANGE_NUMBER_COST)
            yield number

    def refuse(message: str) -> None:
        raise TemplateError(message)

    return {
        **{name: table[name] for name in ("namespace", "dict", "cycler", "joiner")},
        "range": bounded_range,
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
    }


def _filters(budget: TemplateBudget, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of Jinja's filters that are in ALLOWED_FILTERS. Filters whose output may be
    larger than their input charge the budget first.
    """
    from jinja2 import filters, pass_eval_context
    from markupsafe import soft_str

    def indent(text: str, width: int = 4, *rest: Any, **more: Any) -> str:
        budget.charge(len(text) + 64 * text.count("\n"))
        return filters.do_indent(text, min(width, 64), *rest, **more)

    @pass_eval_context
    def join(context: Any, items: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        items = list(items)
        budget.charge_text_of(items)
        budget.charge(len(str(d)) * len(items))
        return filters.sync_do_join(context, items, d, attribute)

    @pass_eval_context
    def replace(context: Any, text: str, old: str, new: str, count: int | None = None) -> str:
        budget.charge(len(text) + str(text).count(old) * len(new))
        return filters.do_replace(context, text, old, new, count)

    def string(value: Any) -> str:
        budget.charge_text_of(value)
        return soft_str(value)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter would escape < > & ' for HTML, but models were not trained on such
        # text.
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=min(indent or 0, 8) or None,
            separators=separators,
            sort_keys=sort_keys,
        )
        pieces = []
        for piece in encoder.iterencode(value):
            budget.charge(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    limited = {
        "indent": indent,
        "join": join,
        "replace": replace,
        "string": string,
        "tojson": tojson,
    }
    return {name: table[name] for name in ALLOWED_FILTERS} | limited


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 1


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1
