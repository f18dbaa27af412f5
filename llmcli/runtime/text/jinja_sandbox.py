"""A Jinja environment with limits of time and memory, for the chat templates of downloaded model
files.

Jinja's own sandbox protects the Python interpreter, but a template could still run forever or fill
the memory. Here loops and calls check the time. Every operation that builds texts or lists first
charges a budget. Only the filters and methods that chat templates use are available.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

# limits of one rendering: its time, and its output in addition to the length of the conversation
MAX_SECONDS, MAX_CHARACTERS = 2.0, 1 << 20
# The budget is this many times the maximum output, because templates join texts repeatedly while
# they build the output.
BUDGET_FACTOR = 64
RANGE_NUMBER_COST = 64  # characters that each number of a range() is charged as
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
# A printf format with `*`, or a number of three digits, as its width or precision. It could build a
# text of any length.
PADDED_FORMAT = re.compile(r"[*]|\d{3}")


class TemplateError(Exception):
    """Raised when a template calls raise_exception(), by which it refuses a conversation."""


class TemplateBudgetExceeded(Exception):
    """Raised when a template takes too long or builds too much text."""


class TemplateBudget:
    """The remaining budget of a rendering: its deadline, and how many characters it may still
    build. An item of a list counts as one character.
    """

    def start_rendering(self, characters: int) -> None:
        """Reset the budget for the rendering of a conversation of `characters` characters."""
        self.deadline = time.monotonic() + MAX_SECONDS
        self.characters_left = BUDGET_FACTOR * (MAX_CHARACTERS + characters)

    def check_time(self) -> None:
        """Raise TemplateBudgetExceeded after the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateBudgetExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def charge(self, amount: int) -> None:
        """Take `amount` characters from the budget, before they are built. Raises
        TemplateBudgetExceeded when the budget or the time is used up.
        """
        self.characters_left -= amount
        if self.characters_left < 0:
            raise TemplateBudgetExceeded("a loop, list or text is too large")
        self.check_time()

    def charge_text_of(self, *values: Any) -> None:
        """Charge the characters that `values` have as text, and one for each item of a list or
        dictionary. Nested lists are followed, because a short list may contain the same long text
        many times.
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
    """Return a Jinja environment for chat templates with the functions that transformers offers.
    Everything that its templates do is charged to `budget`.
    """
    from jinja2 import sandbox

    class LimitedEnvironment(sandbox.ImmutableSandboxedEnvironment):
        code_generator_class = _code_generator()
        intercepted_binops = frozenset(("*", "**", "+", "%"))

        def check_each(self, items: Iterable[Any]) -> Iterator[Any]:
            """Yield the items of a `for` loop, and check the time before each."""
            for item in items:
                budget.check_time()
                yield item

        def join_charged(self, *items: Any) -> str:
            """Return the operands of `~`, joined as text."""
            budget.charge_text_of(*items)
            return "".join(map(str, items))

        def concat(self, parts: Iterable[str]) -> str:
            parts = list(parts)
            budget.charge(sum(map(len, parts)))
            return "".join(parts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _charge_operator(budget, operator, left, right)
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

    def charge_output(value: Any) -> Any:
        """Charge the value of an expression {{ … }} before it becomes text."""
        budget.charge_text_of(value)
        return value

    extensions = ["jinja2.ext.loopcontrols", _generation_extension()]
    jinja = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=charge_output
    )
    jinja.globals = _globals(budget, jinja.globals)
    jinja.filters = _filters(budget, jinja.filters)
    return jinja


def _code_generator() -> Any:
    """Return a subclass of Jinja's code generator. In the code that it generates, `for` loops call
    the environment's check_each(), and the operator `~` calls join_charged().
    """
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    class LimitedCodeGenerator(CodeGenerator):
        def visit_For(self, node: nodes.For, frame: Any) -> None:
            node.iter = _call_environment("check_each", [node.iter], node)
            super().visit_For(node, frame)

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            self.visit(_call_environment("join_charged", node.nodes, node), frame)

    def _call_environment(name: str, arguments: list[Any], node: Any) -> Any:
        """Return a syntax node that calls the environment's method `name`. The line number in error
        messages is that of `node`.
        """
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        return call.set_environment(node.environment).set_lineno(node.lineno)

    return LimitedCodeGenerator


def _generation_extension() -> Any:
    """Return a Jinja extension for the block `{% generation %}`, with which transformers marks the
    answers for training (AssistantTracker). Here the contents of the block are simply rendered.
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


def _charge_operator(budget: TemplateBudget, operator: str, left: Any, right: Any) -> None:
    """Charge the text or list that `left operator right` builds. Raises TemplateBudgetExceeded when
    the result could be too large.
    """
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


def _globals(budget: TemplateBudget, jinja_globals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions that templates may call, by name: some of Jinja's, a range() that
    charges the budget, and those that transformers adds.
    """

    def limited_range(*bounds: int) -> Iterator[int]:
        for number in range(*bounds):
            budget.charge(RANGE_NUMBER_COST)
            yield number

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    return {
        **{name: jinja_globals[name] for name in ("namespace", "dict", "cycler", "joiner")},
        "range": limited_range,
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
    }


def _filters(budget: TemplateBudget, jinja_filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters that templates may use, by name: those of Jinja that are in
    ALLOWED_FILTERS. Filters whose output may be longer than their input are replaced by versions
    that charge the budget first.
    """
    from jinja2 import filters, pass_eval_context
    from markupsafe import soft_str

    def indent(text: str, width: int = 4, *args: Any, **kwargs: Any) -> str:
        budget.charge(len(text) + 64 * text.count("\n"))
        return filters.do_indent(text, min(width, 64), *args, **kwargs)

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
        # Jinja's own filter escapes < > & ' for HTML, but models were not trained on such text.
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
    return {name: jinja_filters[name] for name in ALLOWED_FILTERS} | limited


def _length(value: Any) -> int:
    """Return the length of a text or list, and 1 for any other value."""
    return len(value) if isinstance(value, (str, list, tuple)) else 1


def _count(value: Any) -> int:
    """Return how often `value` as a factor repeats a text: the absolute value of an integer, and 1
    for any other value.
    """
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1
