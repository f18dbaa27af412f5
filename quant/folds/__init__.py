"""Exact rescalings and permutations of a model's channels. A folded model computes the same
function; only the rounding of its weights changes.

`free_channels` defines which channels of an architecture may be rescaled or reordered, `fold`
computes the effect on each tensor and on its calibration statistics, and `folded_source` applies
folds to a source while its rows are read. Folds work on GGUF tensors, because a norm's weight is a
plain factor there in every model family.
"""

from quant.folds.fold import Fold, FoldedTensor, FoldSite, TensorEdit, combine_folds, digest_folds
from quant.folds.folded_source import fold_source, randomize
from quant.folds.free_channels import FREE_CHANNELS, find_sites

__all__ = [
    "FREE_CHANNELS",
    "Fold",
    "FoldSite",
    "FoldedTensor",
    "TensorEdit",
    "combine_folds",
    "digest_folds",
    "find_sites",
    "fold_source",
    "randomize",
]
