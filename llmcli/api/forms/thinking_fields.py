"""Reads the request fields by which clients turn thinking on or off. Templates and APIs have many
names for the same switch.
"""

from typing import Any

from llmcli.api.fields import Fields
from llmcli.runtime.text.chat_template import ChatTemplate

REASONING_EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
EFFORTS_WITHOUT_THINKING = "none", "minimal"
# The values of `thinking.type`, as Anthropic, GLM, DeepSeek and others have it, and whether the
# model thinks; None leaves it to the template.
THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def read_thinking(fields: Fields, template: ChatTemplate | None) -> dict[str, Any]:
    """Return the template variables for the fields `enable_thinking`, `think`, `thinking`,
    `reasoning` and `reasoning_effort`. Raises ApiError for a value that is none of theirs.
    """
    effort, is_thinking = _read_effort(fields, "reasoning_effort"), None
    for name in ("reasoning", "think", "thinking", "enable_thinking"):
        if not fields.has(name):
            continue
        if isinstance(fields.values[name], str):
            effort = _read_effort(fields, name)
        elif isinstance(fields.values[name], dict) and name in ("reasoning", "thinking"):
            table = fields.table(name) or Fields({})
            effort = _read_effort(table, "effort") or effort
            switch = table.flag("enabled") if table.has("enabled") else _read_type(table)
            is_thinking = is_thinking if switch is None else switch
        else:
            is_thinking = fields.flag(name)
    if is_thinking is None and effort is not None:
        is_thinking = effort not in EFFORTS_WITHOUT_THINKING
    switches = template.thinking_values(is_thinking) if template else {}
    return {**({} if effort is None else {"reasoning_effort": effort}), **switches}


def _read_effort(fields: Fields, name: str) -> str | None:
    return fields.choice(name, REASONING_EFFORTS, "medium") if fields.has(name) else None


def _read_type(fields: Fields) -> bool | None:
    return THINKING_TYPES[fields.choice("type", tuple(THINKING_TYPES), "auto")]
