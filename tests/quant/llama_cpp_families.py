"""Tiny random checkpoints of families that llmcli does not convert itself, and llama.cpp's converter
does.
"""

from tests.quant.families import TINY, Case
from tests.quant.families.glm4_moe import SECTIONS

# Heads fill hidden_size, and each query head has its own keys and values.
FULL = {"head_dim": None, "num_key_value_heads": 8}
GROUPED = {"head_dim": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 1024}
VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
# The width of a head is hidden_size / heads: 8 rotary pairs.
GLM4V = {key: value for key, value in TINY.items() if key != "head_dim"} | {
    "rope_parameters": SECTIONS | {"mrope_section": [2, 3, 3]}
}
# Those whose conversion reads a SentencePiece model; the others get a byte-level tokenizer.
SENTENCEPIECE = {"gemma", "jamba", "t5", "llama4", "minicpm3"}

CASES = [
    Case("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}, norm=0.0),
    Case("bloom", "BloomForCausalLM", {"n_layer": 2, "n_head": 8, "n_embed": 256}),
    Case("falcon", "FalconForCausalLM", FULL | {"multi_query": True, "num_kv_heads": 1}),
    Case("mamba", "MambaForCausalLM", {"tie_word_embeddings": True}),
    Case("falcon-mamba", "FalconMambaForCausalLM", {"tie_word_embeddings": True}),
    Case("bamba", "BambaForCausalLM", GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 8}),
    Case("starcoder", "GPTBigCodeForCausalLM", GPT2),
    Case("bitnet", "BitNetForCausalLM", GROUPED),
    Case(
        "dbrx",
        "DbrxForCausalLM",
        {"d_model": 256, "n_layers": 2, "n_heads": 8, "max_seq_len": 1024},
    ),
    Case("kimi-linear", "KimiLinearForCausalLM", EXPERTS),
    Case("granite, shared experts", "GraniteMoeSharedForCausalLM", GROUPED | EXPERTS),
    Case("granite, sliding window", "GraniteSWAForCausalLM", GROUPED),
    Case("hunyuan v3", "HYV3ForCausalLM", EXPERTS),
    Case("laguna", "LagunaForCausalLM", EXPERTS),
    Case("mellum", "MellumForCausalLM", EXPERTS),
    Case("mimo2", "MiMoV2FlashForCausalLM", EXPERTS),
    Case("minicpm3", "MiniCPM3ForCausalLM", GROUPED),
    Case("plm", "YoutuForCausalLM", {}),
    Case(
        "glm4v",
        "Glm4vForConditionalGeneration",
        {
            "head_dim": None,
            "text_config": GLM4V,
            "vision_config": VISION | {"out_hidden_size": 256},
        },
    ),
    Case("paddleocr", "PaddleOCRVLForConditionalGeneration", {"vision_config": VISION}),
    Case("hrm", "HrmTextForCausalLM", {}),
    Case("qwen4exp", "Qwen4ExpForCausalLM", EXPERTS),
    Case("muse-glimmer", "MuseGlimmerForCausalLM", {}),
    Case("t5", "T5ForConditionalGeneration", {"d_model": 256, "num_layers": 2, "d_ff": 512}),
]
