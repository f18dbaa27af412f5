"""The options of `quantize` that request a file size instead of a file type."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmcli.errors import UsageError
from quant.allocation import defaults

TARGET_FLAGS = "--target-bpw, --target-size and --fit"
UNIT_BYTES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """The requested size of the file, the types to choose from, and how the loss from each type is
    measured. The fields are the command-line options of the same names.
    """

    target_bpw: float | None = None
    target_size: str | None = None
    fit: bool = False
    types: str | None = None
    text: Path | None = None
    probe: Literal["tensor", "group"] | None = None
    probe_chunks: int | None = None
    swaps: int | None = None
    quick: bool = False
    sensitivity: bool = False
    plan_out: Path | None = None
    plan: Path | None = None

    @property
    def has_target(self) -> bool:
        """Whether a target size is set: bits per weight, bytes, or the free memory."""
        return self.fit or self.target_size is not None or self.target_bpw is not None

    @property
    def overrides_recipe(self) -> bool:
        """Whether a target size or a plan file determines the types of the tensors, instead of the
        file type's recipe.
        """
        return self.has_target or self.plan is not None

    @property
    def needs_statistics(self) -> bool:
        """Whether planning needs measured statistics, either to choose types or because the plan
        file to be written contains their digests.
        """
        return self.overrides_recipe or self.plan_out is not None

    @property
    def probe_unit(self) -> str:
        """What a single measurement quantizes: "tensor", or a "group" of tensors."""
        return self.probe or defaults.PROBE_UNIT

    @property
    def n_chunks(self) -> int:
        """The number of chunks that each measurement reads."""
        return defaults.PROBE_CHUNKS if self.probe_chunks is None else self.probe_chunks

    @property
    def refinement_trials(self) -> int:
        """The number of alternative mixes to try on held-out text."""
        return 0 if self.quick else defaults.SWAPS if self.swaps is None else self.swaps

    @property
    def input_files(self) -> tuple[Path | None, ...]:
        """The paths of all files that the user has provided."""
        return self.text, self.plan

    @property
    def candidate_types(self) -> tuple[str, ...]:
        """The types to choose from, parsed from --types; empty: the default types."""
        from quant.recipes.tensor_types import parse_tensor_type

        return tuple(
            dict.fromkeys(
                parse_tensor_type(word) for word in (self.types or "").split(",") if word.strip()
            )
        )

    def validate(self, *, is_split: bool, has_file_type: bool, has_overrides: bool) -> None:
        """Raise UsageError for options that exclude each other.

        `is_split`: whether the file will be split into shards. `has_file_type`: whether a file type
        is requested. `has_overrides`: whether types of single tensors are requested.
        """
        size_flags = [
            flag
            for flag, value in (
                ("--target-bpw", self.target_bpw is not None),
                ("--target-size", self.target_size is not None),
                ("--fit", self.fit),
                ("--plan", self.plan),
            )
            if value
        ]
        if len(size_flags) > 1:
            raise UsageError(
                f"{size_flags[0]} and {size_flags[1]} cannot be combined",
                hint="leave out one of them",
            )
        if size_flags and has_file_type:
            raise UsageError(
                f"{size_flags[0]} decides every tensor's type", hint="leave out the file type"
            )
        if size_flags and has_overrides:
            raise UsageError(
                f"{size_flags[0]} decides every tensor's type",
                hint="leave out --tensor-type and similar options; "
                "or edit the file that --plan-out writes",
            )
        if self.has_target and is_split:
            raise UsageError(
                f"{size_flags[0]} makes a single file",
                hint="make a plan with --plan-out FILE, then --plan FILE --split-max-size",
            )
        if self.has_target:
            assert self.candidate_types is not None  # raises UsageError for invalid --types
            self.max_bytes(1)
            if self.quick and self._measurement_flags:
                raise UsageError(
                    f"{self._measurement_flags[0]} configures measurements, and --quick measures "
                    "nothing",
                    hint="leave out one of them",
                )
            return
        target_options = {
            "--types": self.types,
            "--quick": self.quick,
            "--sensitivity": self.sensitivity,
        }
        if flags := [
            *(flag for flag, value in target_options.items() if value),
            *self._measurement_flags,
        ]:
            raise UsageError(f"{flags[0]} needs a target size", hint=f"add one of {TARGET_FLAGS}")

    @property
    def _measurement_flags(self) -> list[str]:
        """The options that the user has set, among those that configure how divergence is
        measured.
        """
        options = {
            "--text": self.text,
            "--probe": self.probe,
            "--probe-chunks": self.probe_chunks,
            "--swaps": self.swaps,
        }
        return [flag for flag, value in options.items() if value is not None]

    def max_bytes(self, n_weights: int) -> int | None:
        """Return the size limit of the file in bytes, for a model with `n_weights` weights; None if
        the free memory decides the size. Raises UsageError.
        """
        if self.target_bpw is not None:
            if not 0 < self.target_bpw <= 32:
                raise UsageError(
                    f"--target-bpw is {self.target_bpw}", hint="for example --target-bpw 4.8"
                )
            return int(self.target_bpw * n_weights / 8)
        return None if self.target_size is None else parse_size(self.target_size)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "90M", "0.5G" or "94371840". Units are decimal, as in
    --split-max-size. Raises UsageError.
    """
    digits_and_unit = text.strip().upper().removesuffix("B")
    unit = UNIT_BYTES.get(digits_and_unit[-1:], 1)
    number = digits_and_unit[:-1] if unit > 1 else digits_and_unit
    integer_digits, _, fraction_digits = number.partition(".")
    if (
        not (integer_digits + fraction_digits).isascii()
        or not (integer_digits + fraction_digits).isdigit()
        or len(number) > 18
    ):
        raise UsageError(f"{text!r} is not a size", hint="for example --target-size 90M, or 0.5G")
    return int(float(number) * unit) if fraction_digits else int(integer_digits) * unit
