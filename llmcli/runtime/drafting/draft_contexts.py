"""The contexts of draft files, and what the model's own context keeps for them."""

from dataclasses import replace

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.eagle_context import MAX_ROWS
from llmcli.runtime.drafting.draft_files.eagle3_match import is_eagle3, read_layers
from llmcli.runtime.drafting.draft_model import CHUNK_TOKENS
from llmcli.runtime.drafting.gain.pass_cost import PASS_ROWS
from quant.model_file.model_header import ModelHeader


def draft_file_options(draft: ModelHeader, context: ContextOptions) -> ContextOptions:
    """Return the options of the context of a draft file, a model or an EAGLE-3 draft. `context`:
    those of the model's context.
    """
    return (eagle_context_options if is_eagle3(draft) else draft_context_options)(context)


def layer_input_bytes(draft: ModelHeader, context: ContextOptions) -> int:
    """Return the bytes that a model's context keeps for a draft file besides its logits: the inputs
    of layers for an EAGLE-3 draft. `context`: the options of that context.
    """
    if not is_eagle3(draft):
        return 0
    width = draft.get_int("target_hidden_size") or 0
    return 4 * width * len(set(read_layers(draft))) * context.n_batch


def eagle_context_options(context: ContextOptions) -> ContextOptions:
    """Return the options of the context of an EAGLE-3 draft. `context`: those of the model's
    context, which has the same length.
    """
    return replace(
        draft_context_options(context), n_batch=MAX_ROWS, n_ubatch=MAX_ROWS, n_outputs=MAX_ROWS
    )


def draft_context_options(context: ContextOptions) -> ContextOptions:
    """Return the options of the draft model's context. `context`: those of the model's context,
    which has the same length.
    """
    return ContextOptions(
        context.n_ctx,
        CHUNK_TOKENS,
        CHUNK_TOKENS,
        1,
        context.n_threads,
        context.n_threads_batch,
        flash_attn=context.flash_attn,
        n_outputs=PASS_ROWS[0],
        offload_kqv=context.offload_kqv,
        gemm_min_rows=context.gemm_min_rows,
    )
