"""KV states of saved chats: with NAME.kv, the conversation is not computed again after /load.

A chat can be loaded without its state; one line then says why the state was not used.
"""

from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.chat.chat_session import ChatSession
from llmcli.runtime import kv_state_file


def save_state(chat: ChatSession, path: Path) -> str:
    """Write the conversation's KV state to `path`; return a description for the user.

    Removes an older state if there is nothing to save. Raises UserError if the disk cannot be
    written.
    """
    saved_state = kv_state_file.copy_state(
        chat.runner, chat.conversation_tokens() or chat.runner.engine.ledger.latest_tokens
    )
    environment = kv_state_file.state_identity(chat.runner)
    if saved_state is None or environment is None:
        path.unlink(missing_ok=True)
        return (
            ""
            if saved_state is None
            else "without its KV state: the model file has changed since it was loaded"
        )
    if not kv_state_file.has_complete_state(chat.runner, len(saved_state.tokens)):
        path.unlink(missing_ok=True)
        return (
            "without its KV state: the model's attention windows no longer see all of it, "
            "which --reproducible requires"
        )
    # readable by the user only: the state reveals the conversation
    write_atomically(path, *kv_state_file.encode_state(saved_state, environment), mode=0o600)
    return f"with the KV state of {len(saved_state.tokens)} tokens"


def restore_state(chat: ChatSession, path: Path) -> str:
    """Read the KV state of the conversation that was just loaded; return a description for the
    user.
    """
    tokens, ledger, reason = chat.conversation_tokens(), chat.runner.engine.ledger, ""
    if not tokens:
        return ""
    if 2 * ledger.find_nearest(tokens)[1] < len(tokens):
        # The cells of another conversation cannot be reused, and would slow down every pass.
        ledger.evict_idle()
    try:
        with path.open("rb") as file:
            kv_state_file.restore_state(
                chat.runner,
                kv_state_file.read_state(file, chat.runner),
                chat.conversation.tree.current_turn,
            )
    except FileNotFoundError:
        reason = "it was saved without a KV state"
    except OSError as error:
        reason = f"its KV state cannot be read ({error.strerror})"
    except kv_state_file.UnusableState as error:
        reason = f"its KV state is not used: {error}"
    if n_cached := ledger.find_nearest(tokens)[1]:
        return f"{n_cached} of {len(tokens)} tokens in the cache" + (
            f" ({reason})" if reason else ""
        )
    return (
        f"{reason or 'its KV state has other tokens'}; "
        f"{len(tokens)} tokens are computed with the next message"
    )
