"""The options of `quantize` that ask for a size instead of a type, and what they mean in bytes. It
knows words only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmcli.errors import UsageError

TARGETS = "--target-bpw, --target-size and --fit"
PROBE, CHUNKS, SWAPS = "tensor", 4, 6
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Sizing:
    """A size for the file, the types that may make it up, and how their cost is measured."""

    target_bpw: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="A type for each tensor, so that the file has at most X bits for each weight.",
        ),
    ] = None
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The same for a file of at most SIZE: 90M, 0.5G, or bytes."
        ),
    ] = None
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="The same for the largest file that this machine's free memory runs."
        ),
    ] = False
    types: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="With a size: the types to choose from, as q4_k,q6_k,q8_0."
        ),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With a size: text to measure by; default: what ships."),
    ] = None
    probe: Annotated[
        Literal["tensor", "group"] | None,
        typer.Option(
            help=f"With a size: what is measured at a time, default {PROBE}; group takes q with k, and gate with up."
        ),
    ] = None
    probe_chunks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"With a size: chunks of 512 tokens that every measurement reads, default {CHUNKS}.",
        ),
    ] = None
    swaps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"With a size: other mixes of it that are tried on held-out text, default {SWAPS}.",
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="With a size: go by the error of the weights alone; no model is run."
        ),
    ] = False
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity", help="With a size: a table of every tensor's SpQR-style sensitivity."
        ),
    ] = False
    plan_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the type of every tensor to a plan file."),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Give every tensor the type that a plan file has for it."
        ),
    ] = None

    @property
    def wanted(self) -> bool:
        """Whether a size is asked for."""
        return self.fit or self.target_size is not None or self.target_bpw is not None

    @property
    def any(self) -> bool:
        """Whether the types are not the recipe's."""
        return self.wanted or self.plan is not None

    @property
    def steered(self) -> bool:
        """Whether types go by what was measured of the model's inputs, or a plan file tells what
        that was.
        """
        return self.any or self.plan_out is not None

    @property
    def unit(self) -> str:
        """What is measured at a time: a tensor, or those that are read together."""
        return self.probe or PROBE

    @property
    def chunks(self) -> int:
        """Chunks that every measurement reads."""
        return CHUNKS if self.probe_chunks is None else self.probe_chunks

    @property
    def tries(self) -> int:
        """Other mixes that are tried on held-out text."""
        return 0 if self.quick else SWAPS if self.swaps is None else self.swaps

    @property
    def files(self) -> tuple[Path | None, ...]:
        """What is read of the user's for it."""
        return self.text, self.plan

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types to choose from, those of --types."""
        from quant.recipe import tensor_type

        return tuple(
            dict.fromkeys(
                tensor_type(word) for word in (self.types or "").split(",") if word.strip()
            )
        )

    def check(self, *, split: bool, typed: bool, wished: bool) -> None:
        """Refuse what excludes each other; `typed`: a file type was asked for as well; `wished`:
        types of tensors.
        """
        asked = [
            flag
            for flag, given in (
                ("--target-bpw", self.target_bpw is not None),
                ("--target-size", self.target_size is not None),
                ("--fit", self.fit),
                ("--plan", self.plan),
            )
            if given
        ]
        if len(asked) > 1:
            raise UsageError(
                f"{asked[0]} and {asked[1]} exclude each other", hint="give one of them"
            )
        if asked and typed:
            raise UsageError(
                f"{asked[0]} decides every tensor's type", hint="leave out the file type"
            )
        if asked and wished:
            raise UsageError(
                f"{asked[0]} decides every tensor's type",
                hint="leave out --tensor-type and the like; what --plan-out FILE writes may be changed by hand",
            )
        if self.wanted and split:
            raise UsageError(
                f"{asked[0]} is for one file",
                hint="make a plan with --plan-out FILE, then --plan FILE --split-max-size",
            )
        if self.wanted:
            assert self.kinds is not None  # what cannot be read is refused here
            self.most(1)
            if self.quick and self._measuring:
                why = f"{self._measuring[0]} is for what is measured, --quick measures nothing"
                raise UsageError(why, hint="leave out one of them")
            return
        choosing = {"--types": self.types, "--quick": self.quick, "--sensitivity": self.sensitivity}
        if flags := [*(flag for flag, given in choosing.items() if given), *self._measuring]:
            raise UsageError(f"{flags[0]} goes with a size", hint=f"add one of {TARGETS}")

    @property
    def _measuring(self) -> list[str]:
        """The flags that were typed of how divergence is measured."""
        said = {
            "--text": self.text,
            "--probe": self.probe,
            "--probe-chunks": self.probe_chunks,
            "--swaps": self.swaps,
        }
        return [flag for flag, given in said.items() if given is not None]

    def most(self, weights: int) -> int | None:
        """Bytes of the whole file for a model of so many weights; None where memory decides."""
        if self.target_bpw is not None:
            if not 0 < self.target_bpw <= 32:
                raise UsageError(
                    f"--target-bpw is {self.target_bpw}", hint="for example --target-bpw 4.8"
                )
            return int(self.target_bpw * weights / 8)
        return None if self.target_size is None else nbytes(self.target_size)


def nbytes(text: str) -> int:
    """Bytes of "90M", "0.5G" or "94371840", in thousands as --split-max-size counts."""
    word = text.strip().upper().removesuffix("B")
    unit = UNITS.get(word[-1:], 1)
    number = word[:-1] if unit > 1 else word
    whole, _, part = number.partition(".")
    if not (whole + part).isascii() or not (whole + part).isdigit() or len(number) > 18:
        raise UsageError(f"{text!r} is no size", hint="for example --target-size 90M, or 0.5G")
    return int(float(number) * unit) if part else int(whole) * unit
