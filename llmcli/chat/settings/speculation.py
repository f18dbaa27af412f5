"""The setting `ngram_draft`: speculative decoding with drafts that are copied from earlier text."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, parse_choice
from llmcli.errors import UserError
from llmcli.runtime.draft_settings import NGRAM_DRAFT_MODES


def _change(chat: ChatSession, value: str) -> None:
    mode = parse_choice("ngram_draft", NGRAM_DRAFT_MODES, value)
    if not chat.runner.set_ngram_draft(mode) and mode == "on":
        raise UserError(
            "this model was loaded without n-gram drafting, or drafting cannot pay off here",
            hint="leave, and start with --ngram-draft on",
        )


SETTINGS = (
    ChatSetting(
        "ngram_draft",
        ANSWER_GROUP,
        "draft tokens from repetitions in the text and in earlier answers",
        ", ".join(NGRAM_DRAFT_MODES),
        "auto",
        lambda chat: chat.runner.ngram_draft,
        _change,
        lambda chat: (
            NGRAM_DRAFT_MODES
            if chat.runner.drafts_repetitions
            else [word for word in NGRAM_DRAFT_MODES if word != "on"]
        ),
    ),
)
