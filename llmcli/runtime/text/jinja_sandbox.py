"""A Jinja environment with limits of time and memory, for the chat templates of downloaded model
files.

Jinja's own sandbox protects the Python interpreter, but a template could still run forever or fill
the memory. Here loops and calls check the time, and every operation that builds texts or lists
charges a budget (template_budget.py). Texts from outside the template are TrackedTexts, and every
operation that returns text keeps their sources.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from llmcli.runtime.text.jinja_filters import limited_filters
from llmcli.runtime.text.template_budget import ITEM_COST, TemplateBudget, TemplateBudgetExceeded
from llmcli.runtime.text.text_format import format_method, format_percent
from llmcli.runtime.text.tracked_text import TrackedText, join_texts, track
from llmcli.runtime.text.value_text import write_text

# Methods of texts that templates may call. TrackedText has its own version of each that returns
# text.
TEXT_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "expandtabs",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
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
        "zfill",
    }
)
# Methods that change a list. Some templates call them on lists that they have made themselves.
LIST_METHODS = frozenset({"append", "extend", "insert", "pop", "reverse"})
SPLITTING_METHODS = frozenset({"split", "rsplit", "splitlines"})
PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateError(Exception):
    """Raised when a template calls raise_exception(), by which it refuses a conversation."""


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
            return join_texts([write_text(item) for item in items])

        def concat(self, parts: Iterable[str]) -> str:
            parts = list(parts)
            budget.charge(sum(map(len, parts)))
            return join_texts(parts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _charge_operator(budget, operator, left, right)
            if operator == "%" and isinstance(left, str):
                return format_percent(left, right, budget)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            budget.check_time()
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(owner, str):
                _charge_method(budget, owner, name, args)
                if any(isinstance(arg, (TrackedText, list, types.GeneratorType)) for arg in args):
                    # the arguments may have sources, which str's own method would lose
                    function = getattr(track(owner), name, function)
            elif isinstance(owner, list) and name in LIST_METHODS:
                budget.charge(ITEM_COST)
            return super().call(context, function, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            """Return the method format or format_map of a text. None for any other value."""
            owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
            if not isinstance(owner, str) or name not in ("format", "format_map"):
                return None
            return format_method(owner, name, sandbox.SandboxedFormatter(self).get_field, budget)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, (int, float, bytes)) or (
                isinstance(obj, str) and attr not in TEXT_METHODS
            ):
                return False
            if type(obj) is list and attr in LIST_METHODS:
                return True
            return super().is_safe_attribute(obj, attr, value)

    def write_output(value: Any) -> Any:
        """Return the value of an expression {{ … }} as text, after charging it."""
        budget.charge_text_of(value)
        return write_text(value)

    extensions = ["jinja2.ext.loopcontrols", _generation_extension()]
    jinja = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=write_output
    )
    jinja.globals = _globals(budget, jinja.globals)
    jinja.filters = limited_filters(budget, jinja.filters)
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


def _charge_method(budget: TemplateBudget, owner: str, name: str, args: tuple[Any, ...]) -> None:
    """Charge what the method `name` of the text `owner` builds."""
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        budget.charge(sum(map(_length, args[0])) + len(owner) * len(args[0]))
    elif name == "replace" and len(args) > 1:
        budget.charge(len(owner) + owner.count(args[0]) * _length(args[1]))
    elif name in PADDING_METHODS and args and isinstance(args[0], int):
        budget.charge(args[0] * (1 + owner.count("\t")))
    elif name in SPLITTING_METHODS:
        separator = args[0] if args and isinstance(args[0], str) else None
        budget.charge(ITEM_COST * (owner.count(separator) if separator else len(owner) // 2))


def _globals(budget: TemplateBudget, jinja_globals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions that templates may call, by name: some of Jinja's, a range() that
    charges the budget, and those that transformers adds.
    """

    def limited_range(*bounds: int) -> Iterator[int]:
        for number in range(*bounds):
            budget.charge(ITEM_COST)
            yield number

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    return {
        **{name: jinja_globals[name] for name in ("namespace", "dict", "cycler", "joiner")},
        "range": limited_range,
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
    }


def _length(value: Any) -> int:
    """Return the length of a text or list, and 1 for any other value."""
    return len(value) if isinstance(value, (str, list, tuple)) else 1


def _count(value: Any) -> int:
    """Return how often `value` as a factor repeats a text: the absolute value of an integer, and 1
    for any other value.
    """
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1
