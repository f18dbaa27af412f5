"""`--method gptq`: errors are fed forward column by column on each format's grid, guided by second
moments.

This module splits a tensor into panels of rows and chooses between the results; the loop over
columns is in error_feedback.py. Rows are independent: the factor of a matrix's second moments is
computed once, and panels of its rows are solved on any thread. A panel is padded with zeros to a
fixed width, so that a row's arithmetic does not depend on the panel that it is in.

Two kinds of tensors are left to `--method search`:

- Values of the attention without mixed moments (quant/calibration/attention_moments.py). Plain
  moments count every token alike, but attention does not: most heads attend mainly to the first
  token, which is only one of 512 in plain moments. This concerns attn_v, the value rows of
  attn_qkv, and all of attn_kv_b, where values share a weight with other outputs. The input of MLA's
  attn_v_b is mixed already.
- Q8_0, because its error is only 1/16 of Q4's.

Unless `--sequential` is given (quant/quantize/blockwise.py), all layers use the moments of the
unquantized model.

On a CPU the arithmetic is numpy's, except that our C code, if it is built, searches the scales.
"""

from typing import TYPE_CHECKING, Any

from quant.calibration.statistics import InputStatistics
from quant.formats.base import LinearFormat
from quant.methods.base import Method, MethodReport, RowEncoder
from quant.methods.column_grids import ColumnFormat, ColumnGrid
from quant.methods.error_feedback import output_errors, round_with_feedback
from quant.methods.hessian_factor import DAMPING, HessianFactor, factor_moments
from quant.methods.search import Search, pack_search_result
from quant.methods.search_settings import SEARCH_SETTINGS
from quant.native import array_backends, blas_threads, ggml
from quant.native.array_backends import Array

if TYPE_CHECKING:
    from quant.formats.base import BlockFormat
    from quant.native.ggml import F32, U8

FALLBACK_SEARCH = Search()
DESCENT_SWEEPS = 2  # sweeps of coordinate descent
PANEL_ROWS = 1024  # most rows of a panel on a CPU
# most values of a panel on a GPU. Panels are large there, because Python has to launch operations
# for each column, however many rows the panel has
DEVICE_PANEL_VALUES = 1 << 25
PANEL_ROW_MULTIPLE = 64  # a panel's width is a multiple of this
ERROR_BAND_COLUMNS = (
    # number of columns of a factor that errors are multiplied with at a time: the factor is
    # triangular, so half of it is zeros
    256
)
UNSOLVED_FORMATS = ("Q8_0",)  # with eight bits the error is too small to be worth the time
# attention mixes the outputs of these tensors, see above
VALUE_TENSORS = (".attn_v.", ".attn_kv_b.")


class Gptq(Method):
    """GPTQ for the k-quants and the formats with blocks of 32, with the second moments of
    `calibrate --moments`.
    """

    name, help = "gptq", "error feedback by second moments"
    needs, fallback = "moments", "search"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the format is evenly spaced and the statistics contain second moments that
        suit the tensor (see above).
        """
        if statistics.moments is None or (
            any(part in statistics.name for part in VALUE_TENSORS) and not statistics.moments.mixed
        ):
            return False
        if ".attn_qkv." in statistics.name and not statistics.value_rows:
            return False  # it is unknown which rows are values
        return (
            isinstance(format, LinearFormat)
            and format.name in SEARCH_SETTINGS
            and format.name not in UNSOLVED_FORMATS
        )

    def values_per_chunk(self, statistics: InputStatistics) -> int:
        """Return the number of values in a panel."""
        return panel_rows(statistics) * statistics.columns

    def backend_name(self) -> str:
        """Return the GPU's name, or "numpy" with the back end of the search. Sums are added in a
        different order on each, so the bytes depend on it.
        """
        return array_backends.device() or f"numpy, {FALLBACK_SEARCH.backend_name()}"

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return an encoder that solves the panels of each matrix with the factor of that matrix's
        second moments.
        """
        return _TensorEncoder(format, statistics)

    def report(self, encoder: RowEncoder) -> MethodReport | None:
        """Return the report on the tensor: how many rows got the codes of search, and the damping."""
        return encoder.remark if isinstance(encoder, _TensorEncoder) else None


