"""Folds: exact rescalings and permutations of a model's channels. A channel is one feature that
some tensors produce (a row of up) and others read (a column of down). A folded model computes the
same function, but its weights round differently, so that a good fold lowers the error of
quantization.

`free_channels` defines which channels of an architecture may be rescaled or reordered. `fold`
computes the effect of a fold on each tensor and on its calibration statistics. `folded_source`
applies folds to a source while its rows are read. `choose` searches for good folds. Folds work on
GGUF tensors, because a norm's weight is a plain factor there in every model family.
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
