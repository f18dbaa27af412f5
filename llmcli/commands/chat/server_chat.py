"""Opens a chat with a model behind a server (`chat --server`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.chat.tools.tool_request import ToolRequest
from llmcli.commands.options.run import FLAGS_OF_FIELD, run_flags
from llmcli.commands.options.tools import list_tool_flags
from llmcli.errors import UsageError, UserError
from llmcli.loopback import is_loopback
from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.chat.chat_session import ChatSession
    from llmcli.config import Config
    from llmcli.http_client.client import ConnectionSettings
    from llmcli.ui import UI

EXAMPLE = "llmcli chat --server http://127.0.0.1:8080"
MAX_ANSWER_SECONDS = 6 * 3600.0  # of one answer; its connection is closed then
# The fields of RunFlags whose options have an effect with a server, besides the sampling settings.
SERVER_FIELDS = (
    *("model", "offline", "prompt", "file", "system", "predict", "stops", "ignore_eos"),
    *("reasoning", "reasoning_budget", "markdown", "hide_thinking", "logprobs"),
)
CONSTRAINT_OPTIONS = ("json_schema", "json_schema_file", "grammar", "grammar_file")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server of a chat and how it is reached. `url`: as the user typed it."""

    url: str
    api_key: str | None = None
    api_key_file: Path | None = None
    cacert: Path | None = None
    insecure: bool = False


def check_run_flags(typed: Mapping[str, object]) -> None:
    """Raise UsageError if one of the typed options, by name, configures a model in this process."""
    from llmcli.runtime.sampling import sampling_settings

    names = {name for field in SERVER_FIELDS for name in FLAGS_OF_FIELD.get(field, (field,))}
    names |= {*CONSTRAINT_OPTIONS, *sampling_settings()}
    for flag in run_flags():
        if flag.name in typed and flag.name not in names:
            spelling = next(word for word in flag.spellings if word.startswith("--"))
            raise UsageError(
                f"{spelling} configures a model in this process, and --server uses another",
                hint=f"leave out {spelling}, or give it to the server",
            )


def check_tools(tools: ToolRequest) -> None:
    """Raise UsageError for an option about tools, which only a model in this process can call."""
    if flags := list_tool_flags(tools):
        raise UsageError(
            "tools are called only by a model in this process, and --server uses another",
            hint=f"leave out {' and '.join(flags)}, or chat without --server: "
            "llmcli chat REF --mcp FILE",
        )


@contextmanager
def open_server_chat(
    options: ServerOptions,
    name: str | None,
    earlier_model: str,
    run_flags: RunFlags,
    config: "Config",
    ui: "UI",
) -> Iterator["ChatSession"]:
    """Open a chat session for the block with the model `name` of a server. Without a name, it is
    `earlier_model` if the server has it, or the only model. Raises UserError.
    """
    from llmcli.chat.chat_session import ChatSession
    from llmcli.chat.conversation.conversation import Conversation
    from llmcli.chat.display.display_settings import HIDE, SHOW, DisplaySettings
    from llmcli.chat.server.remote_model import RemoteModel
    from llmcli.chat.settings import find_setting
    from llmcli.http_client.api_address import parse_base_url
    from llmcli.http_client.background_client import open_background_client
    from llmcli.runtime import sampling

    base_url = parse_base_url(options.url, EXAMPLE)
    _check_offline(base_url, config)
    with open_background_client(_connection(options, base_url, config)) as client:
        model = RemoteModel(client, base_url)
        with ui.status(f"asking {base_url} for its models …"):
            name = model.choose(name, earlier_model)
        if not model.is_listed(name):
            ui.warn(f"the server does not list {name}; it has {model.describe_models(name)}")
        typed = {
            sampling.find_setting(word).name: value for word, value in run_flags.settings.items()
        }
        budget = None if run_flags.reasoning_budget == -1 else run_flags.reasoning_budget
        others = {"ignore_eos": run_flags.ignore_eos, "reasoning_budget": budget is not None}
        for setting in (*typed, *(name for name, is_set in others.items() if is_set)):
            if obstacle := model.setting_obstacle(setting):
                flag = setting.replace("_", "-")
                raise UserError(f"--{flag} has no effect here: {obstacle}", hint="leave it out")
        if run_flags.constraint:
            model.check_constraint(run_flags.constraint)
        conversation = Conversation(
            sampling.default_sampling().with_values(typed),
            run_flags.system or None,
            None if run_flags.predict == -1 else run_flags.predict,
            constraint=run_flags.constraint,
            typed_settings=set(typed),
        )
        chat_session = ChatSession(
            name,
            model,
            conversation,
            config,
            ui,
            run_flags.stops,
            run_flags.ignore_eos,
            reasoning_budget=budget,
            display=DisplaySettings(
                probs=run_flags.logprobs,
                thinking=HIDE if run_flags.hide_thinking else SHOW,
                markdown=run_flags.markdown,
            ),
        )
        if run_flags.reasoning != "auto":
            find_setting("reasoning").set_value(chat_session, run_flags.reasoning)
        yield chat_session


def _connection(options: ServerOptions, base_url: str, config: "Config") -> "ConnectionSettings":
    """Return how to connect to the server. A typed key comes before that of LLMCLI_API_KEY. Raises
    UserError or UsageError for a wrong key.
    """
    from llmcli.http_client.api_key import read_api_key
    from llmcli.http_client.client import ConnectionSettings

    if options.api_key and options.api_key_file:
        raise UsageError("two keys given", hint="leave out --api-key or --api-key-file")
    key = options.api_key or (None if options.api_key_file else config.server_key)
    return ConnectionSettings(
        uses_tls=base_url.startswith("https"),
        api_key=read_api_key(key, options.api_key_file),
        cacert=options.cacert,
        insecure=options.insecure,
        timeout_seconds=MAX_ANSWER_SECONDS,
    )


def _check_offline(base_url: str, config: "Config") -> None:
    """Raise UserError for a server of another machine if no network connection may be made."""
    if config.offline and not is_loopback(base_url):
        raise UserError(
            f"offline: no connection to {base_url} is made",
            hint="leave out --offline (or HF_HUB_OFFLINE), or use a server on this machine",
        )
