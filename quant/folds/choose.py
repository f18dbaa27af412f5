"""Choice of folds. For each site (channels whose factors or order are free, see fold.py), candidate
folds are tried: sampled rows are folded and quantized with the plan's own types and method. The
candidate with the lowest loss is chosen if that is lower than without a fold.

There are three kinds of folds:

- awq: factors s_j = E[x_j^2]^(a/2) for small exponents a, so that important columns get more of a
  block's range (AWQ, Lin et al. 2306.00978)
- smooth: factors s_j = rms(x_j)^a / max|w_j|^(1-a), which also move the range of activations into
  the weights (SmoothQuant, Xiao et al. 2211.10438)
- deal: channels are ranked by E[x^2] mean(w^2) and spread evenly over the sub-blocks, as cards are
  dealt. It applies to hidden channels, to values within a head, and to the residual stream, where a
  single order must serve all layers

The loss of a site is a mean over the tensors that read the site's channels; each tensor's loss
(loss.py) is divided by its loss without a fold. The choice is deterministic: it depends on the
plan, the calibration statistics and the sampled rows.

`auto` means awq,deal. smooth is left out: awq is chosen by a loss that includes the rounding of
activations, so that smooth gains nothing more. The exponents of awq end at 0.3, because larger ones
lower the sampled loss slightly but not the KL divergence of the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quant.calibration.moments import MomentsFile
from quant.errors import UserError
from quant.folds.fold import Fold, FoldSite, TensorEdit, combine_folds
from quant.folds.free_channels import find_sites
from quant.folds.loss import ReaderTensor
from quant.native import ggml
from quant.quantize.plan import Plan, TensorPlan

if TYPE_CHECKING:
    from quant.folds.fold import F64, Ints
    from quant.native.ggml import F32

FOLD_KINDS = {
    "awq": "important columns get more of a block's range",
    "smooth": "moves the range of activations into the weights",
    "deal": "spreads important channels evenly over the blocks",
}
SCALE_EXPONENTS = {"awq": (0.05, 0.1, 0.15, 0.2, 0.3), "smooth": (0.3, 0.5, 0.7)}
MAX_FACTOR = 16.0  # the largest factor; the smallest factor is 1 / MAX_FACTOR
AUTO_KINDS = ("awq", "deal")
# Number of channels in a sub-block. A sub-block of 32 counts as two neighboring ones.
SUBBLOCK_CHANNELS = 16


def parse_fold_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of folds that the value of --fold names, in the order of FOLD_KINDS:
    "awq,deal" gives ("awq", "deal"), "none" gives (), "auto" gives AUTO_KINDS.

    Raises UserError if a kind is unknown or the text is empty.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["none"]:
        return ()
    if words == ["auto"]:
        return AUTO_KINDS
    if not words or (unknown := [word for word in words if word not in FOLD_KINDS]):
        raise UserError(
            f"{text!r} names no folds" if not words else f"unknown fold {unknown[0]!r}",
            hint=f"--fold takes {', '.join(FOLD_KINDS)} (several with commas), auto or none",
        )
    return tuple(word for word in FOLD_KINDS if word in words)


@dataclass(frozen=True)
class FoldChoice:
    """The fold chosen for one site.

    `label` describes the fold for the user ("awq 0.15 dealt"). If no candidate lowers the loss, it
    is "" and `fold` is None. `loss_ratio` is the site's loss with the fold divided by its loss
    without.
    """

    site: FoldSite
    label: str
    loss_ratio: float
    fold: Fold | None = field(repr=False)


def choose_folds(
    plan: Plan,
    kinds: Sequence[str],
    threads: int,
    on_site_done: Callable[[str], None] = lambda name: None,
) -> tuple[FoldChoice, ...]:
    """Choose a fold for each site of a plan's model. Return the choices in the order of
    find_sites(), except that the residual stream's choice is last.

    `kinds` are names in FOLD_KINDS. `on_site_done` is called with the name of each finished site,
    from any thread. Raises UserError if the plan has no calibration statistics.
    """
    if not any(step.statistics.mean_squares for step in plan.steps):
        raise UserError(
            "folds are chosen by calibration data, and this plan has none",
            hint="add --imatrix FILE or --moments FILE; `llmcli calibrate` writes both",
        )
    search = _FoldSearch(plan, kinds)
    with ThreadPoolExecutor(threads, thread_name_prefix="fold") as pool:
        residual = search.choose_residual(pool)
        if residual is not None:
            on_site_done(residual.site.name)
        other_sites = [site for site in search.sites if site.kind != "residual"]

        def choose_site(site: FoldSite) -> FoldChoice:
            choice = search.choose(site)
            on_site_done(site.name)
            return choice

        choices = list(pool.map(choose_site, other_sites))
    return (*choices, residual) if residual is not None else tuple(choices)


class _FoldSearch:
    """The search for the best fold of each site of a plan.

    choose_residual() must be called before choose(): it stores the residual stream's new order in
    `residual_edits` (by tensor name), and all other candidates are measured with that order.
    """

    def __init__(self, plan: Plan, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.steps = {
            step.weight.name: _with_second_moments(step, plan.moments) for step in plan.steps
        }
        self.sites = tuple(
            site
            for site in find_sites(plan.source)
            if not any(map(self._is_copied, _tensor_names(site)))
        )
        self.residual_edits: Mapping[str, TensorEdit] = {}

    def choose(self, site: FoldSite) -> FoldChoice:
        """Return the best fold of a site: the factors with the lowest loss, and a new order of the
        channels if it lowers the loss further.

        Works for all sites except the residual stream.
        """
        readers = self._readers(site)
        unfolded_losses = [reader.loss(self._edit(reader, None)) for reader in readers]
        if not readers or not all(unfolded_losses):
            return FoldChoice(site, "", 1.0, None)
        best = FoldChoice(site, "", 1.0, None)
        for label, fold in self._scales(site, readers):
            if (ratio := self._ratio(readers, unfolded_losses, fold)) < best.loss_ratio:
                best = FoldChoice(site, label, ratio, fold)
        if (
            "deal" in self.kinds
            and site.group_size
            and (order := _interleaved_order(site, readers)) is not None
        ):
            fold = Fold(site, best.fold.factors if best.fold else None, order)
            if (ratio := self._ratio(readers, unfolded_losses, fold)) < best.loss_ratio:
                best = FoldChoice(site, f"{best.label} dealt".strip(), ratio, fold)
        return best

    def choose_residual(self, pool: ThreadPoolExecutor) -> FoldChoice | None:
        """Choose one order of the residual stream's channels that serves all tensors that read the
        stream, and store it in `residual_edits` if it lowers the loss.

        Return None if the model has no residual stream that may be reordered, or if "deal" is not
        among the kinds.
        """
        import numpy as np

        site = next((site for site in self.sites if site.kind == "residual"), None)
        if site is None or "deal" not in self.kinds:
            return None
        names = [
            tensor.name
            for tensor in site.tensors
            if tensor.axis == "columns" and self._is_measured(tensor.name)
        ]
        scores = [*pool.map(lambda name: _energy_shares(ReaderTensor(self.steps[name])), names)]
        order = _interleave(np.sum(scores, 0), site.group_size) if names else None
        if order is None:
            return None
        fold = Fold(site, order=order)
        edits = combine_folds([fold])

        def ratio(name: str) -> float:
            reader = ReaderTensor(self.steps[name])
            unfolded_loss = reader.loss(TensorEdit())
            return (
                reader.loss(TensorEdit(column_order=edits[name].column_order)) / unfolded_loss
                if unfolded_loss
                else 1.0
            )

        ratios = list(pool.map(ratio, names))
        if (mean := sum(ratios) / len(ratios)) >= 1:
            return FoldChoice(site, "", mean, None)
        self.residual_edits = {
            name: TensorEdit(column_order=edit.column_order) for name, edit in edits.items()
        }
        return FoldChoice(site, "dealt", mean, fold)

    def _scales(
        self, site: FoldSite, readers: Sequence[ReaderTensor]
    ) -> Iterator[tuple[str, Fold]]:
        """Yield the candidate factors for a site, each as a label and a fold."""
        import numpy as np

        if not site.has_free_factors:
            return
        inputs = _channel_means(site, readers, [reader.input_mean_squares for reader in readers])
        for exponent in SCALE_EXPONENTS["awq"] if "awq" in self.kinds else ():
            yield f"awq {exponent:g}", Fold(site, _factors(inputs ** (exponent / 2)))
        if "smooth" in self.kinds:
            weights = _channel_means(site, readers, [reader.largest_weights for reader in readers])
            for exponent in SCALE_EXPONENTS["smooth"]:
                factors = np.sqrt(inputs) ** exponent / np.maximum(weights, 1e-12) ** (1 - exponent)
                yield f"smooth {exponent:g}", Fold(site, _factors(factors))

    def _ratio(
        self, readers: Sequence[ReaderTensor], unfolded_losses: Sequence[float], fold: Fold
    ) -> float:
        """Return the mean over the readers of loss with the fold / loss without. `unfolded_losses`
        has the losses without, in the order of `readers`.
        """
        losses = [reader.loss(self._edit(reader, fold)) for reader in readers]
        return sum(
            loss / unfolded_loss
            for loss, unfolded_loss in zip(losses, unfolded_losses, strict=True)
        ) / len(losses)

    def _edit(self, reader: ReaderTensor, fold: Fold | None) -> TensorEdit:
        """Return the edit of a tensor's columns by a site's fold (None for no fold) and by the
        chosen order of the residual stream.
        """
        name = reader.step.weight.name
        edit = combine_folds([fold]).get(name, TensorEdit()) if fold else TensorEdit()
        residual_order = self.residual_edits.get(name, TensorEdit()).column_order
        return TensorEdit(
            column_factors=edit.column_factors,
            column_order=residual_order if edit.column_order is None else edit.column_order,
        )

    def _readers(self, site: FoldSite) -> list[ReaderTensor]:
        """Return the tensors that read a site's channels and whose loss can be measured."""
        names = dict.fromkeys(
            tensor.name
            for tensor in site.tensors
            if tensor.axis == "columns" and self._is_measured(tensor.name)
        )
        return [ReaderTensor(self.steps[name]) for name in names]

    def _is_measured(self, name: str) -> bool:
        """Return whether the loss of a tensor can be measured: it gets new codes, and the mean
        squares of its input are known.
        """
        step = self.steps[name]
        return step.method is not None and step.statistics.mean_squares is not None

    def _is_copied(self, name: str) -> bool:
        """Return whether a quantized tensor's blocks are copied unchanged. Such a tensor is not
        folded, because it would have to be quantized again.
        """
        step: TensorPlan = self.steps[name]
        return step.type == step.weight.type and ggml.is_quantized(step.type)


