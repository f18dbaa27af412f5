"""Which folds a plan's own types and method would rather have: candidates per site, kept where the
measured loss falls.

  awq     s_j = E[x_j^2]^(a/2), for small a: columns that matter get more of a block's range smooth
  s_j = rms(x_j)^a / max|w_j|^(1-a), SmoothQuant's, for activations that are rounded in blocks, too
  deal    channels ranked by E[x^2] mean(w^2) and dealt out over the sub-blocks like cards: hidden
  channels, values
          within a head, and the residual's, whose one order must do for all layers

A site takes the candidate with the least mean of its readers' losses, each in proportion to what it
is without (loss.py). Everything is decided by the plan, the evidence and the rows sampled; nothing
is drawn.

2026-11-22, mean KL divergence from the F32 or F16 teacher, held-out wiki text, ggml's search with
an imatrix unless told; standard errors are those of the means, the texts are the same within a
line:

  SmolLM2-135M (Q4_1 with its lattice broken; 8 x 512)    none              folds
    Q4_K_M    .03902 +- .00098    awq,deal .03198 +- .00152  (-18 %)
  a Llama of hidden 512 trained here (perplexity 90; 24 x 256)
    Q2_K      .005657 +- .000224  deal .005543, awq .005273, awq,deal .005169 +- .000176  (-8.6 %)
    Q3_K_M    .001245 +- .000029  awq,deal .001176 +- .000027  (-5.5 %) Q4_K_M    .000459 +- .000009
    awq .000436, awq,deal .000421 +- .000008  (-8.3 %), with smooth .000428 Q4_K_M by gptq  .000192
    +- .000005  awq,deal .000181 +- .000004  (-5.7 %); chosen by search's loss .000189 Q6_K
    .000172 +- .000003  awq,deal .000154 +- .000002  (-10.5 %), with smooth .000156

So `auto` is awq,deal: smooth is taken at Q6_K (six of sixteen sites) and gains nothing that awq
does not, for awq's loss counts the activations' rounding, too. A method that needs second moments
is asked itself up to loss.SOLVED columns: choosing by search's loss keeps a quarter of the gain in
a quarter of the time. With exponents up to .7 SmolLM2's sites prefer .3 (52 of 121) to .4 (19); the
loss falls by another half percent, the divergence to .03036 +- .00095, which these eight chunks do
not tell from .03198: the grid ends at .3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant import native
from quant.errors import Refusal
from quant.folds.fold import Edit, Fold, Site, edits
from quant.folds.loss import Reader
from quant.folds.wiring import sites
from quant.moments import Moments
from quant.planning import Plan, Step

if TYPE_CHECKING:
    from quant.folds.fold import F64, Ints
    from quant.native import F32

KINDS = {
    "awq": "columns that matter get more of a block's range",
    "smooth": "activations' range moves into weights",
    "deal": "channels dealt out over the blocks",
}
EXPONENTS = {"awq": (0.05, 0.1, 0.15, 0.2, 0.3), "smooth": (0.3, 0.5, 0.7)}
RANGE = 16.0  # of a factor, either way
AUTO = ("awq", "deal")
CARDS = 16  # channels of a sub-block: where it has 32, these are two neighbours, dealt alike


def parse(text: str) -> tuple[str, ...]:
    """The kinds of folds that "awq,deal" names; "none" names none, "auto" what was found to pay."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["none"]:
        return ()
    if words == ["auto"]:
        return AUTO
    if not words or (wrong := [word for word in words if word not in KINDS]):
        raise Refusal(
            f"{text!r} names no folds" if not words else f"there is no fold {wrong[0]!r}",
            hint=f"--fold takes {', '.join(KINDS)} (several with commas), auto or none",
        )
    return tuple(word for word in KINDS if word in words)


@dataclass(frozen=True)
class Found:
    """What became of one site: `how` names the fold, "" for none; `ratio` is its loss against none."""

    site: Site
    how: str
    ratio: float
    fold: Fold | None = field(repr=False)


