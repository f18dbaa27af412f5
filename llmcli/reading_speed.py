"""Compare the speed of a model with the speeds at which people read.

Tokens per second are converted to words per minute with the number of tokens that the model's
vocabulary needs for a word of the sample text below. The text is English prose. Other languages,
code and tables need more tokens per word in most vocabularies. The reading speeds are rules of
thumb.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

READING_PACES = {"silent reading": 250, "listening": 450, "skimming": 700}  # words a minute
SAMPLE_TEXT = """\
On the morning of the market the ferry came in late, and the people who had waited on the quay
since six were cold and a little cross. "It's the fog," said the harbour master, who had been
saying so for an hour. "Nobody can sail through that." Then the bell rang, twice, and out of the
grey came first a light, then a bow, and at last the whole ship.

Hanna carried two baskets of apples and a letter that she had not opened. Her brother had
written it in March; it had gone to the wrong island, come back, and lain in a drawer until
yesterday. She did not want to read it among strangers. What could he have to say that would not
keep until evening? The apples were another matter: by noon they would be sold, or they would be
jam.

Water boils at one hundred degrees at sea level, but on a mountain of three thousand metres it
boils at about ninety, because the air above it presses less. That is why a stew takes longer in
the hills, and why cooks there use a heavy lid. The same rule explains a good deal of weather:
warm air rises, grows thin, cools, and lets its water fall as rain.

If you want to repair a bicycle chain, begin by cleaning it. Turn the pedals slowly backwards
and look for a link that does not bend; mark it with chalk. Push the pin halfway out, never all
the way, or you will spend the afternoon looking for it on the floor. Most people learn this
twice. When the chain runs freely, add one drop of oil to each joint and wipe off the rest,
since oil that stays outside collects sand and wears the teeth away.
"""
SAMPLE_WORDS = len(SAMPLE_TEXT.split())


@dataclass(frozen=True, slots=True)
class ReadingPace:
    """Converts between tokens per second and words per minute for the vocabulary of a model."""

    tokens_per_word: float  # mean over the sample text

    def words_per_minute(self, rate: float) -> float:
        """Return the words per minute of a model that generates `rate` tokens per second."""
        return rate * 60 / self.tokens_per_word

    def tokens_per_second(self, words: float) -> float:
        """Return the tokens per second that are needed for `words` words per minute."""
        return words * self.tokens_per_word / 60

    def build_document(self, rate: float) -> dict[str, Any]:
        """Return the reading pace at `rate` tokens per second as a JSON object. Its field `times`
        contains the speed divided by each of READING_PACES. A value below 1 means that the model is
        slower than people read.
        """
        words = self.words_per_minute(rate)
        times = {
            name.replace(" ", "_"): round(words / pace, 3) for name, pace in READING_PACES.items()
        }
        return {
            "tokens_per_word": round(self.tokens_per_word, 4),
            "words_per_minute": round(words, 1),
            "times": times,
        }

    def format_line(self, rates: Sequence[float]) -> str:
        """Return one line that compares the lowest and the highest of `rates`, in tokens per
        second, with READING_PACES.

        Example: `98.0 tok/s are 4,455 words a minute (1.32 tokens a word): 18 × silent reading, …`.
        """
        low, high = min(rates), max(rates)
        limits = (low,) if f"{low:.1f}" == f"{high:.1f}" else (low, high)
        speeds = " to ".join(f"{rate:.1f}" for rate in limits)
        words = " to ".join(f"{self.words_per_minute(rate):,.0f}" for rate in limits)
        times = ", ".join(
            f"{_format_ratio(self.words_per_minute(low) / pace)} × {name}"
            for name, pace in READING_PACES.items()
        )
        prefix = "" if len(limits) == 1 else "at least "
        return (
            f"{speeds} tok/s are {words} words a minute ({self.tokens_per_word:.2f} tokens a word):"
            f" {prefix}{times}"
        )


def measure_pace(tokenize: Callable[[str], Sequence[int]]) -> ReadingPace | None:
    """Return the reading pace of a model whose tokenizer is `tokenize`, measured on the sample
    text. Return None if the vocabulary cannot encode the text.
    """
    count = len(tokenize(SAMPLE_TEXT))
    return ReadingPace(count / SAMPLE_WORDS) if count else None


def _format_ratio(ratio: float) -> str:
    """Return a ratio with about two significant digits."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"
