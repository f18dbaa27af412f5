"""`PlacementOptions`: what a user asks for about the devices of a model."""

from dataclasses import dataclass, fields, replace

from llmcli.runtime.binding.placement.model_placement import ModelPlacement, TensorOverride


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """What a user asks for about the devices of a model. Defaults leave the choice to llmcli.

    - `tensor_split`: proportions of the layers for each GPU and RPC worker.
    - `cpu_moe`: how many layers keep their experts on the host: a number, "auto" or "all".
    - `kv_offload`: False keeps the KV cache on the host.
    - `devices`, `split_mode`, `main_gpu`, `tensor_overrides`, `load_mode`, `numa`: as in
      ModelPlacement.
    """

    tensor_split: tuple[float, ...] = ()
    cpu_moe: str = "auto"
    kv_offload: bool = True
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_overrides: tuple[TensorOverride, ...] = ()
    load_mode: str = "auto"
    numa: str = ""

    def apply_to(self, placement: ModelPlacement) -> ModelPlacement:
        """Return a placement with the devices, overrides and ways of loading that were asked for."""
        return replace(
            placement,
            devices=self.devices,
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            tensor_overrides=self.tensor_overrides,
            load_mode=self.load_mode,
            numa=self.numa,
        )

    @property
    def placement_identity(self) -> str:
        """Return a text that differs where results may differ, because other devices compute; ""
        for the defaults. How the file is loaded has no influence.
        """
        values = {each.name: getattr(self, each.name) for each in fields(PlacementOptions)}
        # a PlacementOptions also where this is a RunOptions, whose other options do not count
        same = PlacementOptions(**values | {"load_mode": "auto", "numa": ""})
        return "" if same == NO_PLACEMENT else repr(same)

    def as_asked(self, gpu_layers: int) -> ModelPlacement:
        """Return the placement of `gpu_layers` layers (negative: all), with nothing chosen by
        llmcli: experts move with their layers unless a number keeps them on the host.
        """
        layers = {"auto": 0, "all": -1}.get(self.cpu_moe)
        count = int(self.cpu_moe) if layers is None else layers
        return self.apply_to(ModelPlacement(gpu_layers, self.tensor_split, count))


NO_PLACEMENT = PlacementOptions()
PLACEMENT_FIELDS = tuple(field.name for field in fields(PlacementOptions))
