"""ConversationForm: the base class of the forms whose request is a conversation. It reads the
fields of OpenAI's chat completions and builds the engine's request.
"""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import ApiForm
from llmcli.api.forms.messages import read_messages
from llmcli.api.forms.prompt import (
    PromptRequest,
    RenderedPrompt,
    base_model_error,
    read_answer_schema,
    read_constraint,
    read_template_variables,
    render_prompt,
    render_text,
)
from llmcli.api.forms.tools import read_tools
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.chat_template import ChatTemplate


class ConversationForm(ApiForm):
    """Reads the fields of OpenAI's chat completions. Subclasses write the responses in the format
    of their API; those with other field names first translate the request.

    `prompt`: the rendered prompt. `has_logprobs`: the request asks for log-probabilities.
    `_splitters`: an OutputSplitter for each sample, used for streams.
    """

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        if set(fields.texts("modalities", 8)) - {"text"}:
            raise ApiError("modalities: this server generates only text", param="modalities")
        if fields.choice("verbosity", ("low", "medium", "high"), "medium") != "medium":
            raise ApiError(
                "verbosity is not supported: ask for it in the system text", param="verbosity"
            )
        prompt_request = read_prompt_request(fields, runner.template)
        self.prompt = self._render_prompt(prompt_request, runner, settings)
        self.has_logprobs = fields.flag("logprobs")
        top = fields.integer("top_logprobs", 0, logprobs.MAX_ALTERNATIVES, 0) or 0
        if top and not self.has_logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        options = common.read_common_fields(fields, settings)
        self.samples_per_request = common.read_samples(fields, options["search"].beams)
        if self.has_logprobs and options["search"].beams > 1:
            raise ApiError(
                "a beam search has no log-probabilities of tokens: leave out logprobs or beams",
                param="logprobs",
            )
        limit = common.effective_limit(common.read_limit(fields), settings)
        tokens, opened_tags = self.prompt.tokens, self.prompt.opened_tags
        n_answers = self.samples_per_request, options["search"].beams
        max_tokens = common.answer_budget(runner, settings, len(tokens), limit, *n_answers)
        self.constraint = self.prompt.constraint
        self.requests = (
            Request(
                tokens,
                max_tokens=max_tokens,
                grammar_after=opened_tags.closing if opened_tags else "",
                **common.context_fields(fields, runner, settings, len(tokens), *n_answers),
                **common.with_logprobs(options, runner, self.has_logprobs, top),
            ),
        )
        self.check_requests()
        self._splitters = [self.prompt.new_splitter() for _ in range(self.samples_per_request)]

    def _render_prompt(
        self, request: PromptRequest, runner: Runner, settings: ServerSettings
    ) -> RenderedPrompt:
        return render_prompt(request, runner, settings)


def read_prompt_request(fields: Fields, template: ChatTemplate | None) -> PromptRequest:
    """Return the conversation in the fields of OpenAI's chat completions. Raises ApiError for an
    invalid field.
    """
    return PromptRequest(
        read_messages(fields),
        read_tools(fields),
        read_answer_schema(fields, "response_format"),
        read_constraint(fields),
        read_template_variables(fields, template),
        fields.flag("add_generation_prompt", True),
        fields.flag("continue_final_message"),
    )


def apply_template(body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> str:
    """Return the prompt text of a conversation, of any length. If the tokenizer adds a BOS token,
    the text does not begin with one, so that a client can send it to /completion.

    Raises ApiError for an invalid field or a model without a template, and UserError if the
    template fails for this conversation.
    """
    template = runner.template
    if template is None:
        raise base_model_error()
    request = read_prompt_request(Fields(body), template)
    text = render_text(request, template, settings).text
    has_bos = runner.model.add_bos and runner.begins_with_bos(text)
    return text.plain[len(template.bos) if has_bos else 0 :]
