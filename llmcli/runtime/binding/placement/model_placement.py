"""Where llama.cpp puts the weights of a model: on which devices, and in which layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant.model_file.model_header import ModelHeader

ALL_GPU_LAYERS = -1
HOST_BUFFER = "CPU"  # the buffer type of the host's memory
NO_DEVICES = ("none",)  # in place of the names of devices: use none
EXPERTS_PATTERN = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # common/common.h, LLM_FFN_EXPS_REGEX
SPLIT_MODES = ("none", "layer", "row", "tensor")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock")
NUMA_STRATEGIES = ("distribute", "isolate", "numactl")


@dataclass(frozen=True, slots=True)
class TensorOverride:
    """Tensors with a name that contains `pattern`, a regular expression, are put into buffers of
    the type `buffer`, whatever the layer's device.
    """

    pattern: str
    buffer: str


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
    - `ggml_products`: use ggml's layouts and kernels, not llmcli's own (kernels/products.py).
      `ggml_types`: use them for these types of weights, for which they are faster here.
    - `latent`: whether the model has latent attention (MLA); None reads this from the file.
    - `devices`: the names of the devices to use, in this order; empty for llama.cpp's choice,
      NO_DEVICES for none.
    - `split_mode`: one of SPLIT_MODES. `main_gpu`: with "none", the number of the only device.
    - `tensor_overrides`: the first one that matches a tensor decides, before `cpu_moe_layers`.
    - `load_mode`: one of LOAD_MODES. `numa`: one of NUMA_STRATEGIES, or empty; the first model that
      a process loads decides.
    """

    gpu_layers: int = ALL_GPU_LAYERS
    tensor_split: tuple[float, ...] = ()
    cpu_moe_layers: int = 0
    repack: bool = True
    ggml_products: bool = False
    ggml_types: tuple[str, ...] = ()
    latent: bool | None = None
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_overrides: tuple[TensorOverride, ...] = ()
    load_mode: str = "auto"
    numa: str = ""

    @property
    def uses_gpu(self) -> bool:
        """Return whether weights are put on a GPU or an RPC worker, if there is one."""
        has_override = any(entry.buffer != HOST_BUFFER for entry in self.tensor_overrides)
        return self.devices != NO_DEVICES and (self.gpu_layers != 0 or has_override)

    @property
    def maps_file(self) -> bool:
        """Return whether weights on the host stay in the mapped file, so that the system can drop
        them and read them again. Locked weights cannot be dropped.
        """
        return self.load_mode in ("auto", "mmap")

    @property
    def overrides(self) -> tuple[TensorOverride, ...]:
        """Return all overrides as llama.cpp gets them, including that of `cpu_moe_layers`. It is one
        pattern for all layers, because llama.cpp compiles each pattern again for each tensor.
        """
        count = self.cpu_moe_layers
        if not count:
            return self.tensor_overrides
        layers = "" if count < 0 else rf"blk\.({'|'.join(map(str, range(count)))})"
        return (*self.tensor_overrides, TensorOverride(layers + EXPERTS_PATTERN, HOST_BUFFER))

    def own_product_types(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return those of the `known` types of weights that llmcli's own products multiply."""
        if self.ggml_products:
            return ()
        return tuple(name for name in known if name not in self.ggml_types)

    def on_host(self) -> "ModelPlacement":
        """Return the placement of a model on the processor alone, loaded in the same way."""
        return ModelPlacement(
            0,
            repack=self.repack,
            ggml_products=self.ggml_products,
            ggml_types=self.ggml_types,
            latent=self.latent,
            devices=NO_DEVICES,
            load_mode=self.load_mode,
            numa=self.numa,
        )

    def for_header(self, header: "ModelHeader") -> "ModelPlacement":
        """Return the placement with what the header of the model file says, so that `open_model`
        need not read the file for it.
        """
        return replace(self, latent=header.has_latent_attention)

    def for_draft(self) -> "ModelPlacement":
        """Return the placement of a draft model: all of it on GPUs if layers of the main model are
        there, and otherwise none. Overrides and experts on the host are those of the main model.
        """
        return replace(
            self,
            gpu_layers=ALL_GPU_LAYERS if self.uses_gpu else 0,
            latent=None,
            cpu_moe_layers=0,
            tensor_overrides=(),
        )


EVERYWHERE = ModelPlacement()
ON_HOST = ModelPlacement(gpu_layers=0)
