"""Base of the conversational forms: reads OpenAI's chat fields and builds the engine's request."""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import Form
from llmcli.api.forms.messages import messages
from llmcli.api.forms.prompt import Prompt, Wanted, answer_format, grammar, prompt, variables
from llmcli.api.forms.tools import tools
from llmcli.api.server_settings import Settings
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner


class Conversation(Form):
    """Reads the fields of OpenAI's chat completions; subclasses write the answers in their API's
    form.

    `prompt` is what the model reads, `has_logprobs` whether log-probabilities are returned,
    `_splitters` has one splitter for each sample.
    """

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        if set(fields.words("modalities", 8)) - {"text"}:
            raise Problem("modalities: this server generates only text", param="modalities")
        if fields.choice("verbosity", ("low", "medium", "high"), "medium") != "medium":
            raise Problem(
                "verbosity is not supported: ask for it in the system text", param="verbosity"
            )
        self.prompt = self._prompt(self._prompt_request(), runner, settings)
        self.logprobs = fields.flag("logprobs")
        top = fields.whole("top_logprobs", 0, logprobs.MOST, 0) or 0
        if top and not self.logprobs:
            raise Problem("top_logprobs needs logprobs to be true", param="top_logprobs")
        options = common.common(fields, settings)
        self.samples = common.samples(fields, options["search"].beams)
        if self.logprobs and options["search"].beams > 1:
            raise Problem(
                "a beam search has no log-probabilities of tokens: leave out logprobs or beams",
                param="logprobs",
            )
        limit = common.limit(common.asked_limit(fields), settings)
        tokens, opened = self.prompt.tokens, self.prompt.opened
        max_tokens = common.room(runner, settings, len(tokens), limit, self.samples)
        self.constraint = self.prompt.constraint
        options = {
            "strategy": runner.strategy(),
            **options,
            "logprobs": self.logprobs,
            "top_logprobs": top,
        }
        self.requests = (
            Request(
                tokens, max_tokens=max_tokens, after=opened.closes if opened else "", **options
            ),
        )
        self.check()
        self._splitters = [self.prompt.listener() for _ in range(self.samples)]

    def _prompt(self, wanted: Wanted, runner: Runner, settings: Settings) -> Prompt:
        return prompt(wanted, runner, settings)

    def _prompt_request(self) -> Wanted:
        fields = self.fields
        generate, continued = (
            fields.flag("add_generation_prompt", True),
            fields.flag("continue_final_message"),
        )
        return Wanted(
            messages(fields),
            tools(fields),
            answer_format(fields, "response_format"),
            grammar(fields),
            variables(fields, self.runner.template),
            generate,
            continued,
        )
