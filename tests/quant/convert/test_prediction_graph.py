"""The layer that predicts a further token computes in llama.cpp what its definition says: the block
of transformers, applied to the projection of the next token's embedding and the hidden state.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import families, predicting_checkpoint, tiny_checkpoint

CLASSES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    predicting_checkpoint.NEMOTRON,
)


def theirs(hf: str, folder: Path, hidden: np.ndarray) -> np.ndarray:
    """Return the logits of the prediction layer, `[tokens, vocabulary]`, computed with modules of
    transformers. `hidden` are hidden states `[tokens, hidden]`, which precede families.TOKENS.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if hf == predicting_checkpoint.NEMOTRON:
        return theirs_of_nemotron(model, folder, hidden)
    body = model.model
    layer = body.layers[-1]  # the block of the prediction layer is a copy of the last one
    stored = {
        name: torch.from_numpy(np.array(values))
        for name, values in tiny_checkpoint.read(folder / "model.safetensors").items()
    }
    ahead = f"model.layers.{len(body.layers)}."
    names = (
        ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        if hf.startswith("Qwen")
        else tuple(ahead + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    )
    projection, *norm_weights = (stored[f"{name}.weight"] for name in names)
    norms = []
    for weight in norm_weights:
        norm = type(body.norm)(len(weight), eps=model.config.rms_norm_eps)
        norm.weight.data.copy_(weight)
        norms.append(norm)
    count = len(families.TOKENS)
    positions = torch.arange(count)[None]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        embedded = body.embed_tokens(torch.tensor([families.TOKENS]))
        state = torch.from_numpy(hidden)[None]
        values = torch.cat([norms[0](embedded), norms[1](state)], -1) @ projection.T
        output = layer(
            values,
            position_embeddings=body.rotary_emb(values, positions),
            attention_mask=mask,
            position_ids=positions,
        )
        output = output[0] if isinstance(output, tuple) else output
        logits: np.ndarray = model.lm_head(norms[2](output))[0].numpy()
        return logits


def theirs_of_nemotron(model: Any, folder: Path, hidden: np.ndarray) -> np.ndarray:
    """Do as theirs() for Nemotron H, whose prediction layer is a layer of attention and one of
    experts. Its last norm subtracts the mean, as in llama.cpp.
    """
    import torch
    from torch.nn.functional import layer_norm, rms_norm

    stored = {
        name: torch.from_numpy(np.array(values))
        for name, values in tiny_checkpoint.read(folder / "model.safetensors").items()
    }
    eps, size, count = model.config.layer_norm_epsilon, hidden.shape[1:], len(families.TOKENS)
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        embedded = model.model.embeddings(torch.tensor([families.TOKENS]))
        parts = [
            rms_norm(values, size, stored[f"mtp.layers.0.{name}.weight"], eps)
            for name, values in (("enorm", embedded), ("hnorm", torch.from_numpy(hidden)[None]))
        ]
        values = torch.cat(parts, -1) @ stored["mtp.layers.0.eh_proj.weight"].T
        for layer in predicting_checkpoint.NEMOTRON_LAYERS:
            values = model.model.layers[layer](values, attention_mask=mask)
        last = stored["mtp.layers.1.final_layernorm.weight"]
        logits: np.ndarray = model.lm_head(layer_norm(values, size, last, eps=eps))[0].numpy()
        return logits


def ours(path: Path, hidden: np.ndarray) -> np.ndarray:
    """Return the logits of the prediction layer, `[tokens, vocabulary]`, computed by llama.cpp."""
    import llama_cpp

    count = len(families.TOKENS)
    settings = llama_cpp.llama_model_default_params()
    settings.load_mtp = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    assert model
    contexts = []
    for kind in (llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT, llama_cpp.LLAMA_CONTEXT_TYPE_MTP):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
        params.ctx_type = kind
        params.ctx_other = contexts[0] if contexts else None
        contexts.append(llama_cpp.llama_init_from_model(model, params))
        assert contexts[-1]
    batch = llama_cpp.llama_batch_init(count, hidden.shape[1], 1)
    tokens = (llama_cpp.llama_token * count)(*families.TOKENS)
    batch.n_tokens = count
    batch.token = tokens
    for index in range(count):
        batch.pos[index], batch.n_seq_id[index], batch.logits[index] = index, 1, 1
        batch.seq_id[index][0] = 0
    ctypes.memmove(batch.embd, np.ascontiguousarray(hidden).ctypes.data, hidden.nbytes)
    assert llama_cpp.llama_decode(contexts[1], batch) == 0
    rows: Any = llama_cpp.llama_get_logits(contexts[1])
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(rows, (count * width,)).reshape(count, width).copy()
    batch.token = ctypes.POINTER(llama_cpp.llama_token)()  # Python owns it
    llama_cpp.llama_batch_free(batch)
    for context in reversed(contexts):
        llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


@pytest.mark.parametrize("hf", CLASSES)
def test_prediction_layer_computes_its_definition(hf: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: logits have no oracle")
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = predicting_checkpoint.build(hf, tmp_path / "model")
    out = tmp_path / "model.gguf"
    write.write_model(plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out)
    hidden = np.random.default_rng(2).normal(0, 1, (len(families.TOKENS), 256)).astype(np.float32)
    logits, expected = ours(out, hidden), theirs(hf, folder, hidden)
    assert families.nmse(logits, expected) < 1e-6
    same, clear = families.agreement(logits, expected)
    assert same == clear > 300
