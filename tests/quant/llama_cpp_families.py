"""Tiny random checkpoints of families that llmcli does not convert itself, and llama.cpp's converter
does.
"""

from tests.quant.families import Case

# Heads fill hidden_size, and each query head has its own keys and values.
FULL = {"head_dim": None, "num_key_value_heads": 8}
GROUPED = {"head_dim": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 1024}
VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
# Those whose conversion reads a SentencePiece model; the others get a byte-level tokenizer.
SENTENCEPIECE = {"gemma", "jamba", "t5", "llama4", "minicpm3"}

CASES = [
    Case("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}, norm=0.0),
    Case("phi2", "PhiForCausalLM", FULL | {"intermediate_size": 1024}),
    Case("gpt2", "GPT2LMHeadModel", GPT2, config=lambda config: config | {"n_ctx": 1024}),
    Case("gptneox", "GPTNeoXForCausalLM", FULL | {"use_parallel_residual": True}),
    Case("bloom", "BloomForCausalLM", {"n_layer": 2, "n_head": 8, "n_embed": 256}),
    Case("falcon", "FalconForCausalLM", FULL | {"multi_query": True, "num_kv_heads": 1}),
    Case("command-r", "CohereForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    Case("cohere2", "Cohere2ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 64}),
    Case("mamba", "MambaForCausalLM", {"tie_word_embeddings": True}),
    Case("falcon-mamba", "FalconMambaForCausalLM", {"tie_word_embeddings": True}),
    Case(
        "mamba2",
        "Mamba2ForCausalLM",
        {"head_dim": 64, "num_heads": 8, "state_size": 16, "n_groups": 1},
    ),
    Case("jamba", "JambaForCausalLM", GROUPED | {"num_experts": 2, "num_hidden_layers": 8}),
    Case("bamba", "BambaForCausalLM", GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 8}),
    Case("apertus", "ApertusForCausalLM", GROUPED),
    Case("starcoder", "GPTBigCodeForCausalLM", GPT2),
    Case("chatglm", "GlmForCausalLM", {"partial_rotary_factor": 0.5}),
    Case(
        "qwen2vl",
        "Qwen2VLForConditionalGeneration",
        {"text_config": {"rope_parameters": MROPE}, "vision_config": VISION},
    ),
    Case("bitnet", "BitNetForCausalLM", GROUPED),
    Case("afmoe", "AfmoeForCausalLM", EXPERTS),
    Case(
        "dbrx",
        "DbrxForCausalLM",
        {"d_model": 256, "n_layers": 2, "n_heads": 8, "max_seq_len": 1024},
    ),
    Case("jais2", "Jais2ForCausalLM", FULL),
    Case("lfm2", "Lfm2ForCausalLM", GROUPED | {"full_attn_idxs": [1]}),
    Case("lfm2moe", "Lfm2MoeForCausalLM", GROUPED | EXPERTS | {"full_attn_idxs": [1]}),
    Case("llama4", "Llama4ForCausalLM", {"num_local_experts": 4}),
    Case("kimi-linear", "KimiLinearForCausalLM", EXPERTS),
    Case("granite, shared experts", "GraniteMoeSharedForCausalLM", GROUPED | EXPERTS),
    Case("granite, sliding window", "GraniteSWAForCausalLM", GROUPED),
    Case("hunyuan v3", "HYV3ForCausalLM", EXPERTS),
    Case("laguna", "LagunaForCausalLM", EXPERTS),
    Case("mellum", "MellumForCausalLM", EXPERTS),
    Case("mimo2", "MiMoV2FlashForCausalLM", EXPERTS),
    Case("minicpm3", "MiniCPM3ForCausalLM", GROUPED),
    Case("plm", "YoutuForCausalLM", {}),
    Case("glm4v", "Glm4vForConditionalGeneration", {"vision_config": VISION}),
    Case("paddleocr", "PaddleOCRVLForConditionalGeneration", {"vision_config": VISION}),
    Case("hrm", "HrmTextForCausalLM", {}),
    Case("qwen4exp", "Qwen4ExpForCausalLM", EXPERTS),
    Case("muse-glimmer", "MuseGlimmerForCausalLM", {}),
    Case("t5", "T5ForConditionalGeneration", {"d_model": 256, "num_layers": 2, "d_ff": 512}),
]
