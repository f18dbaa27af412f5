"""ConversationForm: the base class of the forms whose request is a conversation. It reads the
fields of OpenAI's chat completions and builds the engine's request.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from llmcli.api import request_settings
from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    refused,
)
from llmcli.api.bodies.checks import read_body
from llmcli.api.bodies.generation_fields import (
    GenerationBody,
    OpenAiFields,
    StreamOptions,
    Texts,
    TokenLimit,
)
from llmcli.api.conversation.messages import MAX_MESSAGES, ChatMessage, to_conversation
from llmcli.api.conversation.prompt import (
    PromptRequest,
    RenderedPrompt,
    base_model_error,
    render_prompt,
    render_text,
)
from llmcli.api.conversation.template_fields import (
    ReasoningFields,
    TemplateFields,
    read_template_variables,
    read_thinking_budget,
)
from llmcli.api.conversation.tool_fields import (
    MAX_TOOLS,
    ChatTool,
    ToolFields,
    define_tools,
    read_tools,
)
from llmcli.api.conversation.tools import ToolDefinition
from llmcli.api.errors import ApiError
from llmcli.api.forms.answer_constraint import (
    ResponseFormat,
    read_answer_schema,
    read_constraint,
)
from llmcli.api.forms.base import ApiForm
from llmcli.api.forms.logprobs import MAX_ALTERNATIVES, MAX_NATIVE_ALTERNATIVES
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Message

CONTINUE_WORDS = "true, false, or content"


class LlamaServerChatFields(TemplateFields):
    """Fields that llama-server adds to chat completions."""

    origin: ClassVar[str] = "llama-server"
    n_predict: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    n_cmpl: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "the number of answers"
    )
    n_probs: Annotated[int, WholeNumber(0, MAX_NATIVE_ALTERNATIVES)] | None = honored(
        "return log-probabilities with this many alternatives"
    )
    return_tokens: Any = ignored("the entries of logprobs have the ids of tokens")
    response_fields: Any = ignored("chat completions have all of their fields")
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = honored(
        "none leaves the thinking in the text of the answer"
    )
    parse_tool_calls: bool | None = honored("false leaves tool calls in the text of the answer")


class VllmChatFields(LlamaServerChatFields):
    """Fields that vLLM adds to chat completions."""

    origin: ClassVar[str] = "vLLM"
    add_generation_prompt: bool | None = honored(
        "whether the prompt ends with the beginning of an answer"
    )
    continue_final_message: Annotated[bool | Literal["content"], Either(CONTINUE_WORDS)] | None = (
        honored("continue the last message, as is done for an assistant's message anyway")
    )
    include_reasoning: bool | None = honored("false leaves the thinking out of the answer")
    echo: bool | None = refused("the answer has only the new text")


class ChatBody(VllmChatFields, ToolFields, ReasoningFields, OpenAiFields, GenerationBody):
    """A request for a chat completion."""

    origin: ClassVar[str] = "OpenAI"
    messages: Annotated[list[ChatMessage], MaxEntries(MAX_MESSAGES)] = honored(
        "the conversation", ...
    )
    tools: Annotated[list[ChatTool], MaxEntries(MAX_TOOLS)] | None = honored(
        "functions and custom tools that the model may call; others are left out"
    )
    response_format: ResponseFormat | None = honored("the form of the answer")
    max_completion_tokens: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    max_tokens: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    n: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "the number of answers"
    )
    stop: Texts | None = honored("texts that end the answer")
    logprobs: bool | None = honored("return the log-probability of each token")
    top_logprobs: Annotated[int, WholeNumber(0, MAX_ALTERNATIVES)] | None = honored(
        "return this many alternatives of each token"
    )
    stream_options: StreamOptions | None = honored("what a stream contains")
    metadata: Any = ignored("nothing is stored")
    prediction: Any = ignored("it only speeds up the answer; the server drafts by itself")
    modalities: Any = refused("this server generates only text", ["text"])
    audio: Any = refused("this server generates only text")
    verbosity: Any = refused("ask for it in the system text", "medium")
    web_search_options: Any = refused("this server cannot search the web")
    functions: Any = refused("use tools")
    function_call: Any = refused("use tool_choice", "auto", "none")


class ConversationForm(ApiForm):
    """Reads the fields of OpenAI's chat completions. Subclasses write the responses in the format
    of their API; those with other field names translate their request in chat_body().

    `chat`: the request as a chat completion. `prompt`: the rendered prompt. `has_logprobs`: the
    request asks for log-probabilities. `_splitters`: an OutputSplitter for each sample, used for
    streams.
    """

    body_type: ClassVar[type[RequestBody]] = ChatBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        self.chat = chat = self.chat_body()
        self._set_verbose(chat.verbose)
        self.samples_per_request = chat.n or chat.n_cmpl or 1
        self.prompt = self._render_prompt(self._prompt_request())
        self.has_logprobs = bool(chat.logprobs or chat.n_probs)
        if chat.top_logprobs and not self.has_logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        limit = request_settings.first_limit(
            chat.n_predict, chat.max_completion_tokens, chat.max_tokens
        )
        options = request_settings.read_common_fields(
            chat, runner, settings, chat.stop, limit, self.samples_per_request
        )
        request_settings.check_samples(self.samples_per_request, options["search"].beams)
        if self.has_logprobs and options["search"].beams > 1:
            raise ApiError(
                "a beam search has no log-probabilities of tokens: leave out logprobs or beams",
                param="logprobs",
            )
        tokens = self.prompt.tokens
        n_answers = self.samples_per_request, options["search"].beams
        max_tokens = request_settings.answer_budget(
            runner,
            settings,
            len(tokens),
            request_settings.effective_limit(limit, settings),
            *n_answers,
        )
        self.constraint = self.prompt.constraint
        top = chat.top_logprobs or chat.n_probs or 0
        self.requests = (
            Request(
                tokens,
                max_tokens=max_tokens,
                thinking=runner.thinking_limit(
                    self.prompt.opened_tags,
                    read_thinking_budget(chat, runner.template, settings.reasoning_budget),
                ),
                **self.prompt.request_fields,
                **request_settings.context_fields(chat, runner, settings, len(tokens), *n_answers),
                **request_settings.with_logprobs(options, runner, chat, self.has_logprobs, top),
            ),
        )
        self.check_requests()
        self._splitters = [self.prompt.new_splitter() for _ in range(self.samples_per_request)]

    def chat_body(self) -> ChatBody:
        """Return the request as a chat completion."""
        body: ChatBody = self.body
        return body

    def _render_prompt(self, request: PromptRequest) -> RenderedPrompt:
        return render_prompt(request, self.runner, self.settings)

    def _prompt_request(self) -> PromptRequest:
        definitions = self._tool_definitions()
        return read_prompt_request(self.chat, definitions, self.runner.template, self.notes)

    def _tool_definitions(self) -> list[ToolDefinition]:
        return define_tools(self.body.tools, self.notes)


def read_prompt_request(
    chat: ChatBody,
    definitions: Sequence[ToolDefinition],
    template: ChatTemplate | None,
    notes: list[str],
) -> PromptRequest:
    """Return the conversation of a chat completion with its tools. Notes about what is left out are
    appended to `notes`. Raises ApiError for an invalid field.
    """
    messages = to_conversation(chat.messages, notes)
    continues_last = _continues_last(chat, messages[-1])
    schema = read_answer_schema(chat.response_format, "response_format")
    form = read_constraint(chat, schema)
    return PromptRequest(
        messages,
        read_tools(definitions, chat.tool_choice, chat.parallel_tool_calls),
        form if isinstance(form, AnswerSchema) else None,
        form if isinstance(form, Constraint) else None,
        read_template_variables(chat, template, notes),
        chat.add_generation_prompt is not False,
        continues_last,
        splits_thinking=chat.reasoning_format != "none",
        splits_calls=chat.parse_tool_calls is not False,
        truncation=request_settings.read_truncation(chat),
    )


def _continues_last(chat: ChatBody, last: Message) -> bool:
    """Return whether the answer continues the last message: if the request says so, and without a
    word about it if this is a text of the assistant.
    """
    if chat.continue_final_message is not None:
        if chat.continue_final_message and chat.add_generation_prompt:
            raise ApiError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return bool(chat.continue_final_message)
    is_text = last.role == "assistant" and bool(last.content.strip())
    has_calls = bool(last.template_fields.get("tool_calls"))
    return is_text and not has_calls and not chat.add_generation_prompt


def apply_template(
    document: Mapping[str, Any],
    runner: Runner,
    settings: ServerSettings,
    notes: list[str] | None = None,
) -> str:
    """Return the prompt text of a conversation, of any length. If the tokenizer adds a BOS token,
    the text does not begin with one, so that a client can send it to /completion. `document`: the
    JSON object of a chat completion. Notes about what has no effect are appended to `notes`.

    Raises ApiError for an invalid field or a model without a template, and UserError if the
    template fails for this conversation.
    """
    template = runner.template
    if template is None:
        raise base_model_error()
    notes = [] if notes is None else notes
    chat = read_body(ChatBody, document, notes)
    request = read_prompt_request(chat, define_tools(chat.tools, notes), template, notes)
    text = render_text(request, template, settings).text
    has_bos = runner.model.add_bos and runner.begins_with_bos(text)
    return text.plain[len(template.bos) if has_bos else 0 :]
