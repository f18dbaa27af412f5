"""`--method gptq`: errors fed forward column by column on each format's own grid, by the second moments of its input.

Rows are independent: a tensor's factor is made once, and panels of its rows are solved wherever there is a thread. A
panel has always the same width, zeros where the rows end, so that the same arithmetic meets a row whatever it is cut
from.

2026-11-22, attention's values want the moments of what attention mixes (quant/gather.py has the numbers). Those of the
rows that enter count every token alike, attention does not: the first token, which most heads look at, is one of 512 in
them. Where a file has no better ones the values are left to search, and so are those rows of attn_qkv that put out
values, and all of attn_kv_b, where they stand among others: an input would have to be gathered twice for one weight.
What enters MLA's attn_v_b is mixed already.
Queries and keys of attn_qkv solved, too, took a random Phi-3 of two blocks at Q4_K_M from a divergence of .197 to .131.
Q8_0 is left to search, too: its error is 1/16 of Q4's.

2026-11-22, no layer waits for those before it unless `--sequential` asks for that (quant/prefix.py), which reads the
text once a block. Llama of hidden 512 and 4 layers, 50 chunks of 512 tokens of calibration, one text, KL divergence on
24 chunks of 256 of Wikipedia and of plays: at Q4_K_M .000198 and .000234, by the unchanged model's moments .000198 and
.000249 (-0.1 % [-2.9, +3.0] and -5.9 % [-12.8, +0.6], chunks drawn in pairs); at Q2_K .001363 and .001977 for .001394
and .002068 (-2.2 % [-3.8, -0.6] and -4.4 % [-7.5, -1.2]).
"""

from typing import TYPE_CHECKING, Any

from quant import accelerate, native
from quant.formats.base import Linear
from quant.methods.base import Evidence, Method, Remark, Solver
from quant.methods.factor import DAMPING, Factor, factor
from quant.methods.feedback import solve
from quant.methods.panels import KINDS, Grid, Levels
from quant.methods.search import Search

if TYPE_CHECKING:
    from quant.formats.base import Fields, Format
    from quant.native import F32, U8

SEARCH = Search()
SWEEPS = 2  # of coordinate descent
PANEL = 1024  # rows of a panel at most
LANES = 64  # its width is a multiple of it
FINE = ("Q8_0",)  # eight bits leave too little error to be worth the time
VALUES = (".attn_v.", ".attn_kv_b.")  # attention mixes what comes out of these: see above


class Gptq(Method):
    """The k-quants and the formats with blocks of 32, on what `calibrate --moments` measured."""

    name, help = "gptq", "error feedback by second moments, needs torch"
    needs, instead = "moments", "search"

    def handles(self, format: "Format", evidence: Evidence) -> bool:
        """Evenly spaced formats, where the moments speak of the tensor and tell what counts in it."""
        if evidence.second is None or (any(part in evidence.name for part in VALUES) and not evidence.second.mixed):
            return False
        if ".attn_qkv." in evidence.name and not evidence.values:  # which rows are values is not known
            return False
        return isinstance(format, Linear) and format.name in KINDS and format.name not in FINE

    def values(self, evidence: Evidence) -> int:
        """A panel."""
        return width(evidence.rows) * evidence.columns

    def means(self) -> str:
        """The device of torch's."""
        return accelerate.device() or "cpu"

    def solver(self, format: "Format", evidence: Evidence) -> Solver:
        """Solves panel after panel of each matrix with its own factor."""
        return _Tensor(format, evidence)

    def remark(self, solver: Solver) -> Remark | None:
        """What it took to solve the tensor."""
        return solver.remark if isinstance(solver, _Tensor) else None