def _with_second_moments(step: TensorPlan, moments: MomentsFile | None) -> TensorPlan:
    """Return a tensor's plan with the second moments of its input, if `moments` has them in the
    tensor's shape. They measure the loss even if the tensor's method does not use them.
    """
    second, statistics = moments.input_of(step.weight.name) if moments else None, step.statistics
    if second is None or (second.columns, second.matrices) != (
        statistics.columns,
        statistics.matrices,
    ):
        return step
    return replace(step, statistics=replace(statistics, moments=second))


def _tensor_names(site: FoldSite) -> list[str]:
    return [tensor.name for tensor in site.tensors]


def _channel_means(
    site: FoldSite, readers: Sequence[ReaderTensor], vectors: "Sequence[F32 | F64]"
) -> "F64":
    """Return the mean [width] for each channel of a site, over all columns of all readers that
    belong to the channel. `vectors` has one array of column values [matrices, columns] for each
    reader.
    """
    import numpy as np

    total, count = np.zeros(site.width), np.zeros(site.width)
    for reader, values in zip(readers, vectors, strict=True):
        for tensor in site.tensors:
            if tensor.name == reader.step.weight.name and tensor.axis == "columns":
                channels = np.broadcast_to(tensor.channels, values.shape).ravel()
                total += np.bincount(channels, values.ravel(), site.width)
                count += np.bincount(channels, minlength=site.width)
    means: F64 = total / np.maximum(count, 1)
    return means


