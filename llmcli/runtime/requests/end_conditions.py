"""Conditions for the end of an answer, in addition to end tokens, stop strings and token limits. They
are those of llama-server and vLLM.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndConditions:
    """When an answer ends, or must not end yet.

    - `stop_tokens`: tokens that end the answer, as end tokens do. They are not in its text.
    - `min_tokens`: before this many tokens, neither end tokens nor stop tokens are drawn.
    - `line_limit_ms`: the answer ends with the first line end that is drawn more than this time
      after the first token; 0 for no limit.
    - `min_indent`: the answer ends in a line, except its first, that begins with fewer spaces and
      tabs than this. The rest of this line is not in its text.
    """

    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    line_limit_ms: float = 0.0
    min_indent: int = 0


NO_CONDITIONS = EndConditions()
