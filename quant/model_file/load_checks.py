"""Checks a GGUF header for content on which llama.cpp would abort or crash instead of returning an
error.

An abort in the library would end the whole process, and with it the user's conversation. The checks
come from mutated headers (scripts/fuzz/header.py) and from the assertions in llama-model.cpp,
llama-vocab.cpp and models/*.cpp. Only metadata and shapes are checked; weights are not read.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quant.errors import UserError
from quant.gguf.header import GgufArray, MetadataValue
from quant.native import ggml
from quant.tokenizer import charsmap
from quant.tokenizer.unigram import MAX_PIECE_BYTES

if TYPE_CHECKING:
    from quant.model_file.model_header import ModelHeader

MAX_LAYERS, MAX_EXPERTS, MAX_GATING = 512, 1024, 4  # llama-hparams.h
MAX_WINDOW_TOKENS, MAX_TOKENS = 1 << 24, 1 << 22
UNSUPPORTED_TYPES = ggml.INTEGER_TYPES | {
    "F64",
    "Q8_1",
    "Q8_K",
}  # no graph multiplies by these types
INTEGER_TENSORS = ("tid2eid", "d2t", "t2d")  # tensors that hold integers
WEIGHT_ALIGNMENT_BYTES = (
    32  # bytes; the CPU backend asserts that mapped weights start at a multiple of it
)
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
EPSILON_KEYS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
)
# Architectures whose graph asserts one size for keys, values and the rotary part of a head
# (models/*.cpp: n_embd_head == n_rot), and those that assert it for keys and values only.
ARCHS_WITH_ONE_HEAD_SIZE = frozenset(
    {
        "apertus",
        "arcee",
        "arctic",
        "baichuan",
        "chameleon",
        "codeshell",
        "cogvlm",
        "cohere2moe",
        "dbrx",
        "deci",
        "deepseek",
        "dots1",
        "dream",
        "ernie4_5",
        "ernie4_5-moe",
        "exaone",
        "exaone-moe",
        "exaone4",
        "falcon",
        "granite",
        "granite_swa",
        "granitemoe",
        "graniteswitch",
        "grok",
        "grovemoe",
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan_vl",
        "hy_v3",
        "internlm2",
        "jais2",
        "llada",
        "llada-moe",
        "llama",
        "llama-embed",
        "llama4",
        "maincoder",
        "mellum",
        "minicpm",
        "mistral3",
        "olmo",
        "olmo2",
        "olmoe",
        "orion",
        "paddleocr",
        "pangu-embedded",
        "plamo",
        "pockettts",
        "qwen2",
        "qwen2moe",
        "qwen2vl",
        "qwen3",
        "qwen3moe",
        "qwen3tts",
        "qwen3vl",
        "qwen3vlmoe",
        "rnd1",
        "seed_oss",
        "smallthinker",
        "smollm3",
        "starcoder2",
        "talkie",
        "xverse",
    }
)
ARCHS_WITH_ONE_KEY_SIZE = frozenset(
    {
        "afmoe",
        "bailingmoe2",
        "bert",
        "bitnet",
        "bloom",
        "chatglm",
        "cohere2",
        "command-r",
        "dflash",
        "eagle3",
        "eurobert",
        "glm4",
        "glm4moe",
        "gpt2",
        "gptneox",
        "granitehybrid",
        "jais",
        "jina-bert-v2",
        "jina-bert-v3",
        "laguna",
        "minimax-01",
        "minimax-m2",
        "minimax-m3",
        "modern-bert",
        "mpt",
        "muse-glimmer",
        "nanbeige",
        "nemotron",
        "nemotron_h",
        "nemotron_h_moe",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "openelm",
        "phi2",
        "phi3",
        "phimoe",
        "qwen",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "refact",
        "spark2_5",
        "stablelm",
        "starcoder",
        "t5",
        "t5encoder",
    }
)
# Those of ARCHS_WITH_ONE_HEAD_SIZE whose layers may have a sliding window; others read none.
ARCHS_WITH_WINDOWS = {
    "cohere2moe",
    "exaone-moe",
    "exaone4",
    "granite_swa",
    "llama4",
    "mellum",
    "olmo2",
    "smallthinker",
}
WINDOW_HEAD_KEYS = (
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
# Further architectures whose graph rotates every head: a head without values is an endless loop.
ROTARY_ARCHS = ARCHS_WITH_ONE_HEAD_SIZE | {
    "gemma",
    "gemma2",
    "gemma3",
    "phi2",
    "phi3",
    "stablelm",
    "command-r",
    "cohere2",
    "glm4",
    "chatglm",
    "deepseek2",
    "exaone",
    "exaone4",
    "gptneox",
    "gpt-oss",
    "seed_oss",
    "gemma3n",
    "qwen2vl",
    "ernie4_5",
    "hunyuan-dense",
}
# Tokenizers without a default BOS (EOS): adding one that the file does not name is an assertion.
TOKENIZERS_WITHOUT_BOS, TOKENIZERS_WITHOUT_EOS = (
    frozenset({"t5", "rwkv", "gemma4"}),
    frozenset({"bert", "rwkv", "gemma4"}),
)
# The general.type of llama-imatrix's files and of second moments.
IMATRIX_TYPE, MOMENTS_TYPE = "imatrix", "llmcli.moments"
STATISTICS_FLAGS = {
    IMATRIX_TYPE: "--imatrix",
    MOMENTS_TYPE: "--moments",
}  # and the flag that takes such a file
PRE_TOKENIZERS_WITHOUT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})


def require_model(header: "ModelHeader") -> None:
    """Raise UserError unless a GGUF file holds a model: files of statistics have tensors, too."""
    kind, flag = (
        header.metadata.get("general.type"),
        STATISTICS_FLAGS.get(str(header.metadata.get("general.type"))),
    )
    if flag:
        raise UserError(
            f"{header.path} is not a model but statistics of one ({kind})",
            hint=f"llmcli quantize takes it as {flag} '{header.path}'",
        )
    if header.architecture == "unknown":
        raise UserError(
            f"{header.path} is not a model that llama.cpp can load: it names no architecture",
            hint=f"llmcli show '{header.path}' lists what is in it",
        )


def check_loadable(header: "ModelHeader") -> None:
    """Raise UserError if a file is not a model, or if loading it would crash llama.cpp.

    The message lists the first reasons.
    """
    require_model(header)
    problems = [
        *_layout(header),
        *_layers(header),
        *_heads(header),
        *_latent_attention(header),
        *_window(header),
    ]
    problems += [*_experts(header), *_settings(header), *_types(header), *_vocabulary(header)]
    if problems:
        reasons = "; ".join(problems[:3]) + f"; and {len(problems) - 3} more" * (len(problems) > 3)
        raise UserError(
            f"{header.path} would crash llama.cpp: {reasons}",
            hint="fetch or convert the file again",
        )


def _layout(header: "ModelHeader") -> Iterator[str]:
    if header.tensors and header.alignment % WEIGHT_ALIGNMENT_BYTES:
        yield f"its weights are aligned to {header.alignment} bytes, not to {WEIGHT_ALIGNMENT_BYTES}"


def _layers(header: "ModelHeader") -> Iterator[str]:
    layers = header.get_int("block_count")
    if layers is None:
        return  # llama.cpp reports this itself
    if not 0 < layers <= MAX_LAYERS:
        yield f"block_count is {layers}; 1 to {MAX_LAYERS} are allowed"
    for key in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count"):
        if (header.get_int(key) or 0) > layers:
            yield f"{key} is larger than block_count"


def _heads(header: "ModelHeader") -> Iterator[str]:
    heads, width = header.get_int("attention.head_count"), header.get_int("embedding_length")
    counts = _as_list(header.metadata.get(f"{header.architecture}.attention.head_count"))
    if header.tensors and header.architecture in ROTARY_ARCHS and not any(counts):
        yield "its attention has no heads"
    if not heads or not width:
        return
    size = width // heads
    lengths = {
        "attention.key_length": header.get_int("attention.key_length"),
        "attention.value_length": header.get_int("attention.value_length"),
        "rope.dimension_count": header.get_int("rope.dimension_count"),
    }
    sizes = {
        size if value is None else value
        for key, value in lengths.items()
        if key != "rope.dimension_count"
    }
    key_size = lengths["attention.key_length"] or size
    must_be_equal = header.architecture in ARCHS_WITH_ONE_KEY_SIZE
    if header.architecture in {*ARCHS_WITH_ONE_HEAD_SIZE, "gpt-oss"}:
        must_be_equal = True
        sizes.add(lengths["rope.dimension_count"] or key_size)
        window_lengths = {
            key: value for key in WINDOW_HEAD_KEYS if (value := header.get_int(key)) is not None
        }
        sizes.update(window_lengths.values())
        lengths |= window_lengths
    if must_be_equal and len(sizes) > 1:
        listed = ", ".join(f"{key} {value}" for key, value in lengths.items() if value is not None)
        yield f"its heads have several sizes ({listed or size})"
    rotary = lengths["rope.dimension_count"] or 0
    if rotary % 2 or rotary > key_size:
        yield f"{rotary} values of each head are rotary, but a head has {key_size}"
    if header.architecture in ROTARY_ARCHS and 0 in lengths.values():
        yield "its heads have a size of 0"


def _latent_attention(header: "ModelHeader") -> Iterator[str]:
    """Check the sizes that DeepSeek's graph assumes: one key head, as wide as the compressed and
    the rotary part together.
    """
    full_key = header.get_int("attention.key_length_mla")
    if header.architecture != "deepseek2" or not full_key:
        return
    heads, key = (
        header.get_int("attention.head_count_kv"),
        header.get_int("attention.key_length") or 0,
    )
    rotary = header.get_int("rope.dimension_count") or key
    if heads != 1:
        yield f"its compressed keys have {heads} heads"
    if key != (header.get_int("attention.kv_lora_rank") or 0) + rotary or full_key <= rotary:
        yield (
            f"its compressed keys have {key} values and its full keys {full_key}, "
            f"of which {rotary} are rotary"
        )


def _window(header: "ModelHeader") -> Iterator[str]:
    window = header.get_int("attention.sliding_window") or 0
    if (
        window > MAX_WINDOW_TOKENS
        and header.architecture not in ARCHS_WITH_ONE_HEAD_SIZE - ARCHS_WITH_WINDOWS
    ):
        yield f"its sliding window is {window} positions"


def _types(header: "ModelHeader") -> Iterator[str]:
    for tensor in header.tensors:
        vector = tensor.elements == tensor.columns
        strange = tensor.type in UNSUPPORTED_TYPES or (
            vector and tensor.type not in ggml.FLOAT_TYPES
        )
        if strange and not any(part in tensor.name for part in INTEGER_TENSORS):
            yield f"tensor {tensor.name} is stored as {tensor.type}"


def _experts(header: "ModelHeader") -> Iterator[str]:
    count, groups = header.get_int("expert_count") or 0, header.get_int("expert_group_count") or 0
    used = max(_as_list(header.metadata.get(f"{header.architecture}.expert_used_count")), default=0)
    gating = header.get_int("expert_gating_func") or 0
    if not 0 <= gating <= MAX_GATING:
        yield f"its expert_gating_func is {gating}; 0 to {MAX_GATING} are allowed"
    if count > MAX_EXPERTS or used > count or (count and not used):
        yield f"it uses {used} of {count} experts (at most {MAX_EXPERTS})"
    if groups and groups >= count:
        yield f"it has {groups} groups of {count} experts"
    elif groups > 1:
        picked = header.get_int("expert_group_used_count") or 0
        if count % groups or not 0 < picked < groups:
            yield f"it picks {picked} of {groups} groups of {count} experts"


def _settings(header: "ModelHeader") -> Iterator[str]:
    for key in EPSILON_KEYS:
        value = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            yield f"{key} is {value}"
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in ROPE_SCALINGS:
        yield f"its rope scaling {scaling!r} is unknown"


def _as_list(value: MetadataValue | None) -> list[int]:
    """Return a number, or the numbers of all layers, as a list."""
    if isinstance(value, GgufArray) and value.kind != "string":
        return [item for item in value.head(MAX_LAYERS).read_values() if isinstance(item, int)]
    return [value] if isinstance(value, int) else []


def _vocabulary(header: "ModelHeader") -> Iterator[str]:
    kind, tokens = header.tokenizer, header.metadata.get("tokenizer.ggml.tokens")
    if kind in ("none", "no_vocab") or not isinstance(tokens, GgufArray) or tokens.kind != "string":
        return
    if tokens.count > MAX_TOKENS:
        yield f"its vocabulary has {tokens.count} tokens"
        return
    # llama.cpp cuts tokens at the first zero byte, and replaces empty ones.
    cut = (word.partition(b"\0")[0] if b"\0" in word else word for word in tokens.read_strings())
    words = [word or b"[EMPTY_%d]" % index for index, word in enumerate(cut)]
    known = set(words)
    if len(known) != len(words):
        yield f"its vocabulary repeats {len(words) - len(known)} tokens"
    if kind == "t5":
        yield from _unigram(header, words)
    if kind == "llama":
        missing = [
            byte
            for byte in range(256)
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known
        ]
        if missing:
            yield f"its vocabulary has no token for {len(missing)} of the 256 bytes"
    pre = header.metadata.get("tokenizer.ggml.pre")
    for slot, lacking in (
        ("bos", kind in TOKENIZERS_WITHOUT_BOS or pre in PRE_TOKENIZERS_WITHOUT_BOS),
        ("eos", kind in TOKENIZERS_WITHOUT_EOS),
    ):
        named = header.metadata.get(f"tokenizer.ggml.{slot}_token_id")
        absent = not isinstance(named, int) or named >= len(words)
        if header.metadata.get(f"tokenizer.ggml.add_{slot}_token") is True and lacking and absent:
            yield f"it adds a {slot} token but has none"


def _unigram(header: "ModelHeader", words: list[bytes]) -> Iterator[str]:
    """Check what llama.cpp's Unigram tokenizer assumes.

    It follows character rules without bounds checks, and stores pieces in a tree as deep as they
    are long.
    """
    if max(map(len, words), default=0) > MAX_PIECE_BYTES:
        longest = max(map(len, words))
        yield f"its vocabulary has a piece of {longest} bytes; the limit is {MAX_PIECE_BYTES}"
    rules = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if rules is None or (isinstance(rules, GgufArray) and not rules.count):
        return
    try:
        if (
            not isinstance(rules, GgufArray)
            or rules.kind not in ("int8", "uint8")
            or rules.nbytes > charsmap.MAX_BYTES
        ):
            raise ValueError("it is not an array of bytes, or too long")
        charsmap.parse_charsmap(rules.read_bytes())
    except ValueError as error:
        yield f"its precompiled_charsmap is damaged: {error}"
