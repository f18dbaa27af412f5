"""The page of a certificate: what it says, how the divergence lies, where bytes and errors are,
every tensor.
"""

from llmcli.bench.charts.chart import Axis, Chart, Row, Rows, Table, Value
from llmcli.bench.charts.page import Page
from llmcli.bench.charts.scale import figure
from llmcli.commands.certified import part, rows
from llmcli.units import size
from quant.certificate import Certificate, Tensor
from quant.container import role

MIB = 2**20
MOST = 24  # kinds of tensors that are drawn; the table has all


def made(found: Certificate) -> Page:
    """The whole page, from the certificate alone."""
    answers, ratio = found.answers, found.answers.perplexity_ratio
    lead = (
        f"The mean KL divergence from {found.source.name} is {answers.kld.value:.6f} ± {answers.kld.error:.6f}.",
        f"Both say the same next token in {answers.same_top.value:.2%} ± {answers.same_top.error:.2%} of "
        f"{answers.positions:,} positions of {answers.text}.",
        f"Perplexity is {ratio.value:.4f} ± {ratio.error:.4f} times the source's.",
    )
    about = f"{size(found.content.nbytes)}, {found.content.bits_per_weight:.3f} bits per weight · {found.world.date}"
    return Page(
        f"{found.model} as {found.file_type}",
        about,
        lead,
        tuple(charts(found)),
        (("Every tensor", _tensors(found)),),
        (("What was done and found", tuple(rows(found))),),
    )


def charts(found: Certificate) -> list[Chart]:
    """Divergence by rank, speed, bytes and errors by kind of tensor."""
    groups: dict[str, list[Tensor]] = {}
    for one in found.tensors:
        groups.setdefault(role(one.name), []).append(one)
    heavy = dict(
        sorted(groups.items(), key=lambda item: -sum(one.nbytes for one in item[1]))[:MOST]
    )
    return [*_ranks(found), *_speed(found), *_bytes(heavy), *_errors(heavy)]


def _ranks(found: Certificate) -> list[Chart]:
    answers = found.answers
    known = [(f"{rank} %", value) for rank, value in answers.kld_ranks.items()]
    known += [
        ("median", answers.kld_median),
        ("mean", answers.kld.value),
        ("maximum", answers.kld_most),
    ]
    shown = sorted(((name, value) for name, value in known if value > 0), key=lambda one: one[1])
    if not shown:
        return []
    says = "How far what it expects at one position is from the source's: 99 % of them lie below the 99 % mark."
    drawn = tuple(
        Row(name, (Value("KL divergence", value),), figure(value)) for name, value in shown
    )
    return [
        Rows("Divergence", says, Axis("KL divergence, nats", log=len(shown) > 1), drawn, dots=True)
    ]


def _speed(found: Certificate) -> list[Chart]:
    drawn = []
    for one in found.speed:
        for name, rate, span in (
            ("the source", one.base, one.base_span),
            ("this file", one.made, one.made_span),
        ):
            ends = (span[0], span[1]) if len(span) == 2 else None
            drawn.append(
                Row(f"{one.test}, {name}", (Value("tokens a second", rate),), figure(rate), ends)
            )
    says = "Medians, measured in turn; whiskers from the slowest tenth to the fastest."
    return [Rows("Speed", says, Axis("tokens a second"), tuple(drawn))] if drawn else []


def _bytes(groups: dict[str, list[Tensor]]) -> list[Chart]:
    """A bar for each kind of tensor, its types stacked."""
    drawn = []
    for name, tensors in groups.items():
        kinds: dict[str, float] = {}
        for one in tensors:
            kinds[one.type] = kinds.get(one.type, 0.0) + one.nbytes / MIB
        total = sum(one.nbytes for one in tensors)
        drawn.append(
            Row(name, tuple(Value(kind, value) for kind, value in kinds.items()), size(total))
        )
    if not drawn:
        return []
    return [
        Rows(
            "Bytes",
            "What each kind of tensor is stored as, over all layers.",
            Axis("MiB"),
            tuple(drawn),
        )
    ]


def _errors(groups: dict[str, list[Tensor]]) -> list[Chart]:
    """The smallest, the middle and the largest error of each kind."""
    drawn = []
    for name, tensors in groups.items():
        errors = sorted(one.error for one in tensors if one.error)
        if errors:
            ends = (
                ("smallest", errors[0]),
                ("middle", errors[len(errors) // 2]),
                ("largest", errors[-1]),
            )
            note = figure(100 * errors[len(errors) // 2]) + " %"
            drawn.append(Row(name, tuple(Value(word, 100 * value) for word, value in ends), note))
    if not drawn:
        return []
    says = "Relative RMS of the values against the source's, over the tensors of a kind."
    return [Rows("Error of the weights", says, Axis("%"), tuple(drawn), dots=True)]


def _tensors(found: Certificate) -> Table:
    lines = tuple(
        (
            one.name,
            one.type,
            f"{one.nbytes:,}",
            f"{one.bits:.3f}",
            part(one.error),
            part(one.weighted),
        )
        for one in found.tensors
    )
    return Table(
        ("tensor", "type", "bytes", "bits/weight", "error", "weighed"),
        lines,
        frozenset(range(2, 6)),
    )
