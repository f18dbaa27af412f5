"""Lists of parameter values in llama-bench's notation, and the tests of all combinations of values.

The notations of numbers are `1,2,4`, `first-last`, `first-last+step` and `first-last*factor`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from llmcli.errors import UserError
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions

RANGE_PATTERN = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
MAX_VALUES = 10_000


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """One test, which is one row of the results. `n_prompt`, `n_gen` and `n_depth` are numbers of
    tokens in each of the `n_parallel` sequences. The other fields are settings.
    """

    n_prompt: int
    n_gen: int
    n_depth: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    n_threads: int
    n_gpu_layers: int
    flash_attn: str
    n_parallel: int = 1
    placement_options: PlacementOptions = NO_PLACEMENT

    @property
    def placement(self) -> ModelPlacement:
        """The devices of the model's weights."""
        return self.placement_options.as_asked(self.n_gpu_layers)

    @property
    def tokens(self) -> int:
        """The number of tokens that are computed while the clock runs, over all sequences."""
        return (self.n_prompt + self.n_gen) * self.n_parallel

    @property
    def name(self) -> str:
        """The name of the test as in llama-bench: pp512, tg128 or pp512+tg128. A depth is appended,
        as in "tg128 @ d4096".
        """
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(
            self.n_gen
        )
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def title(self) -> str:
        """The name of the test, followed by its number of sequences if there are several: tg128 @
        d4096 x8.
        """
        return self.name + (f" x{self.n_parallel}" if self.n_parallel > 1 else "")


@dataclass(frozen=True, slots=True)
class ParameterGrid:
    """The values of all parameters of `bench`. `pairs`: the (prompt, generation) lengths of -pg,
    which are measured together in one test.
    """

    prompts: Sequence[int]
    generations: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    depths: Sequence[int]
    batches: Sequence[int]
    ubatches: Sequence[int]
    types_k: Sequence[str]
    types_v: Sequence[str]
    threads: Sequence[int]
    gpu_layers: Sequence[int]
    flash: Sequence[str]
    parallel: Sequence[int] = (1,)

    def tests(self) -> Iterator[SpeedTest]:
        """Yield a test for each combination of values. Settings that require loading the model
        again vary most slowly.
        """
        lengths = (
            [(p, 0) for p in self.prompts if p]
            + [(0, g) for g in self.generations if g]
            + list(self.pairs)
        )
        for layers, batch, ubatch, k, v, flash, threads, depth, parallel in product(
            self.gpu_layers,
            self.batches,
            self.ubatches,
            self.types_k,
            self.types_v,
            self.flash,
            self.threads,
            self.depths,
            self.parallel,
        ):
            for n_prompt, n_gen in lengths:
                yield SpeedTest(
                    n_prompt, n_gen, depth, batch, ubatch, k, v, threads, layers, flash, parallel
                )


def parse_numbers(
    flag: str, texts: Sequence[str], lowest: int = 0, highest: int = 2**31 - 1
) -> list[int]:
    """Return the numbers of several lists, each in the notation of this module. Raises UserError
    for invalid text and for numbers outside `lowest` to `highest`. `flag`: the option, for the
    message.
    """
    values: list[int] = []
    for part in ",".join(texts).split(","):
        match = RANGE_PATTERN.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"{flag}: invalid value {part!r}",
                hint=f"{flag} takes e.g. 512 or 128,256 or 1-8*2",
            )
        first, last, sign, step = match.groups()
        values += _expand_range(flag, int(first), int(last or first), sign or "+", int(step or 1))
    for number in values:
        if not lowest <= number <= highest:
            raise UserError(
                f"{flag} is {number}", hint=f"{flag} takes whole numbers from {lowest} to {highest}"
            )
    return values


def parse_words(flag: str, texts: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Return the words of several comma-separated lists. Raises UserError for a word that is not in
    `allowed`. `flag`: the option, for the message.
    """
    values = [part.strip().lower() for part in ",".join(texts).split(",")]
    # older versions of llama.cpp use 0 and 1
    values = [{"0": "off", "1": "on"}.get(word, word) for word in values]
    for word in values:
        if word not in allowed:
            raise UserError(
                f"{flag}: unknown value {word!r}", hint=f"{flag} takes: {' '.join(allowed)}"
            )
    return values


def parse_pairs(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the values of -pg: each text `PP,TG` is a pair of a prompt length and a generation
    length. Raises UserError.
    """
    values = []
    for text in texts:
        lengths = parse_numbers("-pg", [text])
        if len(lengths) != 2 or not sum(lengths):
            raise UserError(
                f"-pg: invalid value {text!r}",
                hint="-pg takes a prompt and a generation length: -pg 512,128",
            )
        values.append((lengths[0], lengths[1]))
    return values


def _expand_range(flag: str, first: int, last: int, sign: str, step: int) -> Iterator[int]:
    next_value: Callable[[int], int] = (lambda v: v + step) if sign == "+" else (lambda v: v * step)
    if next_value(first) <= first and last > first:
        raise UserError(
            f"{flag}: the range {first}-{last}{sign}{step} never ends",
            hint="use a step of at least 1, a factor of at least 2",
        )
    if last < first:
        raise UserError(
            f"{flag}: the range {first}-{last} runs backwards", hint=f"{flag} {last}-{first}"
        )
    value, count = first, 0
    while value <= last:
        yield value
        value, count = next_value(value), count + 1
        if count > MAX_VALUES:
            raise UserError(f"{flag}: more than {MAX_VALUES} values", hint="use a larger step")
