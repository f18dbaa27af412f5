"""`quantize --verify`: compares the finished file with its source and writes a certificate into
it.
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
from llmcli.bench.compare import interleaved
from llmcli.bench.speed.parameter_grid import Test
from llmcli.bench.statistics.paired_test import Comparison, Design, tenths
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.model_loader import float_copy as bases
from llmcli.runtime.binding import rpc
from llmcli.runtime.binding.library import version
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import several
from llmcli.workflows.evaluation import evaluate, models
from llmcli.workflows.evaluation.text import CTX, side, words_of
from llmcli.workflows.quantization.scratch_model import N_CTX
from quant.certificate import certificate
from quant.certificate.certificate import (
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
from quant.certificate.embed import stamp
from quant.certificate.tensor_errors import Original, deviations
from quant.evaluation.metrics import Estimate
from quant.folds.folded_source import FOLD_KEY
from quant.model_file import model_header, read_header

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import Side
    from quant.quantize.plan import Plan
    from quant.source.source import Source

# chunks of 512 tokens; 8 chunks give SmolLM2 135M's mean divergence in Q4_K_M within 2.2 %
CHUNKS = 32
TESTS = ((256, 0), (0, 32))  # (tokens of a prompt, generated tokens)
SECONDS = 4.0  # measuring time of each test
LARGEST_TEXT = 1 << 28  # bytes of a calibration text that is read again for its hash
# tokens that a text may have without using a byte of it: BOS, EOS, a leading space
BESIDE = 3
SIDECAR = 1 << 20  # bytes of the certificate files next to the model file


@dataclass(frozen=True, slots=True)
class Wish:
    """How to verify a file: the text (None: the built-in one), the number of chunks and of threads
    (0: all cores).

    `allocation_text`: digest and number of chunks of the text by which the tensor types were
    chosen.
    """

    text: Path | None = None
    chunks: int = CHUNKS
    threads: int = 0
    mixed: tuple[str, int] | None = None

    @property
    def options(self) -> RunOptions:
        """The run options of both models, as llama-perplexity's."""
        return RunOptions(CTX, self.threads or None)


def check_text(source: "Source", request: Wish) -> None:
    """Raise UserError if the source has no vocabulary, or if the text is too short for any
    vocabulary.
    """
    bases.check(source, "leave --verify out")
    words, name = words_of(request.text)
    if (count := len(words.encode())) < 2 * CTX - BESIDE:
        raise _too_short(
            f"{name} has {several(count, 'byte')}; verification needs {2 * CTX} tokens"
        )


def check(plan: "Plan", out: Path, config: "Config") -> None:
    """Raise UserError if the disks have too little space for the file, its certificate and the
    float copy.
    """
    float_copy = bases.copied(plan.source.origin or plan.source)
    # the first file exists twice while the certificate is embedded
    first_shard_bytes = plan.parts[0].layout.nbytes
    existing_bytes = sum(file.stat().st_size for file in plan.files(out) if file.exists())
    needed_bytes = {
        out.parent.absolute(): max(0, plan.nbytes - existing_bytes) + first_shard_bytes + SIDECAR
    }
    bases.room(
        {**needed_bytes, **({config.cache.absolute(): float_copy.nbytes} if float_copy else {})}
    )


def verify(plan: "Plan", out: Path, request: Wish, config: "Config", ui: "UI") -> Certificate:
    """Compare the finished file of a plan with its source and embed the certificate in its first
    shard.

    Raises UserError.
    """
    file = plan.files(out)[0]
    header = read_header.read(file)
    with ui.bar(f"hash {file.name}", header.tensor_bytes) as bar:
        content = certificate.content(header, bar.advance)
    tensors = _tensors(plan, header, request.threads or host.cores(), ui)
    with bases.runnable(plan.source.origin or plan.source, config, ui, request.threads) as base:
        model_side, base_side = side(file, request.options, ui), side(base, request.options, ui)
        text_content, text_name = words_of(request.text)
        _require_long_text(model_side, text_content, text_name)
        steered = (
            *steering(plan),
            *_allocation_text(plan, request, min(N_CTX, header.context_length or N_CTX)),
        )
        outcome = evaluate.run(
            evaluate.Wish(model_side, base_side, None, text_content, request.chunks, quiet=True),
            config,
            ui,
        )
        answers = figures(outcome, (text_content, text_name), base_side.header.file_type, steered)
        if answers.calibrated:
            ui.warn(
                f"{text_name} was also used to quantize the file, so its results look too good; "
                "--verify-text takes another text"
            )
        speed = speeds(model_side, base_side, request.threads or host.cores(), ui)
    verified = Certificate(
        FORMAT,
        plan.source.name,
        plan.file_type.name,
        plan.method.name,
        plan.settings,
        _describe_source(plan),
        content,
        world(request.threads or host.cores()),
        answers,
        steered,
        _folds(plan, header),
        _types_by_count(plan),
        tensors,
        speed,
        _methods(plan),
    )
    with ui.bar(
        f"write the certificate into {file.name}", sum(step.nbytes for step in plan.parts[0].steps)
    ) as bar:
        stamp(file, verified, bar.advance)
    return verified


