#!/usr/bin/env python3
"""Write a random BF16 checkpoint of one kind of model, for measurements of speed, memory and disk.

usage: .venv/bin/python scripts/quality/make_family_checkpoint.py FOLDER --kind KIND --gb 2
       --tokenizer TOKENIZER_FOLDER

The kinds are dense (Llama), moe (Qwen3-MoE), hybrid (LFM2), multimodal (Gemma 3 with its vision
part) and mla (DeepSeek V3). The size is reached by the number of layers. The tokenizer's files are
copied; Gemma 3 needs one with tokenizer.model. Needs torch and transformers.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from tests.quant import families

COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 14,
}
MLA = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 768,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 16,
}
# kind -> class, settings of the text part, and the settings beside it
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {}, {}),
    "moe": ("Qwen3MoeForCausalLM", {"head_dim": 128, "norm_topk_prob": True, **EXPERTS}, {}),
    "hybrid": ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False}, {}),
    "multimodal": (
        "Gemma3ForConditionalGeneration",
        {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 512},
        {"vision_config": VISION, "mm_tokens_per_image": 256, "tie_word_embeddings": True},
    ),
    "mla": ("DeepseekV3ForCausalLM", MLA, {}),
}


def main() -> None:
    """Choose the number of layers, and write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    n_vocab = families.token_count(args.tokenizer)
    sizes = [count_parameters(args.kind, n_vocab, layers) for layers in (2, 4)]
    each = (sizes[1] - sizes[0]) / 2
    layers = max(2, round(2 + (args.gb * 1e9 / 2 - sizes[0]) / each))
    model = build(args.kind, n_vocab, layers, "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(1 if value.dim() == 1 else 0, 0.02)
    model.save_pretrained(args.folder, max_shard_size="1GB", save_original_format=True)
    families.copy_tokenizer(args.tokenizer, args.folder)
    keep_tokenizer(args.folder / "tokenizer_config.json")
    count = sum(value.numel() for value in model.parameters())
    print(f"{args.folder}: {args.kind}, {layers} layers, {2 * count / 1e9:.2f} GB")


def keep_tokenizer(path: Path) -> None:
    """Name the class that reads tokenizer.json as it is. transformers 5 changes the splitting of
    words for other classes, and llama.cpp's converter does not recognize the result.
    """
    if not path.is_file():
        return
    settings = json.loads(path.read_bytes())
    if settings.get("tokenizer_class") == "GPT2Tokenizer":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(settings, indent=1))


def build(kind: str, n_vocab: int, layers: int, device: str) -> Any:
    """Return a model of a kind in BF16. On the device "meta", it has no values."""
    name, text, other = KINDS[kind]
    settings = {**COMMON, "vocab_size": n_vocab, "num_hidden_layers": layers, **text}
    if kind == "hybrid":
        types = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)]
        settings["layer_types"] = types
    model_class = getattr(transformers, name)
    if other:
        config = model_class.config_class(text_config=settings, **other)
    else:
        config = model_class.config_class(**settings)
    with torch.device(device):
        return model_class._from_config(config, dtype=torch.bfloat16)


def count_parameters(kind: str, n_vocab: int, layers: int) -> int:
    """Return the number of parameters of a model, which is not built."""
    return sum(value.numel() for value in build(kind, n_vocab, layers, "meta").parameters())


if __name__ == "__main__":
    main()