def _factors(raw_factors: "F64") -> "F32":
    """Return factors [width] divided by their geometric mean and clipped to 1 / MAX_FACTOR ..
    MAX_FACTOR. A channel without input has the raw factor 0: it gets the smallest factor and does
    not count in the mean.
    """
    import numpy as np

    positive = raw_factors[raw_factors > 0]
    geometric_mean = np.exp(np.log(positive).mean()) if len(positive) else 1.0
    factors: F32 = np.clip(raw_factors / geometric_mean, 1 / MAX_FACTOR, MAX_FACTOR).astype(
        np.float32
    )
    return factors


def _energy_shares(reader: ReaderTensor) -> "F64":
    """Return the share [columns] of each column in the energy of a tensor's output, E[x^2]
    mean(w^2) summed over its matrices. The shares add up to 1.
    """
    import numpy as np

    energies = reader.input_mean_squares.astype(np.float64) * reader.weight_mean_squares
    shares: F64 = energies.sum(0) / max(energies.sum(), 1e-30)
    return shares


def _interleaved_order(site: FoldSite, readers: Sequence[ReaderTensor]) -> "Ints | None":
    """Return the order [width] that spreads a site's important channels evenly over sub-blocks.
    Channels move only within their run of `group_size` channels. Return None if a run has fewer
    than two sub-blocks.
    """
    import numpy as np

    scores = _channel_means(
        site,
        readers,
        [reader.input_mean_squares * reader.weight_mean_squares for reader in readers],
    )
    runs = [
        _interleave(scores[at : at + site.group_size], site.group_size)
        for at in range(0, site.width, site.group_size)
    ]
    orders = [order + at * site.group_size for at, order in enumerate(runs) if order is not None]
    return np.concatenate(orders) if orders else None


def _interleave(scores: "F64", size: int) -> "Ints | None":
    """Return an order of `size` channels that spreads high scores evenly over the sub-blocks.
    Return None if there are fewer than two sub-blocks, or if `size` is not a multiple of
    SUBBLOCK_CHANNELS.
    """
    import numpy as np

    blocks = size // SUBBLOCK_CHANNELS
    if blocks < 2 or size % SUBBLOCK_CHANNELS:
        return None
    ranked = np.argsort(-scores, kind="stable")
    return ranked.reshape(SUBBLOCK_CHANNELS, blocks).T.ravel()
