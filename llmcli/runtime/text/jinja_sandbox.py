"""A Jinja environment with limits of time and memory, for the chat templates of downloaded model
files.

Jinja's own sandbox protects the Python interpreter, but a template could still run forever or fill
the memory. Here loops and calls check the time, and every operation that builds texts or lists
charges a budget (template_budget.py). Texts from outside the template are TrackedTexts, and every
operation that returns text keeps their sources.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from datetime import datetime
from typing import Any

from llmcli.runtime.text.jinja_filters import limited_filters
from llmcli.runtime.text.template_budget import (
    ENTRY_COST,
    ITEM_COST,
    MAX_INTEGER,
    TemplateBudget,
    TemplateBudgetExceeded,
    check_integer,
    is_container,
    text_size,
)
from llmcli.runtime.text.template_costs import METHOD_COSTS, charge_tests
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
# A template is compiled in a time that grows with its length; the longest of released models has
# some ten thousand characters.
MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_RANGE = 100_000  # numbers of a range(), as in Jinja's sandbox
MAX_DATE_CHARACTERS = 200  # of the form of a date
# the comparisons of Jinja by their names in its syntax tree
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}


class TemplateError(Exception):
    """Raised when a template calls raise_exception(), by which it refuses a conversation."""


def make_environment(budget: TemplateBudget) -> Any:
    """Return a Jinja environment for chat templates with the functions that transformers offers.
    Everything that its templates do is charged to `budget`.
    """
    from jinja2 import TemplateSyntaxError, nodes, sandbox
    from jinja2.runtime import LoopContext

    class LimitedEnvironment(sandbox.ImmutableSandboxedEnvironment):
        code_generator_class = _code_generator()
        intercepted_binops = frozenset(("*", "**", "+", "-", "/", "//", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            if len(source) > MAX_TEMPLATE_CHARACTERS:
                raise TemplateSyntaxError(
                    f"it has more than {MAX_TEMPLATE_CHARACTERS:,} characters", 1
                )
            try:
                template = super()._parse(source, name, filename)
            except ValueError as error:  # a number of too many digits
                raise TemplateSyntaxError(str(error), 1) from None
            for constant in template.find_all(nodes.Const):
                if isinstance(constant.value, int) and abs(constant.value) > MAX_INTEGER:
                    raise TemplateSyntaxError("a number is too large", constant.lineno)
            return template

        def _compile(self, source: str, filename: str) -> Any:
            try:
                return super()._compile(source, filename)
            except (MemoryError, RecursionError):  # Python's parser has a stack of limited size
                raise TemplateSyntaxError("it is nested too deeply", 1) from None

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

        def compare(self, operation: str, left: Any, right: Any) -> Any:
            """Return the result of a comparison, or of a search in a text, list or dictionary."""
            if operation in ("in", "notin"):
                if isinstance(right, Iterator) and is_container(left):
                    right = list(right)
                budget.charge_search(left, right)
            else:
                budget.charge_comparison(left, right)
            return COMPARISONS[operation](left, right)

        def get_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
            """Return value[start:stop:step]."""
            key = slice(start, stop, step)
            if isinstance(value, (str, list, tuple)):
                count = len(range(*key.indices(len(value))))
                budget.charge(count if isinstance(value, str) else ENTRY_COST * count)
            return value[key]

        def make_dictionary(self, items: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
            """Return the dictionary of a literal with these keys and values."""
            for key, _ in items:
                budget.check_key(key)
            return dict(items)

        def getitem(self, obj: Any, argument: Any) -> Any:
            budget.check_key(argument)
            return super().getitem(obj, argument)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _charge_operator(budget, operator, left, right)
            if operator == "%" and isinstance(left, str):
                return format_percent(left, right, budget)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            budget.charge(ENTRY_COST * (len(args) + len(kwargs)))
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(function, LoopContext) and args:
                args = (self.check_each(args[0]), *args[1:])  # a recursive loop
            elif isinstance(owner, str):
                if name == "join" and args and isinstance(args[0], Iterator):
                    args = (list(args[0]), *args[1:])
                if name in METHOD_COSTS:
                    METHOD_COSTS[name](budget, owner, *args, **kwargs)
                if any(isinstance(arg, (TrackedText, list, Iterator)) for arg in args):
                    # the arguments may have sources, which str's own method would lose
                    function = getattr(track(owner), name, function)
            elif owner is not None:
                _charge_method(budget, owner, name, args)
            return super().call(context, function, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            """Return the method format or format_map of a text. None for any other value."""
            owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
            if not isinstance(owner, str) or name not in ("format", "format_map"):
                return None
            return format_method(owner, name, sandbox.SandboxedFormatter(self).get_field, budget)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if (
                isinstance(obj, (int, float, bytes))
                or (isinstance(obj, str) and attr not in TEXT_METHODS)
                or attr == "fromkeys"
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
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=extensions,
        finalize=write_output,
        optimized=False,  # nothing is computed while the template is compiled
    )
    jinja.globals = _globals(budget, jinja.globals)
    jinja.filters = limited_filters(budget, jinja.filters)
    environment: Any = jinja  # Jinja declares the type of its tests too narrowly
    environment.tests = charge_tests(budget, environment.tests)
    return jinja


def _code_generator() -> Any:
    """Return a subclass of Jinja's code generator. The code that it generates calls methods of the
    environment for loops, comparisons, slices, dictionaries and the operator `~`.
    """
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    class LimitedCodeGenerator(CodeGenerator):
        def visit_For(self, node: nodes.For, frame: Any) -> None:
            node.iter = _call_environment("check_each", [node.iter], node)
            super().visit_For(node, frame)

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            self.visit(_call_environment("join_charged", node.nodes, node), frame)

        def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
            # in a chain such as 1 < x < 3, each value is computed once, and only if it is needed
            names = [self.temporary_identifier() for _ in node.ops[1:]]
            self.write("(")
            for number, operation in enumerate(node.ops):
                self.write(f"{' and ' * (number > 0)}environment.compare({operation.op!r}, ")
                if number:
                    self.write(names[number - 1])
                else:
                    self.visit(node.expr, frame)
                self.write(", ")
                if number < len(names):
                    self.write(f"({names[number]} := ")
                self.visit(operation.expr, frame)
                self.write(")" * (1 + (number < len(names))))
            self.write(")")

        def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
            if not isinstance(node.arg, nodes.Slice):
                super().visit_Getitem(node, frame)
                return
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            arguments = [node.node, *(bound or nodes.Const(None) for bound in bounds)]
            self.visit(_call_environment("get_slice", arguments, node), frame)

        def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
            self.write("environment.make_dictionary((")
            for pair in node.items:
                self.write("(")
                self.visit(pair.key, frame)
                self.write(", ")
                self.visit(pair.value, frame)
                self.write("),")
            self.write("))")

        def visit_Const(self, node: nodes.Const, frame: Any) -> None:
            value = node.as_const(frame.eval_ctx)
            # Python has no word for an infinite number
            self.write("1e999" if value == math.inf else repr(value))

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
    check_integer(left, right)
    if operator == "**" and (abs(left) > 1024 or abs(right) > 64):
        raise TemplateBudgetExceeded("a power is too large")
    if operator == "*":
        budget.charge(max(_size(left) * _count(right), _size(right) * _count(left)))
    if operator in ("+", "-"):
        # a text that is marked as safe escapes the other one, up to six characters for one
        is_safe = hasattr(left, "__html__") or hasattr(right, "__html__")
        budget.charge((_size(left) + _size(right)) * (6 if is_safe else 1))
        if isinstance(left, Set):
            budget.check_entries(right)


def _charge_method(budget: TemplateBudget, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Charge the method `name` of a list, dictionary or loop."""
    if isinstance(owner, (list, tuple)):
        if name in ("count", "index") and args:
            budget.charge_search(args[0], owner)
        else:
            budget.charge(ITEM_COST + ENTRY_COST * len(owner) * (name not in ("append", "pop")))
            budget.charge(sum(map(_size, args)) if name == "extend" else 0)
    elif isinstance(owner, Mapping):
        budget.check_key(args[0] if args else None)
        budget.charge(ENTRY_COST * len(owner) if name == "copy" else 0)
    elif name == "changed":  # of a loop
        budget.charge_text_of(*args)


