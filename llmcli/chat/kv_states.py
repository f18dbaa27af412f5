"""KV states beside saved chats: NAME.kv, which spares the chat's next answer its prefill.

A chat can always be read without one. Of a state that cannot be taken up it is said why, in one
line.
"""

from pathlib import Path

from llmcli.atomic_files import write_whole
from llmcli.chat.chat_session import Talk
from llmcli.runtime import kv_state_file


def keep(talk: Talk, path: Path) -> str:
    """Write the conversation's KV state to `path` and tell how large it is; where there is none
    remove the old one.

    Raises UserError where the disk does not take it.
    """
    kept = kv_state_file.keep(talk.runner, talk.spoken() or talk.runner.engine.ledger.latest)
    here = kv_state_file.world(talk.runner)
    if kept is None or here is None:
        path.unlink(missing_ok=True)
        return (
            ""
            if kept is None
            else "without its KV state: the model's file has changed since it was loaded"
        )
    if not kv_state_file.whole(talk.runner, len(kept.tokens)):
        path.unlink(missing_ok=True)
        return "without its KV state: the model's windows no longer see all of it, which --reproducible needs"
    write_whole(
        path, *kv_state_file.parts(kept, here), mode=0o600
    )  # what people say can be read from it
    return f"with the KV state of {len(kept.tokens)} tokens"


def take_up(talk: Talk, path: Path) -> str:
    """Read the KV state of the conversation that was just loaded; what it is worth, in words."""
    spoken, ledger, why = talk.spoken(), talk.runner.engine.ledger, ""
    if not spoken:
        return ""
    if 2 * ledger.nearest(spoken)[1] < len(spoken):
        # another conversation's cells: of no use, and every pass would go through them
        ledger.forget_idle()
    try:
        with path.open("rb") as file:
            kv_state_file.resume(
                talk.runner, kv_state_file.read(file, talk.runner), talk.session.tree.at
            )
    except FileNotFoundError:
        why = "no KV state is kept with it"
    except OSError as error:
        why = f"its KV state cannot be read ({error.strerror})"
    except kv_state_file.Unusable as error:
        why = f"its KV state is not used: {error}"
    if cached := ledger.nearest(spoken)[1]:
        return f"{cached} of {len(spoken)} tokens in the cache" + (f" ({why})" if why else "")
    return f"{why or 'its KV state is of other tokens'}; {len(spoken)} tokens are computed with the next message"