def figures(
    outcome: evaluate.Outcome, text: tuple[str, str], base: str, steered: tuple[Steering, ...]
) -> Answers:
    """Return how closely the answers of both models agree.

    `text`: content and name of the text; `base`: the type that the source was run in;
    `statistics_used`: the texts that the quantization used.
    """
    text_content, name = text
    text_hash = _sha256(text_content)
    against = outcome.quality.against
    assert against is not None
    return Answers(
        text=_name(name),
        text_sha256=text_hash,
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
        calibrated=any(_is_among((text_hash, _name(name)), record) for record in steered),
    )


def _is_among(text: tuple[str, str], steered: Steering) -> bool:
    """Return whether a text (hash and name) is among the used texts; names are compared where a
    hash is unknown.
    """
    text_hash, name = text
    recorded_texts = zip(steered.hashes, steered.texts, strict=True)
    return any(
        text_hash.startswith(recorded_hash) if recorded_hash else name == recorded_name
        for recorded_hash, recorded_name in recorded_texts
    )


def speeds(
    model: "Side", base: "Side", threads: int, ui: "UI", seconds: float | None = None
) -> tuple[Speed, ...]:
    """Measure the speed of both models in pairs, in random order (tokens per second)."""
    tests = [
        Test(prompt, gen, 0, 2048, 512, "f16", "f16", threads, -1, "auto") for prompt, gen in TESTS
    ]
    pairs = [
        (interleaved.Side(base.header.path, test), interleaved.Side(model.header.path, test))
        for test in tests
    ]
    design = Design(
        seconds=SECONDS if seconds is None else seconds, precision=0.02, confidence=0.95
    )
    return tuple(
        _speed_record(test.name, comparison)
        for test, comparison in zip(tests, interleaved.run(pairs, design, ui), strict=True)
    )


