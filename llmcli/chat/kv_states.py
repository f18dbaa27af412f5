"""Saves the KV cache of a conversation next to a saved chat, in NAME.kv, and restores it. After
/load, the model then need not compute the conversation again.

If a KV state is missing or does not fit the open model, the chat is loaded without it, with a text
that says why.
"""

from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.chat.chat_model import ChatState
from llmcli.runtime import kv_state_file


def save_state(chat: ChatState, path: Path) -> str:
    """Write the conversation's KV state to `path`. Return a text for the user that says what was
    saved, or why nothing was. If nothing can be saved, an older file at `path` is removed, because
    it does not fit the conversation any more.

    Raises UserError if the file cannot be written.
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
    # Only the user may read the file, because the state reveals the conversation.
    write_atomically(path, *kv_state_file.encode_state(saved_state, environment), mode=0o600)
    return f"with the KV state of {len(saved_state.tokens)} tokens"


def restore_state(chat: ChatState, path: Path) -> str:
    """Restore the KV cache of the conversation, which must be loaded already, from the file `path`.
    Return a text for the user: how many tokens are in the cache, or why the file was not used.
    Empty if the conversation has no tokens.
    """
    tokens, ledger, reason = chat.conversation_tokens(), chat.runner.engine.ledger, ""
    if not tokens:
        return ""
    if 2 * ledger.find_nearest(tokens)[1] < len(tokens):
        # The cache contains another conversation, whose cells would slow down every pass.
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
