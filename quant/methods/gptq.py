"""`--method gptq`: errors fed forward column by column on each format's grid, guided by second
moments.

Rows are independent: a tensor's factor is computed once, and panels of its rows are solved on any
thread. A panel is padded with zeros to a fixed width, so that a row meets the same arithmetic
whichever panel it is in.

Exceptions:

- attention's values need the moments of what attention mixes
  (quant/calibration/attention_moments.py). Plain moments count every token alike, but attention
  does not: the first token, which most heads attend to, is one of 512 in them. Without mixed
  moments, values are left to search, and so are the value rows of attn_qkv and all of attn_kv_b,
  where values share a weight with other outputs. The input of MLA's attn_v_b is mixed already.
- Q8_0 is left to search: its error is 1/16 of Q4's.

Unless `--sequential` is given (quant/quantize/blockwise.py), all layers use the moments of the
unquantized model.

On a CPU the arithmetic is numpy's, and our C code searches the scales where it is built.
"""

from typing import TYPE_CHECKING, Any

from quant.calibration.statistics import Evidence
from quant.formats.base import Linear
from quant.methods.base import Method, Remark, Solver
from quant.methods.column_grids import Grid, Kind
from quant.methods.error_feedback import lost, solve
from quant.methods.hessian_factor import DAMPING, Factor, factor
from quant.methods.search import Search, packed
from quant.methods.search_settings import GRIDS
from quant.native import array_backends, blas_threads, ggml
from quant.native.array_backends import Array

if TYPE_CHECKING:
    from quant.formats.base import Format
    from quant.native.ggml import F32, U8

SEARCH = Search()
SWEEPS = 2  # of coordinate descent
PANEL = 1024  # most rows of a panel on a CPU
# most values of a panel on a GPU, which waits for Python at each column however many rows it has
ON_DEVICE = 1 << 25
LANES = 64  # a panel's width is a multiple of it
BAND = 256  # columns of a factor that errors are multiplied with at a time: half of it is zeros
FINE = ("Q8_0",)  # eight bits leave too little error to be worth the time
VALUES = (".attn_v.", ".attn_kv_b.")  # attention mixes the outputs of these, see above


class Gptq(Method):
    """The k-quants and the formats with blocks of 32, with the second moments of `calibrate
    --moments`.
    """

    name, help = "gptq", "error feedback by second moments"
    needs, instead = "moments", "search"

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Return whether the format is evenly spaced and the statistics contain suitable moments of
        the tensor.
        """
        if evidence.second is None or (
            any(part in evidence.name for part in VALUES) and not evidence.second.mixed
        ):
            return False
        if ".attn_qkv." in evidence.name and not evidence.values:
            return False  # it is unknown which rows are values
        return isinstance(format, Linear) and format.name in GRIDS and format.name not in FINE

    def values(self, evidence: Evidence) -> int:
        """Return the number of values of a panel."""
        return width(evidence) * evidence.columns

    def means(self) -> str:
        """Return the GPU's name, or numpy with the back end of the search: each adds in a different
        order.
        """
        return array_backends.device() or f"numpy, {SEARCH.means()}"

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """Return an encoder that solves panels of each matrix with that matrix's factor."""
        return _TensorEncoder(format, evidence)

    def remark(self, solver: Solver) -> Remark | None:
        """Return what solving the tensor took."""
        return solver.remark if isinstance(solver, _TensorEncoder) else None


