"""--tensor-type and its companions as one value."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quant.recipes.tensor_types import TypeOverrides


@dataclass(frozen=True, slots=True)
class TensorTypeOptions:
    """Types for single tensors that override the file type's recipe."""

    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor-type",
            metavar="REGEX=TYPE",
            help="Type of the tensors whose name matches; repeatable.",
        ),
    ] = None
    output_tensor_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of output.weight.")
    ] = None
    token_embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of token_embd.weight.")
    ] = None
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Do not quantize output.weight.")
    ] = False
    pure: Annotated[
        bool,
        typer.Option("--pure", help="One type for all matrices instead of the recipe's mixture."),
    ] = False

    @property
    def recipe_overrides(self) -> "TypeOverrides":
        """The overrides as quant takes them."""
        from quant.recipes.tensor_types import TypeOverrides

        return TypeOverrides(
            tuple(self.tensor_type or ()),
            self.pure,
            self.output_tensor_type,
            self.token_embedding_type,
            self.leave_output_tensor,
        )
