"""Reports on answers that had to follow a grammar or a JSON schema: whether an answer is complete,
why it is not, and what the constraint cost.
"""

from collections.abc import Sequence
from typing import Any

from llmcli.runtime.constraint.base import Constraint, accepts
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.strategies.constrained_chain import pieces_until_tag
from llmcli.runtime.text.reasoning import ThinkingTags

# By finish reason of an incomplete answer: why it is incomplete, and what the user can do.
REASON_AND_HINT = {
    "context_full": (
        "the context is full",
        "start with a larger --ctx-size, or bound the schema (maxLength, maxItems)",
    ),
    "stop": (
        "a stop text came first, or the model ended while thinking",
        "leave out --reverse-prompt, or ask again",
    ),
    "cancelled": ("it was stopped", "ask again"),
    "repetition": ("the thinking repeated itself", "use --endless to allow that"),
}


def is_complete(
    runner: Runner, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
) -> bool:
    """Return whether the grammar or schema accepts the answer as a complete text. True without a
    constraint.

    `opened_tags`: the thinking tags that are open at the end of the prompt, or None. The constraint
    applies only to the text after the thinking.
    """
    if constraint is None:
        return True
    tokens = [token.id for token in answer.tokens]
    pieces = [runner.model.piece(token) for token in tokens]
    start = pieces_until_tag(opened_tags.closing if opened_tags else "", pieces)
    is_unchanged = b"".join(pieces).decode("utf-8", "replace") == answer.text
    return (
        start is not None and is_unchanged and accepts(runner.grammars(constraint), tokens[start:])
    )


def describe_incomplete(constraint: Constraint | None, answer: Answer) -> tuple[str, str]:
    """Return two texts about an answer that does not satisfy its constraint: why it is incomplete,
    and a hint what to do.
    """
    noun = "JSON document" if constraint and constraint.kind == "json_schema" else "answer"
    limit = (
        f"the limit of {len(answer.tokens)} tokens was reached",
        "raise the limit with -n; -n -1 removes it",
    )
    reason, hint = REASON_AND_HINT.get(answer.finish, limit)
    return f"the {noun} is incomplete: {reason}", hint


def describe_not_enforced(not_enforced: Sequence[str]) -> str:
    """Return a line about what a schema demands and the grammar does not enforce."""
    from llmcli.runtime.constraint.json_schema.check import join_problems  # the import is slow

    return f"note: of the schema, this is not enforced: {join_problems(not_enforced)}"


def constraint_json(
    runner: Runner, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
) -> dict[str, Any]:
    """Return the fields about the constraint for the document of `run --json`: its kind, whether
    the answer is complete, and the time and tokens it took. Empty without a constraint.
    """
    if constraint is None:
        return {}
    milliseconds = sum(token.constraint_ms for token in answer.tokens)
    beams = [
        {"text": beam.text, "score": beam.score, "complete": beam.is_complete}
        for beam in answer.beams
    ]
    return {
        **({"beams": beams} if beams else {}),
        "constraint": {
            "kind": constraint.kind,
            "engine": constraint.engine,
            "jump": "off" if beams else constraint.jump,
            "not_enforced": list(runner.grammars(constraint).not_enforced),
            "complete": is_complete(runner, constraint, opened_tags, answer),
            "forced_tokens": sum(token.forced for token in answer.tokens),
            "constraint_ms": milliseconds,
        },
    }
