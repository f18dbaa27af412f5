"""The kinds of servers with OpenAI's API, and the names by which each knows the settings of a chat.

A kind is recognized by the field `owned_by` of the server's list of models. OpenAI's API has few
sampling settings; vLLM, SGLang and llama-server have more, under names of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPENAI_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
VLLM_NAMES = {
    **OPENAI_NAMES,
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
}
LLAMA_NAMES = {
    **VLLM_NAMES,
    "repeat_penalty": "repeat_penalty",
    "typical": "typical_p",
    **{
        name: name
        for name in (
            *("repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
            *("dry_penalty_last_n", "dry_sequence_breakers", "top_n_sigma", "xtc_probability"),
            *("xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
            *("mirostat", "mirostat_tau", "mirostat_eta"),
        )
    },
}


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server.

    - `field_names`: for each sampling setting that it knows, and for `ignore_eos`, the name of the
      field in a request.
    - `grammar_path`: the names of the nested fields that hold a GBNF grammar; () if it takes none.
    - `reasoning`: the fields that turn thinking off and on; empty if it has none.
    - `has_reasoning_budget`: whether it has OpenRouter's field `reasoning.max_tokens`.
    - `is_known`: whether it was recognized. An unknown server gets every setting under the name
      that llama-server uses, and may ignore it.
    """

    name: str
    field_names: Mapping[str, str]
    grammar_path: tuple[str, ...] = ()
    reasoning: Mapping[bool, Mapping[str, Any]] = field(default_factory=dict)
    has_reasoning_budget: bool = False
    is_known: bool = True


_TEMPLATE_SWITCH = {
    value: {"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True)
}
UNKNOWN = ServerKind("unknown", LLAMA_NAMES, ("grammar",), _TEMPLATE_SWITCH, True, is_known=False)
# by the value of `owned_by`
KINDS = {
    "llmcli": ServerKind("llmcli", LLAMA_NAMES, ("grammar",), _TEMPLATE_SWITCH, True),
    "llamacpp": ServerKind("llama-server", LLAMA_NAMES, ("grammar",), _TEMPLATE_SWITCH),
    "vllm": ServerKind("vLLM", VLLM_NAMES, ("structured_outputs", "grammar"), _TEMPLATE_SWITCH),
    "sglang": ServerKind("SGLang", VLLM_NAMES, (), _TEMPLATE_SWITCH),
    "lmdeploy": ServerKind("LMDeploy", VLLM_NAMES, (), _TEMPLATE_SWITCH),
    "library": ServerKind(
        "ollama",
        OPENAI_NAMES,
        (),
        {False: {"reasoning_effort": "none"}, True: {"reasoning_effort": "medium"}},
    ),
    **dict.fromkeys(("openai", "openai-internal", "system"), ServerKind("OpenAI", OPENAI_NAMES)),
}


def recognize_kind(owner: object) -> ServerKind:
    """Return the kind of the server whose list of models has `owner` as `owned_by`."""
    return KINDS.get(owner, UNKNOWN) if isinstance(owner, str) else UNKNOWN
