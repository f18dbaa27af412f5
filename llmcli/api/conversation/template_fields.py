"""The fields of a conversation that reach the chat template: switches of thinking, documents, and
the template's own variables.

Each vendor has a field of its own to switch thinking. They set two things here: the effort, which
some templates read, and whether the model thinks at all. An effort of "none" or "minimal" switches
thinking off.
"""

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
    budget_tokens: Any = noted("the model decides how long it thinks; use max_tokens")
    display: Any = noted("thinking is always returned in full", "summarized")

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
    max_tokens: Any = noted("the model decides how long it thinks; use max_tokens of the request")
    encrypted_content: Any = ignored("thinking is returned in full")
    context: Any = ignored("the model does not receive earlier thinking")
    mode: Any = ignored("there is one kind of thinking")


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


def _thinking_variables(
    body: ReasoningFields, template: ChatTemplate | None, notes: list[str]
) -> dict[str, Any]:
    effort, is_on = body.thinking_choice()
    if template is None:
        return {}
    switches = template.thinking_values(is_on)
    has_effect = bool(switches) or (effort is not None and EFFORT_VARIABLE in template.variables)
    if not has_effect and (is_on or (is_on is False and THINKING_MARK in template.source)):
        notes.append(NO_SWITCH)
    return {**({} if effort is None else {EFFORT_VARIABLE: effort}), **switches}
