"""What an earlier plan or load of a model has found, so that another load need not find it again."""

from dataclasses import dataclass

from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses


@dataclass(frozen=True, slots=True)
class EarlierLoad:
    """The findings for a file and settings that have not changed since.

    - `n_ctx`: the context in tokens for which the model was planned.
    - `passes`: the passes that were measured; None: they are measured again.
    """

    n_ctx: int
    passes: MeasuredPasses | None = None