def _globals(budget: TemplateBudget, jinja_globals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions that templates may call, by name: some of Jinja's, a range() that
    charges the budget, and those that transformers adds.
    """

    def limited_range(*bounds: int) -> range:
        numbers = range(*bounds)
        if len(numbers) > MAX_RANGE:
            raise TemplateBudgetExceeded(f"a range has more than {MAX_RANGE:,} numbers")
        return numbers

    def make_dictionary(*args: Any, **values: Any) -> dict[Any, Any]:
        entries = [dict(args[0]) if isinstance(args[0], Mapping) else list(args[0])] if args else []
        for entry in entries:
            budget.charge(ITEM_COST * len(entry))
            if isinstance(entry, list):
                budget.check_entries(entry)
        budget.charge(ITEM_COST * len(values))
        return dict(*entries, *args[1:], **values)

    def make_namespace(*args: Any, **values: Any) -> Any:
        return jinja_globals["namespace"](make_dictionary(*args, **values))

    def strftime_now(form: str) -> str:
        if len(form) > MAX_DATE_CHARACTERS:
            raise TemplateBudgetExceeded("the form of a date is too long")
        return datetime.now().astimezone().strftime(form)

    def raise_exception(message: Any) -> None:
        budget.charge_text_of(message)
        raise TemplateError(write_text(message))

    return {
        **{name: jinja_globals[name] for name in ("cycler", "joiner")},
        "dict": make_dictionary,
        "namespace": make_namespace,
        "range": limited_range,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }


def _size(value: Any) -> int:
    """Return what a copy of a text or list is charged as, and 1 for any other value."""
    if isinstance(value, str):
        return text_size(value)
    return ENTRY_COST * len(value) if is_container(value) or isinstance(value, range) else 1


def _count(value: Any) -> int:
    """Return how often `value` as a factor repeats a text: the absolute value of an integer, and 1
    for any other value.
    """
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1
