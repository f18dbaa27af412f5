"""Whether a full context may slide: whether the oldest tokens can be dropped, and cached keys moved."""

from llmcli.errors import UserError
from llmcli.runtime.runner import Runner


def require_sinks_support(runner: Runner) -> None:
    """Raise UserError if attention sinks are not possible with this model or these options.

    With sinks, cached keys are rotated to other positions and still reflect removed tokens. Some
    models do not support the rotation, and --reproducible does not allow it.
    """
    if runner.options.reproducible:
        raise UserError(
            "sinks keep values that were computed with removed tokens, "
            "which --reproducible does not allow",
            hint="use --on-full shift, which recomputes what stays",
        )
    if runner.context.can_shift:
        return
    if runner.options.cache_type_k == "bf16":
        raise UserError(
            "sinks move keys to other positions, and bf16 keys cannot be rotated",
            hint="use -ctk f16",
        )
    reason = "keys cannot be rotated to other positions"
    if runner.context.is_recurrent:
        reason = "state is recurrent"
    elif runner.context.n_swa:
        reason = f"window of {runner.context.n_swa} tokens has separate cells"
    raise UserError(
        f"sinks move keys to other positions, but this model's {reason}",
        hint="use --on-full shift: whole turns leave, and what stays is recomputed",
    )
