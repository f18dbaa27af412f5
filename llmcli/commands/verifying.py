"""What `quantize --verify` does behind the quantizing: the file is held against its source, and
certified.

It joins quant's certificate with evaluation and bench; what is printed is commands/certified.py's.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from llmcli import __version__
from llmcli.bench import sides
from llmcli.bench.grid import Test
from llmcli.bench.paired import Comparison, Design, tenths
from llmcli.commands import bases, evaluating, scorers
from llmcli.commands.eval import CTX, side, words_of
from llmcli.commands.stage import N_CTX
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding import remote
from llmcli.runtime.binding.library import version
from llmcli.runtime.request import RunOptions
from llmcli.units import several
from quant import certificate, container
from quant.certificate import (
    FORMAT,
    Answers,
    Certificate,
    Figure,
    Origin,
    Speed,
    Steering,
    Tensor,
    World,
)
from quant.deviation import Original, deviations
from quant.folds.rewrite import FOLD_KEY
from quant.quality import Estimate
from quant.stamp import stamp

if TYPE_CHECKING:
    from llmcli.commands.scorers import Side
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.planning import Plan
    from quant.source import Source

# of 512 tokens, unless told; after 8 the mean divergence of SmolLM2 135M in Q4_K_M is known to 2.2
# %
CHUNKS = 32
TESTS = ((256, 0), (0, 32))  # tokens of a prompt, tokens generated
SECONDS = 4.0  # for each of these
LARGEST_TEXT = 1 << 28  # bytes of a calibration text that is read once more for its hash
# tokens that a text may have without a byte of their own: BOS, EOS, the space that some put first
BESIDE = 3
SIDECAR = 1 << 20  # bytes that the files beside may take


@dataclass(frozen=True, slots=True)
class Wish:
    """How a file is to be verified: with which text (None: the one that ships), how much of it, on
    how many threads (0: all cores). `mixed`: the digest of a text, and the chunks of it, by which
    the tensors' types were chosen.
    """

    text: Path | None = None
    chunks: int = CHUNKS
    threads: int = 0
    mixed: tuple[str, int] | None = None

    @property
    def options(self) -> RunOptions:
        """How both sides run: as llama-perplexity does."""
        return RunOptions(CTX, self.threads or None)


def check_text(source: "Source", wish: Wish) -> None:
    """Refuse a source that cannot read, and a text that is too short whatever the vocabulary."""
    bases.check(source, "leave --verify out")
    words, name = words_of(wish.text)
    if (count := len(words.encode())) < 2 * CTX - BESIDE:
        raise _too_short(f"{name} has {several(count, 'byte')}, to verify takes {2 * CTX} tokens")


def check(plan: "Plan", out: Path, config: "Config") -> None:
    """Refuse what the disk has no room for, before anything is made."""
    copy = bases.copied(plan.source.origin or plan.source)
    part = plan.parts[0].layout.nbytes  # the first file stands twice while it is stamped
    there = sum(file.stat().st_size for file in plan.files(out) if file.exists())
    room = {out.parent.absolute(): max(0, plan.nbytes - there) + part + SIDECAR}
    bases.room({**room, **({config.cache.absolute(): copy.nbytes} if copy else {})})


def verify(plan: "Plan", out: Path, wish: Wish, config: "Config", ui: "UI") -> Certificate:
    """Certify the finished file of a plan: its first shard carries the certificate afterwards.
    Raises Refusal.
    """
    file = plan.files(out)[0]
    header = container.read(file)
    with ui.bar(f"hash {file.name}", header.tensor_bytes) as bar:
        content = certificate.content(header, bar.advance)
    tensors = _tensors(plan, header, wish.threads or host.cores(), ui)
    with bases.runnable(plan.source.origin or plan.source, config, ui, wish.threads) as base:
        model, other = side(file, wish.options, ui), side(base, wish.options, ui)
        words, name = words_of(wish.text)
        _long_enough(model, words, name)
        steered = (
            *steering(plan),
            *_mixing(plan, wish, min(N_CTX, header.context_length or N_CTX)),
        )
        outcome = evaluating.run(
            evaluating.Wish(model, other, None, words, wish.chunks, quiet=True), config, ui
        )
        found = figures(outcome, (words, name), other.header.file_type, steered)
        if found.calibrated:
            ui.warn(
                f"{name} is what the file was made by: its figures flatter; --verify-text takes another"
            )
        speed = speeds(model, other, wish.threads or host.cores(), ui)
    made = Certificate(
        FORMAT,
        plan.source.name,
        plan.file_type.name,
        plan.method.name,
        plan.settings,
        _origin(plan),
        content,
        world(wish.threads or host.cores()),
        found,
        steered,
        _folds(plan, header),
        _mix(plan),
        tensors,
        speed,
        _methods(plan),
    )
    with ui.bar(
        f"write the certificate into {file.name}", sum(one.nbytes for one in plan.parts[0].steps)
    ) as bar:
        stamp(file, made, bar.advance)
    return made


def figures(
    outcome: evaluating.Outcome, text: tuple[str, str], base: str, steered: tuple[Steering, ...]
) -> Answers:
    """How alike both answer, over a text (its words and its name); `base` is the type the source
    ran in.
    """
    words, name = text
    known = _sha256(words)
    against = outcome.quality.against
    assert against is not None
    return Answers(
        text=_name(name),
        text_sha256=known,
        n_ctx=outcome.n_ctx,
        chunks=outcome.chunks,
        positions=outcome.quality.positions,
        base=base,
        perplexity=_figure(outcome.quality.perplexity),
        base_perplexity=_figure(against.base),
        perplexity_ratio=_figure(against.ratio),
        kld=_figure(against.kld),
        kld_median=against.klds.median,
        kld_ranks={f"{rank:g}": value for rank, value in against.klds.ranks.items()},
        kld_most=against.klds.most,
        same_top=_figure(against.same_top),
        rms_delta_p=_figure(against.delta_rms),
        calibrated=any(_same((known, _name(name)), one) for one in steered),
    )


def _same(text: tuple[str, str], steered: Steering) -> bool:
    """Whether a text (its hash and name) is one of those: by the hash, where that is known."""
    known, name = text
    both = zip(steered.hashes, steered.texts, strict=True)
    return any(known.startswith(one) if one else name == other for one, other in both)


def speeds(
    model: "Side", base: "Side", threads: int, ui: "UI", seconds: float | None = None
) -> tuple[Speed, ...]:
    """Tokens a second of both, measured in pairs in random order."""
    tests = [
        Test(prompt, gen, 0, 2048, 512, "f16", "f16", threads, -1, "auto") for prompt, gen in TESTS
    ]
    pairs = [
        (sides.Side(base.header.path, one), sides.Side(model.header.path, one)) for one in tests
    ]
    design = Design(
        seconds=SECONDS if seconds is None else seconds, precision=0.02, confidence=0.95
    )
    return tuple(
        _speed(one.name, found)
        for one, found in zip(tests, sides.run(pairs, design, ui), strict=True)
    )


def world(threads: int) -> World:
    """This machine and these versions, now."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    count = len(remote.joined())  # their addresses are nobody's business
    machine = host.identity() + (f" and {several(count, 'worker')}" if count else "")
    return World(__version__, version(), machine, threads, now)


