"""The HTML page of a certificate: a summary, charts of the divergence, the speed and the tensors'
bytes and errors, and a table of all tensors.
"""

from llmcli.charts.chart import Axis, Chart, ChartRow, NamedValue, RowChart, Table
from llmcli.charts.html_page import ReportPage
from llmcli.charts.scale import format_number
from llmcli.units import format_size
from llmcli.workflows.certification.certificate_text import certificate_rows, format_error
from quant.certificate.certificate import Certificate, TensorRecord
from quant.model_file.model_header import tensor_role

MIB = 2**20
MAX_CHARTED_ROLES = 24  # maximum number of kinds of tensors (such as ffn_down) in a chart


def build_page(certificate: Certificate) -> ReportPage:
    """Return the page. It contains only data from the certificate."""
    answers, ratio = certificate.answers, certificate.answers.perplexity_ratio
    lead = (
        f"The mean KL divergence from {certificate.source.name} is {answers.kld.value:.6f} ± "
        f"{answers.kld.error:.6f}.",
        f"Both predict the same next token at {answers.same_top.value:.2%} ± "
        f"{answers.same_top.error:.2%} of {answers.positions:,} positions of {answers.text}.",
        f"Perplexity is {ratio.value:.4f} ± {ratio.error:.4f} times the source's.",
    )
    about = (
        f"{format_size(certificate.content.nbytes)}, {certificate.content.bits_per_weight:.3f} bits per weight · "
        f"{certificate.world.date}"
    )
    return ReportPage(
        f"{certificate.model} as {certificate.file_type}",
        about,
        lead,
        tuple(build_charts(certificate)),
        (("Every tensor", _tensor_table(certificate)),),
        (("Certificate", tuple(certificate_rows(certificate))),),
    )


def build_charts(certificate: Certificate) -> list[Chart]:
    """Return the charts: divergence by percentile, speed, and bytes and errors by kind of
    tensor.
    """
    groups: dict[str, list[TensorRecord]] = {}
    for tensor in certificate.tensors:
        groups.setdefault(tensor_role(tensor.name), []).append(tensor)
    largest_groups = dict(
        sorted(groups.items(), key=lambda item: -sum(tensor.nbytes for tensor in item[1]))[
            :MAX_CHARTED_ROLES
        ]
    )
    return [
        *_rank_charts(certificate),
        *_speed_charts(certificate),
        *_byte_charts(largest_groups),
        *_error_charts(largest_groups),
    ]


def _rank_charts(certificate: Certificate) -> list[Chart]:
    answers = certificate.answers
    marks = [(f"{rank} %", value) for rank, value in answers.kld_ranks.items()]
    marks += [
        ("median", answers.kld_median),
        ("mean", answers.kld.value),
        ("maximum", answers.kld_most),
    ]
    positive_marks = sorted(
        ((name, value) for name, value in marks if value > 0), key=lambda mark: mark[1]
    )
    if not positive_marks:
        return []
    caption = "Divergence of single positions by percentile: 99 % of them are below the 99 % mark."
    chart_rows = tuple(
        ChartRow(name, (NamedValue("KL divergence", value),), format_number(value))
        for name, value in positive_marks
    )
    return [
        RowChart(
            "Divergence",
            caption,
            Axis("KL divergence, nats", is_log=len(positive_marks) > 1),
            chart_rows,
            draws_marks=True,
        )
    ]


def _speed_charts(certificate: Certificate) -> list[Chart]:
    chart_rows = []
    for speed in certificate.speed:
        for name, rate, span in (
            ("the source", speed.base, speed.base_span),
            ("this file", speed.quantized, speed.quantized_span),
        ):
            ends = (span[0], span[1]) if len(span) == 2 else None
            chart_rows.append(
                ChartRow(
                    f"{speed.test}, {name}",
                    (NamedValue("tokens per second", rate),),
                    format_number(rate),
                    ends,
                )
            )
    caption = "Medians, measured in turn; whiskers span from the slowest tenth to the fastest."
    return (
        [RowChart("Speed", caption, Axis("tokens per second"), tuple(chart_rows))]
        if chart_rows
        else []
    )


def _byte_charts(groups: dict[str, list[TensorRecord]]) -> list[Chart]:
    """Return a chart with a bar for each kind of tensor. The bar is divided by tensor type.
    `groups`: the tensors of each kind.
    """
    chart_rows = []
    for name, tensors in groups.items():
        mib_by_type: dict[str, float] = {}
        for tensor in tensors:
            mib_by_type[tensor.type] = mib_by_type.get(tensor.type, 0.0) + tensor.nbytes / MIB
        total = sum(tensor.nbytes for tensor in tensors)
        chart_rows.append(
            ChartRow(
                name,
                tuple(NamedValue(kind, value) for kind, value in mib_by_type.items()),
                format_size(total),
            )
        )
    if not chart_rows:
        return []
    return [
        RowChart(
            "Bytes",
            "Types of each kind of tensor, over all layers.",
            Axis("MiB"),
            tuple(chart_rows),
        )
    ]


def _error_charts(groups: dict[str, list[TensorRecord]]) -> list[Chart]:
    """Return a chart of the smallest, median and largest error of each kind of tensor. `groups`:
    the tensors of each kind. Both chart functions return an empty list if there is nothing to draw.
    """
    chart_rows = []
    for name, tensors in groups.items():
        errors = sorted(tensor.error for tensor in tensors if tensor.error)
        if errors:
            ends = (
                ("smallest", errors[0]),
                ("median", errors[len(errors) // 2]),
                ("largest", errors[-1]),
            )
            note = format_number(100 * errors[len(errors) // 2]) + " %"
            chart_rows.append(
                ChartRow(name, tuple(NamedValue(label, 100 * value) for label, value in ends), note)
            )
    if not chart_rows:
        return []
    caption = "Relative RMS error of the values against the source, over the tensors of a kind."
    return [
        RowChart("Error of the weights", caption, Axis("%"), tuple(chart_rows), draws_marks=True)
    ]


def _tensor_table(certificate: Certificate) -> Table:
    lines = tuple(
        (
            tensor.name,
            tensor.type,
            f"{tensor.nbytes:,}",
            f"{tensor.bits:.3f}",
            format_error(tensor.error),
            format_error(tensor.weighted),
        )
        for tensor in certificate.tensors
    )
    return Table(
        ("tensor", "type", "bytes", "bits/weight", "weight RMSE", "weighted"),
        lines,
        frozenset(range(2, 6)),
    )
