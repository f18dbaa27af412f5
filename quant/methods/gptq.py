"""`--method gptq`: errors fed forward column by column on each format's own grid, by the second
moments of its input.

Rows are independent: a tensor's factor is made once, and panels of its rows are solved wherever
there is a thread. A panel has always the same width, zeros where the rows end, so that the same
arithmetic meets a row whatever it is cut from.

2026-11-22, attention's values want the moments of what attention mixes (quant/mixing.py has the
numbers). Those of the rows that enter count every token alike, attention does not: the first token,
which most heads look at, is one of 512 in them. Where a file has no better ones the values are left
to search, and so are those rows of attn_qkv that put out values, and all of attn_kv_b, where they
stand among others: an input would have to be gathered twice for one weight. What enters MLA's
attn_v_b is mixed already. Queries and keys of attn_qkv solved, too, took a random Phi-3 of two
blocks at Q4_K_M from a divergence of .197 to .131. Q8_0 is left to search, too: its error is 1/16
of Q4's.

2026-11-22, no layer waits for those before it unless `--sequential` asks for that
(quant/prefix.py), which reads the text once a block. Llama of hidden 512 and 4 layers, 50 chunks of
512 tokens of calibration, one text, KL divergence on 24 chunks of 256 of Wikipedia and of plays: at
Q4_K_M .000198 and .000234, by the unchanged model's moments .000198 and .000249 (-0.1 % [-2.9,
+3.0] and -5.9 % [-12.8, +0.6], chunks drawn in pairs); at Q2_K .001363 and .001977 for .001394 and
.002068 (-2.2 % [-3.8, -0.6] and -4.4 % [-7.5, -1.2]).

2026-11-22, on a CPU it is numpy's, the scales by our C where it is built: 13.6 M weights of that
Llama to Q4_K_M took 4.3 CPU seconds, by torch 7.3 (1.4 for its import alone, and a slower search of
its own for the scales); the error under their moments is 0.2 % larger in the geometric mean of the
tensors.
"""

from typing import TYPE_CHECKING, Any

from quant import accelerate, blas, native
from quant.accelerate import Array
from quant.formats.base import Linear
from quant.methods.base import Evidence, Method, Remark, Solver
from quant.methods.factor import DAMPING, Factor, factor
from quant.methods.feedback import lost, solve
from quant.methods.grids import GRIDS
from quant.methods.panels import Grid, Kind
from quant.methods.search import Search, packed

if TYPE_CHECKING:
    from quant.formats.base import Format
    from quant.native import F32, U8

SEARCH = Search()
SWEEPS = 2  # of coordinate descent
PANEL = 1024  # rows of a panel at most,
ON_DEVICE = (
    1 << 25
)  # but a GPU has so many values: it waits for Python at each column, however wide they are
LANES = 64  # its width is a multiple of it
BAND = 256  # columns of a factor that errors are multiplied by at a time: half of it is zeros
FINE = ("Q8_0",)  # eight bits leave too little error to be worth the time
VALUES = (".attn_v.", ".attn_kv_b.")  # attention mixes what comes out of these: see above