def _speed(name: str, found: Comparison) -> Speed:
    known = found.low > 0
    return Speed(
        name,
        median(found.a),
        median(found.b),
        tenths(found.a),
        tenths(found.b),
        found.ratio,
        found.low if known else None,
        found.high if known else None,
        len(found.a),
        found.noisy,
    )


def _tensors(plan: "Plan", header: container.Header, threads: int, ui: "UI") -> tuple[Tensor, ...]:
    """The table: what each tensor is and how far it is from the source."""
    originals = {
        step.weight.name: Original(step.weight, step.evidence.weigh) for step in plan.steps
    }
    with ui.bar(
        f"compare {header.path.name} with {plan.source.name}", len(originals), unit="tensors"
    ) as bar:
        found = list(deviations(originals, header, threads, bar.advance))
    return tuple(
        Tensor(
            one.name,
            one.type,
            one.nbytes,
            one.nbytes * 8 / one.elements,
            apart.error,
            apart.weighted,
        )
        for one, apart in zip(header.tensors, found, strict=True)
    )


def _origin(plan: "Plan") -> Origin:
    source = plan.source.origin or plan.source
    nbytes, elements = (
        sum(getattr(one, what) for one in source.weights) for what in ("nbytes", "elements")
    )
    types = tuple(dict.fromkeys(one.type for one in source.weights))
    return Origin(
        _name(source.path.absolute()), source.fingerprint, types, nbytes, nbytes * 8 / elements
    )


