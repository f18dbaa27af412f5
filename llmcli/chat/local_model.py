"""The model of a chat in this process."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.chat import constraint_report, context_overflow, kv_states
from llmcli.chat.chat_model import ChatModel, ChatReply, ChatState, ContextUse
from llmcli.chat.display import answer_report
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import find_setting, sampling_settings
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Message
from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.api.conversation.tools import ToolSet
    from llmcli.api.tool_calls.base import ToolCallFormat
    from llmcli.chat.tools.call_filter import CallFilter


class LocalModel(ChatModel):
    """A model that is loaded in this process, `runner`."""

    has_tokenizer = True
    timed_unit = "token"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._call_format: ToolCallFormat | None = None  # of the last prompt
        self._shows_call_marks = False

    def require_runner(self) -> Runner:
        return self.runner

    @property
    def location(self) -> str:
        return str(self.runner.header.path)

    @property
    def n_ctx(self) -> int:
        return self.runner.n_ctx

    def describe(self, name: str, shows_start: bool = False) -> str:
        runner = self.runner
        trained = runner.header.context_length or 0
        context = f"{runner.n_ctx:,}" + (f" of {trained:,}" if runner.n_ctx < trained else "")
        start = f" · loaded in {runner.load_ms / 1000:.1f} s" if shows_start else ""
        return f"{name} · {runner.header.file_type} · {context} tokens of context{start}"

    def summary_rows(self, name: str) -> list[tuple[str, str]]:
        runner, header = self.runner, self.runner.header
        return [
            ("model", name),
            ("file", str(header.path)),
            ("architecture", header.architecture),
            ("type", f"{header.file_type}, {header.bits_per_weight:.2f} bits per weight"),
            ("parameters", f"{header.parameters:,}"),
            ("size", format_size(header.tensor_bytes)),
            ("context", f"{runner.n_ctx} of {header.context_length or '?'} tokens"),
            ("KV cache", f"K {runner.options.cache_type_k}, V {runner.options.cache_type_v}"),
            ("threads", f"{runner.options.threads}"),
            (
                "template",
                "from the model or --chat-template"
                if runner.template
                else "none: messages are plain text",
            ),
        ]

    def list_names(self, chat: ChatState) -> Iterable[str]:
        return chat.models.list_names() if chat.models else ()

    def switch(self, chat: ChatState, ref: str) -> None:
        if chat.models is None:
            raise UserError(
                "the model cannot be changed here", hint="leave, and start with the other model"
            )
        chat.models.switch(
            ref, chat.conversation.search.beams, lambda opened: _use_model(chat, opened)
        )
        _warn_if_too_long(chat)

    def start_reply(self, chat: ChatState, text: str, count: int) -> ChatReply:
        return self.runner.reply(self._request(chat, text), count)

    def _request(self, chat: ChatState, text: str) -> Request:
        """Return the request to the engine for the message `text`, according to the settings of the
        conversation. Raises UserError if the message does not fit into the context.
        """
        start, runner = perf_counter(), self.runner
        prompt, conversation = context_overflow.fit_prompt(chat, text), chat.conversation
        chat.opened_tags = runner.opened_tags(prompt.tokens)
        grammar = runner.grammars(conversation.constraint) if conversation.constraint else None
        strategy = "beam" if conversation.search.beams > 1 else runner.default_strategy(grammar)
        return Request(
            prompt.tokens,
            conversation.sampling,
            conversation.predict,
            chat.stop_texts,
            chat.ignore_eos,
            chat.logprobs or chat.display.probs > 0,
            start,
            strategy,
            conversation.search,
            allow_repetition=chat.endless,
            top_logprobs=chat.display.probs,
            turn=len(conversation.tree.turns) + 1,
            earlier_turns=frozenset(conversation.tree.current_path()),
            grammar=grammar,
            grammar_after=chat.opened_tags.closing if chat.opened_tags else "",
            overflow=prompt.overflow,
            can_move_cells=prompt.can_move_cells,
            thinking=runner.thinking_limit(chat.opened_tags, chat.reasoning_budget)
            if runner.template
            else None,
        )

    def encode_messages(
        self, chat: ChatState, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        tools, template = self._tool_set(chat), self.runner.template
        self._call_format = None
        if tools is None and not any(message.template_fields for message in messages):
            return self.runner.encode_chat(messages, add_generation_prompt=add_generation_prompt)
        assert template is not None
        from llmcli.api.conversation.conversation_text import render_conversation
        from llmcli.api.conversation.tools import NO_TOOLS

        rendered = render_conversation(
            template, messages, tools or NO_TOOLS, add_generation_prompt=add_generation_prompt
        )
        self._call_format = rendered.call_format
        return self.runner.encode_prompt(rendered.text)

    def open_call_filter(self, chat: ChatState) -> "CallFilter | None":
        tools = self._tool_set(chat)
        if tools is None or self._call_format is None:
            return None
        from llmcli.chat.tools.call_filter import CallFilter

        return CallFilter(chat.opened_tags, self._call_format, tools)

    def _tool_set(self, chat: ChatState) -> "ToolSet | None":
        """Return the tools that prompts offer to the model; None if there are none. With a grammar
        or schema an answer cannot call tools, and without a chat template no model can.
        """
        if chat.tools is None or not chat.tools.offered_names:
            return None
        if self.runner.template is None or chat.conversation.constraint is not None:
            reason = "a grammar or schema" if self.runner.template else "a model without a template"
            chat.warn_once(f"with {reason}, tools are not offered")
            return None
        if not self._shows_call_marks:
            from llmcli.api.tool_calls import call_marks  # would delay the start if imported above

            self.runner.show_control_tokens(call_marks())
            self._shows_call_marks = True
        return chat.tools.tool_set()

    def build_document(self, chat: ChatState, answer: Answer) -> dict[str, Any]:
        return answer_report.build_document(self.runner, chat.name, chat.file_bytes, answer)

    def format_timing(self, answer: Answer) -> str:
        return answer_report.format_timing(self.runner, answer)

    def report_lines(self, answer: Answer, timing: str) -> list[str]:
        return answer_report.report_lines(self.runner, answer, timing)

    def token_text(self, answer: Answer, token: int) -> str:
        return answer_report.token_text(self.runner, token)

    def count_text(self, text: str) -> int:
        return len(self.runner.encode_text(text))

    def check_constraint(self, constraint: Constraint) -> Sequence[str]:
        return self.runner.grammars(constraint).not_enforced

    def is_complete(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> bool:
        return constraint_report.is_complete(self.runner, constraint, opened_tags, answer)

    def constraint_json(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> dict[str, Any]:
        return constraint_report.constraint_json(self.runner, constraint, opened_tags, answer)

    def setting_obstacle(self, name: str) -> str:
        return ""

    def has_own_value(self, chat: ChatState, name: str) -> bool:
        return False

    @property
    def reasoning(self) -> bool | None:
        return self.runner.template.reasoning if self.runner.template else None

    def set_reasoning(self, reasoning: bool | None) -> None:
        if reasoning is not None and not self.can_switch_reasoning:
            raise UserError(
                "this model's template cannot turn thinking on or off",
                hint="/set thinking hide (--hidethinking) hides any thinking",
            )
        if self.runner.template:
            self.runner.template.reasoning = reasoning

    @property
    def can_switch_reasoning(self) -> bool:
        return bool(self.runner.template and self.runner.template.thinking_variables)

    def context_use(self, chat: ChatState) -> ContextUse:
        kv = self.runner.kv_report()
        cache = self.runner.predict_cache(kv.type_k, kv.type_v)
        used = (
            f"KV {format_size(answer_report.used_cache_bytes(cache, kv.used_cells))}"
            if cache
            else f"KV {kv.used_cells} cells"
        )
        return ContextUse(self._count_conversation(chat), self.runner.n_ctx, used)

    def _count_conversation(self, chat: ChatState) -> int:
        """Return the number of tokens that the conversation adds to the next prompt. They are
        counted again only if the conversation or the model has changed.
        """
        template = self.runner.template
        key = (
            self.runner,
            template,
            template and template.reasoning,
            chat.conversation.system,
            chat.conversation.constraint is None,
            chat.tools and chat.tools.offered_names,
            *(message.content for message in chat.conversation.sent_messages),
        )
        if chat.counted_tokens[0] != key:
            try:
                chat.counted_tokens = key, chat.token_count()
            except UserError:  # the template rejects this: sending will report the error
                return self.runner.engine.ledger.used_cells
        return chat.counted_tokens[1]

    def describe_position(self, chat: ChatState) -> str:
        tokens = chat.conversation_tokens()
        if not tokens:
            return ""
        n_cached = self.runner.engine.ledger.find_nearest(tokens)[1]
        return f"{n_cached} of {len(tokens)} tokens in the cache"

    def conversation_size(self, chat: ChatState) -> int | None:
        return len(chat.conversation_tokens()) or None

    def forget_conversation(self) -> None:
        self.runner.engine.ledger.evict_idle()

    def save_state(self, chat: ChatState, path: Path) -> str:
        return kv_states.save_state(chat, path)

    def restore_state(self, chat: ChatState, path: Path) -> str:
        return kv_states.restore_state(chat, path)


def _use_model(chat: ChatState, opened: OpenedModel) -> None:
    """Make `opened` the model of the session. Settings with default values get the new model's
    recommended values, and logit_bias is reset, because token ids differ between models.
    """
    conversation = chat.conversation
    sampling = conversation.sampling
    if sampling["logit_bias"]:
        sampling = sampling.with_values({"logit_bias": ()})
        chat.ui.warn("logit_bias was reset: its token ids belong to the other model")
    unset = {
        setting.name
        for setting in sampling_settings().values()
        if sampling[setting.name] == setting.default
    }
    new_defaults = {
        name: value for name, value in opened.settings.items() if find_setting(name).name in unset
    }
    sampling = sampling.with_values(new_defaults)
    # Nothing after this line can fail, so that the session never has the state of two models.
    conversation.sampling, conversation.system = sampling, conversation.system or opened.system
    chat.name, chat.model, chat.file_bytes = (
        opened.name,
        LocalModel(opened.runner),
        opened.file_bytes,
    )
    chat.model_sha256 = opened.sha256


def _warn_if_too_long(chat: ChatState) -> None:
    """Print a warning if the conversation does not fit into the context of the new model, or if
    its template cannot render the conversation.
    """
    if not chat.conversation.messages:
        return
    try:
        count = len(chat.prompt_tokens(""))
    except UserError as error:  # a template that rejects this conversation
        chat.ui.warn(str(error))
        return
    if count >= chat.runner.n_ctx:
        chat.ui.warn(
            f"the conversation has {count} tokens, but this context holds "
            f"{chat.runner.n_ctx}: /clear starts over"
        )
