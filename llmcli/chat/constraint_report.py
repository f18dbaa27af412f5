"""What is told of answers that follow a grammar or schema: whether they are whole, and what that
took.
"""

from typing import TYPE_CHECKING, Any

from llmcli.runtime.constraint.base import accepts
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.strategies.constrained_chain import after

if TYPE_CHECKING:  # it tells what stands here of its answers
    from llmcli.chat.chat_session import Talk

REASONS = {
    "context_full": ("the context is full", "start with a larger --ctx-size"),
    "stop": (
        "a stop text came first, or the model ended in its thoughts",
        "leave out --reverse-prompt, or ask again",
    ),
    "cancelled": ("it was cut", "ask again"),
    "repetition": (
        "it only repeats itself",
        "--endless lets it; a bound in the schema (maxLength, maxItems) ends it",
    ),
}


def whole(talk: "Talk", answer: Answer) -> bool:
    """Whether an answer is all that was asked for; one that nothing was asked of is."""
    if talk.session.constraint is None:
        return True
    tokens = [token.id for token in answer.tokens]
    pieces = [talk.runner.model.piece(token) for token in tokens]
    start = after(talk.opened.closes if talk.opened else "", pieces)
    uncut = b"".join(pieces).decode("utf-8", "replace") == answer.text
    return (
        start is not None
        and uncut
        and accepts(talk.runner.grammars(talk.session.constraint), tokens[start:])
    )


def incomplete(talk: "Talk", answer: Answer) -> tuple[str, str]:
    """Why an answer is not whole, and what to do."""
    asked = talk.session.constraint
    what = "JSON document" if asked and asked.kind == "json_schema" else "answer"
    limit = (
        f"its limit of {len(answer.tokens)} tokens came first",
        "give it more with -n; -n -1 is no limit",
    )
    reason, hint = REASONS.get(answer.finish, limit)
    return f"the {what} is incomplete: {reason}", hint


def facts(talk: "Talk", answer: Answer) -> dict[str, Any]:
    """The part of `run --json` about the constraint; nothing where there is none."""
    asked = talk.session.constraint
    if asked is None:
        return {}
    spent = sum(token.constraint_ms for token in answer.tokens)
    beams = [{"text": one.text, "score": one.score, "complete": one.whole} for one in answer.beams]
    return {
        **({"beams": beams} if beams else {}),
        "constraint": {
            "kind": asked.kind,
            "engine": asked.engine,
            "jump": "off" if beams else asked.jump,
            "complete": whole(talk, answer),
            "forced_tokens": sum(token.forced for token in answer.tokens),
            "constraint_ms": spent,
        },
    }
