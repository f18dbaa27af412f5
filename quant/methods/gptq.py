"""`--method gptq`: columns are rounded one after another, and the error of each column is corrected
in the columns after it, guided by second moments of the input.

This module splits a tensor into panels of rows, and for each row takes the codes of error feedback
or of search. The loop over columns is in error_feedback.py. Rows are independent: the factor of a
matrix's second moments is computed once, and panels of its rows are encoded on any thread. A panel
is padded with zeros to a fixed width, so that a row's arithmetic does not depend on the panel that
it is in.

Two kinds of tensors are left to `--method search`:

- Values of the attention without mixed moments (quant/calibration/attention_moments.py). Plain
  moments count every token alike, but attention does not: most heads attend mainly to the first
  token, which is only one of 512 in plain moments. This concerns attn_v, the value rows of
  attn_qkv, and all of attn_kv_b, where values share a weight with other outputs. The input of MLA's
  attn_v_b is mixed already.
- Q8_0, because its error is only 1/16 of Q4's.

Unless `--sequential` is given (quant/quantize/blockwise.py), all layers use the moments of the
unquantized model.

On a CPU the products are numpy's. Our C code, if it is built, searches the scales and goes from
column to column within a block.
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
    from quant.calibration.statistics import SecondMoments
    from quant.formats.base import BlockFormat
    from quant.native.array_backends import ArrayBackend
    from quant.native.ggml import F32, U8

FALLBACK_SEARCH = Search()
KEPT_FACTORS = 2  # while the last rows of a tensor are encoded, the next one has begun
DESCENT_SWEEPS = 2  # sweeps of coordinate descent
PANEL_ROWS = 1024  # maximum number of rows in a panel on a CPU
# Maximum number of values in a panel on a GPU. Panels are large there, because the time for Python
# to launch the operations of a column does not depend on the number of rows.
DEVICE_PANEL_VALUES = 1 << 25
PANEL_ROW_MULTIPLE = 64  # the number of rows in a padded panel is a multiple of this
# Number of columns of a factor that errors are multiplied with at a time. The factor is triangular,
# so that a product with all columns would multiply many zeros.
ERROR_BAND_COLUMNS = 256
UNSOLVED_FORMATS = ("Q8_0",)  # with eight bits the error is too small to be worth the time
# Attention mixes the outputs of these tensors, see the top of this file.
VALUE_TENSORS = (".attn_v.", ".attn_kv_b.")


class Gptq(Method):
    """GPTQ for the k-quants and the formats with blocks of 32 values. It needs the second moments
    that `calibrate --moments` writes.
    """

    name, help = "gptq", "error feedback by second moments"
    needs, fallback = "moments", "search"

    def can_encode(self, format: "BlockFormat", statistics: InputStatistics) -> bool:
        """Return whether the format has evenly spaced levels and the statistics contain second
        moments that suit the tensor (see the top of this file).
        """
        if statistics.moments is None or (
            any(name in statistics.name for name in VALUE_TENSORS) and not statistics.moments.mixed
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
        """Return the number of values in a panel, so that the encoder gets one panel in each
        call.
        """
        return panel_rows(statistics) * statistics.columns

    def backend_name(self) -> str:
        """Return the GPU's name, or "numpy" with the backend of the search. Each backend adds sums
        in a different order, so the bytes depend on it.
        """
        return array_backends.device() or f"numpy, {FALLBACK_SEARCH.backend_name()}"

    def slow_reason(self) -> str:
        """Return why numpy searches the scales; "" if a GPU or our C code does."""
        return FALLBACK_SEARCH.slow_reason()

    def make_encoder(self, format: "BlockFormat", statistics: InputStatistics) -> RowEncoder:
        """Return the encoder of one tensor's rows."""
        return _TensorEncoder(format, statistics)

    def free_memory(self) -> None:
        """Free the factors of the latest second moments."""
        FACTORS.clear()

    def report(self, encoder: RowEncoder) -> MethodReport | None:
        """Return how many rows got the codes of search, and the damping."""
        return encoder.report if isinstance(encoder, _TensorEncoder) else None


