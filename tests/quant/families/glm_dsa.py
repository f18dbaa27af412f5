"""GLM 5: indexers in all layers or some, which select fewer positions than the compared text has,
or all of them. Small differences of scores can swap two selected positions of equal rank, so that
the number of positions is one for which this does not happen.
"""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.deepseek2 import ONE_GROUP, SIZES, randomize_router_biases

SMALL: dict[str, Any] = {
    **SIZES,
    **ONE_GROUP,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 256,
    "num_hidden_layers": 3,
}


def case(name: str, *, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"glm-dsa, {name}",
        "GlmMoeDsaForCausalLM",
        SMALL | settings,
        change=randomize_router_biases,
        original=original,
    )


CASES = [
    case("indexers in all layers"),
    case("indexers in some layers", indexer_types=["full", "shared", "full"]),
    case(
        "fused experts, two dense layers, tied, all positions selected",
        original=False,
        first_k_dense_replace=2,
        tie_word_embeddings=True,
        index_topk=512,
    ),
]
