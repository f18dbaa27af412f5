"""/stats: what this sitting has come to, and what the conversation is made of."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.answer_report import NOTES
from llmcli.errors import UserError
from llmcli.runtime.text.reasoning import split


def show_stats(talk: Talk, rest: str) -> None:
    """Show this sitting's tokens, times and speeds, and the conversation by kind.

    Prompt tokens are counted as often as they were sent; those whose KV cells were still there are
    reused. The best speed is that of the fastest answer of at least eight tokens.
    """
    if rest:
        raise UserError(
            f"/stats takes no argument: {rest}", hint="/stats alone; /timing shows the last answer"
        )
    tally = talk.tally
    ends = ", ".join(f"{count} {NOTES[end]}" for end, count in tally.ends.items() if end in NOTES)
    first = tally.first_ms / tally.answers if tally.answers else 0.0
    guessed = (
        [("guessed ahead", f"{tally.guessed}, {tally.right} of them right")]
        if tally.guessed
        else []
    )
    talk.ui.table(
        ("this sitting", ""),
        [
            ("answers", f"{tally.answers}" + (f" ({ends})" if ends else "")),
            (
                "prompt tokens",
                f"{tally.prompt}: {tally.reused} reused, {tally.prompt - tally.reused} computed",
            ),
            ("prefill", f"{tally.prompt_ms / 1e3:.2f} s, {tally.prompt_per_second:.1f} tok/s"),
            (
                "generated tokens",
                f"{tally.generated}: {tally.generated - tally.thought} said, {tally.thought} thought",
            ),
            (
                "generating",
                f"{tally.generate_ms / 1e3:.2f} s, mean {tally.tokens_per_second:.1f} tok/s"
                + (f", best {tally.best:.1f} tok/s" if tally.best else ""),
            ),
            ("first token", f"{first:.0f} ms on average"),
            *_reading(talk),
            *guessed,
        ],
    )
    talk.ui.table(("this conversation", "tokens"), _kinds(talk), right=("tokens",))


def _reading(talk: Talk) -> list[tuple[str, str]]:
    """How the mean speed compares with how fast people read."""
    from llmcli.reading_speed import pace  # every chat would pay for it at its start

    rate = talk.tally.tokens_per_second
    found = pace(lambda text: talk.runner.model.tokenize(text, special=False)) if rate else None
    return [("reading", found.line([rate]))] if found else []


def _kinds(talk: Talk) -> list[tuple[str, str]]:
    """The conversation's tokens as it is sent, by whose they are; what the template adds is the
    difference.
    """
    held, before = talk.held(), talk.prefix()
    messages = talk.session.kept
    asked = sum(_count(talk, one.content) for one in messages if one.role == "user")
    said = sum(_count(talk, split(one.content)[1]) for one in messages if one.role == "assistant")
    thought = sum(
        _count(talk, split(one.content)[0]) for one in messages if one.role == "assistant"
    )
    rows = [
        ("before the first message", before),
        ("questions", asked),
        ("answers", said),
        ("around them", held - before - asked - said),
    ]
    rows.append((f"all, of {talk.runner.n_ctx}", held))
    if thought:
        rows.append(("thought, and not sent again", thought))
    return [(name, str(count)) for name, count in rows]


def _count(talk: Talk, text: str) -> int:
    return len(talk.runner.model.tokenize(text, special=False)) if text else 0


COMMANDS = (Command("stats", show_stats, group="inside the model"),)
