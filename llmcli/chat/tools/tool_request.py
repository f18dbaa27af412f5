"""Which tools a chat has, as the options of `chat` and `run` say it."""

import math
from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.tool_servers.limits import MAX_MESSAGE_BYTES, ToolLimits

MAX_SECONDS = 86_400.0
MAX_ROUNDS = 1000
DEFAULTS = ToolLimits()


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Which tools a chat has. `mcp`: the file of the tool servers; None for no tools. `allow_tool`:
    patterns of tools that are called without asking. The other fields are those of ToolLimits.
    """

    mcp: str | None = None
    allow_tool: list[str] | None = None
    tool_timeout: float = DEFAULTS.call_seconds
    tool_start_timeout: float = DEFAULTS.start_seconds
    tool_output: int = DEFAULTS.output_bytes
    tool_rounds: int = DEFAULTS.rounds

    def limits(self) -> ToolLimits:
        """Return the limits. Raises UserError for values out of range."""
        for flag, seconds in (
            ("--tool-timeout", self.tool_timeout),
            ("--tool-start-timeout", self.tool_start_timeout),
        ):
            if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
                raise UserError(
                    f"{flag} is {seconds}", hint=f"{flag} takes seconds, at most {MAX_SECONDS:,.0f}"
                )
        for flag, value, limit in (
            ("--tool-output", self.tool_output, MAX_MESSAGE_BYTES),
            ("--tool-rounds", self.tool_rounds, MAX_ROUNDS),
        ):
            if not 0 < value <= limit:
                raise UserError(f"{flag} is {value}", hint=f"{flag} takes 1 to {limit:,}")
        return ToolLimits(
            self.tool_start_timeout, self.tool_timeout, self.tool_output, self.tool_rounds
        )
