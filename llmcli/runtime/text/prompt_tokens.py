"""Tokenizes the prompts of chat templates. Only the template's own words become control tokens: the
name of a control token in a message, a tool's result or a system text stays text.

A prompt without such names is tokenized as any other text. In a prompt with them, the text between
two control tokens of the template is tokenized without control tokens. The ids of all other texts
stay the same, because llama.cpp tokenizes each of these texts on its own.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from llmcli.runtime.binding.tokens.special_tokens import SpecialToken
from llmcli.runtime.text.tracked_text import Span, TrackedText

# A token that the author of a vocabulary has defined, and that can mark the turns of a conversation.
MARK_NAME = re.compile(r"[<\[{|]\S+[>\]}|]")


class Tokenizer(Protocol):
    """The methods of a Model that this module uses."""

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return the token ids of a text."""
        ...

    def special_tokens(self, tokens: Sequence[int]) -> dict[int, SpecialToken]:
        """Return the special tokens among `tokens`, by their ids."""
        ...


class TemplateToken(NamedTuple):
    """A special token that the template has written: its place in the prompt, and the token."""

    start: int
    end: int
    token: SpecialToken


def tokenize_prompt(
    model: Tokenizer,
    prompt: str,
    add_special: bool,
    turn_marks: Callable[[], frozenset[int]],
) -> list[int]:
    """Return the token ids of a prompt. `add_special`: add BOS and EOS if the file asks for them.
    `turn_marks`: returns the ids of user-defined tokens that must stay text, too, in the texts of a
    conversation. (Model.tokenize finds these tokens in any text.)
    """
    ids = model.tokenize(prompt, special=True, add_special=add_special)
    spans = prompt.spans if isinstance(prompt, TrackedText) else ()
    if not spans:
        return ids
    plain = str.__str__(prompt)
    forged = [
        token
        for id_, token in model.special_tokens(ids).items()
        if _overlaps(plain, token.name, spans) and (token.is_control or id_ in turn_marks())
    ]
    if not forged:
        return ids
    added = model.tokenize("", special=True, add_special=True) if add_special else []
    n_before = 1 if added and ids[0] == added[0] else 0  # BOS, which is not always added
    tokens = _tokenize_parts(model, plain, spans, [token.name for token in forged])
    return [*added[:n_before], *tokens, *added[n_before:]]


def begins_with(prompt: str, mark: str) -> bool:
    """Return whether a template has written `mark` at the beginning of a prompt. In a text without
    sources, nothing else can have written it.
    """
    if not mark or not prompt.startswith(mark):
        return False
    spans = prompt.spans if isinstance(prompt, TrackedText) else ()
    return not spans or spans[0][0] >= len(mark)


def find_turn_marks(model: Tokenizer, prompt: TrackedText) -> frozenset[int]:
    """Return the ids of user-defined tokens that the template has written in a prompt, and that
    have names like marks.
    """
    found = set[int]()
    for start, end in _own_texts(prompt, prompt.spans):
        ids = model.tokenize(prompt.plain[start:end], special=True)
        found |= {
            id_
            for id_, token in model.special_tokens(ids).items()
            if not token.is_control and MARK_NAME.fullmatch(token.name)
        }
    return frozenset(found)


def _overlaps(text: str, name: str, spans: Sequence[Span]) -> bool:
    """Return whether an occurrence of `name` in `text` has a character of a span."""
    number = 0
    start = text.find(name)
    while start >= 0:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        if number == len(spans):
            return False
        if spans[number][0] < start + len(name):
            return True
        start = text.find(name, start + 1)
    return False


def _own_texts(text: str, spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each text between the spans."""
    position = 0
    for start, end, _ in spans:
        if start > position:
            yield position, start
        position = end
    if position < len(text):
        yield position, len(text)


def _tokenize_parts(
    model: Tokenizer, text: str, spans: Sequence[Span], forged: Sequence[str]
) -> list[int]:
    """Return the token ids of a prompt in which the names `forged` are text wherever they overlap
    one of `spans`.
    """
    ids, position = list[int](), 0  # everything before the position is tokenized
    for start, end, before, after in _between(text, _template_tokens(model, text, spans, forged)):
        inside = [
            (max(a, start) - start, min(b, end) - start, source)
            for a, b, source in spans
            if a < end and b > start
        ]
        part = text[start:end]
        if not any(_overlaps(part, name, inside) for name in forged):
            continue
        ids += model.tokenize(text[position:start], special=True)
        if before and before.token.strips_right:
            part = part.lstrip()
        if after and after.token.strips_left:
            part = part.rstrip()
        ids += _tokenize_as_text(model, part, forged)
        position = end
    return [*ids, *model.tokenize(text[position:], special=True)]


def _template_tokens(
    model: Tokenizer, text: str, spans: Sequence[Span], forged: Sequence[str]
) -> list[TemplateToken]:
    """Return the control tokens, and the tokens with names in `forged`, in the template's own
    texts, in order.
    """
    found = []
    for start, end in _own_texts(text, spans):
        ids = model.tokenize(text[start:end], special=True)
        special, position = model.special_tokens(ids), start
        for id_ in ids:
            token = special.get(id_)
            if not token or not token.name or not (token.is_control or token.name in forged):
                continue
            at = text.find(token.name, position, end)
            if at >= 0:
                position = at + len(token.name)
                found.append(TemplateToken(at, position, token))
    return found


def _between(
    text: str, tokens: Sequence[TemplateToken]
) -> Iterator[tuple[int, int, TemplateToken | None, TemplateToken | None]]:
    """Yield start and end of each text between two special tokens, and these tokens; None at the
    beginning and the end of the text.
    """
    neighbors: list[TemplateToken | None] = [None, *tokens, None]
    for before, after in itertools.pairwise(neighbors):
        start, end = before.end if before else 0, after.start if after else len(text)
        if start < end:
            yield start, end, before, after


def _tokenize_as_text(model: Tokenizer, text: str, forged: Sequence[str]) -> list[int]:
    """Return the token ids of a text without control tokens. User-defined tokens with names in
    `forged` are avoided by a cut after their first character.
    """
    ids = model.tokenize(text, special=False)
    names = [
        token.name
        for token in model.special_tokens(ids).values()
        if not token.is_control and token.name in forged
    ]
    if not names:
        return ids
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    cuts = [match.start() + 1 for match in re.finditer(pattern, text)]
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = model.tokenize(parts[0], special=False)
    for part in parts[1:]:
        ids += _tokenize_rest(model, part)
    return ids


def _tokenize_rest(model: Tokenizer, text: str) -> list[int]:
    """Return the token ids of the rest of a text. Some vocabularies put a space before each text;
    here it is put before a newline, whose tokens are then removed.
    """
    newline = model.tokenize("\n", special=False)
    ids = model.tokenize("\n" + text, special=False)
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return model.tokenize(text, special=False)
