"""`llmcli quantize`: parses the options, plans, writes and prints."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.certifying import Verifying
from llmcli.commands.file_types import with_types
from llmcli.commands.folding import Fold
from llmcli.commands.grouped import grouped
from llmcli.commands.pickles import offered
from llmcli.commands.show import start
from llmcli.commands.sizing import Sizing
from llmcli.commands.workers import Workers
from llmcli.commands.writing import Reading, Writing
from quant.methods import METHODS

if TYPE_CHECKING:
    from llmcli.commands import gathering
    from llmcli.commands.mixes import Making
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.imatrix import Imatrix
    from quant.methods.base import Method
    from quant.moments import Moments
    from quant.pending import Pending
    from quant.quantize import Report
    from quant.recipe import Wishes
    from quant.source import Source

DEFAULT = "Q4_K_M"
SplitMaxSize = Annotated[
    str | None,
    typer.Option(
        metavar="N(M|G)",
        help="Write shards NAME-00001-of-0000N.gguf with at most this size of tensors each.",
    ),
]
_METHODS = "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())


@dataclass(frozen=True, slots=True)
class Mixing:
    """Types for single tensors that override the file type's recipe."""

    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor-type",
            metavar="REGEX=TYPE",
            help="Type of the tensors whose name matches; repeatable.",
        ),
    ] = None
    output_tensor_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of output.weight.")
    ] = None
    token_embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of token_embd.weight.")
    ] = None
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Do not quantize output.weight.")
    ] = False
    pure: Annotated[
        bool,
        typer.Option("--pure", help="One type for all matrices instead of the recipe's mixture."),
    ] = False

    @property
    def wishes(self) -> "Wishes":
        """The overrides as quant takes them."""
        from quant.recipe import Wishes

        return Wishes(
            tuple(self.tensor_type or ()),
            self.pure,
            self.output_tensor_type,
            self.token_embedding_type,
            self.leave_output_tensor,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """The statistics that quantization uses, and those that will be collected later."""

    imatrix: "Imatrix | None"
    moments: "Moments | None"
    pending: "Pending | None"

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a plan."""
        return {"imatrix": self.imatrix, "moments": self.moments, "pending": self.pending}

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts from which the statistics were or will be collected."""
        sums = self.imatrix.datasets if self.imatrix else ()
        moments = self.moments.about.datasets if self.moments else ()
        return (*sums, *moments, *(self.pending.texts if self.pending else ()))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the statistics, by kind."""
        said = {"imatrix": self.imatrix, "moments": self.moments, "sequential": self.pending}
        return {key: one.digest for key, one in said.items() if one and one.digest}


@dataclass(frozen=True, slots=True)
class Steering:
    """How codes are chosen, and the statistics for it."""

    method: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"How codes are chosen. {_METHODS}.", show_default=True),
    ] = "ggml"
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix for the rounding, as written by llama-imatrix.",
        ),
    ] = None
    moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second moments, as written by calibrate --moments; they include an imatrix. "
            "Statistics that a method or fold needs are collected from the built-in text, and "
            "kept.",
        ),
    ] = None
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="With --method gptq: quantize block by block, each with second moments collected "
            "behind the blocks that are already quantized. Reads the text once per block.",
        ),
    ] = False
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text to collect statistics from, instead of the built-in text; repeatable.",
        ),
    ] = None
    calibration_chunks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Collect from at most N chunks of the text."),
    ] = None
    fold: Fold = "none"

    def known(
        self,
        method: "Method",
        source: "Source",
        writing: Writing,
        config: "Config",
        ui: "UI",
        *,
        dry_run: bool,
    ) -> Known:
        """Load the files of --imatrix and --moments, and collect missing statistics unless it is a
        `dry_run`.

        Raises UserError.
        """
        from quant import imatrix, moments
        from quant.pending import Pending

        sums = imatrix.load(self.imatrix.expanduser()) if self.imatrix else None
        second = moments.load(self.moments.expanduser()) if self.moments else None
        if self.runs(method):
            from llmcli.commands import gathering  # imported here because it opens the runtime

            wish = self.wish(method, source, writing, dry_run=dry_run)
            if self.missing(method):
                sums, second = gathering.gathered(wish, sums, config, ui)
            if self.sequential:
                return Known(sums, None, gathering.pending(wish, sums))
        return Known(sums, second, Pending() if self.missing(method) and dry_run else None)

    @property
    def promised(self) -> Known:
        """Placeholder statistics, enough to validate the plan before anything is measured."""
        from quant import imatrix
        from quant.pending import Pending

        return Known(
            imatrix.load(self.imatrix.expanduser()) if self.imatrix else None, None, Pending()
        )

    def behind(
        self, method: "Method", source: "Source", writing: Writing, config: "Config"
    ) -> "Callable[..., Report]":
        """Return the function that writes a plan with --sequential.

        It has the signature of write_with_progress.
        """
        from llmcli.commands import sequential

        return partial(sequential.write, self.wish(method, source, writing), config)

    def runs(self, method: "Method") -> bool:
        """Return whether the source itself has to be run."""
        return self.sequential or bool(self.missing(method))

    def missing(self, method: "Method") -> str:
        """Return the option that needs statistics which were not given, "" if there is none."""
        if method.needs == "moments" and not self.moments:
            if not self.sequential:
                return f"--method {method.name}"
            return "" if self.imatrix else "--sequential"
        return f"--fold {self.fold}" if self.folds and not (self.moments or self.imatrix) else ""

    def check(self, method: "Method", sizing: Sizing) -> None:
        """Raise UsageError for options that cannot be combined."""
        from llmcli.errors import UsageError

        if self.sequential and method.needs != "moments":
            raise UsageError(
                f"--sequential needs a method that uses second moments, and {method.name} does not",
                hint="add --method gptq, or leave out --sequential",
            )
        if self.sequential and self.moments:
            raise UsageError(
                "--sequential collects moments behind quantized blocks, but "
                f"{self.moments} has those of the whole model",
                hint="leave out --moments; pass its text with --calibration FILE",
            )
        if self.sequential and sizing.wanted:
            raise UsageError(
                "--sequential cannot be combined with a target size: the cost of a tensor is known "
                "only after the tensors ahead of it are quantized",
                hint="make a plan without --sequential: --plan-out FILE, "
                "then --plan FILE --sequential",
            )
        if (self.calibration or self.calibration_chunks) and not (
            self.sequential or self.missing(method)
        ):
            raise UsageError(
                "--calibration has no effect: no statistics need to be collected",
                hint="leave out --calibration",
            )

    def wish(
        self, method: "Method", source: "Source", writing: Writing, *, dry_run: bool = False
    ) -> "gathering.Wish":
        """Return the request for the missing statistics; with --sequential, those of the whole
        model that are collected first.
        """
        from llmcli.commands.gathering import Wish

        moments = method.needs == "moments" and not self.sequential
        text = tuple(path.expanduser() for path in self.calibration or ())
        why = self.missing(method) or "--sequential"
        return Wish(source, why, moments, writing.threads, dry_run, text, self.calibration_chunks)

    @property
    def files(self) -> tuple[Path | None, ...]:
        """The user's files that are read."""
        return (self.imatrix, self.moments, *(self.calibration or ()))

    @property
    def folds(self) -> bool:
        """Whether any fold is requested."""
        from quant.folds.choose import parse

        return bool(parse(self.fold))


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_types(grouped(quantize)))


