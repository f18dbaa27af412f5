"""Skeleton-of-Thought (Ning et al. 2023, arXiv:2307.15337): an outline first, then all its points
at once.

The outline is a numbered list by a grammar, where the paper parses what comes; the points' prompts
differ in their last words only, so that question and outline are computed once. The words of the
prompts are ours.

2026-11: a JSON schema asked the same of SmolLM2-135M and its outlines were JSON about JSON
("{{value}},"); lists are what small models have seen.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.request import Answer, Request
from llmcli.runtime.sampling import SEEDS
from llmcli.runtime.thinking import TAGS
from llmcli.serve.batch.plans import Plan, Wanted, plain
from llmcli.serve.problems import Problem
from llmcli.serve.schema.base import Form
from llmcli.serve.schema.chat import Chat
from llmcli.serve.schema.conversation import Conversation

LEAST, MOST = 3, 10  # points of an outline
LONGEST, WORDS = 80, 8  # letters of a point that are drawn, words that are kept
OUTLINE = (
    "{question}\n\nGive only the outline of an answer to this: {least} to {most} numbered points in the order in "
    "which to read them, each of three to five words."
)
POINT = (
    "{question}\n\nThe outline of the answer:\n{outline}\n\nWrite one or two plain sentences for one point of it and "
    "nothing of the others. The point: {point}"
)
ASIDE = (
    "n",
    "response_format",
    "tools",
    "logprobs",
)  # fields of a request that are about a single text


def skeleton(form: Form) -> Plan:
    """An outline, its points in parallel, and all of it as one message; the document also has them
    under `skeleton`.

    Where the outline did not come to an end the plain answer is given. Raises Problem for what is
    no conversation that ends with a question, or wants more than one text.
    """
    if not isinstance(form, Conversation):
        raise Problem("a skeleton answers a conversation, at /v1/chat/completions")
    for name in ASIDE:
        if form.fields.values.get(name) not in (None, False, 1):
            raise Problem(f"a skeleton is one text in parts: leave out {name}", param=name)
    question = _question(form)
    begun = yield from _outlined(form, question)
    points = _points(begun)
    if points is None:
        return (yield from plain(form))
    asked = [_point(form, question, points, number) for number in range(len(points))]
    answers = [answer for (answer,) in (yield [Wanted(request) for request in asked])]
    texts = [_said(answer) for answer in answers]
    parts = [{"point": point, "text": text} for point, text in zip(points, texts, strict=True)]
    return {**form.whole([_joined(begun, answers, parts)]), "skeleton": parts}


def _outlined(
    form: Conversation, question: str
) -> Generator[Sequence[Wanted], list[list[Answer]], Answer]:
    request = _ask(form, OUTLINE.format(question=question, least=LEAST, most=MOST))
    grammar = form.runner.grammars(Constraint("gbnf", listed()))
    tags = form.runner.opened(request.tokens)
    request = replace(
        request,
        grammar=grammar,
        strategy=form.runner.strategy(grammar),
        after=tags.closes if tags else "",
    )
    ((answer,),) = yield [Wanted(request)]
    return answer


def _point(form: Conversation, question: str, points: list[str], number: int) -> Request:
    outline = "\n".join(f"{at}. {point}" for at, point in enumerate(points, 1))
    text = POINT.format(question=question, outline=outline, point=points[number])
    request, whole = _ask(form, text), form.requests[0]
    seed = (whole.sampling.seed + 1 + number) % SEEDS
    most = max(1, (whole.max_tokens or 0) // len(points))
    return replace(
        request,
        sampling=replace(whole.sampling, seed=seed),
        max_tokens=min(most, request.max_tokens or most),
    )


def _question(form: Conversation) -> str:
    """What the conversation ends with."""
    last = form.fields.list("messages")[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        raise Problem(
            "a skeleton needs a conversation that ends with a user's text", param="messages"
        )
    return str(last["content"])


def _ask(form: Conversation, text: str) -> Request:
    """The same conversation with other last words; as long an answer as there is room for."""
    body: dict[str, Any] = {**form.fields.values, "max_tokens": None, "max_completion_tokens": None}
    body["messages"] = [*body["messages"][:-1], {"role": "user", "content": text}]
    (request,) = Chat(body, form.runner, replace(form.settings, max_tokens=None)).requests
    return replace(request, sampling=form.requests[0].sampling)


def listed() -> str:
    """The grammar of an outline: "1. Few words", a line a point."""
    points = [f'"{number}. " words' for number in range(1, MOST + 1)]
    rule = ""
    for number, point in reversed(list(enumerate(points, 1))):
        inner = f'"\\n" {point}{rule}' if number > 1 else f"{point}{rule}"
        rule = f" ({inner})?" if number > LEAST else f" {inner}"
    return f"root ::= {rule.strip()}\nwords ::= [A-Za-z0-9] [^\\n]{{2,{LONGEST - 1}}}\n"


def _points(answer: Answer) -> list[str] | None:
    """The points of an outline, each once; None where it was cut short, or says the same over and
    over.
    """
    found = [_short(line.partition(". ")[2]) for line in _said(answer).split("\n")]
    points = list(dict.fromkeys(point for point in found if point))
    return points if len(points) >= LEAST else None


def _short(point: str) -> str:
    """The first words of a point, without what explains it behind a colon."""
    whole = point if len(point) < LONGEST else point.rpartition(" ")[0]
    return " ".join(whole.partition(": ")[0].split()[:WORDS]).rstrip(" .,:;-")


def _joined(begun: Answer, answers: list[Answer], parts: list[dict[str, str]]) -> Answer:
    """One answer made of all: its tokens are all that were drawn, its prompt all prompts."""
    every = [begun, *answers]
    text = "\n\n".join(f"{at}. {part['point']}: {part['text']}" for at, part in enumerate(parts, 1))
    return replace(
        begun,
        text=text,
        tokens=tuple(token for answer in every for token in answer.tokens),
        top=(),
        finish="stop" if all(answer.finish == "stop" for answer in answers) else "length",
        prompt_tokens=sum(answer.prompt_tokens for answer in every),
        cached_tokens=sum(answer.cached_tokens for answer in every),
    )


def _said(answer: Answer) -> str:
    """What an answer says after its thinking, whether it or its prompt began that."""
    text = answer.text
    for tags in TAGS:
        text = text.rpartition(tags.closes)[2]
    return text.strip()