def world(threads: int) -> World:
    """Return the machine, the versions and the time of the verification."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    count = len(rpc.joined())  # worker addresses are private
    machine = host.identity() + (f" and {several(count, 'worker')}" if count else "")
    return World(__version__, version(), machine, threads, now)


def _speed_record(name: str, found: Comparison) -> Speed:
    is_known = found.low > 0
    return Speed(
        name,
        median(found.a),
        median(found.b),
        tenths(found.a),
        tenths(found.b),
        found.ratio,
        found.low if is_known else None,
        found.high if is_known else None,
        len(found.a),
        found.noisy,
    )


def _tensors(
    plan: "Plan", header: model_header.Header, threads: int, ui: "UI"
) -> tuple[Tensor, ...]:
    """Return the type, size and relative error of every tensor."""
    originals = {
        step.weight.name: Original(step.weight, step.evidence.weigh) for step in plan.steps
    }
    with ui.bar(
        f"compare {header.path.name} with {plan.source.name}", len(originals), unit="tensors"
    ) as bar:
        errors = list(deviations(originals, header, threads, bar.advance))
    return tuple(
        Tensor(
            tensor.name,
            tensor.type,
            tensor.nbytes,
            tensor.nbytes * 8 / tensor.elements,
            tensor_error.error,
            tensor_error.weighted,
        )
        for tensor, tensor_error in zip(header.tensors, errors, strict=True)
    )


def _describe_source(plan: "Plan") -> Origin:
    source = plan.source.origin or plan.source
    nbytes, elements = (
        sum(getattr(weight, field_name) for weight in source.weights)
        for field_name in ("nbytes", "elements")
    )
    types = tuple(dict.fromkeys(weight.type for weight in source.weights))
    return Origin(
        _name(source.path.absolute()), source.fingerprint, types, nbytes, nbytes * 8 / elements
    )


def steering(plan: "Plan") -> tuple[Steering, ...]:
    """Return the statistics and texts that the quantization used.

    A text has a hash only if its file still exists and is older than the statistics.
    """
    diagonal = (
        plan.imatrix is not None
        and plan.moments is not None
        and plan.imatrix.digest == plan.moments.digest
    )
    # the diagonal of the moments is not listed as a separate imatrix
    files = {} if plan.imatrix is None or diagonal else {"imatrix": plan.imatrix}
    if plan.moments is not None and (
        diagonal or plan.method.needs == "moments" or plan.source.fold
    ):  # the moments chose the folds
        files["moments"] = plan.moments.imatrix
    return (
        *_blockwise_statistics(plan),
        *(
            Steering(
                kind,
                statistics.digest,
                tuple(map(_name, statistics.datasets)),
                tuple(_hash(name, statistics.path.stat().st_mtime) for name in statistics.datasets),
                statistics.chunks or None,
                statistics.chunks * statistics.chunk_size or None,
            )
            for kind, statistics in files.items()
        ),
    )


def _blockwise_statistics(plan: "Plan") -> tuple[Steering, ...]:
    """Return the texts of moments that were collected block by block, after earlier tensors were
    quantized.
    """
    pending = plan.pending
    if pending is None or not pending.digest:
        return ()
    names, hashes = tuple(map(_name, pending.texts)), tuple(map(_hash, pending.texts))
    return (
        Steering(
            "sequential",
            pending.digest,
            names,
            hashes,
            pending.chunks or None,
            pending.chunks * pending.chunk_size or None,
        ),
    )


def _allocation_text(plan: "Plan", request: Wish, n_ctx: int) -> tuple[Steering, ...]:
    """Return the text that chose the tensor types, if there was one; chunks of `n_ctx` tokens."""
    if request.mixed is None:
        return ()
    digest, chunks = request.mixed
    return (
        Steering("mix", json.loads(plan.settings)["mix"], ("",), (digest,), chunks, chunks * n_ctx),
    )


def _hash(name: str, before: float = inf) -> str:
    """Return the hash of a text that a statistics file names, or "" if it cannot be trusted.

    The file must exist and must not be younger than `newest_mtime`: names in a statistics file come
    from anyone, and the text may have been replaced.
    """
    path = Path(name)
    try:
        is_trusted = (
            path.is_file() and path.stat().st_size < LARGEST_TEXT and path.stat().st_mtime <= before
        )
        return _sha256(words_of(path)[0]) if is_trusted else ""
    except (UserError, OSError, ValueError):
        return ""


def _folds(plan: "Plan", header: model_header.Header) -> tuple[str, ...]:
    """Return the folds that were applied to the source, with their digest, as the file states
    them.
    """
    fold_json = header.metadata.get(FOLD_KEY)
    if not (plan.source.fold and isinstance(fold_json, str)):
        return ()
    fold_record = json.loads(fold_json)
    return (f"{fold_record['how']} {fold_record['digest']}".strip(),)


def _methods(plan: "Plan") -> dict[str, int]:
    """Return the number of tensors by method; empty if moments were collected after planning, since
    some may be missing.
    """
    return {} if plan.pending else {name: len(steps) for name, steps in plan.methods.items()}


def _types_by_count(plan: "Plan") -> dict[str, int]:
    types = [step.type for step in plan.steps]
    return {kind: types.count(kind) for kind in dict.fromkeys(types)}


def _require_long_text(model: "Side", words: str, name: str) -> None:
    count = len(models.tokens(model, words))
    if count < 2 * CTX:
        raise _too_short(f"{name} has {several(count, 'token')}; verification needs {2 * CTX}")


def _too_short(what: str) -> UserError:
    return UserError(what, hint="use a longer --verify-text")


def _figure(estimate: Estimate) -> Figure:
    return Figure(estimate.value, estimate.error)


def _name(path: Path | str) -> str:
    """Return a file's name without its folder: certificates are published."""
    return Path(path).name.encode("utf-8", "replace").decode()


def _sha256(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()
