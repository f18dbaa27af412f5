"""DeepSeek V3.2: indexers, expert groups and YaRN."""

from typing import Any

from tests.quant.families import Case
from tests.quant.families.deepseek2 import randomize_router_biases, yarn_settings
from tests.quant.families.glm_dsa import SMALL


def case(name: str, *, original: bool = True, **settings: Any) -> Case:
    return Case(
        f"deepseek v3.2, {name}",
        "DeepseekV32ForCausalLM",
        SMALL | {"n_group": 4, "topk_group": 2} | settings,
        change=randomize_router_biases,
        original=original,
    )


CASES = [
    case("groups"),
    case("fused experts, no dense layer, tied", original=False, tie_word_embeddings=True),
    case("yarn", index_topk=300, **yarn_settings(mscale=1.0, mscale_all_dim=1.0)),
]