def panel_rows(statistics: InputStatistics) -> int:
    """Return the number of rows in the panels of a matrix. All panels have the same size, and the
    last one is not nearly empty.
    """
    most = (
        max(PANEL_ROWS, DEVICE_PANEL_VALUES // statistics.columns)
        if array_backends.device()
        else PANEL_ROWS
    )
    panels = -(-statistics.rows // most)
    return _padded_rows(-(-statistics.rows // panels))


def _padded_rows(rows: int) -> int:
    return -(-rows // PANEL_ROW_MULTIPLE) * PANEL_ROW_MULTIPLE


class _TensorEncoder:
    """The encoder of one tensor. The factor of a matrix's second moments is computed when its first
    rows arrive.

    Each row gets the codes of error feedback if their error under the row's damped moments is lower
    than that of search, else the codes of search.
    """

    def __init__(self, format: "BlockFormat", evidence: InputStatistics) -> None:
        from threading import Lock

        self.ops = array_backends.array_backend(array_backends.device())
        blas_threads.use_one_thread()
        assert isinstance(format, LinearFormat), format
        self.format, self.evidence, self.kind = format, evidence, ColumnFormat.from_format(format)
        self.search = FALLBACK_SEARCH.make_encoder(format, evidence)
        self.lock = Lock()
        self.factors: dict[int, HessianFactor] = {}
        self.rows = self.fallback_rows = 0
        self.damping = 0.0

    @property
    def remark(self) -> MethodReport:
        """The report on all rows so far."""
        return MethodReport(
            self.rows, self.fallback_rows, self.damping if self.damping > DAMPING else 0.0
        )

    def __call__(self, rows: "F32", first: int) -> "U8":
        """Return the blocks of `rows`, of which the first is row `first` of the tensor. Raises
        UserError for rows that ggml's encoder refuses.
        """
        import numpy as np

        ggml.require_encodable(rows, self.format.name, label=self.evidence.name)
        out = np.empty((len(rows), ggml.row_bytes(self.format.name, rows.shape[1])), np.uint8)
        at, height = 0, self.evidence.rows
        step, solved_rows = panel_rows(self.evidence), height - self.evidence.value_rows
        while at < len(rows):
            matrix, within = divmod(first + at, height)
            if within < solved_rows:
                end = min(len(rows), at + min(step, solved_rows - within))
                out[at:end] = self._encode_panel(rows[at:end], first + at, matrix, step)
            else:
                end = min(len(rows), at + height - within)
                out[at:end] = self.search(rows[at:end], first + at)
            at = end
        ggml.require_finite_scales(out, self.format.name, label=self.evidence.name)
        return out

    def _encode_panel(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """Return the blocks of a panel. If the device runs out of memory, the panel is split."""
        try:
            return self._choose_rows(rows, first, matrix, step)
        except array_backends.DeviceOutOfMemory:
            pass

        def narrow(rows: "F32", at: int) -> "U8":
            return self._choose_rows(rows, at, matrix, _padded_rows(len(rows)))

        return array_backends.retry_in_halves(narrow, self.evidence.name)(rows, first)

    def _choose_rows(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """Return the blocks of a panel of at most `step` rows of one matrix: for each row those of
        error feedback, or those of search if feedback is not better.
        """
        factor = self._factor(matrix)
        from_search = self.search(rows, first)
        with self.ops.without_warnings():
            blocks = self._solve_panel(rows, factor, step)
            feedback_error = self._output_error(blocks, rows, factor, step)
            worse = ~(
                feedback_error < self._output_error(from_search, rows, factor, step)
            )  # this is also true for NaN
        blocks[worse] = from_search[worse]
        with self.lock:
            self.rows, self.fallback_rows = (
                self.rows + len(rows),
                self.fallback_rows + int(worse.sum()),
            )
        return blocks

    def _solve_panel(self, rows: "F32", factor: HessianFactor, step: int) -> "U8":
        """Return the blocks of the rows by error feedback."""
        with self.ops.exclusive_access():
            grids, levels = round_with_feedback(
                self.kind, self._to_panel(rows, step), factor, DESCENT_SWEEPS, self.ops
            )
            found = self._result(grids, levels, len(rows))
        return pack_search_result(found, self.format, self.kind.settings).reshape(len(rows), -1)

    def _output_error(self, blocks: "U8", rows: "F32", factor: HessianFactor, step: int) -> "F32":
        """Return the error [rows] that rounding `rows` to `blocks` causes in the layer's output."""
        errors = ggml.decode(blocks, self.format.name, rows.shape[1], label=self.evidence.name)
        errors -= rows
        with self.ops.exclusive_access():
            return self.ops.to_numpy(
                output_errors(self._to_panel(errors, step), factor, ERROR_BAND_COLUMNS)
            )[: len(rows)]

    def _to_panel(self, rows: "F32", step: int) -> Array:
        """Return the rows as a panel [columns, step], padded with zeros."""
        panel = self.ops.zeros(rows.shape[1], step)
        panel[:, : len(rows)] = self.ops.array(rows).T
        return panel

    def _factor(self, matrix: int) -> HessianFactor:
        assert self.evidence.moments is not None
        with self.lock:
            if matrix not in self.factors:
                self.factors.clear()
                try:
                    with self.ops.exclusive_access():
                        self.factors[matrix] = factor_moments(
                            self.evidence.moments.mean(matrix), self.ops
                        )
                except array_backends.DeviceOutOfMemory:
                    raise array_backends.out_of_memory_error(
                        f"the second moments of {self.evidence.name}"
                    ) from None
                self.damping = max(self.damping, self.factors[matrix].damping)
            return self.factors[matrix]

    def _result(self, grids: list[ColumnGrid], levels: Array, count: int) -> ggml.ScaleSearchResult:
        """Return the solution of the first `count` rows, ordered by row and then by block."""
        import numpy as np

        def numbers(name: str, kind: type) -> Any:
            """Return the grids' field `name` as [rows x blocks] or [rows x blocks, groups]; an
            empty array if the format does not have it.
            """
            parts = [getattr(grid, name) for grid in grids]
            if parts[0] is None:
                return np.zeros(0, kind)
            # [blocks, .., rows]
            stacked = np.stack([self.ops.to_numpy(part)[..., :count] for part in parts])
            values: Any = np.ascontiguousarray(np.moveaxis(stacked, -1, 0), kind)
            return values.reshape(count * len(grids), *values.shape[2:])

        codes = np.ascontiguousarray(self.ops.to_numpy(levels)[:, :count].T, np.int16).reshape(
            count * len(grids), -1
        )
        return ggml.ScaleSearchResult(
            codes,
            numbers("d", np.float32),
            numbers("m", np.float32),
            numbers("scales", np.int16),
            numbers("mins", np.int16),
        )


METHODS = (Gptq(),)
