"""Write GGUF files of real models without their weights: metadata, and tensors of the real names,
shapes and types. The files are sparse, so that they have the real size but take no disk space.

llama.cpp's dry run lays them out like the real files. The shapes are those of the published
configurations; the vocabulary has no words, only its size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

Tensor = tuple[str, tuple[int, ...]]  # a name and a shape, the length of a row first
SUPERBLOCK = 256  # rows of K-quants are multiples of it


@dataclass(frozen=True, slots=True)
class LabModel:
    """A published model. The fields are those of its configuration.

    - `experts`, `used_experts`, `expert_ffn`, `shared_experts`, `dense_layers`: of a mixture;
      `dense_layers` come before the layers with experts.
    - `window`, `window_period`: the sliding window, and of how many layers the last has none.
    - `q_rank`, `kv_rank`, `rope_values`, `value_length`: of latent attention (MLA).
    - `kv_layers`: of a hybrid, the layers with attention; the others have recurrent state.
    - `next_layers`: layers that predict further tokens (MTP), of `layers` the last.
    """

    name: str
    arch: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    context: int
    tied: bool = False
    experts: int = 0
    used_experts: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    window: int = 0
    window_period: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_values: int = 0
    value_length: int = 0
    kv_layers: tuple[int, ...] = ()
    next_layers: int = 0


QWEN2, QWEN3 = 151_936, 151_936
LLAMA3 = 128_256

MODELS = (
    LabModel("SmolLM2-135M", "llama", 30, 576, 9, 3, 64, 1536, 49_152, 8192, tied=True),
    LabModel("Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 64, 4864, QWEN2, 32_768, tied=True),
    LabModel("Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 128, 3072, QWEN3, 40_960, tied=True),
    LabModel("Llama-3.2-1B", "llama", 16, 2048, 32, 8, 64, 8192, LLAMA3, 131_072, tied=True),
    LabModel("Qwen2.5-1.5B", "qwen2", 28, 1536, 12, 2, 128, 8960, QWEN2, 32_768),
    LabModel("Llama-3.2-3B", "llama", 28, 3072, 24, 8, 128, 8192, LLAMA3, 131_072, tied=True),
    LabModel("Phi-3.5-mini", "phi3", 32, 3072, 32, 32, 96, 8192, 32_064, 131_072),
    LabModel("Mistral-7B", "llama", 32, 4096, 32, 8, 128, 14_336, 32_768, 32_768),
    LabModel("Qwen2.5-7B", "qwen2", 28, 3584, 28, 4, 128, 18_944, 152_064, 131_072),
    LabModel("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14_336, LLAMA3, 131_072),
    LabModel("Qwen3-14B", "qwen3", 40, 5120, 40, 8, 128, 17_408, QWEN3, 40_960),
    LabModel("Mistral-Small-24B", "llama", 40, 5120, 32, 8, 128, 32_768, 131_072, 131_072),
    LabModel("Qwen3-32B", "qwen3", 64, 5120, 64, 8, 128, 25_600, QWEN3, 40_960),
    LabModel("Llama-3.3-70B", "llama", 80, 8192, 64, 8, 128, 28_672, LLAMA3, 131_072),
    LabModel("Qwen2.5-72B", "qwen2", 80, 8192, 64, 8, 128, 29_568, 152_064, 131_072),
    LabModel("Llama-3.1-405B", "llama", 126, 16_384, 128, 8, 128, 53_248, LLAMA3, 131_072),
    # sliding windows
    LabModel(
        *("Gemma-3-270M", "gemma3", 18, 640, 4, 1, 256, 2048, 262_144, 32_768),
        tied=True,
        window=512,
        window_period=6,
    ),
    LabModel(
        *("Gemma-3-4B", "gemma3", 34, 2560, 8, 4, 256, 10_240, 262_208, 131_072),
        tied=True,
        window=1024,
        window_period=6,
    ),
    LabModel(
        *("Gemma-3-27B", "gemma3", 62, 5376, 32, 16, 128, 21_504, 262_208, 131_072),
        tied=True,
        window=1024,
        window_period=6,
    ),
    LabModel(
        *("Gemma-2-9B", "gemma2", 42, 3584, 16, 8, 256, 14_336, 256_000, 8192),
        tied=True,
        window=4096,
        window_period=2,
    ),
    # mixtures of experts
    LabModel(
        *("Mixtral-8x7B", "llama", 32, 4096, 32, 8, 128, 14_336, 32_000, 32_768),
        experts=8,
        used_experts=2,
        expert_ffn=14_336,
    ),
    LabModel(
        *("Qwen3-30B-A3B", "qwen3moe", 48, 2048, 32, 4, 128, 6144, QWEN3, 40_960),
        experts=128,
        used_experts=8,
        expert_ffn=768,
    ),
    LabModel(
        *("Qwen3-235B-A22B", "qwen3moe", 94, 4096, 64, 4, 128, 12_288, QWEN3, 40_960),
        experts=128,
        used_experts=8,
        expert_ffn=1536,
    ),
    LabModel(
        *("gpt-oss-20B", "gpt-oss", 24, 2880, 64, 8, 64, 2880, 201_088, 131_072),
        experts=32,
        used_experts=4,
        expert_ffn=2880,
        window=128,
        window_period=2,
    ),
    LabModel(
        *("gpt-oss-120B", "gpt-oss", 36, 2880, 64, 8, 64, 2880, 201_088, 131_072),
        experts=128,
        used_experts=4,
        expert_ffn=2880,
        window=128,
        window_period=2,
    ),
    LabModel(
        *("GLM-4.5-Air", "glm4moe", 47, 4096, 96, 8, 128, 10_944, 151_552, 131_072),
        experts=128,
        used_experts=8,
        expert_ffn=1408,
        shared_experts=1,
        dense_layers=1,
        next_layers=1,
    ),
    # latent attention
    LabModel(
        *("DeepSeek-V2-Lite", "deepseek2", 27, 2048, 16, 1, 128, 10_944, 102_400, 163_840),
        experts=64,
        used_experts=6,
        expert_ffn=1408,
        shared_experts=2,
        dense_layers=1,
        kv_rank=512,
        rope_values=64,
        value_length=128,
    ),
    LabModel(
        *("DeepSeek-V3-671B", "deepseek2", 61, 7168, 128, 1, 128, 18_432, 129_280, 163_840),
        experts=256,
        used_experts=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        q_rank=1536,
        kv_rank=512,
        rope_values=64,
        value_length=128,
    ),
    # hybrids and recurrent models
    LabModel(
        *("Granite-4-H-Tiny-7B", "granitehybrid", 40, 1536, 12, 4, 128, 512, 100_352, 131_072),
        tied=True,
        experts=64,
        used_experts=6,
        expert_ffn=512,
        shared_experts=2,
        kv_layers=(5, 15, 25, 35),
    ),
    LabModel("Mamba-2.8B", "mamba", 64, 2560, 0, 0, 0, 0, 50_280, 1_048_576, tied=True),
)


def metadata(model: LabModel) -> dict[str, Any]:
    """Return the metadata of a model: for each key its value."""
    has_kv = [layer in model.kv_layers for layer in range(model.layers)]
    settings: dict[str, Any] = {
        "vocab_size": model.vocab,
        "context_length": model.context,
        "embedding_length": model.width,
        "block_count": model.layers,
        "feed_forward_length": model.ffn,
        "attention.head_count": model.heads,
        "attention.head_count_kv": [model.kv_heads if has else 0 for has in has_kv]
        if model.kv_layers
        else model.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if model.head:
        settings |= {
            "attention.key_length": model.head,
            "attention.value_length": model.head,
            "rope.dimension_count": model.head,
            "rope.freq_base": 10000.0,
        }
    if model.window:
        settings["attention.sliding_window"] = model.window
    if model.experts:
        settings |= {
            "expert_count": model.experts,
            "expert_used_count": model.used_experts,
            "expert_feed_forward_length": model.expert_ffn,
            "expert_shared_count": model.shared_experts,
            "expert_shared_feed_forward_length": model.expert_ffn * model.shared_experts,
            "leading_dense_block_count": model.dense_layers,
        }
    if model.kv_rank:
        settings |= {
            "attention.key_length": model.kv_rank + model.rope_values,
            "attention.value_length": model.kv_rank,
            "attention.key_length_mla": model.head + model.rope_values,
            "attention.value_length_mla": model.value_length,
            "attention.kv_lora_rank": model.kv_rank,
            "rope.dimension_count": model.rope_values,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 2,
        }
        if model.q_rank:
            settings["attention.q_lora_rank"] = model.q_rank
    if model.arch == "glm4moe":
        settings |= {"rope.dimension_count": model.head // 2, "expert_gating_func": 2}
    if model.arch in ("mamba", "granitehybrid"):
        inner = 2 * model.width
        settings |= {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": 16 if model.arch == "mamba" else 128,
            "ssm.time_step_rank": model.width // 16 if model.arch == "mamba" else inner // 64,
            "ssm.group_count": 0 if model.arch == "mamba" else 1,
        }
    if model.arch == "mamba":
        settings |= {"attention.head_count": 0, "attention.head_count_kv": 0}
    if model.next_layers:
        settings["nextn_predict_layers"] = model.next_layers
    return {f"{model.arch}.{key}": value for key, value in settings.items()}


def tensors(model: LabModel) -> Iterator[Tensor]:
    """Yield the tensors of a model in the order of the file."""
    yield "token_embd.weight", (model.width, model.vocab)
    for layer in range(model.layers):
        for name, shape in _layer_tensors(model, layer):
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (model.width,)
    if not model.tied:
        yield "output.weight", (model.width, model.vocab)


def write_header(model: LabModel, path: Path, file_type: str = "Q4_K_M") -> Path:
    """Write the file of a model, and return its path. `file_type`: "Q4_K_M", "Q8_0" or "F16"."""
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_name(model.name)
    for key, value in metadata(model).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    n_bytes = 0
    for name, shape in tensors(model):
        kind = _tensor_type(model, name, shape, file_type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for length in shape:
            count *= length
        size = count // block * block_bytes
        numpy_shape = list(reversed(shape))
        numpy_shape[-1] = numpy_shape[-1] // block * block_bytes
        writer.add_tensor_info(name, numpy_shape, gguf.np.dtype("uint8"), size, raw_dtype=kind)
        n_bytes += gguf.GGUFWriter.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as stream:
        header_bytes = gguf.GGUFWriter.ggml_pad(stream.seek(0, 2), writer.data_alignment)
        stream.truncate(header_bytes + n_bytes)
    return path


def _layer_tensors(model: LabModel, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer, without the prefix of their names."""
    yield "attn_norm.weight", (model.width,)
    if model.arch in ("mamba", "granitehybrid") and layer not in model.kv_layers:
        yield from _recurrent_tensors(model)
    elif model.kv_rank:
        yield from _latent_tensors(model)
    else:
        yield from _attention_tensors(model)
    if model.arch == "mamba":
        return
    yield (
        "post_attention_norm.weight"
        if model.arch
        in (
            "glm4moe",
            "gpt-oss",
        )
        else "ffn_norm.weight",
        (model.width,),
    )
    if model.arch.startswith("gemma"):
        yield "post_attention_norm.weight", (model.width,)
        yield "post_ffw_norm.weight", (model.width,)
    if layer >= model.layers - model.next_layers:
        yield "nextn.eh_proj.weight", (2 * model.width, model.width)
        yield "nextn.enorm.weight", (model.width,)
        yield "nextn.hnorm.weight", (model.width,)
    if model.experts and layer >= model.dense_layers:
        yield from _expert_tensors(model)
    elif model.arch == "phi3":
        yield "ffn_up.weight", (model.width, 2 * model.ffn)
        yield "ffn_down.weight", (model.ffn, model.width)
    else:
        yield from _ffn_tensors(model.width, model.ffn, "")


