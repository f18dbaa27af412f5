"""ConversationForm: the base class of the forms whose request is a conversation. It reads the
fields of OpenAI's chat completions and builds the engine's request.
"""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import ApiForm
from llmcli.api.forms.messages import read_messages
from llmcli.api.forms.prompt import (
    PromptRequest,
    RenderedPrompt,
    read_answer_schema,
    read_constraint,
    read_template_variables,
    render_prompt,
)
from llmcli.api.forms.tools import read_tools
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner


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
        self.prompt = self._render_prompt(self._read_prompt_request(), runner, settings)
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

    def _read_prompt_request(self) -> PromptRequest:
        fields = self.fields
        generate, continued = (
            fields.flag("add_generation_prompt", True),
            fields.flag("continue_final_message"),
        )
        return PromptRequest(
            read_messages(fields),
            read_tools(fields),
            read_answer_schema(fields, "response_format"),
            read_constraint(fields),
            read_template_variables(fields, self.runner.template),
            generate,
            continued,
        )