@offered()
def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name."),
    ],
    *,
    quant: Annotated[
        str | None,
        typer.Option("-t", "--type", metavar="TYPE", help=f"The file type; default: {DEFAULT}."),
    ] = None,
    steering: Steering,
    mixing: Mixing,
    split_max_size: SplitMaxSize = None,
    sizing: Sizing,
    verifying: Verifying,
    reading: Reading,
    writing: Writing,
    workers: Workers,
) -> None:
    """Quantize a checkpoint folder or a GGUF.

    The new GGUF is written in one pass, on all cores.
    """
    from llmcli.catalog.partial import check_apart
    from llmcli.commands import certifying, closing, folding, mixes, weights
    from quant import planning, recipe
    from quant import quantize as road

    config, ui = start(writing.json, writing.offline, reading.allow_pickle)
    how, wish = planning.named(steering.method), verifying.wish(writing.threads)
    steering.check(how, sizing)
    dry_run = writing.dry_run and not sizing.steered  # whether statistics are not collected
    workers.join(ui, runs=verifying.verify or (steering.runs(how) and not dry_run))
    kept = reading.keep_source or verifying.verify or steering.folds or steering.runs(how)
    model = weights.find_model(source, config, ui, kept)
    kind = recipe.parse(quant or (model.quant if model else None) or DEFAULT)
    if quant and quant.upper() in recipe.ALIASES:
        ui.note(f"{quant.upper()} means {kind.name}")
    wishes = mixing.wishes
    sizing.check(split=bool(split_max_size), typed=bool(quant), wished=wishes.any)
    most = planning.shard_size(split_max_size) if split_max_size else 0
    place, blobs = (model.path, model.blobs) if model else (Path(source), None)
    opened = weights.open_source(
        place,
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
        blobs=blobs,
    )
    check_apart(
        [writing.out, sizing.plan_out], [*steering.files, *sizing.files, verifying.verify_text]
    )
    check_apart([sizing.plan_out], opened.files)
    certifying.check_text(opened, wish)
    if writing.out and not (most or writing.dry_run):
        road.check_place(opened, writing.out.expanduser())
    making = partial(_making, opened, how, steering, verifying, most, writing.threads)
    # collecting takes long, so everything that can be refused is refused before
    if steering.runs(how):
        weights.check_named(model, writing.out)
        mixes.rehearse(sizing, making(steering.promised), kind.name, wishes)
    known = steering.known(how, opened, writing, config, ui, dry_run=dry_run)
    plan, told = mixes.planned(sizing, making(known), kind.name, wishes, config, ui)
    if known.imatrix or known.moments or not writing.dry_run:
        plan = folding.folded(plan, steering.fold, writing.threads, ui)
    closing.tell(plan, ui)
    mixed = (
        wishes.any
        or sizing.any
        or bool(known.digests or most)
        or how.name != "ggml"
        or steering.folds
    )
    out = writing.out or (mixes.beside(plan) if sizing.any and model is None else None)
    with weights.placed(
        plan, model, out, config, ui, mixed=mixed, dry_run=writing.dry_run
    ) as target:
        certifying.check(plan, target, wish, config)
        make = (
            weights.write
            if not steering.sequential
            else steering.behind(how, opened, writing, config)
        )
        report = (
            None
            if writing.dry_run
            else make(plan, target, ui, threads=writing.threads, force=writing.force)
        )
        report, found = certifying.certify(plan, target, report, wish, told, config, ui)
    closing.close(plan, target, report, ui, found, told)


def _making(
    source: "Source",
    method: "Method",
    steering: Steering,
    verifying: Verifying,
    most: int,
    threads: int,
    known: Known,
) -> "Making":
    """Return a plan builder for these statistics."""
    from llmcli.commands.mixes import Making
    from quant import planning
    from quant.folds import rewrite

    return Making(
        source,
        lambda name, wishes: planning.plan(
            source, name, wishes, most=most, method=method.name, **known.given
        ),
        {"method": method.name, "fold": steering.fold * steering.folds, **known.digests},
        threads,
        rewrite.ROOM * steering.folds + verifying.room(source, known.texts),
    )
