"""Prompts that ask a model for the text of a gap, from the text before and the text after it.

Source: format_prompt_infill in llama.cpp's tools/server/server-common.cpp.
"""

from collections.abc import Sequence

from llmcli.api import request_settings
from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.binding.model import Model
from llmcli.runtime.runner import Runner

INFILL_TOKENS = ("pre", "suf", "mid")  # the model's tokens before prefix, suffix and answer


def infill_tokens(model: Model) -> dict[str, int]:
    """Return the model's tokens for gaps. Raises ApiError if its file does not name them."""
    if missing := [f"fim_{name}" for name in INFILL_TOKENS if name not in model.fim_tokens]:
        raise ApiError(
            f"this model cannot fill gaps: its file has no {', '.join(missing)} token", 501
        )
    return model.fim_tokens


def gap_tokens(
    runner: Runner, settings: ServerSettings, prefix: Sequence[int], suffix: str
) -> tuple[int, ...]:
    """Return the token ids of a prompt that asks for the text between `prefix` and `suffix`. BOS is
    put in front of it if the model's file asks for it. Raises ApiError if the suffix is too long,
    or if the model cannot fill gaps.
    """
    model = runner.model
    fim = infill_tokens(model)
    request_settings.check_text_length(runner, settings, suffix)
    bos = [model.bos] if model.add_bos and model.bos is not None else []
    after = model.tokenize(suffix, special=False)
    return (*bos, fim["pre"], *prefix, fim["suf"], *after, fim["mid"])
