"""Splits the text of an answer into the model's thinking and the content after it."""

from dataclasses import dataclass, replace

from llmcli.runtime.text.reasoning import THINKING_TAGS, ThinkingTags, split_thinking
from llmcli.types import Message


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The text of an answer, split into thinking and content.

    - `full`: the complete text. If the prompt already ended with an opening thinking tag, the text
      begins with this tag.
    - `thinking`: the thinking with its tags; "" without thinking.
    - `content`: the text after the thinking.
    - `n_prompt_chars`: length of the tag at the start of `full` that was in the prompt, not
      generated.
    """

    full: str
    thinking: str
    content: str
    n_prompt_chars: int = 0

    @property
    def n_thinking_chars(self) -> int:
        """The number of generated characters that are thinking."""
        return max(0, len(self.thinking) - self.n_prompt_chars)

    @property
    def plain_thinking(self) -> str:
        """The thinking without its tags."""
        text = self.thinking.strip()
        for tags in THINKING_TAGS:
            text = text.removeprefix(tags.opening).removesuffix(tags.closing)
        return text.strip()


NO_ANSWER_TEXT = AnswerText("", "", "")


def split_answer(text: str, opened_tags: ThinkingTags | None = None) -> AnswerText:
    """Split a generated text into thinking and content. `opened_tags`: the thinking tags that are
    open at the end of the prompt, or None.
    """
    opening = opened_tags.opening if opened_tags else ""
    thinking, content = split_thinking(opening + text)
    return AnswerText(opening + text, thinking, content, len(opening))


def without_thinking(message: Message) -> Message:
    """Return a message of the assistant without its thinking, and any other message unchanged."""
    if message.role != "assistant":
        return message
    thought, content = split_thinking(message.content)
    return replace(message, content=content) if thought else message
