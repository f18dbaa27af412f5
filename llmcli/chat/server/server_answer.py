"""An answer of a server: while its chunks arrive, and when it is complete."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmcli.chat.server.answer_stream import AnswerChunk, ScoredToken, read_chunks
from llmcli.errors import UserError
from llmcli.http_client.background_client import BackgroundStream
from llmcli.http_client.client import RequestError
from llmcli.http_client.openai_stream import TokenUsage
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.sampling.top_logprobs import TokenLogprob
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Event, Finish, TokenTime

# The tags that stand around thinking which a server sends in a field of its own.
TAGS = ThinkingTags("<think>", "</think>")
FINISH_OF_WORD: dict[str, Finish] = {"length": "length"}  # all others are "stop"


@dataclass(frozen=True, slots=True)
class ServerAnswer(Answer):
    """An answer of a server. Its `tokens` are chunks, or single tokens if the server sends
    log-probabilities; the first token of a chunk then has the chunk's time. Their ids are indices
    of `texts`.

    - `n_chunks`: the number of chunks with text.
    - `usage`: the token counts of the server; None if it sends none.
    - `server_finish`: why the answer ended, in the server's word.
    """

    n_chunks: int = 0
    usage: TokenUsage | None = None
    server_finish: str = ""
    texts: tuple[str, ...] = ()

    @property
    def n_generated(self) -> int:
        """Return the number of generated tokens, as the server counts them. If it does not, return
        the number of `tokens`.
        """
        if self.usage is None or self.usage.output is None:
            return len(self.tokens)
        return self.usage.output


class AnswerBuilder:
    """Puts the chunks of an answer together. `start`: `time.perf_counter()` of the user's call."""

    def __init__(self, start: float, seed: int) -> None:
        self._last_time, self._seed = start, seed
        self._pieces: list[str] = []
        self._tokens: list[TokenTime] = []
        self._likeliest: list[tuple[TokenLogprob, ...]] = []
        self._id_of_text: dict[str, int] = {}
        self._n_chunks, self._is_thinking = 0, False
        self._server_finish = ""
        self._usage: TokenUsage | None = None

    def add(self, chunk: AnswerChunk) -> Iterator[Event]:
        """Add a chunk, and yield the event with its text, if it has any."""
        self._server_finish = chunk.finish or self._server_finish
        self._usage = chunk.usage or self._usage
        text = self._switch(True) + chunk.thinking if chunk.thinking else ""
        if chunk.content:
            text += self._switch(False) + chunk.content
        if not text:
            return
        ms = (chunk.time - self._last_time) * 1e3
        self._last_time = chunk.time
        self._n_chunks += 1
        scored = chunk.tokens
        if not scored or "".join(token.text for token in scored) != chunk.thinking + chunk.content:
            scored = (ScoredToken(text, None),)
        for token in scored:
            token_id = self._intern(token.text)
            self._tokens.append(TokenTime(token_id, token.text, ms, 0.0, 0.0, token.logprob))
            self._likeliest.append(
                tuple(TokenLogprob(self._intern(text), score) for text, score in token.likeliest)
            )
            ms = 0.0
        self._pieces.append(text)
        yield Event(0, self._tokens[-1], text)

    def close_thinking(self) -> Iterator[Event]:
        """End the thinking of an answer that has nothing after it, and yield the event for it."""
        if self._is_thinking and self._server_finish:
            self._pieces.append(self._switch(False))
            yield Event(0, None, self._pieces[-1])

    @property
    def has_text(self) -> bool:
        """Whether any text has arrived."""
        return bool(self._pieces)

    def build(self, finish: Finish | None, error: UserError | None) -> ServerAnswer:
        """Return the answer. `finish`: why it ended; None for the reason that the server gave."""
        prompt = self._usage.prompt if self._usage else None
        cached = self._usage.cached if self._usage else None
        return ServerAnswer(
            "".join(self._pieces),
            tuple(self._tokens),
            finish or FINISH_OF_WORD.get(self._server_finish, "stop"),
            prompt or 0,
            min(cached or 0, prompt or 0),
            0.0,
            self._seed,
            top_logprobs=tuple(self._likeliest) if any(self._likeliest) else (),
            error=error,
            n_chunks=self._n_chunks,
            usage=self._usage,
            server_finish=self._server_finish,
            texts=tuple(self._id_of_text),
        )

    def _switch(self, is_thinking: bool) -> str:
        """Begin or end the thinking. Return the tag for that, or "" if nothing changes."""
        if is_thinking == self._is_thinking:
            return ""
        self._is_thinking = is_thinking
        return TAGS.opening if is_thinking else f"{TAGS.closing}\n\n"

    def _intern(self, text: str) -> int:
        """Return the id of a token's text, which is its index in `texts`."""
        return self._id_of_text.setdefault(text, len(self._id_of_text))


class ServerReply:
    """An answer of a server while it is generated. Iterate over it to get the events, then read
    `answer`. A Ctrl-C closes the connection and ends the answer early.

    `start`: `time.perf_counter()` of the user's call. `explain`: makes the user's error of a failed
    request.
    """

    def __init__(
        self,
        stream: BackgroundStream,
        start: float,
        seed: int,
        explain: Callable[[RequestError], UserError],
    ) -> None:
        self._stream, self._explain = stream, explain
        self._builder = AnswerBuilder(start, seed)
        self._is_stopped = False
        self._answer: ServerAnswer | None = None

    def __iter__(self) -> Iterator[Event]:
        """Yield an event for each chunk. Raises UserError if the request fails before any text has
        arrived. If it fails later, the text so far is the answer, and the answer has the error.
        """
        builder, error = self._builder, None
        try:
            with on_interrupt(self.stop):
                for chunk in read_chunks(self._stream):
                    yield from builder.add(chunk)
        except RequestError as failure:
            if not self._is_stopped:  # otherwise the stream ends early because it was stopped
                error = self._explain(failure)
        finally:
            self._stream.stop()
        if error and not builder.has_text:
            raise error
        yield from builder.close_thinking()
        finish: Finish | None = "failed" if error else "cancelled" if self._is_stopped else None
        self._answer = builder.build(finish, error)
        yield Event(0, None, "", self._answer.finish)

    def stop(self) -> None:
        """Close the connection and finish the answer with the text that it has so far. This method
        may be called from any thread.
        """
        self._is_stopped = True
        self._stream.stop()

    @property
    def answers(self) -> list[Answer]:
        """Return the finished answer. Read this only after the iteration has ended."""
        return [self.answer]

    @property
    def answer(self) -> Answer:
        """Return the finished answer. Read this only after the iteration has ended."""
        assert self._answer is not None, "read the answer after the last event"
        return self._answer
