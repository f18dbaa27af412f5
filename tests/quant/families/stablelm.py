"""StableLM: partial rope in both config spellings, biases, and the parallel blocks of 12B."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.glm4_moe import YARN, old_spelling

SMALL: dict[str, Any] = {"head_dim": None}


def case(name: str, config: Any = None, **settings: Any) -> Case:
    return Case(f"stablelm, {name}", "StableLmForCausalLM", SMALL | settings, config=config)


CASES = [
    case("untied"),
    case(
        "tied, biases, 4 query heads per key head",
        tie_word_embeddings=True,
        use_qkv_bias=True,
        num_key_value_heads=2,
    ),
    case("parallel, norms of heads", use_parallel_residual=True, qk_layernorm=True),
    case("yarn rope, old spelling", old_spelling, rope_parameters=YARN),
]
