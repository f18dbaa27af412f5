#!/usr/bin/env python3
"""Write a tiny random GGUF of each architecture that llama.cpp can load.

usage: .venv/bin/python scripts/fuzz/tiny_architectures.py FOLDER [--only REGEX]

llama.cpp itself says which tensors an architecture has: it makes an empty model from metadata
(llama_model_init_from_user), as its test tests/test-llama-archs.cpp does, from which the sizes here
are taken. The file is written with the gguf package: the metadata, a SentencePiece vocabulary, and
random weights. The script prints the architectures that cannot be made in this way.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CTX, VOCAB = 256, 320


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names of src/llama-arch.cpp, without those that are no language models.
ARCHITECTURES = _names(
    "afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom "
    "chameleon chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 "
    "deepseek2-ocr deepseek32 deepseek4 dots1 dots3note dream ernie4_5 ernie4_5-moe eurobert exaone "
    "exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 glm-dsa "
    "glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe grok "
    "grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba "
    "jina-bert-v2 jina-bert-v3 kimi-k3 kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama- "
    "embed llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 "
    "minimax-m3 mistral3 mistral4 modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h "
    "nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr "
    "pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 "
    "qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 "
    "rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 t5 t5encoder "
    "talkie xverse "
)
MIXTURES = frozenset(
    _names(
        "afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 "
        "deepseek2-ocr deepseek32 deepseek4 dots1 dots3note ernie4_5 ernie4_5-moe exaone-moe glm-dsa "
        "glm4moe glm5-next gpt-oss granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear "
        "laguna lfm2moe llada-moe llama4 maple mellum mimo2 minimax-01 minimax-m2 minimax-m3 mistral4 "
        "nemotron_h_moe nomic-bert-moe olmoe paddleocr phimoe qwen2moe qwen35moe qwen3moe qwen3next "
        "qwen3vlmoe qwen4exp rnd1 smallthinker step35 "
    )
)
LATENT = frozenset(
    _names(
        "bailingmoe3 deepseek2 deepseek32 dots3note glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear mistral4 "
    )
)
HYBRID = frozenset(
    _names(
        "bailingmoe3 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe nemotron_h "
        "nemotron_h_moe plamo2 "
    )
)
WINDOW_PATTERNS = frozenset(
    _names("cohere2moe dots3note granite_swa maple mimo2 muse-glimmer spark2_5 step35 ")
)
LAYERS = {"llama4": 4, "gemma3n": 22, "gemma4": 5, "deepseek4": 4, "hrm_text": 6} | dict.fromkeys(
    ("nemotron_h", "nemotron_h_moe"), 3
)


def metadata(arch: str) -> dict[str, Any]:
    """Return the metadata of a tiny model, without those of the tokenizer. The keys of an
    architecture are without its name. Most architectures ignore most keys.
    """
    layers, width, heads = LAYERS.get(arch, 2), 64, 2
    if arch == "deepseek4":
        width, heads = 512, 8
    elif arch in ("qwen3", "muse-glimmer", "afmoe"):
        heads = 4
    elif arch in LATENT or arch == "gemma3n":
        heads = 1
    head = width // heads
    key_heads = {"qwen3": 1, "muse-glimmer": 2, "afmoe": 2, "deepseek4": 1}.get(arch, heads)
    alternating = [0 if layer == 1 else heads for layer in range(layers)]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": CTX,
        "embedding_length": width,
        "features_length": width,
        "block_count": layers,
        "leading_dense_block_count": 1,
        "feed_forward_length": 96,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "time_mix_extra_dim": 16,
        "time_decay_extra_dim": 32,
        "full_attention_interval": 2,
        "attention.head_count": alternating if arch in HYBRID else heads,
        "attention.head_count_kv": alternating if arch in HYBRID else key_heads,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 64,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": CTX // 8,
        "attention.sliding_window_pattern": [layer % 2 for layer in range(layers)]
        if arch in WINDOW_PATTERNS
        else 5
        if arch == "gemma4"
        else 2,
        "attention.decay_lora_rank": 16,
        "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 16,
        "attention.gate_lora_rank": 16,
        "attention.indexer.head_count": heads if arch == "minimax-m3" else 64,
        "attention.indexer.key_length": head if arch == "qwen4exp" else 128,
        "attention.indexer.top_k": 131072,
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [8, 12, 12, 0] if arch == "bailingmoe3" else [head // 4] * 4,
        "posnet.embedding_length": width,
        "posnet.block_count": layers,
        "ssm.inner_size": width if arch.startswith(("qwen3", "qwen4")) else 2 * width,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.time_step_rank": heads,
        "ssm.group_count": 0 if arch == "plamo2" else 2,
        "kda.head_dim": 32,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": head,
        "shortconv.l_cache": 3,
        "residual_scale": 3.5565588200778455,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "decoder_start_token_id": 0,
    }
    if "bert" in arch or "embed" in arch:
        settings["pooling_type"] = 1
    if arch.startswith("nemotron_h"):
        settings["feed_forward_length"] = [0 if layer <= 1 else 96 for layer in range(layers)]
    if arch == "glm5-next":
        settings["attention.head_count"] = heads
    if arch in LATENT:
        rope = 0 if arch == "glm5-next" else 16
        sizes = {
            "attention.key_length": 64 + rope,
            "attention.value_length": 64,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
        }
        settings |= sizes | {"rope.dimension_count": rope}
        if arch == "dots3note":
            settings |= {f"{key}_swa": value for key, value in sizes.items()}
            settings |= {"attention.kv_lora_rank_swa": 64, "rope.freq_base_swa": 10000.0}
            settings["attention.indexer.types"] = [1 - layer % 2 for layer in range(layers)]
    if arch == "deepseek4":
        settings |= {
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.dimension_count": head // 2,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160000.0,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
        }
    if arch == "minimax-m3":
        settings["rope.dimension_count"] = 16
    if arch == "gemma4":
        settings |= {
            "embedding_length_per_layer_input": width // 2,
            "attention.shared_kv_layers": 0,
            "attention.key_length_swa": head,
            "attention.value_length_swa": head,
            "rope.freq_base_swa": 10000.0,
        }
    if arch == "hy_v4":
        settings |= {
            "hyper_connection.count": 4,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.magnitude": 2.0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "attention.indexer.types": [1 - layer % 2 for layer in range(layers)],
        }
    if arch == "hrm_text":
        settings |= {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}
    if arch == "maple":
        settings["swiglu_clamp_exp"] = 7.0
    if arch in MIXTURES:
        settings |= {
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 48,
            "expert_latent_length": 96,
            "interleave_moe_layer_step": 2,
            "expert_count": 2,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_gating_func": 4 if arch == "deepseek4" else 2,
            "expert_group_scale": 1.0,
            "experts_per_group": 1,
            "moe_every_n_layers": 2,
        }
    named = {f"{arch}.{key}": value for key, value in settings.items()}
    return named | {
        "general.file_type": 0,
        "xielu.alpha_n": 1.0,
        "xielu.alpha_p": 1.0,
        "xielu.beta": 1.0,
        "xielu.eps": 1e-7,
    }


def open_writer(
    path: Path, arch: str, unused: frozenset[str] = frozenset(), text_key: str = ""
) -> gguf.GGUFWriter:
    """Return a writer of a file with the metadata of `arch` and a SentencePiece vocabulary. Keys in
    `unused` are left out. The key `text_key` gets a text, which llama.cpp refuses if it reads it.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata(arch).items():
        if key in unused:
            continue
        if key == text_key:
            writer.add_string(key, "x")
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tokenizer_model("llama")
    words = [f"\u2581w{number}" for number in range(VOCAB - 259)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words])
    writer.add_token_scores([-float(number) for number in range(VOCAB)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "bert" in arch:
        writer.add_token_type_count(2)
    return writer


class TensorHead(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
    )


def list_tensors(header: Path) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return name, type number and shape of the tensors of a model with the metadata of a file. The
    process may crash.
    """
    import llama_cpp.llama_cpp as llama

    from llmcli.runtime.binding.contract import set_fields

    llama.llama_backend_init()
    library = llama._lib
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_n_dims.argtypes = [ctypes.c_void_p]
    tensors = {}

    def record(tensor: int, _data: object) -> None:
        head = TensorHead.from_address(tensor)
        shape = tuple(head.ne[: library.ggml_n_dims(tensor)])
        tensors[library.ggml_get_name(tensor).decode()] = head.type, shape

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(record)

    class InitParams(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, InitParams]
    context = library.gguf_init_from_file(str(header).encode(), InitParams(True, None))
    make_model = library.llama_model_init_from_user
    make_model.restype = ctypes.c_void_p
    make_model.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        llama.llama_model_params,
    ]
    parameters = llama.llama_model_default_params()
    set_fields(parameters, n_gpu_layers=0)
    model = make_model(context, ctypes.cast(callback, ctypes.c_void_p), None, parameters)
    if not model:
        raise SystemExit("llama.cpp refuses the metadata")
    return [(name, kind, shape) for name, (kind, shape) in tensors.items()]


def find_unused_keys(arch: str, folder: Path) -> list[str]:
    """Return the keys of the metadata that the architecture does not read. Each key in turn is
    stored as a text.
    """
    import llama_cpp.llama_cpp as llama

    from llmcli.runtime.binding.contract import set_fields

    llama.llama_backend_init()
    unused = []
    for key in metadata(arch):
        path = folder / "key.gguf"
        writer = open_writer(path, arch, text_key=key)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        messages: list[str] = []
        callback = llama.llama_log_callback(
            lambda level, text, data, messages=messages: messages.append(text.decode())
        )
        llama.llama_log_set(callback, None)
        parameters = llama.llama_model_default_params()
        set_fields(parameters, no_alloc=True, load_mode=0)
        if model := llama.llama_model_load_from_file(str(path).encode(), parameters):
            llama.llama_model_free(model)
        if not any(f"key {key} has wrong type" in message for message in messages):
            unused.append(key)
    return unused


def write_model(path: Path, arch: str, seed: int = 0) -> str:
    """Write a tiny model, and return "". Return the reason if llama.cpp does not accept the
    metadata.
    """
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        writer = open_writer(header, arch)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        done = subprocess.run(
            [sys.executable, __file__, "--list", str(header)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        unused_keys = subprocess.run(
            [sys.executable, __file__, "--unused", arch, folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["crash"])[-1][-150:] + f" ({done.returncode})"
    lines = unused_keys.stdout.splitlines()[-1:] if unused_keys.returncode == 0 else []
    writer = open_writer(path, arch, frozenset(json.loads(lines[0]) if lines else ()))
    random = np.random.default_rng(seed)
    for name, number, shape in json.loads(done.stdout.splitlines()[-1]):
        kind = gguf.GGMLQuantizationType(number)
        integers = {"I32": np.int32, "I64": np.int64}.get(kind.name)
        values = random.normal(1.0 if "norm" in name else 0.0, 0.1, tuple(reversed(shape)))
        if name.endswith("ssm_a"):
            values = -np.abs(values)
        floats = np.float32 if kind.name != "F16" else np.float16
        writer.add_tensor(name, values.astype(integers or floats))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ""


def main() -> None:
    """Write the models, and print those that cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="regular expression of architectures")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--unused", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unused:
        print(json.dumps(find_unused_keys(args.unused, args.folder)))
        return
    if args.list:
        print(json.dumps(list_tensors(args.folder)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for arch in ARCHITECTURES:
        if re.search(args.only, arch):
            reason = write_model(args.folder / f"{arch}.gguf", arch)
            written += not reason
            if reason:
                print(f"{arch}: {reason}")
    print(f"{written} architectures written to {args.folder}")


if __name__ == "__main__":
    main()
