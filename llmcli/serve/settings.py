"""What a server was told: frozen, the same for every request."""

from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.sampling import Sampling, defaults


@dataclass(frozen=True, slots=True)
class Settings:
    """`names` are what a request may call the model, the first is what it is called. `sampling`, `system`,
    `stops` and `max_tokens` hold where a request says nothing; `most_tokens` limits every answer, `most_context`
    prompt and answer together (None: the cache). `keys` empty: nobody needs one. `cors` are the origins whose pages
    may ask, `allow_hosts` names of the server beside its own. Sizes in bytes, `drain` and `ping` in seconds."""

    names: tuple[str, ...]
    created: int = 0
    sampling: Sampling = defaults()  # noqa: RUF009 (frozen)
    system: str | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    most_tokens: int | None = None
    most_context: int | None = None
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_body: int = 8 << 20
    drain: float = 30.0
    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = None
    ssl_key: Path | None = None
    ssl_cert: Path | None = None

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.names[0]