class Gptq(Method):
    """The k-quants and the formats with blocks of 32, on what `calibrate --moments` measured."""

    name, help = "gptq", "error feedback by second moments"
    needs, instead = "moments", "search"

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Evenly spaced formats, where the moments speak of the tensor and tell what counts in it."""
        if evidence.second is None or (
            any(part in evidence.name for part in VALUES) and not evidence.second.mixed
        ):
            return False
        if (
            ".attn_qkv." in evidence.name and not evidence.values
        ):  # which rows are values is not known
            return False
        return isinstance(format, Linear) and format.name in GRIDS and format.name not in FINE

    def values(self, evidence: Evidence) -> int:
        """A panel."""
        return width(evidence) * evidence.columns

    def means(self) -> str:
        """A GPU, or numpy with the search that there is: each adds up in an order of its own."""
        return accelerate.device() or f"numpy, {SEARCH.means()}"

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """Solves panel after panel of each matrix with its own factor."""
        return _Tensor(format, evidence)

    def remark(self, solver: Solver) -> Remark | None:
        """What it took to solve the tensor."""
        return solver.remark if isinstance(solver, _Tensor) else None


def width(evidence: Evidence) -> int:
    """How many rows a panel of a matrix has: as equal as they come, none of them nearly empty."""
    most = max(PANEL, ON_DEVICE // evidence.columns) if accelerate.device() else PANEL
    panels = -(-evidence.rows // most)
    return _lanes(-(-evidence.rows // panels))


def _lanes(rows: int) -> int:
    return -(-rows // LANES) * LANES


class _Tensor:
    """One tensor under way: the factor of each of its matrices, made when its first row comes.

    Called with rows it is a Solver. Each row keeps the codes with the less error under its damped
    moments: what was fed forward or, where that is not below it, search's.
    """

    def __init__(self, format: "Format", evidence: Evidence) -> None:
        from threading import Lock

        self.ops = accelerate.operations(accelerate.device())
        blas.one_thread()
        assert isinstance(format, Linear), format
        self.format, self.evidence, self.kind = format, evidence, Kind.of(format)
        self.search = SEARCH.solver(format, evidence)
        self.making = Lock()
        self.factors: dict[int, Factor] = {}
        self.solved = self.others = 0
        self.damping = 0.0

    @property
    def remark(self) -> Remark:
        """Of all rows so far."""
        return Remark(self.solved, self.others, self.damping if self.damping > DAMPING else 0.0)

    def __call__(self, rows: "F32", first: int) -> "U8":
        """Blocks of the rows first … of the tensor; refuses what ggml's encoder refuses."""
        import numpy as np

        native.check_rows(rows, self.format.name, label=self.evidence.name)
        out = np.empty((len(rows), native.row_bytes(self.format.name, rows.shape[1])), np.uint8)
        at, every = 0, self.evidence.rows
        step, others = width(self.evidence), every - self.evidence.values
        while at < len(rows):
            matrix, within = divmod(first + at, every)
            if within < others:
                end = min(len(rows), at + min(step, others - within))
                out[at:end] = self._fitting(rows[at:end], first + at, matrix, step)
            else:
                end = min(len(rows), at + every - within)
                out[at:end] = self.search(rows[at:end], first + at)
            at = end
        native.check_made(out, self.format.name, label=self.evidence.name)
        return out

    def _fitting(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """The blocks of a panel, by narrower ones where a device has no room for it."""
        try:
            return self._better(rows, first, matrix, step)
        except accelerate.Full:
            pass

        def narrow(some: "F32", at: int) -> "U8":
            return self._better(some, at, matrix, _lanes(len(some)))

        return accelerate.halved(narrow, self.evidence.name)(rows, first)

    def _better(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """The blocks of a panel of at most `step` rows of one matrix, each row's the better of the
        two.
        """
        factor = self._factor(matrix)
        theirs = self.search(rows, first)
        with self.ops.quiet():
            mine = self._panel(rows, factor, step)
            worse = ~(
                self._lost(mine, rows, factor, step) < self._lost(theirs, rows, factor, step)
            )  # NaN, too
        mine[worse] = theirs[worse]
        with self.making:
            self.solved, self.others = self.solved + len(rows), self.others + int(worse.sum())
        return mine

    def _panel(self, rows: "F32", factor: Factor, step: int) -> "U8":
        """Blocks of the rows by error feedback."""
        with self.ops.alone():
            grids, levels = solve(self.kind, self._upright(rows, step), factor, SWEEPS, self.ops)
            found = self._found(grids, levels, len(rows))
        return packed(found, self.format, self.kind.form).reshape(len(rows), -1)

    def _lost(self, made: "U8", rows: "F32", factor: Factor, step: int) -> "F32":
        """The error [rows] of each row of blocks in the layer's output."""
        off = native.decode(made, self.format.name, rows.shape[1], label=self.evidence.name)
        off -= rows
        with self.ops.alone():
            return self.ops.numpy(lost(self._upright(off, step), factor, BAND))[: len(rows)]

    def _upright(self, rows: "F32", step: int) -> Array:
        """Rows as a panel [columns, step], with zeros behind them."""
        panel = self.ops.zeros(rows.shape[1], step)
        panel[:, : len(rows)] = self.ops.array(rows).T
        return panel

    def _factor(self, matrix: int) -> Factor:
        assert self.evidence.second is not None
        with self.making:
            if matrix not in self.factors:
                self.factors.clear()
                try:
                    with self.ops.alone():
                        self.factors[matrix] = factor(self.evidence.second.mean(matrix), self.ops)
                except accelerate.Full:
                    raise accelerate.no_room(
                        f"the second moments of {self.evidence.name}"
                    ) from None
                self.damping = max(self.damping, self.factors[matrix].damping)
            return self.factors[matrix]

    def _found(self, grids: list[Grid], levels: Array, count: int) -> native.Found:
        """What was solved, of the first `count` rows, their blocks in order."""
        import numpy as np

        def numbers(name: str, kind: type) -> Any:
            """[rows x blocks], or [rows x blocks, groups]; nothing where the format has none."""
            parts = [getattr(grid, name) for grid in grids]
            if parts[0] is None:
                return np.zeros(0, kind)
            stacked = np.stack(
                [self.ops.numpy(part)[..., :count] for part in parts]
            )  # [blocks, .., rows]
            found: Any = np.ascontiguousarray(np.moveaxis(stacked, -1, 0), kind)
            return found.reshape(count * len(grids), *found.shape[2:])

        codes = np.ascontiguousarray(self.ops.numpy(levels)[:, :count].T, np.int16).reshape(
            count * len(grids), -1
        )
        return native.Found(
            codes,
            numbers("d", np.float32),
            numbers("m", np.float32),
            numbers("scales", np.int16),
            numbers("mins", np.int16),
        )


METHODS = (Gptq(),)
