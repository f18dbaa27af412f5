"""The settings of a server. They do not change while the server runs."""

from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.sampling import Sampling, default_sampling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server.

    - `names`: the model names that a request may use; the first is the model's own name.
    - `created`: the Unix time at which the model was loaded.
    - `sampling`, `system`, `stops`, `max_tokens`: defaults for requests that do not set them.
    - `allow_repetition`: whether an answer that only repeats itself goes on.
    - `reasoning_budget`: the largest number of thinking tokens of an answer whose request sets none;
      None: any number.
    - `max_answer_tokens`: the largest number of tokens of any answer; a request cannot exceed it.
    - `max_context`: the largest number of tokens of a prompt and its answer; None: the whole
      context.
    - `slides_context`: when the context of an answer is full, its oldest tokens are dropped, so that
      the answer goes on (AttentionSinks).
    - `shows_prompts`: an answer has the text of its prompt, unless its request declines it.
    - `keeps_nonces`: texts that an agent changes with each request stay in the prompt, which then is
      not found in the cache (conversation/billing_header.py).
    - `keys`: the accepted API keys; if empty, requests need no key.
    - `allows_priorities`: requests may have a priority above 0. `priority_keys`: those with one of
      these API keys may in any case.
    - `cors`: the origins of web pages that may send requests.
    - `allow_hosts`: additional host names by which clients may address the server.
    - `max_body`: the largest request body in bytes.
    - `drain`: seconds that running answers have to finish at shutdown.
    - `host`, `port`: the first address; `further_hosts`: more addresses with the same port.
    - `grpc_port`: the port of the gRPC server; None: no gRPC.
    - `disabled_paths`: paths of routes that are not offered, each with the option that offers it.
    - `slot_folder`: the folder for saved slots; None: clients can save none.
    - `files_folder`: the folder of files and batches; None: the server has none.
    - `max_files_bytes`: the largest number of bytes of all files together.
    - `ssl_key`, `ssl_cert`: the files for HTTPS; None: HTTP.
    """

    names: tuple[str, ...]
    created: int = 0
    sampling: Sampling = default_sampling()  # noqa: RUF009 (frozen)
    system: str | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    allow_repetition: bool = False
    reasoning_budget: int | None = None
    max_answer_tokens: int | None = None
    max_context: int | None = None
    slides_context: bool = False
    shows_prompts: bool = False
    keeps_nonces: bool = False
    keys: tuple[str, ...] = ()
    allows_priorities: bool = False
    priority_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_body: int = 8 << 20
    drain: float = 30.0
    host: str = "127.0.0.1"
    port: int = 8080
    further_hosts: tuple[str, ...] = ()
    grpc_port: int | None = None
    disabled_paths: tuple[tuple[str, str], ...] = ()
    slot_folder: Path | None = None
    files_folder: Path | None = None
    max_files_bytes: int = 4_000_000_000
    ssl_key: Path | None = None
    ssl_cert: Path | None = None

    def may_raise_priority(self, client: str) -> bool:
        """Return whether the requests of a client may have a priority above 0. `client`: its API
        key, if the server has keys.
        """
        return self.allows_priorities or client in self.priority_keys

    def find_name(self, requested: str | None) -> str:
        """Return the served name for the name in a request. A single model is served, so it answers
        to any name: the name of its file, that of another model, or one with ollama's default tag.
        The answer has the name of the model that gave it.
        """
        return requested if requested in self.names else self.model_name

    @property
    def hosts(self) -> tuple[str, ...]:
        """All addresses on which the server listens."""
        return self.host, *self.further_hosts

    @property
    def model_name(self) -> str:
        """The first of `names`, which responses show if the request names no model."""
        return self.names[0]