def choose(
    plan: Plan, kinds: Sequence[str], threads: int, watch: Callable[[str], None] = lambda name: None
) -> tuple[Found, ...]:
    """The folds of each site, in the order of sites(); `watch` is told each site that is done."""
    if not any(step.evidence.sums for step in plan.steps):
        raise Refusal(
            "folds are chosen by what enters the weights, and nothing was measured",
            hint="add --imatrix FILE or --moments FILE, as llmcli calibrate makes them",
        )
    search = _Search(plan, kinds)
    with ThreadPoolExecutor(threads, thread_name_prefix="fold") as pool:
        residual = search.residual(pool)
        if residual is not None:
            watch(residual.site.name)
        inner = [site for site in search.sites if site.kind != "residual"]

        def solve(site: Site) -> Found:
            found = search.best(site)
            watch(site.name)
            return found

        found = list(pool.map(solve, inner))
    return (*found, residual) if residual is not None else tuple(found)


class _Search:
    """A plan's sites and steps, and the order of the residual once it is known."""

    def __init__(self, plan: Plan, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.steps = {step.weight.name: _weighed(step, plan.moments) for step in plan.steps}
        self.sites = tuple(
            site for site in sites(plan.source) if not any(map(self._copied, _names(site)))
        )
        self.under: Mapping[str, Edit] = {}

    def best(self, site: Site) -> Found:
        """The least loss of a site's candidates, its channels dealt on top of it."""
        readers = self._readers(site)
        before = [reader.loss(self._edit(reader, None)) for reader in readers]
        if not readers or not all(before):
            return Found(site, "", 1.0, None)
        best = Found(site, "", 1.0, None)
        for how, fold in self._scales(site, readers):
            if (ratio := self._ratio(readers, before, fold)) < best.ratio:
                best = Found(site, how, ratio, fold)
        if "deal" in self.kinds and site.group and (order := _dealt(site, readers)) is not None:
            fold = Fold(site, best.fold.scale if best.fold else None, order)
            if (ratio := self._ratio(readers, before, fold)) < best.ratio:
                best = Found(site, f"{best.how} dealt".strip(), ratio, fold)
        return best

    def residual(self, pool: ThreadPoolExecutor) -> Found | None:
        """One order for all that reads the residual, kept where the loss falls over all of it."""
        import numpy as np

        site = next((site for site in self.sites if site.kind == "residual"), None)
        if site is None or "deal" not in self.kinds:
            return None
        names = [
            part.name for part in site.parts if part.axis == "columns" and self._read(part.name)
        ]
        scores = [*pool.map(lambda name: _score(Reader(self.steps[name])), names)]
        order = _deal(np.sum(scores, 0), site.group) if names else None
        if order is None:
            return None
        fold = Fold(site, order=order)
        under = edits([fold])

        def ratio(name: str) -> float:
            reader = Reader(self.steps[name])
            before = reader.loss(Edit())
            return (
                reader.loss(Edit(column_order=under[name].column_order)) / before if before else 1.0
            )

        ratios = list(pool.map(ratio, names))
        if (mean := sum(ratios) / len(ratios)) >= 1:
            return Found(site, "", mean, None)
        self.under = {name: Edit(column_order=edit.column_order) for name, edit in under.items()}
        return Found(site, "dealt", mean, fold)

    def _scales(self, site: Site, readers: Sequence[Reader]) -> Iterator[tuple[str, Fold]]:
        """Candidates for a site's factors."""
        import numpy as np

        if not site.scales:
            return
        inputs = _gathered(site, readers, [reader.squares for reader in readers])
        for exponent in EXPONENTS["awq"] if "awq" in self.kinds else ():
            yield f"awq {exponent:g}", Fold(site, _factors(inputs ** (exponent / 2)))
        if "smooth" in self.kinds:
            weights = _gathered(site, readers, [reader.largest for reader in readers])
            for exponent in EXPONENTS["smooth"]:
                factors = np.sqrt(inputs) ** exponent / np.maximum(weights, 1e-12) ** (1 - exponent)
                yield f"smooth {exponent:g}", Fold(site, _factors(factors))

    def _ratio(self, readers: Sequence[Reader], before: Sequence[float], fold: Fold) -> float:
        """The mean of the readers' losses, each in proportion to what it was."""
        losses = [reader.loss(self._edit(reader, fold)) for reader in readers]
        return sum(new / old for new, old in zip(losses, before, strict=True)) / len(losses)

    def _edit(self, reader: Reader, fold: Fold | None) -> Edit:
        """What a fold does to a reader's columns, in the residual's order."""
        name = reader.step.weight.name
        own = edits([fold]).get(name, Edit()) if fold else Edit()
        under = self.under.get(name, Edit()).column_order
        return Edit(
            columns=own.columns,
            column_order=under if own.column_order is None else own.column_order,
        )

    def _readers(self, site: Site) -> list[Reader]:
        names = dict.fromkeys(
            part.name for part in site.parts if part.axis == "columns" and self._read(part.name)
        )
        return [Reader(self.steps[name]) for name in names]

    def _read(self, name: str) -> bool:
        """Whether a tensor gets new codes, and what enters it was measured."""
        step = self.steps[name]
        return step.method is not None and step.evidence.sums is not None

    def _copied(self, name: str) -> bool:
        """Whether a tensor's codes are kept as they are: they would have to be made anew."""
        step: Step = self.steps[name]
        return step.type == step.weight.type and native.quantized(step.type)


def _weighed(step: Step, moments: Moments | None) -> Step:
    """A step whose loss is weighed by second moments where there are any, whether its method needs
    them or not.
    """
    second, known = moments.of(step.weight.name) if moments else None, step.evidence
    if second is None or (second.columns, second.matrices) != (known.columns, known.matrices):
        return step
    return replace(step, evidence=replace(known, second=second))


def _names(site: Site) -> list[str]:
    return [part.name for part in site.parts]


def _gathered(site: Site, readers: Sequence[Reader], vectors: "Sequence[F32 | F64]") -> "F64":
    """The mean [width] of what the readers' columns [matrices, columns] say of each channel."""
    import numpy as np

    total, count = np.zeros(site.width), np.zeros(site.width)
    for reader, values in zip(readers, vectors, strict=True):
        for part in site.parts:
            if part.name == reader.step.weight.name and part.axis == "columns":
                channels = np.broadcast_to(part.channels, values.shape).ravel()
                total += np.bincount(channels, values.ravel(), site.width)
                count += np.bincount(channels, minlength=site.width)
    found: F64 = total / np.maximum(count, 1)
    return found


def _factors(wanted: "F64") -> "F32":
    """Factors around 1, within RANGE; a channel that nothing enters gets the least, and says
    nothing of the others.
    """
    import numpy as np

    live = wanted[wanted > 0]
    middle = np.exp(np.log(live).mean()) if len(live) else 1.0
    found: F32 = np.clip(wanted / middle, 1 / RANGE, RANGE).astype(np.float32)
    return found


def _score(reader: Reader) -> "F64":
    """What each column [columns] of a reader contributes to its output, as a share of all."""
    import numpy as np

    each = reader.squares.astype(np.float64) * reader.weights
    found: F64 = each.sum(0) / max(each.sum(), 1e-30)
    return found


def _dealt(site: Site, readers: Sequence[Reader]) -> "Ints | None":
    """A site's channels dealt out, run by run."""
    import numpy as np

    scores = _gathered(site, readers, [reader.squares * reader.weights for reader in readers])
    runs = [
        _deal(scores[at : at + site.group], site.group) for at in range(0, site.width, site.group)
    ]
    orders = [order + at * site.group for at, order in enumerate(runs) if order is not None]
    return np.concatenate(orders) if orders else None


def _deal(scores: "F64", size: int) -> "Ints | None":
    """An order of `size` channels that gives every sub-block its share of high scores; None where
    there is but one.
    """
    import numpy as np

    blocks = size // CARDS
    if blocks < 2 or size % CARDS:
        return None
    ranked = np.argsort(-scores, kind="stable")
    return ranked.reshape(CARDS, blocks).T.ravel()
