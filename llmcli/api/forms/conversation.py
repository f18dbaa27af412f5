"""ConversationForm: the base of all forms with conversations. It reads the fields of OpenAI's chat
completions and builds the request for the engine.
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
    """Reads the fields of OpenAI's chat completions. Subclasses write the answers in the format of
    their API.

    `prompt`: the rendered prompt; `has_logprobs`: whether log-probabilities are returned;
    `_splitters`: one output splitter for each sample.
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
        self.prompt = self._prompt(self._prompt_request(), runner, settings)
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
        tokens, opened = self.prompt.tokens, self.prompt.opened_tags
        max_tokens = common.answer_budget(
            runner, settings, len(tokens), limit, self.samples_per_request
        )
        self.constraint = self.prompt.constraint
        self.requests = (
            Request(
                tokens,
                max_tokens=max_tokens,
                grammar_after=opened.closing if opened else "",
                **common.with_logprobs(options, runner, self.has_logprobs, top),
            ),
        )
        self.check_requests()
        self._splitters = [self.prompt.new_splitter() for _ in range(self.samples_per_request)]

    def _prompt(
        self, wanted: PromptRequest, runner: Runner, settings: ServerSettings
    ) -> RenderedPrompt:
        return render_prompt(wanted, runner, settings)

    def _prompt_request(self) -> PromptRequest:
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