def _attention_tensors(model: LabModel) -> Iterator[Tensor]:
    queries, keys = model.heads * model.head, model.kv_heads * model.head
    if model.arch == "phi3":
        yield "attn_qkv.weight", (model.width, queries + 2 * keys)
    else:
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"attn_{name}.weight", (model.width, rows)
            if model.arch in ("qwen2", "gpt-oss", "glm4moe"):
                yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (queries, model.width)
    if model.arch == "gpt-oss":
        yield "attn_output.bias", (model.width,)
        yield "attn_sinks.weight", (model.heads,)
    if model.arch in ("qwen3", "qwen3moe", "gemma3"):
        yield "attn_q_norm.weight", (model.head,)
        yield "attn_k_norm.weight", (model.head,)


def _latent_tensors(model: LabModel) -> Iterator[Tensor]:
    queries = model.heads * (model.head + model.rope_values)
    if model.q_rank:
        yield "attn_q_a.weight", (model.width, model.q_rank)
        yield "attn_q_a_norm.weight", (model.q_rank,)
        yield "attn_q_b.weight", (model.q_rank, queries)
    else:
        yield "attn_q.weight", (model.width, queries)
    yield "attn_kv_a_mqa.weight", (model.width, model.kv_rank + model.rope_values)
    yield "attn_kv_a_norm.weight", (model.kv_rank,)
    yield "attn_k_b.weight", (model.head, model.kv_rank, model.heads)
    yield "attn_v_b.weight", (model.kv_rank, model.value_length, model.heads)
    yield "attn_output.weight", (model.heads * model.value_length, model.width)


