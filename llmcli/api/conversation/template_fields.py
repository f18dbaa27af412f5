"""The fields of a conversation that reach the chat template: switches of thinking, documents, and
the template's own variables.

Each vendor has a field of its own to switch thinking. They set three things here: the effort, which
some templates read, whether the model thinks at all, and how many tokens it may think. An effort of
"none" or "minimal" switches thinking off.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from llmcli.api.bodies.base import (
    Either,
    JsonObject,
    MaxEntries,
    RequestBody,
    honored,
    ignored,
    noted,
    refused,
)
from llmcli.api.bodies.generation_fields import TokenLimit
from llmcli.api.conversation.conversation_text import DOCUMENTS
from llmcli.api.errors import ApiError
from llmcli.runtime.text.chat_template import ChatTemplate

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NO_THINKING: tuple[ReasoningEffort, ...] = ("none", "minimal")
# The values of `thinking.type`, as Anthropic, GLM, DeepSeek and others have it, and whether the
# model thinks; None leaves it to the template.
THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
SWITCHES = ("reasoning", "think", "thinking", "enable_thinking")  # the last one decides
MAX_DOCUMENTS = 1000
# Template variables that the server sets, so that a request must not set them.
RESERVED_VARIABLES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
EFFORT_VARIABLE = "reasoning_effort"
# The largest number of thinking tokens of each effort, for a template without that variable. None:
# no limit.
EFFORT_BUDGETS: Mapping[ReasoningEffort, int | None] = {
    "none": 0,
    "minimal": 0,
    "low": 512,
    "medium": 2048,
    "high": 8192,
    "xhigh": 32768,
    "max": None,
}
THINKING_MARK = "</think>"  # in the templates of models that may think
NO_SWITCH = "the choice of thinking has no effect: this model's chat template cannot switch it"
SWITCH_WORDS = f"true or false, or one of {', '.join(get_args(ReasoningEffort))}"
OBJECT_WORDS = f"{SWITCH_WORDS}, or an object"


class ThinkingSwitch(RequestBody):
    """A switch of thinking as an object, as in the APIs of Anthropic, DeepSeek and GLM."""

    origin: ClassVar[str] = "Anthropic"
    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = honored(
        "disabled answers without thinking, if the chat template can switch it off"
    )
    effort: ReasoningEffort | None = honored("how much the model thinks; none: not at all")
    enabled: bool | None = honored("whether the model thinks")
    budget_tokens: TokenLimit | None = honored(
        "the largest number of thinking tokens, after which the answer follows; -1: no limit"
    )
    display: Any = noted("thinking is always returned in full", "summarized")

    @property
    def budget(self) -> int | None:
        """The largest number of thinking tokens, -1 for no limit; None if the object has none."""
        return self.budget_tokens

    @property
    def is_on(self) -> bool | None:
        """Whether the model thinks; None if the chat template decides."""
        if self.enabled is not None:
            return self.enabled
        return THINKING_TYPES[self.type or "auto"]


class ReasoningOptions(ThinkingSwitch):
    """Options of thinking, in the Responses API and OpenRouter's."""

    origin: ClassVar[str] = "OpenAI"
    exclude: bool | None = honored("leave the thinking out of the answer of a chat completion")
    summary: Any = ignored("thinking is returned in full")
    generate_summary: Any = ignored("thinking is returned in full")
    max_tokens: TokenLimit | None = honored(
        "the largest number of thinking tokens, after which the answer follows; -1: no limit"
    )
    encrypted_content: Any = ignored("thinking is returned in full")
    context: Any = ignored("the model does not receive earlier thinking")
    mode: Any = ignored("there is one kind of thinking")

    @property
    def budget(self) -> int | None:
        """The largest number of thinking tokens, -1 for no limit; None if the object has none."""
        return self.budget_tokens if self.max_tokens is None else self.max_tokens