def steering(plan: "Plan") -> tuple[Steering, ...]:
    """What the rounding was steered by. A text's hash is that of its file, where that is still
    there and is no younger than what was gathered from it.
    """
    diagonal = (
        plan.imatrix is not None
        and plan.moments is not None
        and plan.imatrix.digest == plan.moments.digest
    )
    files = {} if plan.imatrix is None or diagonal else {"imatrix": plan.imatrix}
    if plan.moments is not None and (
        diagonal or plan.method.needs == "moments" or plan.source.fold
    ):  # they chose it
        files["moments"] = plan.moments.imatrix
    return (
        *_behind(plan),
        *(
            Steering(
                kind,
                one.digest,
                tuple(map(_name, one.datasets)),
                tuple(_hash(name, one.path.stat().st_mtime) for name in one.datasets),
                one.chunks or None,
                one.chunks * one.chunk_size or None,
            )
            for kind, one in files.items()
        ),
    )


def _behind(plan: "Plan") -> tuple[Steering, ...]:
    """The moments that were gathered behind tensors already quantized."""
    one = plan.pending
    if one is None or not one.digest:
        return ()
    names, hashes = tuple(map(_name, one.texts)), tuple(map(_hash, one.texts))
    return (
        Steering(
            "sequential",
            one.digest,
            names,
            hashes,
            one.chunks or None,
            one.chunks * one.chunk_size or None,
        ),
    )


def _mixing(plan: "Plan", wish: Wish, n_ctx: int) -> tuple[Steering, ...]:
    """What the tensors' types were chosen by, where that was a text, in chunks of so many tokens."""
    if wish.mixed is None:
        return ()
    digest, chunks = wish.mixed
    return (
        Steering("mix", json.loads(plan.settings)["mix"], ("",), (digest,), chunks, chunks * n_ctx),
    )


def _hash(name: str, before: float = inf) -> str:
    """The hash of a text that a stats file names, if it is a file of this machine, last written
    `before` that: anybody may have written it, and another text may stand there by now.
    """
    path = Path(name)
    try:
        known = (
            path.is_file() and path.stat().st_size < LARGEST_TEXT and path.stat().st_mtime <= before
        )
        return _sha256(words_of(path)[0]) if known else ""
    except (UserError, OSError, ValueError):
        return ""


def _folds(plan: "Plan", header: container.Header) -> tuple[str, ...]:
    """How the source was folded before it was rounded, with the digest of that, as the file says."""
    told = header.metadata.get(FOLD_KEY)
    if not (plan.source.fold and isinstance(told, str)):
        return ()
    said = json.loads(told)
    return (f"{said['how']} {said['digest']}".strip(),)


def _methods(plan: "Plan") -> dict[str, int]:
    """Tensors by method; nothing where a method's moments came behind the plan: some may not have
    come.
    """
    return {} if plan.pending else {name: len(steps) for name, steps in plan.methods.items()}


def _mix(plan: "Plan") -> dict[str, int]:
    types = [step.type for step in plan.steps]
    return {kind: types.count(kind) for kind in dict.fromkeys(types)}


def _long_enough(model: "Side", words: str, name: str) -> None:
    count = len(scorers.tokens(model, words))
    if count < 2 * CTX:
        raise _too_short(f"{name} has {several(count, 'token')}, to verify takes {2 * CTX}")


def _too_short(what: str) -> UserError:
    return UserError(what, hint="--verify-text takes a longer text")


def _figure(estimate: Estimate) -> Figure:
    return Figure(estimate.value, estimate.error)


def _name(path: Path | str) -> str:
    """A file's name without its folder, as text: the certificate goes to others."""
    return Path(path).name.encode("utf-8", "replace").decode()


def _sha256(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()
