"""The text that ends a model's thinking: what its chat template writes between the thinking and the
reply of an earlier answer, for example `\n</think>\n\n`.
"""

from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Message

MAX_CHARACTERS = 200  # of the text between thinking and reply; a longer one has more than the end
THOUGHT, REPLY = "thought7", "reply7"  # texts that no template contains
PROBE = (Message("user", "hello"), Message("assistant", REPLY, {"reasoning_content": THOUGHT}))
USUAL_BREAK = "\n\n"  # after the closing tag, where the template does not show what follows
# Closing tags that models write in another way than the template, or that are followed by no blank
# line. gpt-oss ends its message and begins the next one.
KNOWN_CLOSES = {
    "<|channel|>final<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "[/THINK]": "[/THINK]",
    "<|END_THINKING|>": "<|END_THINKING|><|START_RESPONSE|>",
    "<|inner_suffix|>": "<|inner_suffix|>",
    "<channel|>": "<channel|>",
}


@dataclass(frozen=True, slots=True)
class ThinkingClose:
    """How thinking ends. `line_end`: the line end before the tag, which is left out where the
    thinking already ends with one. `before`: further text before the closing tag. `tag`: the closing
    tag. `after`: the white space between the tag and the reply.
    """

    line_end: str
    before: str
    tag: str
    after: str


def find_thinking_close(template: ChatTemplate | None, tags: ThinkingTags) -> ThinkingClose:
    """Return how thinking in these tags ends in the chat template. Where the template writes no
    thinking of earlier answers, return the way that is usual for the tags.
    """
    between = _text_between(template, tags) if template else None
    if between is None:
        between = KNOWN_CLOSES.get(tags.closing, tags.closing + USUAL_BREAK)
    before, _, after = between.partition(tags.closing)
    text = before.lstrip()
    return ThinkingClose(before[: len(before) - len(text)], text, tags.closing, after)


def _text_between(template: ChatTemplate, tags: ThinkingTags) -> str | None:
    """Return the text that the template writes between the thinking and the reply of an answer, or
    None if it leaves the thinking out or does not end it with the closing tag.
    """
    try:
        prompt = template.render(PROBE, add_generation_prompt=False).plain
    except UserError:
        return None
    _, has_thought, rest = prompt.partition(THOUGHT)
    between, has_reply, _ = rest.partition(REPLY)
    is_close = (
        has_thought
        and has_reply
        and len(between) <= MAX_CHARACTERS
        and between.count(tags.closing) == 1
        and not between.partition(tags.closing)[2].strip()
    )
    return between if is_close else None