def panel_rows(statistics: InputStatistics) -> int:
    """Return the number of rows in each panel of a matrix. It is chosen such that all panels have
    the same size and the last one is not nearly empty.
    """
    max_rows = (
        max(PANEL_ROWS, DEVICE_PANEL_VALUES // statistics.columns)
        if array_backends.device()
        else PANEL_ROWS
    )
    panels = -(-statistics.rows // max_rows)
    return _padded_rows(-(-statistics.rows // panels))


def _padded_rows(rows: int) -> int:
    """Return the smallest multiple of PANEL_ROW_MULTIPLE that is not below `rows`."""
    return -(-rows // PANEL_ROW_MULTIPLE) * PANEL_ROW_MULTIPLE


class _FactorCache:
    """The factors of the latest second moments, for all encoders. Weights with the same input share
    a factor, and so do the types that are tried for a weight. The latest ones suffice, because rows
    arrive in order.
    """

    def __init__(self) -> None:
        from threading import Lock

        self.lock = Lock()
        self.latest: list[tuple[SecondMoments, int, ArrayBackend, HessianFactor]] = []

    def factor(self, moments: "SecondMoments", matrix: int, ops: "ArrayBackend") -> HessianFactor:
        """Return the factor of a matrix of these moments. Threads wait while it is computed."""
        with self.lock:
            for known, number, backend, factor in self.latest:
                if known is moments and number == matrix and backend is ops:
                    return factor
            del self.latest[: -KEPT_FACTORS + 1]  # before the next one takes memory
            with ops.exclusive_access():
                factor = factor_moments(moments.mean(matrix), ops)
            self.latest.append((moments, matrix, ops, factor))
            return factor

    def clear(self) -> None:
        """Free the factors."""
        with self.lock:
            self.latest.clear()


FACTORS = _FactorCache()


class _TensorEncoder:
    """The encoder of one tensor, which may have several matrices (experts). The factor of a
    matrix's second moments is computed when the first rows of the matrix arrive.

    Each row gets the codes of error feedback or those of search, whichever have the lower error
    under the damped second moments.
    """

    def __init__(self, format: "BlockFormat", statistics: InputStatistics) -> None:
        from threading import Lock

        self.ops = array_backends.array_backend(array_backends.device())
        blas_threads.use_one_thread()
        assert isinstance(format, LinearFormat), format
        self.format, self.statistics, self.kind = (
            format,
            statistics,
            ColumnFormat.from_format(format),
        )
        self.search = FALLBACK_SEARCH.make_encoder(format, statistics)
        self.lock = Lock()
        self.rows = self.fallback_rows = 0
        self.damping = 0.0

    @property
    def report(self) -> MethodReport:
        """The report on all rows that were encoded so far."""
        return MethodReport(
            self.rows, self.fallback_rows, self.damping if self.damping > DAMPING else 0.0
        )

    def __call__(self, rows: "F32", first: int) -> "U8":
        """Return the blocks [rows, row_bytes] of `rows`. `first` is the index of the first of these
        rows in the tensor. Raises UserError for rows that ggml's encoder refuses.
        """
        import numpy as np

        ggml.require_encodable(rows, self.format.name, label=self.statistics.name)
        blocks = np.empty((len(rows), ggml.row_bytes(self.format.name, rows.shape[1])), np.uint8)
        done, matrix_rows = 0, self.statistics.rows
        panel_width, solved_rows = (
            panel_rows(self.statistics),
            matrix_rows - self.statistics.value_rows,
        )
        while done < len(rows):
            matrix, row = divmod(first + done, matrix_rows)
            if row < solved_rows:
                end = min(len(rows), done + min(panel_width, solved_rows - row))
                blocks[done:end] = self._encode_panel(
                    rows[done:end], first + done, matrix, panel_width
                )
            else:
                end = min(len(rows), done + matrix_rows - row)
                blocks[done:end] = self.search(rows[done:end], first + done)
            done = end
        ggml.require_finite_scales(blocks, self.format.name, label=self.statistics.name)
        return blocks

    def _encode_panel(self, rows: "F32", first: int, matrix: int, panel_width: int) -> "U8":
        """Return the blocks of a panel. If the device runs out of memory, the panel is split in
        halves.
        """
        try:
            return self._choose_rows(rows, first, matrix, panel_width)
        except array_backends.DeviceOutOfMemory:
            pass

        def encode_narrow(rows: "F32", first_row: int) -> "U8":
            return self._choose_rows(rows, first_row, matrix, _padded_rows(len(rows)))

        return array_backends.retry_in_halves(encode_narrow, self.statistics.name)(rows, first)

    def _choose_rows(self, rows: "F32", first: int, matrix: int, panel_width: int) -> "U8":
        """Return the blocks of at most `panel_width` rows of one matrix. For each row these are the
        blocks of error feedback if their error is lower, else those of search.
        """
        factor = self._factor(matrix)
        from_search = self.search(rows, first)
        with self.ops.without_warnings():
            blocks, feedback_error = self._solve_panel(rows, factor, panel_width)
            search_error = self._search_error(
                from_search, rows, factor, feedback_error, panel_width
            )
            use_search = ~(feedback_error < search_error)  # also true if an error is NaN
        blocks[use_search] = from_search[use_search]
        with self.lock:
            self.rows, self.fallback_rows = (
                self.rows + len(rows),
                self.fallback_rows + int(use_search.sum()),
            )
        return blocks

    def _solve_panel(
        self, rows: "F32", factor: HessianFactor, panel_width: int
    ) -> "tuple[U8, F32]":
        """Return the blocks that error feedback gives the rows, and the error [rows] in the layer's
        output that they cause.
        """
        with self.ops.exclusive_access():
            grids, levels, errors = round_with_feedback(
                self.kind, self._to_panel(rows, panel_width), factor, DESCENT_SWEEPS, self.ops
            )
            result, row_errors = self._result(grids, levels, len(rows)), self.ops.to_numpy(errors)
        blocks = pack_search_result(result, self.format, self.kind.settings)
        return blocks.reshape(len(rows), -1), row_errors[: len(rows)]

    def _search_error(
        self,
        blocks: "U8",
        rows: "F32",
        factor: HessianFactor,
        feedback_error: "F32",
        panel_width: int,
    ) -> "F32":
        """Return the error [rows] in the layer's output that is caused by rounding `rows` to
        `blocks`, or at least a number that is also above `feedback_error`.
        """
        import numpy as np

        errors = ggml.decode(blocks, self.format.name, rows.shape[1], label=self.statistics.name)
        errors -= rows
        # Padded rows have no error, so that a limit below 0 keeps them from being waited for.
        limit = np.full(panel_width, -1, np.float32)
        limit[: len(rows)] = feedback_error
        with self.ops.exclusive_access():
            return self.ops.to_numpy(
                output_errors(
                    self._to_panel(errors, panel_width),
                    factor,
                    ERROR_BAND_COLUMNS,
                    self.ops.array(limit),
                )
            )[: len(rows)]

    def _to_panel(self, rows: "F32", panel_width: int) -> Array:
        """Return the rows as a panel [columns, panel_width], transposed and padded with zeros."""
        panel = self.ops.zeros(rows.shape[1], panel_width)
        panel[:, : len(rows)] = self.ops.array(rows).T
        return panel

    def _factor(self, matrix: int) -> HessianFactor:
        """Return the factor of a matrix's second moments."""
        assert self.statistics.moments is not None
        try:
            factor = FACTORS.factor(self.statistics.moments, matrix, self.ops)
        except array_backends.DeviceOutOfMemory:
            raise array_backends.out_of_memory_error(
                f"the second moments of {self.statistics.name}"
            ) from None
        self.damping = max(self.damping, factor.damping)
        return factor

    def _result(self, grids: list[ColumnGrid], levels: Array, count: int) -> ggml.ScaleSearchResult:
        """Return the codes and scales of the first `count` rows of a panel, ordered by row and then
        by block.
        """
        import numpy as np

        def join_field(name: str, kind: type) -> Any:
            """Return the field `name` of all grids as [rows x blocks] or [rows x blocks, groups].
            Return an empty array if the format does not have the field.
            """
            arrays = [getattr(grid, name) for grid in grids]
            if arrays[0] is None:
                return np.zeros(0, kind)
            # [blocks, .., rows]
            stacked = np.stack([self.ops.to_numpy(array)[..., :count] for array in arrays])
            values: Any = np.ascontiguousarray(np.moveaxis(stacked, -1, 0), kind)
            return values.reshape(count * len(grids), *values.shape[2:])

        codes = np.ascontiguousarray(self.ops.to_numpy(levels)[:, :count].T, np.int16).reshape(
            count * len(grids), -1
        )
        return ggml.ScaleSearchResult(
            codes,
            join_field("d", np.float32),
            join_field("m", np.float32),
            join_field("scales", np.int16),
            join_field("mins", np.int16),
        )


METHODS = (Gptq(),)
