"""Reports of prompts that were not found in the cache: a line in the log for each, and the latest for
`/v1/kv`.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.runtime.kv_cache.prefix_losses import LossReason, PrefixLoss
from llmcli.runtime.requests.sequence import Sequence as RunningSequence
from llmcli.serve.engine_thread.server_log import ServerLog

MAX_REPORTS = 32
MAX_TEXT_CHARACTERS = 40  # of a token

CAUSES: dict[LossReason, str] = {
    "different": "",
    "dropped": "its cells were dropped for others",
    "offloaded": "computing it again is faster than copying it from the host's memory, or there is no room",
    "no_rollback": "the cache of this model cannot go back there",
    "reproducible": "--reproducible shares only whole conversations that have ended",
    "not_shared": "a running answer has it and cannot share it",
    "other_client": "only another client has it (--private)",
    "slot": "the request names another slot",
    "scored": "the request asks for log-probabilities of its prompt",
}


@dataclass(frozen=True, slots=True)
class LossReport:
    """Why the prompt of a request was not found in the cache. `time`: Unix time. `token`,
    `cached_token`: the texts of the two tokens that differ. `message`: the message in
    which the token is; "" if unknown. `prompt_tokens`: the length of the prompt.
    """

    loss: PrefixLoss
    time: float
    request: int
    client: str
    prompt_tokens: int
    token: str | None
    cached_token: str | None
    message: str

    def line(self) -> str:
        """Return the report as one line."""
        loss, conversation = self.loss, self.loss.conversation
        n_computed = self.prompt_tokens - loss.reused
        name = f"conversation {conversation.number} (slot {conversation.slot})"
        words = f"prefix lost: request {self.request} "
        if loss.position is None:
            words += f"continues {name} for {loss.shared} tokens"
        else:
            place = f", {self.message}" if self.message else ""
            words += (
                f"leaves {name} at token {loss.position}{place}: {_quote(self.token)} instead of "
                f"{_quote(self.cached_token)}"
            )
        if cause := CAUSES[loss.reason]:
            words += f"; only {loss.reused} tokens before were reused: {cause}"
        return f"{words}; {n_computed} of {self.prompt_tokens} tokens are computed"

    def document(self, client: str) -> dict[str, Any]:
        """Return the report as a JSON object for a client. It shows no text of other clients."""
        loss, conversation = self.loss, self.loss.conversation
        is_own = client == self.client
        return {
            "time": int(self.time),
            "request": self.request,
            "conversation": conversation.number,
            "slot": conversation.slot,
            "reason": loss.reason,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": loss.shared,
            "reused_tokens": loss.reused,
            "position": loss.position,
            "token": self.token if is_own else None,
            "cached_token": self.cached_token if client == conversation.client else None,
            "message": self.message or None,
        }


class LossReports:
    """The latest reports of one server. They are written on the log's thread, because finding the
    place in a long prompt takes time.
    """

    def __init__(self, log: ServerLog, piece: Callable[..., bytes]) -> None:
        """`piece`: returns the bytes of a token (Model.piece)."""
        self._log, self._piece = log, piece
        self._reports: deque[LossReport] = deque(maxlen=MAX_REPORTS)

    def add(self, sequence: RunningSequence, loss: PrefixLoss) -> None:
        """Report the loss of a sequence that begins. Called on the engine's thread."""
        request, request_number, now = sequence.request, sequence.id, time.time()

        def line() -> str:
            token, cached = (
                None if number is None else self._text([number])[:MAX_TEXT_CHARACTERS]
                for number in (loss.token, loss.cached_token)
            )
            message = ""
            if loss.position is not None:
                message = request.locate(self._text(request.tokens[: loss.position]))
            report = LossReport(
                loss,
                now,
                request_number,
                request.client,
                len(request.tokens),
                token,
                cached,
                message,
            )
            self._reports.append(report)
            return report.line()

        self._log.write(line)

    async def documents(self, client: str, is_private: bool) -> list[dict[str, Any]]:
        """Return the reports for a client as JSON objects, the latest last. `is_private`: only its
        own ones, and nothing about the conversations of others.
        """
        await self._log.wait()
        return [
            report.document(client)
            for report in self._reports
            if not is_private or (report.client == client and report.loss.reason != "other_client")
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the names of control tokens."""
        raw = b"".join(self._piece(token, special=True) for token in tokens)
        return raw.decode("utf-8", "replace")


def _quote(text: str | None) -> str:
    """Return the text of a token in quotes and in ASCII, so that it has no control characters."""
    return json.dumps(text or "")
