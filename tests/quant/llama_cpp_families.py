"""Tiny random checkpoints of families that llmcli does not convert itself, and llama.cpp's converter
does.
"""

from typing import Any

from tests.quant.families import TINY, Case
from tests.quant.families.bert import ENCODER, reranker
from tests.quant.families.exaone4 import GLOBAL as EXAONE
from tests.quant.families.gemma3 import SMALL as GEMMA3
from tests.quant.families.gemma4 import SMALL as GEMMA4
from tests.quant.families.gemma4 import set_layers
from tests.quant.families.glm4_moe import SECTIONS
from tests.quant.families.lfm2 import SMALL as LFM2
from tests.quant.families.qwen2vl import ROPE as QWEN2VL_ROPE
from tests.quant.families.qwen2vl import TEXT as QWEN2VL_TEXT
from tests.quant.families.qwen3next import LINEAR, keep_inner_norms
from tests.quant.families.qwen35 import ROPE as QWEN35_ROPE
from tests.quant.families.qwen35 import VISION as QWEN3_VISION

# Heads fill hidden_size, and each query head has its own keys and values.
FULL = {"head_dim": None, "num_key_value_heads": 8}
GROUPED = {"head_dim": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
BLOOM = {"n_layer": 2, "n_head": 8, "n_embed": 256}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 1024}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
# llama.cpp has one rotary base for both kinds of Mellum's layers.
ONE_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 1e6}
    for kind in ("sliding_attention", "full_attention")
}
# Latent attention: each query head has its own keys and values.
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "dim_model_base": 256,
    "scale_emb": 12,
    "scale_depth": 1.4,
}
KIMI_LINEAR = {
    **EXPERTS,
    **LATENT,
    "q_lora_rank": None,
    "v_head_dim": 64,
    "pad_token_id": 0,
    "linear_head_dim": 32,
    "linear_num_heads": 8,
    "layer_types": ["linear_attention", "full_attention"],
    # transformers saves dense layers with names that it does not know.
    "mlp_layer_types": ["sparse", "sparse"],
}
QWEN4 = {
    **EXPERTS,
    **LINEAR,
    "shared_expert_intermediate_size": 64,
    "output_gate_type": "sigmoid",
    "rope_parameters": QWEN35_ROPE,
    "hc_lowrank": 32,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
TIED = {"tie_word_embeddings": True}
GROUPED_TEXT = {key: value for key, value in TINY.items() if key != "head_dim"}
COHERE_EXPERTS = {
    **EXPERTS,
    **WINDOW,
    **TIED,
    "intermediate_size": 128,
    "pad_token_id": 0,
    "expert_selection_fn": "sigmoid",
}
HY_V4 = {
    **EXPERTS,
    **LATENT,
    "head_dim": 16,
    "v_head_dim": 64,
    "pad_token_id": 0,
    "n_routed_experts": 4,
    "index_topk": 512,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
}
# Names that transformers does not save as it has read them
HY_V4_NAMES = {
    r"hc_pre\.hc_head\.": "hc_head.",
    r"hc_pre\.(hc_\w+_layer)\.": r"\1.hc_pre.",
    r"mlp\.(\w+\.)*linear_gate": r"mlp.\1gate_proj",
}
ROBERTA = ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 514}
DISTILBERT = {
    "dim": 256,
    "hidden_dim": 512,
    "n_layers": 2,
    "n_heads": 8,
    "head_dim": None,
    "num_key_value_heads": None,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
T5 = {
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "num_key_value_heads": None,
    "head_dim": None,
}
T5_GATED = {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "scale_decoder_outputs": False,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if "per_layer" not in key} | {
    "pad_token_id": 0,
    "moe_intermediate_size": None,
    "final_logit_softcapping": 30.0,  # which llama.cpp assumes
}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 16}
HUNYUAN_VISION = SIGLIP | {
    "num_key_value_heads": 2,
    "out_hidden_size": 256,
    "text_hidden_size": 256,
    "img_max_token_num": 16,
    "max_image_size": 64,
    "min_image_size": 32,
}
AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WHISPER = {
    "d_model": 32,
    "encoder_ffn_dim": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
}
QWEN_AUDIO = WHISPER | {"output_dim": 256, "downsample_hidden_size": 16}
# llama.cpp's converter chooses by the class of the language part.
GRANITE_TEXT = GROUPED_TEXT | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
GRANITE_SPEECH = {
    "encoder_config": {"hidden_dim": 32, "num_layers": 3, "num_heads": 2, "dim_head": 16},
    "projector_config": {
        "hidden_size": 32,
        "encoder_hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
}
VQ = {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "latent_channels": 32}
MUSE_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
XDROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "alpha": 1000.0,
    "factor": 1.0,
    "mrope_section": [8, 8, 8, 8],
}
# The width of a head is hidden_size / heads: 8 rotary pairs.
GLM4V = {key: value for key, value in TINY.items() if key != "head_dim"} | {
    "rope_parameters": SECTIONS | {"mrope_section": [2, 3, 3]}
}
# Those whose conversion reads a SentencePiece model; the others get a byte-level tokenizer.
SENTENCEPIECE = {"gemma", "jamba", "llama4", "minicpm3", "paddleocr", "gemma4, unified"} | {
    f"{name}t5{part}" for name in ("", "m", "um") for part in ("", ", encoder")
}


