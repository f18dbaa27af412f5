"""The options of `quantize` that set the types of single tensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.recipes.tensor_types import TypeOverrides


@dataclass(frozen=True, slots=True)
class TensorTypeSettings:
    """The types of single tensors, which override the file type's recipe. The fields are the
    command-line options of the same names.
    """

    tensor_type: list[str] | None = None
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    leave_output_tensor: bool = False
    pure: bool = False

    @property
    def recipe_overrides(self) -> "TypeOverrides":
        """The overrides as an object of `quant`."""
        from quant.recipes.tensor_types import TypeOverrides

        return TypeOverrides(
            tuple(self.tensor_type or ()),
            self.pure,
            self.output_tensor_type,
            self.token_embedding_type,
            self.leave_output_tensor,
        )
