"""The text of one answer, split once into thinking and content."""

from dataclasses import dataclass

from llmcli.runtime.text.reasoning import ThinkingTags, split_thinking


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The text of an answer; log, report and display read it.

    - `full`: the whole text, with the thinking tag that the prompt opened.
    - `thinking`: the thinking with its tags; "" without thinking.
    - `content`: the text after the thinking.
    - `n_prompt_chars`: how many characters of `full` the prompt contains.
    """

    full: str
    thinking: str
    content: str
    n_prompt_chars: int = 0

    @property
    def n_thinking_chars(self) -> int:
        """The number of generated characters that are thinking."""
        return max(0, len(self.thinking) - self.n_prompt_chars)


NO_ANSWER_TEXT = AnswerText("", "", "")


def split_answer(text: str, opened_tags: ThinkingTags | None = None) -> AnswerText:
    """Split a generated text; `opened_tags` are the tags that its prompt opened."""
    opening = opened_tags.opening if opened_tags else ""
    thinking, content = split_thinking(opening + text)
    return AnswerText(opening + text, thinking, content, len(opening))
