"""Where llama.cpp puts the weights of a model: on which devices, and in which layout."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.model_file.model_header import ModelHeader

ALL_GPU_LAYERS = -1


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """The placement of a model's weights.

    - `gpu_layers`: how many layers to put on GPUs and RPC workers; negative for all.
    - `tensor_split`: the proportions of the layers that each of these devices gets; empty to
      distribute the layers by free memory.
    - `cpu_moe_layers`: how many layers keep their experts on the host; negative for all. Layers are
      counted from the first.
    - `repack`: let llama.cpp copy weights into the layout of the CPU's kernels. On a CPU with AMX,
      models with latent attention are never repacked, because llama.cpp aborts on a product of a
      repacked matrix with a tensor that is not in memory order.
    - `latent`: whether the model has latent attention (MLA); None reads this from the file.
    """

    gpu_layers: int = ALL_GPU_LAYERS
    tensor_split: tuple[float, ...] = ()
    cpu_moe_layers: int = 0
    repack: bool = True
    latent: bool | None = None

    @property
    def uses_gpu(self) -> bool:
        """Return whether layers are put on a GPU or an RPC worker, if there is one."""
        return self.gpu_layers != 0

    def for_header(self, header: "ModelHeader") -> "ModelPlacement":
        """Return the placement with what the header of the model file says, so that `open_model`
        need not read the file for it.
        """
        return replace(self, latent=header.has_latent_attention)

    def for_draft(self) -> "ModelPlacement":
        """Return the placement of a draft model: all of it on GPUs if layers of the main model are
        there, and otherwise none.
        """
        return replace(self, gpu_layers=ALL_GPU_LAYERS if self.uses_gpu else 0, latent=None)


EVERYWHERE = ModelPlacement()
ON_HOST = ModelPlacement(gpu_layers=0)
