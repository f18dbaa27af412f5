"""The limits for servers of tools: times, and sizes of what they send."""

from dataclasses import dataclass

MAX_MESSAGE_BYTES = 4 << 20  # of one JSON-RPC message
# of everything that a server sends during one request, and between two requests
MAX_REQUEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The limits that users can set.

    - `start_seconds`: how long a server may take until its tools are listed.
    - `call_seconds`: how long a call may take.
    - `output_bytes`: how much of a result is kept, in bytes of UTF-8.
    - `rounds`: how many times a model may call tools before it must answer.
    """

    start_seconds: float = 30.0
    call_seconds: float = 60.0
    output_bytes: int = 16_384
    rounds: int = 10
