"""The model's own chat template. It is untrusted input, so it is rendered in a sandbox with limits
(jinja_sandbox.py).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.runtime.text.jinja_sandbox import (
    MAX_CHARACTERS,
    TemplateBudget,
    TemplateBudgetExceeded,
    TemplateError,
    make_environment,
)
from llmcli.types import Message

if TYPE_CHECKING:
    import jinja2

THINKING_VARIABLES = (
    "enable_thinking",
    "thinking",
)  # the names in Qwen3 and other models, in DeepSeek and in Granite
TEMPLATE_HINT = "use --raw for no template, or --chat-template FILE for another one"


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source, self.bos, self.eos = source, bos, eos
        self.reasoning: bool | None = (
            None  # whether to ask the model to think; None leaves it to the template
        )
        self._compiled: jinja2.Template | None = None
        self._system: bool | None = None
        self._budget = TemplateBudget()

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt text for `messages`. `variables`: values for the variables of the
        template, such as tools and enable_thinking.

        Raises UserError when the template fails or refuses the messages.
        """
        import jinja2

        said = sum(len(message.content) for message in messages) + len(str(variables))
        self._budget.start_rendering(said)
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template().generate(
                messages=[
                    {"role": turn.role, "content": turn.content, **turn.template_fields}
                    for turn in messages
                ],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                **{"tools": None, **self.thinking_values(self.reasoning), **variables},
            ):
                length += len(piece)
                if length > MAX_CHARACTERS + said:
                    raise TemplateBudgetExceeded("its output is too long")
                pieces.append(piece)
            return "".join(pieces)
        except TemplateError as error:
            raise UserError(
                f"the chat template refuses this conversation: {error}", hint=TEMPLATE_HINT
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is broken: line {error.lineno}: {error.message}",
                hint=TEMPLATE_HINT,
            ) from None
        except TemplateBudgetExceeded as error:
            raise UserError(
                f"the chat template asks for too much: {error}", hint=TEMPLATE_HINT
            ) from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            LookupError,
            RuntimeError,
            MemoryError,
            AssertionError,
            SyntaxError,
        ) as error:
            # An error inside the template is a fault of the template, not of llmcli.
            raise UserError(
                f"the chat template fails: {type(error).__name__}: {error}", hint=TEMPLATE_HINT
            ) from None

    def check(self) -> None:
        """Raise UserError when the template cannot be compiled."""
        import jinja2

        try:
            self._template()
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is broken: line {error.lineno}: {error.message}",
                hint=TEMPLATE_HINT,
            ) from None
        except (
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:  # the template is nested too deeply for Python or Jinja
            raise UserError(
                f"the chat template is broken: {type(error).__name__}: {error}", hint=TEMPLATE_HINT
            ) from None

    def thinking_values(self, reasoning: bool | None) -> dict[str, bool]:
        """Return values for the variables of the template that make the model think (`reasoning`
        True) or not (False). None gives no values.
        """
        return {} if reasoning is None else dict.fromkeys(self.thinking_variables, reasoning)

    @property
    def thinking_variables(self) -> tuple[str, ...]:
        """Return the names of the variables by which this template turns thinking on or off."""
        return tuple(name for name in THINKING_VARIABLES if name in self.variables)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Return the names of the variables that this template uses, such as messages and tools."""
        import jinja2
        from jinja2 import meta

        try:
            return frozenset(
                meta.find_undeclared_variables(make_environment(self._budget).parse(self.source))
            )
        # render() reports what is wrong with the template
        except (jinja2.TemplateError, RecursionError):
            return frozenset()

    def accepts_system(self) -> bool:
        """Return whether the text of a system message is in the prompt. Some templates refuse
        system messages or leave them out.
        """
        if self._system is None:
            self._system = self._probed()
        return self._system

    def _probed(self) -> bool:
        probe = "system-probe-5b1f"
        try:
            return probe in self.render([Message("system", probe), Message("user", "hello")])
        except UserError:
            return False

    def _template(self) -> "jinja2.Template":
        if self._compiled is None:
            self._compiled = make_environment(self._budget).from_string(self.source)
        return self._compiled
