"""Skeleton-of-Thought (Ning et al. 2023, arXiv:2307.15337): the model first writes an outline of
the answer, and then the text for each point of the outline. The texts are written in parallel.

Two things differ from the paper. A grammar forces the outline to be a numbered list, where the
paper parses free text. (A list and not JSON, because small models that are forced to write JSON
write text about JSON.) The prompts are worded so that those of the points differ only at their end:
the question and the outline are computed once and shared through the cache.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.forms.base import ApiForm
from llmcli.api.forms.conversation_form import ConversationForm
from llmcli.api.forms.openai_chat import ChatForm
from llmcli.batch.plans import AnswerPlan, SampleRequest, plain
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import N_SEEDS
from llmcli.runtime.text.reasoning import THINKING_TAGS

MIN_POINTS, MAX_POINTS = 3, 10  # points of an outline
MAX_POINT_CHARACTERS = 80  # that the grammar allows for a point of the outline
MAX_POINT_WORDS = 8  # of a point that are used; further words are cut off
OUTLINE_PROMPT = (
    "{question}\n\nGive only the outline of an answer to this: {least} to {most} numbered points "
    "in the order in which to read them, each of three to five words."
)
POINT_PROMPT = (
    "{question}\n\nThe outline of the answer:\n{outline}\n\nWrite one or two plain sentences for "
    "one point of it and nothing of the others. The point: {point}"
)
# Request fields that only make sense for an answer with a single text.
SINGLE_TEXT_FIELDS = ("n", "response_format", "tools", "logprobs")


def skeleton(form: ApiForm) -> AnswerPlan:
    """Answer a parsed request by Skeleton-of-Thought, as an answer plan (plans.py). The returned
    document has the joined text as one message, and the points with their texts in `skeleton`. If
    the outline has too few points, the request is answered by the plan `plain`.

    Raises ApiError if the request is not a conversation that ends with a user's text, or if it asks
    for more than one text. The name of this function is a part of the batch's identity. Renaming it
    would prevent resuming.
    """
    if not isinstance(form, ConversationForm):
        raise ApiError("a skeleton needs a conversation: use /v1/chat/completions")
    for name in SINGLE_TEXT_FIELDS:
        if form.source.get(name) not in (None, False, 1):
            raise ApiError(
                f"a skeleton is one text of several points: leave out {name}", param=name
            )
    question = _question(form)
    outline = yield from _ask_outline(form, question)
    points = _points(outline)
    if points is None:
        return (yield from plain(form))
    requests = [_point(form, question, points, number) for number in range(len(points))]
    answers = [answer for (answer,) in (yield [SampleRequest(request) for request in requests])]
    texts = [_content(answer) for answer in answers]
    joined = [{"point": point, "text": text} for point, text in zip(points, texts, strict=True)]
    return {**form.complete_document([_join(outline, answers, joined)]), "skeleton": joined}


def _ask_outline(
    form: ConversationForm, question: str
) -> Generator[Sequence[SampleRequest], list[list[Answer]], Answer]:
    """Yield the request for the outline and return the answer. A grammar forces the outline's
    format. For a reasoning model the grammar applies only after the end of the thinking.
    """
    request = _with_last_message(
        form, OUTLINE_PROMPT.format(question=question, least=MIN_POINTS, most=MAX_POINTS)
    )
    grammar = form.runner.grammars(Constraint("gbnf", outline_grammar()))
    tags = form.runner.opened_tags(request.tokens)
    request = replace(
        request,
        grammar=grammar,
        strategy=form.runner.default_strategy(grammar),
        grammar_after=tags.closing if tags else "",
    )
    ((answer,),) = yield [SampleRequest(request)]
    return answer


def _point(form: ConversationForm, question: str, points: list[str], number: int) -> Request:
    """Return the request for the text of the point `points[number]`. Each point gets an equal share
    of the original request's `max_tokens`, and another seed.
    """
    outline = "\n".join(f"{index}. {point}" for index, point in enumerate(points, 1))
    text = POINT_PROMPT.format(question=question, outline=outline, point=points[number])
    request, original = _with_last_message(form, text), form.requests[0]
    seed = (original.sampling.seed + 1 + number) % N_SEEDS
    max_tokens = max(1, (original.max_tokens or 0) // len(points))
    return replace(
        request,
        sampling=replace(original.sampling, seed=seed),
        max_tokens=min(max_tokens, request.max_tokens or max_tokens),
    )


def _question(form: ConversationForm) -> str:
    """Return the text of the conversation's last message. Raises ApiError if the message is not
    from the user or is not plain text.
    """
    last = form.chat.messages[-1]
    if last.role != "user" or not isinstance(last.content, str):
        raise ApiError(
            "a skeleton needs a conversation with a user's text at its end", param="messages"
        )
    return last.content


def _with_last_message(form: ConversationForm, text: str) -> Request:
    """Return a request for the conversation of `form` with `text` in place of its last message.
    Only the context size limits the length of the answer.
    """
    body: dict[str, Any] = {**form.source, "max_tokens": None, "max_completion_tokens": None}
    body["messages"] = [*body["messages"][:-1], {"role": "user", "content": text}]
    (request,) = ChatForm(body, form.runner, replace(form.settings, max_tokens=None)).requests
    return replace(request, sampling=form.requests[0].sampling)


def outline_grammar() -> str:
    """Return the GBNF grammar of an outline: MIN_POINTS to MAX_POINTS lines like "1. Few words"."""
    points = [f'"{number}. " words' for number in range(1, MAX_POINTS + 1)]
    rule = ""
    for number, point in reversed(list(enumerate(points, 1))):
        optional = f'"\\n" {point}{rule}' if number > 1 else f"{point}{rule}"
        rule = f" ({optional})?" if number > MIN_POINTS else f" {optional}"
    return (
        f"root ::= {rule.strip()}\nwords ::= [A-Za-z0-9] [^\\n]{{2,{MAX_POINT_CHARACTERS - 1}}}\n"
    )


def _points(answer: Answer) -> list[str] | None:
    """Return the distinct points of the outline in an answer, or None if there are fewer than
    MIN_POINTS.
    """
    lines = [_shorten(line.partition(". ")[2]) for line in _content(answer).split("\n")]
    points = list(dict.fromkeys(point for point in lines if point))
    return points if len(points) >= MIN_POINTS else None


def _shorten(point: str) -> str:
    """Return the first MAX_POINT_WORDS words of a point, without a colon and the text after it. If
    the grammar has cut the point off, its last word is dropped.
    """
    complete = point if len(point) < MAX_POINT_CHARACTERS else point.rpartition(" ")[0]
    return " ".join(complete.partition(": ")[0].split()[:MAX_POINT_WORDS]).rstrip(" .,:;-")


def _join(outline: Answer, answers: list[Answer], parts: list[dict[str, str]]) -> Answer:
    """Return one answer made from the answer with the outline and the answers for its points.

    `parts`: for each point its title (`point`) and its `text`, of which the text of the result
    consists. The result's tokens and token counts include the outline's.
    """
    all_answers = [outline, *answers]
    text = "\n\n".join(
        f"{index}. {point['point']}: {point['text']}" for index, point in enumerate(parts, 1)
    )
    return replace(
        outline,
        text=text,
        tokens=tuple(token for answer in all_answers for token in answer.tokens),
        top_logprobs=(),
        finish="stop" if all(answer.finish == "stop" for answer in answers) else "length",
        prompt_tokens=sum(answer.prompt_tokens for answer in all_answers),
        cached_tokens=sum(answer.cached_tokens for answer in all_answers),
    )


def _content(answer: Answer) -> str:
    """Return the text of an answer without its reasoning: everything after the last closing tag of
    a reasoning block. The opening tag may be in the prompt instead of the text.
    """
    text = answer.text
    for tags in THINKING_TAGS:
        text = text.rpartition(tags.closing)[2]
    return text.strip()
