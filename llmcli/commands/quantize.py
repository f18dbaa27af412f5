"""`llmcli quantize`: parse, plan, write, tell. What a tensor becomes is quant's affair."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.imatrix import Imatrix
    from quant.methods.base import Method
    from quant.moments import Moments
    from quant.recipe import Wishes
    from quant.source import Source

DEFAULT = "Q4_K_M"
SplitMaxSize = Annotated[
    str | None,
    typer.Option(metavar="N(M|G)", help="Write shards NAME-00001-of-0000N.gguf with at most so much of tensors each."),
]
_METHODS = "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())


@dataclass(frozen=True, slots=True)
class Mixing:
    """Which tensor gets which type, beside the file type's recipe."""

    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", metavar="REGEX=TYPE", help="A type for the tensors whose name fits; repeatable."),
    ] = None
    output_tensor_type: Annotated[str | None, typer.Option(metavar="TYPE", help="A type for output.weight.")] = None
    token_embedding_type: Annotated[str | None, typer.Option(metavar="TYPE", help="A type for token_embd.weight.")] = (
        None
    )
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Leave output.weight as it is.")
    ] = False
    pure: Annotated[bool, typer.Option("--pure", help="One type for all matrices, without the recipe's mixture.")] = (
        False
    )

    @property
    def wishes(self) -> "Wishes":
        """The same for quant."""
        from quant.recipe import Wishes

        return Wishes(
            tuple(self.tensor_type or ()), self.pure, self.output_tensor_type, self.token_embedding_type,
            self.leave_output_tensor,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steering:
    """How codes are chosen, and what was measured for it."""

    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"How codes are chosen. {_METHODS}.", show_default=True)
    ] = "ggml"
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An importance matrix that steers the rounding, as llama-imatrix makes it."),
    ] = None
    moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second moments, as calibrate --moments makes them; an imatrix as well. Where a method or a fold "
            "needs what was not given it is gathered with the text that ships, and kept.",
        ),
    ] = None
    fold: Fold = "none"

    @property
    def given(self) -> "tuple[Imatrix | None, Moments | None]":
        """The files of --imatrix and --moments."""
        from quant import imatrix, moments

        sums = imatrix.load(self.imatrix.expanduser()) if self.imatrix else None
        return sums, moments.load(self.moments.expanduser()) if self.moments else None

    def missing(self, method: "Method") -> str:
        """What wants a measurement that was not given, as a flag; "" where nothing does."""
        from quant import accelerate

        if method.needs == "moments" and not self.moments:
            accelerate.torch(f"--method {method.name}")  # said before minutes of measuring
            return f"--method {method.name}"
        return f"--fold {self.fold}" if self.folds and not (self.moments or self.imatrix) else ""

    def gathered(
        self, method: "Method", source: "Source", writing: Writing, sums: "Imatrix | None", config: "Config", ui: "UI"
    ) -> "tuple[Imatrix | None, Moments | None]":  # fmt: skip
        """`sums` or what was gathered instead, and second moments: the measurement that is missing."""
        from llmcli.commands import gathering  # it opens the runtime

        why, moments = self.missing(method), method.needs == "moments"
        return gathering.gathered(
            gathering.Wish(source, why, moments, writing.threads, writing.dry_run), sums, config, ui
        )

    @property
    def folds(self) -> bool:
        """Whether any fold is asked for."""
        from quant.folds.choose import parse

        return bool(parse(self.fold))


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_types(grouped(quantize)))


@offered()
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name.")],
    *,
    quant: Annotated[
        str | None, typer.Option("-t", "--type", metavar="TYPE", help=f"The file type; {DEFAULT} unless told.")
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
    """Make a smaller GGUF from a checkpoint folder or a GGUF, in one pass, on all cores."""
    from llmcli.commands import certifying, closing, folding, mixes, weights
    from quant import planning, recipe
    from quant import quantize as road

    config, ui = start(writing.json, writing.offline, reading.allow_pickle)
    how, wish = planning.named(steering.method), verifying.wish(writing.threads)
    missing = steering.missing(how)
    workers.join(ui, runs=verifying.verify or bool(missing and not writing.dry_run))
    kept = reading.keep_source or verifying.verify or steering.folds or bool(missing)
    model = weights.find_model(source, config, ui, kept)
    kind = recipe.parse(quant or (model.quant if model else None) or DEFAULT)
    if quant and quant.upper() in recipe.ALIASES:
        ui.note(f"{quant.upper()} means {kind.name}")
    wishes = mixing.wishes
    sizing.check(split=bool(split_max_size), typed=bool(quant) or wishes.any)
    sums, moments = steering.given
    most = planning.shard_size(split_max_size) if split_max_size else 0
    place, blobs = (model.path, model.blobs) if model else (Path(source), None)
    opened = weights.open_source(
        place, tokenizer=reading.tokenizer, pre=reading.pre, allow_pickle=reading.allow_pickle, blobs=blobs
    )
    if missing:
        sums, moments = steering.gathered(how, opened, writing, sums, config, ui)
    steered = {"method": how.name, "imatrix": sums.digest if sums else "", "fold": steering.fold * steering.folds}
    steered |= {"moments": moments.digest} if moments else {}
    making = mixes.Making(
        opened, lambda name, wishes: road.plan(opened, name, wishes, sums, most, method=how.name, moments=moments),
        steered, writing.threads,
    )  # fmt: skip
    plan, told = mixes.planned(sizing, making, kind.name, wishes, config, ui)
    plan = folding.folded(plan, steering.fold, writing.threads, ui)
    closing.tell(plan, ui)
    mixed = wishes.any or sizing.any or bool(sums or moments or most) or how.name != "ggml" or steering.folds
    out = writing.out or (mixes.beside(plan) if sizing.any and model is None else None)
    with weights.placed(plan, model, out, config, ui, mixed=mixed, dry_run=writing.dry_run) as target:
        certifying.check(plan, target, wish, config)
        report = (
            None if writing.dry_run else weights.write(plan, target, ui, threads=writing.threads, force=writing.force)
        )
        report, found = certifying.certify(plan, target, report, wish, told, config, ui)
    closing.close(plan, target, report, ui, found, told)