def list_linear_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of Kimi Linear with the settings of linear layers as released."""
    kinds = config.pop("layer_types")
    layers = {
        kind: [number for number, other in enumerate(kinds, 1) if other == kind] for kind in kinds
    }
    return config | {
        "moe_router_activation_func": "sigmoid",
        "first_k_dense_replace": config.pop("mlp_layer_types").count("dense"),
        "linear_attn_config": {
            "full_attn_layers": layers["full_attention"],
            "kda_layers": layers["linear_attention"],
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        },
    }


def name_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of Qwen4-Exp with the names of layers as released."""
    part = config.get("text_config", config)
    names = {"indexed_attention": "full_attention"}
    part["layer_types"] = [names.get(kind, kind) for kind in part["layer_types"]]
    return config


def with_parts(text: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the settings of a model with a language part and others."""
    return {"head_dim": None, "text_config": text, **parts}


CASES = [
    Case("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}, norm=0.0),
    Case("bloom", "BloomForCausalLM", BLOOM),
    Case("falcon", "FalconForCausalLM", FULL | {"multi_query": True, "num_kv_heads": 1}),
    Case("mamba", "MambaForCausalLM", {"tie_word_embeddings": True}),
    Case("falcon-mamba", "FalconMambaForCausalLM", {"tie_word_embeddings": True}),
    Case(
        "bamba",
        "BambaForCausalLM",
        GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 8},
        config=lambda values: values | {"attn_rotary_emb": 16},
    ),
    Case("starcoder", "GPTBigCodeForCausalLM", GPT2),
    Case(
        "dbrx",
        "DbrxForCausalLM",
        {
            "d_model": 256,
            "n_layers": 2,
            "n_heads": 8,
            "max_seq_len": 1024,
            "head_dim": None,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 1.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Case("kimi-linear", "KimiLinearForCausalLM", KIMI_LINEAR, config=list_linear_layers),
    Case("granite, shared experts", "GraniteMoeSharedForCausalLM", GROUPED | EXPERTS),
    Case("granite, sliding window", "GraniteSWAForCausalLM", GROUPED),
    Case("hunyuan v3", "HYV3ForCausalLM", EXPERTS),
    # llama.cpp assumes this order of layers.
    Case(
        "laguna",
        "LagunaForCausalLM",
        EXPERTS | WINDOW | {"layer_types": WINDOW["layer_types"][::-1]},
    ),
    Case("mellum", "MellumForCausalLM", EXPERTS | WINDOW | {"rope_parameters": ONE_ROPE}),
    Case("minicpm3", "MiniCPM3ForCausalLM", LATENT | {"v_head_dim": 32}),
    Case("youtu", "YoutuForCausalLM", LATENT | {"v_head_dim": 64}),
    Case(
        "glm4v",
        "Glm4vForConditionalGeneration",
        {
            "head_dim": None,
            "text_config": GLM4V,
            "vision_config": VISION | {"out_hidden_size": 256},
        },
    ),
    Case(
        "paddleocr",
        "PaddleOCRVLForConditionalGeneration",
        with_parts(TINY | {"rope_parameters": MROPE}, vision_config=SIGLIP),
    ),
    # llama.cpp does not compute the mask of a prefix.
    Case(
        "hrm",
        "HrmTextForCausalLM",
        {"head_dim": 32, "num_key_value_heads": None, "prefix_lm": False},
    ),
    Case(
        "qwen4exp",
        "Qwen4ExpForCausalLM",
        QWEN4,
        norm=0.0,
        change=keep_inner_norms,
        config=name_full_layers,
    ),
    Case(
        "muse-glimmer",
        "MuseGlimmerForConditionalGeneration",
        with_parts(
            TINY | WINDOW,
            vision_config=MUSE_VISION,
            out_hidden_size=128,
            projector_hidden_size=64,
        ),
    ),
    Case("bloom, without a head", "BloomModel", BLOOM | TIED),
    Case("llama, without a head", "LlamaModel", TIED),
    Case("qwen2, without a head", "Qwen2Model", GROUPED | TIED),
    Case("qwen3, without a head", "Qwen3Model", TIED),
    Case("lfm2, without a head", "Lfm2Model", LFM2),
    Case("cohere2, experts", "Cohere2MoeForCausalLM", COHERE_EXPERTS),
    Case("granite, window and experts", "GraniteMoeSWAForCausalLM", GROUPED | EXPERTS),
    Case("hunyuan v4", "HYV4ForCausalLM", HY_V4, names=HY_V4_NAMES),
    Case(
        "eurobert",
        "EuroBertModel",
        GROUPED | {"pad_token_id": 0, "classifier_pooling": "mean"},
        output="vectors",
    ),
    Case("roberta", "RobertaModel", ROBERTA, output="vectors"),
    Case(
        "roberta, reranker",
        "RobertaForSequenceClassification",
        ROBERTA | {"num_labels": 3},
        output="scores",
    ),
    Case("camembert", "CamembertModel", ROBERTA, output="vectors"),
    Case("distilbert", "DistilBertModel", DISTILBERT, output="vectors"),
    Case("distilbert, masked", "DistilBertForMaskedLM", DISTILBERT, output="vectors"),
    Case(
        "distilbert, reranker",
        "DistilBertForSequenceClassification",
        DISTILBERT | {"num_labels": 1},
        config=reranker,
        output="scores",
    ),
    Case(
        "gemma-embedding",
        "Gemma3TextModel",
        GEMMA3 | {"use_bidirectional_attention": True},
        norm=0.0,
        output="vectors",
    ),
    Case(
        "qwen2vl, without a head",
        "Qwen2VLModel",
        with_parts(
            QWEN2VL_TEXT | TIED | {"rope_parameters": QWEN2VL_ROPE},
            **TIED,
            vision_config=VISION | {"embed_dim": 32, "hidden_size": 256, "mlp_ratio": 1},
        ),
    ),
    Case(
        "exaone 4.5",
        "Exaone4_5_ForConditionalGeneration",
        with_parts(
            TINY | EXAONE | {"model_type": "exaone4"},
            vision_config=VISION
            | {"out_hidden_size": 256, "fullatt_block_indexes": [0], "num_key_value_heads": 2},
        ),
    ),
    Case(
        "glm-ocr",
        "GlmOcrForConditionalGeneration",
        with_parts(GLM4V, vision_config=VISION | {"out_hidden_size": 256}),
    ),
    Case(
        "hunyuan vl",
        "HunYuanVLForConditionalGeneration",
        with_parts(TINY | {"rope_parameters": XDROPE}, vision_config=HUNYUAN_VISION),
    ),
    Case(
        "llava",
        "LlavaForConditionalGeneration",
        with_parts(TINY | {"model_type": "llama"}, vision_config=PIXTRAL),
    ),
    Case(
        "qwen4exp, multimodal",
        "Qwen4ExpForConditionalGeneration",
        with_parts(TINY | QWEN4, vision_config=QWEN3_VISION),
        norm=0.0,
        change=keep_inner_norms,
        config=name_full_layers,
    ),
    Case(
        "gemma4, unified",
        "Gemma4UnifiedForConditionalGeneration",
        with_parts(
            TINY | GEMMA4_UNIFIED,
            vision_config={"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
            audio_config={},
            **TIED,
        ),
        change=set_layers,
    ),
    Case(
        "qwen3-asr",
        "Qwen3ASRForConditionalGeneration",
        with_parts(TINY | {"rope_parameters": MROPE}, audio_config=QWEN_AUDIO),
    ),
    Case(
        "qwen2-audio",
        "Qwen2AudioForConditionalGeneration",
        with_parts(GROUPED_TEXT, audio_config=WHISPER),
    ),
    Case("voxtral", "VoxtralForConditionalGeneration", with_parts(TINY, audio_config=AUDIO)),
    Case(
        "audio flamingo 3",
        "AudioFlamingo3ForConditionalGeneration",
        with_parts(GROUPED_TEXT, audio_config=AUDIO),
    ),
    Case(
        "granite speech",
        "GraniteSpeechForConditionalGeneration",
        with_parts(GRANITE_TEXT, **GRANITE_SPEECH),
    ),
    Case(
        "granite speech plus",
        "GraniteSpeechPlusForConditionalGeneration",
        with_parts(GRANITE_TEXT, **GRANITE_SPEECH),
    ),
    Case(
        "janus",
        "JanusForConditionalGeneration",
        with_parts(TINY, vision_config=SIGLIP | {"projection_dim": 256}, vq_config=VQ),
    ),
    Case("t5", "T5ForConditionalGeneration", T5, scale=0.03),
    Case("mt5", "MT5ForConditionalGeneration", T5 | T5_GATED, scale=0.03),
    Case("umt5", "UMT5ForConditionalGeneration", T5 | T5_GATED, scale=0.03),
    Case("t5, encoder", "T5EncoderModel", T5 | T5_GATED, scale=0.03, output="vectors"),
]

# Why a class with a case comes out differently
DIFFERENT = {
    "BambaForCausalLM": (
        "llama.cpp's converter reorders whole heads, of which only a half is rotary"
    ),
    "CamembertModel": "llama.cpp counts positions from 0, and transformers from 2",
    "DistilBertForSequenceClassification": (
        "llama.cpp computes tanh where transformers computes ReLU"
    ),
    "HYV4ForCausalLM": (
        "llama.cpp rotates neighbors in a head, and transformers the halves of a head"
    ),
    "UMT5ForConditionalGeneration": "transformers divides what comes before the head by 16",
}
# Why there is no case of a class that llama.cpp's converter knows
SETTINGS = "llama.cpp's converter does not find its settings in the config.json of transformers 5"
NAMES = "llama.cpp's converter does not know the names of its tensors"
DRAFTS = "drafts for another model, from whose vectors it computes"
NO_CASE = "no small checkpoint yet"
NOT_COMPARED = {
    "BitNetForCausalLM": NAMES,
    "KimiLinearModel": NAMES,
    "MiMoV2FlashForCausalLM": SETTINGS,
    "MiniMaxM3SparseForConditionalGeneration": SETTINGS,
    "MiniCPMV4_6ForConditionalGeneration": (
        "llama.cpp's converter asks for a layer that predicts, and leaves it out"
    ),
    "ChameleonForConditionalGeneration": (
        "llama.cpp masks fixed numbers of tokens, which a small vocabulary has not"
    ),
    "Gemma4AssistantForCausalLM": DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": DRAFTS,
    "MuseGlimmerAssistantModel": DRAFTS,
    "PocketTTSModel": "writes sound",
    "UMT5Model": "an encoder and a decoder without a head",
    "DeepseekV4ForCausalLM": NO_CASE,
    "Dots3NoteForCausalLM": SETTINGS,
    "Dots3NoteForConditionalGeneration": NO_CASE,
    "Glm5NextForConditionalGeneration": NO_CASE,
    "Qwen3OmniMoeForConditionalGeneration": NO_CASE,
    "Step3p7ForConditionalGeneration": SETTINGS,
}