class ReasoningFields(RequestBody):
    """The fields that switch thinking, in chat completions. A request with several of them gets the
    effort of one, and the switch of one: that of the last in SWITCHES.
    """

    origin: ClassVar[str] = "OpenAI, other servers"
    reasoning_effort: ReasoningEffort | None = honored(
        "how much the model thinks, if its chat template has a variable for it"
    )
    reasoning: Annotated[bool | ReasoningEffort | ReasoningOptions, Either(OBJECT_WORDS)] | None = (
        honored("whether and how much the model thinks, in OpenRouter's spelling")
    )
    think: Annotated[bool | ReasoningEffort, Either(SWITCH_WORDS)] | None = honored(
        "whether and how much the model thinks, in ollama's spelling"
    )
    thinking: Annotated[bool | ReasoningEffort | ThinkingSwitch, Either(OBJECT_WORDS)] | None = (
        honored("whether the model thinks, in DeepSeek's spelling")
    )
    enable_thinking: Annotated[bool | ReasoningEffort, Either(SWITCH_WORDS)] | None = honored(
        "whether the model thinks, in Qwen's spelling"
    )
    thinking_budget_tokens: TokenLimit | None = honored(
        "the largest number of thinking tokens, in llama-server's spelling; -1: no limit"
    )
    reasoning_budget_tokens: TokenLimit | None = honored("the same as thinking_budget_tokens")
    thinking_token_budget: TokenLimit | None = honored(
        "the largest number of thinking tokens, in vLLM's spelling; -1: no limit"
    )
    reasoning_control: Any = ignored(
        "the thinking of each answer can be ended with /v1/chat/completions/control"
    )

    @property
    def excludes_thinking(self) -> bool:
        """Whether thinking is left out of the answer."""
        return isinstance(self.reasoning, ReasoningOptions) and bool(self.reasoning.exclude)

    def thinking_choice(self) -> tuple[ReasoningEffort | None, bool | None]:
        """Return the effort of thinking, and whether the model thinks; None for what the request
        leaves to the chat template.
        """
        effort, is_on = self.reasoning_effort, None
        for name in SWITCHES:
            value = getattr(self, name)
            if isinstance(value, bool):
                is_on = value
            elif isinstance(value, ThinkingSwitch):
                effort = value.effort or effort
                is_on = is_on if value.is_on is None else value.is_on
            elif value is not None:
                effort = value
        return effort, effort not in NO_THINKING if is_on is None and effort else is_on

    def named_budget(self) -> int | None:
        """Return the number of thinking tokens that the request names, -1 for no limit; None if it
        names none.
        """
        switches = (getattr(self, name) for name in SWITCHES)
        budgets = (
            *(value.budget for value in switches if isinstance(value, ThinkingSwitch)),
            self.thinking_budget_tokens,
            self.reasoning_budget_tokens,
            self.thinking_token_budget,
        )
        return next((budget for budget in budgets if budget is not None), None)


class TemplateFields(RequestBody):
    """The fields of llama-server and vLLM that reach the chat template."""

    origin: ClassVar[str] = "llama-server, vLLM"
    chat_template_kwargs: Annotated[dict[str, Any], JsonObject("an object")] | None = honored(
        "values of variables of the chat template"
    )
    documents: (
        Annotated[
            list[Annotated[dict[str, Any], JsonObject("an object")]], MaxEntries(MAX_DOCUMENTS)
        ]
        | None
    ) = honored("texts for a chat template that has documents; refused if it has none")
    chat_template: Any = refused("start the server with --chat-template")
    add_special_tokens: bool | None = refused("the chat template writes special tokens", False)


def read_template_variables(
    body: RequestBody, template: ChatTemplate | None, notes: list[str]
) -> dict[str, Any]:
    """Return the template variables that a request sets. `body`: a body with TemplateFields,
    ReasoningFields, or both. A note is appended to `notes` if the template cannot switch thinking
    as requested. Raises ApiError for a reserved variable, and for documents that the template would
    leave out.
    """
    values: dict[str, Any] = {}
    if isinstance(body, ReasoningFields):
        values |= _thinking_variables(body, template, notes)
    if isinstance(body, TemplateFields):
        if body.documents:
            selected = template and template.select(has_documents=True)
            if not selected or DOCUMENTS not in selected.variables:
                raise ApiError(
                    f"{DOCUMENTS}: this model's chat template does not show them; "
                    "write their text into a message",
                    param=DOCUMENTS,
                )
            values[DOCUMENTS] = body.documents
        chosen = body.chat_template_kwargs or {}
        if reserved := sorted(RESERVED_VARIABLES.intersection(chosen)):
            raise ApiError(
                f"chat_template_kwargs.{reserved[0]} is set by the server and cannot be changed",
                param="chat_template_kwargs",
            )
        values |= chosen
    return values


def read_thinking_budget(
    body: ReasoningFields, template: ChatTemplate | None, default: int | None
) -> int | None:
    """Return the largest number of thinking tokens of a request's answer, or None for any number.
    `default`: that of the server.

    A number in the request comes first. Without one, a model that cannot be told not to think ends
    its thinking at once if the request switches it off, and an effort becomes the number in
    EFFORT_BUDGETS if the template has no variable for it.
    """
    effort, is_on = body.thinking_choice()
    variables = template.variables if template else frozenset()
    has_switch = EFFORT_VARIABLE in variables or bool(template and template.thinking_variables)
    if is_on is False and not has_switch:
        return 0
    named = body.named_budget()
    if named is not None:
        return None if named < 0 else named
    if effort and is_on and EFFORT_VARIABLE not in variables:
        return EFFORT_BUDGETS[effort]
    return default


def _thinking_variables(
    body: ReasoningFields, template: ChatTemplate | None, notes: list[str]
) -> dict[str, Any]:
    effort, is_on = body.thinking_choice()
    if template is None:
        return {}
    switches = template.thinking_values(is_on)
    has_effect = bool(switches) or (effort is not None and EFFORT_VARIABLE in template.variables)
    # an effort without a variable becomes a budget, and thinking without a switch is ended at once
    has_budget = effort is not None and THINKING_MARK in template.source
    if is_on and not has_effect and not has_budget:
        notes.append(NO_SWITCH)
    return {**({} if effort is None else {EFFORT_VARIABLE: effort}), **switches}
