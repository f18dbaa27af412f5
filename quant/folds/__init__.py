"""Exact rescalings and permutations of a model in GGUF names: another file, the same answers.

`wiring` knows the graphs, `fold` what a fold does to tensors and to what enters them, `rewrite`
applies folds to a source while its rows are read. Done in GGUF space, where a norm's weight is a
plain factor for every family.
"""

from quant.folds.fold import Edit, Fold, Part, Site, digest, edits
from quant.folds.rewrite import apply, shaken
from quant.folds.wiring import WIRINGS, sites

__all__ = ["WIRINGS", "Edit", "Fold", "Part", "Site", "apply", "digest", "edits", "shaken", "sites"]