def _recurrent_tensors(model: LabModel) -> Iterator[Tensor]:
    inner = 2 * model.width
    if model.arch == "mamba":
        rank, state = model.width // 16, 16
        yield "ssm_in.weight", (model.width, 2 * inner)
        yield "ssm_conv1d.weight", (4, inner)
        yield "ssm_conv1d.bias", (inner,)
        yield "ssm_x.weight", (inner, rank + 2 * state)
        yield "ssm_dt.weight", (rank, inner)
        yield "ssm_dt.bias", (inner,)
        yield "ssm_a", (state, inner)
        yield "ssm_d", (inner,)
    else:
        heads, state = inner // 64, 128
        yield "ssm_in.weight", (model.width, 2 * inner + 2 * state + heads)
        yield "ssm_conv1d.weight", (4, inner + 2 * state)
        yield "ssm_conv1d.bias", (inner + 2 * state,)
        yield "ssm_dt.bias", (heads,)
        yield "ssm_a", (1, heads)
        yield "ssm_d", (1, heads)
        yield "ssm_norm.weight", (inner, 1)
    yield "ssm_out.weight", (inner, model.width)


def _expert_tensors(model: LabModel) -> Iterator[Tensor]:
    yield "ffn_gate_inp.weight", (model.width, model.experts)
    if model.arch == "gpt-oss":
        yield "ffn_gate_inp.bias", (model.experts,)
    if model.q_rank or model.arch == "glm4moe":
        yield "exp_probs_b.bias", (model.experts,)
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (model.width, model.expert_ffn, model.experts)
        if model.arch == "gpt-oss":
            yield f"ffn_{name}_exps.bias", (model.expert_ffn, model.experts)
    yield "ffn_down_exps.weight", (model.expert_ffn, model.width, model.experts)
    if model.arch == "gpt-oss":
        yield "ffn_down_exps.bias", (model.width, model.experts)
    if model.shared_experts:
        yield from _ffn_tensors(model.width, model.shared_experts * model.expert_ffn, "_shexp")


def _ffn_tensors(width: int, ffn: int, suffix: str) -> Iterator[Tensor]:
    yield f"ffn_gate{suffix}.weight", (width, ffn)
    yield f"ffn_up{suffix}.weight", (width, ffn)
    yield f"ffn_down{suffix}.weight", (ffn, width)


def _tensor_type(
    model: LabModel, name: str, shape: tuple[int, ...], file_type: str
) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor in a file of this type."""
    types = gguf.GGMLQuantizationType
    is_small = len(shape) == 1 or not name.endswith(".weight") or "norm" in name
    if is_small or "gate_inp" in name or "ssm_conv1d" in name:
        return types.F32
    if file_type == "F16":
        return types.F16
    if model.arch == "gpt-oss" and "_exps" in name:
        return types.MXFP4
    if file_type == "Q8_0" or shape[0] % SUPERBLOCK:
        return types.Q8_0 if shape[0] % 32 == 0 else types.F16
    if name == "output.weight" or "attn_v." in name or "ffn_down" in name:
        return types.Q6_K
    return types.Q4_K