def width(evidence: Evidence) -> int:
    """Return the number of rows of a matrix's panels: all alike, and none nearly empty."""
    most = max(PANEL, ON_DEVICE // evidence.columns) if array_backends.device() else PANEL
    panels = -(-evidence.rows // most)
    return _padded_rows(-(-evidence.rows // panels))


def _padded_rows(rows: int) -> int:
    return -(-rows // LANES) * LANES


class _TensorEncoder:
    """The encoder of one tensor. The factor of each matrix is computed when its first row arrives.

    Each row gets the codes with the lower error under its damped moments: those of error feedback
    or, where these are not better, those of search.
    """

    def __init__(self, format: "Format", evidence: Evidence) -> None:
        from threading import Lock

        self.ops = array_backends.operations(array_backends.device())
        blas_threads.one_thread()
        assert isinstance(format, Linear), format
        self.format, self.evidence, self.kind = format, evidence, Kind.of(format)
        self.search = SEARCH.solver(format, evidence)
        self.lock = Lock()
        self.factors: dict[int, Factor] = {}
        self.rows = self.fallback_rows = 0
        self.damping = 0.0

    @property
    def remark(self) -> Remark:
        """The report on all rows so far."""
        return Remark(
            self.rows, self.fallback_rows, self.damping if self.damping > DAMPING else 0.0
        )

    def __call__(self, rows: "F32", first: int) -> "U8":
        """Return the blocks of rows `first` … of the tensor. Raises UserError for rows that ggml's
        encoder refuses.
        """
        import numpy as np

        ggml.check_rows(rows, self.format.name, label=self.evidence.name)
        out = np.empty((len(rows), ggml.row_bytes(self.format.name, rows.shape[1])), np.uint8)
        at, height = 0, self.evidence.rows
        step, solved_rows = width(self.evidence), height - self.evidence.values
        while at < len(rows):
            matrix, within = divmod(first + at, height)
            if within < solved_rows:
                end = min(len(rows), at + min(step, solved_rows - within))
                out[at:end] = self._encode_panel(rows[at:end], first + at, matrix, step)
            else:
                end = min(len(rows), at + height - within)
                out[at:end] = self.search(rows[at:end], first + at)
            at = end
        ggml.check_made(out, self.format.name, label=self.evidence.name)
        return out

    def _encode_panel(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """Return the blocks of a panel; split the panel where the device runs out of memory."""
        try:
            return self._choose_rows(rows, first, matrix, step)
        except array_backends.Full:
            pass

        def narrow(rows: "F32", at: int) -> "U8":
            return self._choose_rows(rows, at, matrix, _padded_rows(len(rows)))

        return array_backends.halved(narrow, self.evidence.name)(rows, first)

    def _choose_rows(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """Return the blocks of a panel of at most `step` rows of one matrix, the better of both
        codes for each row.
        """
        factor = self._factor(matrix)
        from_search = self.search(rows, first)
        with self.ops.quiet():
            blocks = self._solve_panel(rows, factor, step)
            feedback_error = self._output_error(blocks, rows, factor, step)
            worse = ~(
                feedback_error < self._output_error(from_search, rows, factor, step)
            )  # NaN, too
        blocks[worse] = from_search[worse]
        with self.lock:
            self.rows, self.fallback_rows = (
                self.rows + len(rows),
                self.fallback_rows + int(worse.sum()),
            )
        return blocks

    def _solve_panel(self, rows: "F32", factor: Factor, step: int) -> "U8":
        """Return the blocks of the rows by error feedback."""
        with self.ops.alone():
            grids, levels = solve(self.kind, self._to_panel(rows, step), factor, SWEEPS, self.ops)
            found = self._result(grids, levels, len(rows))
        return packed(found, self.format, self.kind.form).reshape(len(rows), -1)

    def _output_error(self, blocks: "U8", rows: "F32", factor: Factor, step: int) -> "F32":
        """Return the error [rows] that the rows' blocks cause in the layer's output."""
        errors = ggml.decode(blocks, self.format.name, rows.shape[1], label=self.evidence.name)
        errors -= rows
        with self.ops.alone():
            return self.ops.numpy(lost(self._to_panel(errors, step), factor, BAND))[: len(rows)]

    def _to_panel(self, rows: "F32", step: int) -> Array:
        """Return the rows as a panel [columns, step], padded with zeros."""
        panel = self.ops.zeros(rows.shape[1], step)
        panel[:, : len(rows)] = self.ops.array(rows).T
        return panel

    def _factor(self, matrix: int) -> Factor:
        assert self.evidence.second is not None
        with self.lock:
            if matrix not in self.factors:
                self.factors.clear()
                try:
                    with self.ops.alone():
                        self.factors[matrix] = factor(self.evidence.second.mean(matrix), self.ops)
                except array_backends.Full:
                    raise array_backends.no_room(
                        f"the second moments of {self.evidence.name}"
                    ) from None
                self.damping = max(self.damping, self.factors[matrix].damping)
            return self.factors[matrix]

    def _result(self, grids: list[Grid], levels: Array, count: int) -> ggml.Found:
        """Return the solution of the first `count` rows, with their blocks in order."""
        import numpy as np

        def numbers(name: str, kind: type) -> Any:
            """Return [rows x blocks] or [rows x blocks, groups]; an empty array where the format
            has no such field.
            """
            parts = [getattr(grid, name) for grid in grids]
            if parts[0] is None:
                return np.zeros(0, kind)
            # [blocks, .., rows]
            stacked = np.stack([self.ops.numpy(part)[..., :count] for part in parts])
            values: Any = np.ascontiguousarray(np.moveaxis(stacked, -1, 0), kind)
            return values.reshape(count * len(grids), *values.shape[2:])

        codes = np.ascontiguousarray(self.ops.numpy(levels)[:, :count].T, np.int16).reshape(
            count * len(grids), -1
        )
        return ggml.Found(
            codes,
            numbers("d", np.float32),
            numbers("m", np.float32),
            numbers("scales", np.int16),
            numbers("mins", np.int16),
        )


METHODS = (Gptq(),)