def width(rows: int) -> int:
    """How many rows a panel of a matrix has: as equal as they come, none of them nearly empty."""
    panels = -(-rows // PANEL)
    return -(-rows // (panels * LANES)) * LANES


class _Tensor:
    """One tensor under way: the factor of each of its matrices, made when its first row comes.

    Called with rows it is a Solver. Each row keeps the codes with the less error under its damped moments: what was fed
    forward or, where that is not below it, search's.
    """

    def __init__(self, format: "Format", evidence: Evidence) -> None:
        from threading import Lock

        self.torch, self.device = accelerate.torch("--method gptq"), accelerate.device() or "cpu"
        self.torch.set_num_threads(1)  # the encoders are the threads
        assert isinstance(format, Linear), format
        self.format, self.evidence, self.kind = format, evidence, KINDS[format.name]
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
        step, others = width(every), every - self.evidence.values
        while at < len(rows):
            matrix, within = divmod(first + at, every)
            if within < others:
                end = min(len(rows), at + min(step, others - within))
                out[at:end] = self._better(rows[at:end], first + at, matrix, step)
            else:
                end = min(len(rows), at + every - within)
                out[at:end] = self.search(rows[at:end], first + at)
            at = end
        native.check_made(out, self.format.name, label=self.evidence.name)
        return out

    def _better(self, rows: "F32", first: int, matrix: int, step: int) -> "U8":
        """The blocks of a panel of at most `step` rows of one matrix, each row's the better of the two."""
        factor = self._factor(matrix)
        with self.torch.inference_mode():
            mine, theirs = self._panel(rows, factor, step), self.search(rows, first)
            worse = self._lost(mine, rows, factor, step) >= self._lost(theirs, rows, factor, step)
        mine[worse] = theirs[worse]
        with self.making:
            self.solved, self.others = self.solved + len(rows), self.others + int(worse.sum())
        return mine

    def _panel(self, rows: "F32", factor: Factor, step: int) -> "U8":
        """Blocks of the rows by error feedback."""
        panel = self._upright(rows, step)
        grids, levels = solve(self.kind, Levels.of(self.format), panel, factor, SWEEPS)
        return self.format.pack(self._fields(grids, levels, len(rows))).reshape(len(rows), -1)

    def _lost(self, made: "U8", rows: "F32", factor: Factor, step: int) -> "F32":
        """The error [rows] of each row of blocks in the layer's output."""
        off = native.decode(made, self.format.name, rows.shape[1], label=self.evidence.name) - rows
        panel = self._upright(off, step)
        found: F32 = (panel * (factor.moments @ panel)).sum(0)[: len(rows)].cpu().numpy()
        return found

    def _upright(self, rows: "F32", step: int) -> Any:
        """Rows as a panel [columns, step], with zeros behind them."""
        panel = self.torch.zeros((rows.shape[1], step), device=self.device)
        panel[:, : len(rows)] = self.torch.from_numpy(rows).to(self.device).T
        return panel

    def _factor(self, matrix: int) -> Factor:
        assert self.evidence.second is not None
        with self.making:
            if matrix not in self.factors:
                self.factors = {matrix: factor(self.evidence.second.mean(matrix), self.device)}
                self.damping = max(self.damping, self.factors[matrix].damping)
            return self.factors[matrix]

    def _fields(self, grids: list[Grid], levels: Any, count: int) -> "Fields":
        """What the format packs, of the first `count` rows, their blocks in order."""
        from quant.formats.base import Fields

        def numbers(name: str) -> Any:
            parts = [getattr(grid, name) for grid in grids]
            if parts[0] is None:
                return None
            flat = self.torch.stack(parts)[..., :count].cpu()  # [blocks, rows] or [blocks, groups, rows]
            if flat.dim() == 2:
                return flat.half().T.reshape(-1).numpy()
            return flat.permute(2, 0, 1).reshape(count * len(grids), -1).short().numpy()

        codes = levels[:, :count].T.reshape(count * len(grids), -1).cpu().short().numpy() + self.format.zero
        return Fields(codes, *(numbers(name) for name in ("d", "m", "scales", "mins")))


METHODS = (Gptq(),)
