"""`PlacementFlags`: the options of a command that say on which devices a model runs, as they were
typed, and their values once they are checked.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.runtime.binding.placement.model_placement import TensorOverride
    from llmcli.runtime.requests.placement_options import PlacementOptions
    from llmcli.ui import UI

LAYERS_HINT = "--n-cpu-moe takes a number of layers, auto or all"


@dataclass(frozen=True, slots=True)
class PlacementFlags:
    """The typed values of the options in the panel Placement. None, False: not typed."""

    rpc: str | None = None  # addresses of workers, such as "host:port,host:port"
    device: str | None = None  # names of devices, such as "CUDA0,RPC0"
    tensor_split: str | None = None  # share of the model for each device, such as "3,1"
    split_mode: str | None = None
    main_gpu: int | None = None
    n_cpu_moe: str | None = None
    cpu_moe: bool = False
    override_tensor: list[str] | None = None  # such as "blk.1.=CPU,blk.2.=CUDA0"
    no_kv_offload: bool = False
    load_mode: str | None = None
    mlock: bool = False
    mmap: bool = False
    no_mmap: bool = False
    numa: str | None = None

    @property
    def typed(self) -> tuple[str, ...]:
        """Return the names of the fields that were typed."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return tuple(
            name for name, value in values.items() if value is not None and value is not False
        )

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return the long spellings of the options that were typed."""
        return tuple(map(_spell, self.typed))

    def join(self, ui: "UI", runs_model: bool = True) -> "PlacementOptions":
        """Register the workers, so that models loaded later use them, and return the checked
        options. `runs_model`: whether the command loads a model.

        Raises UserError for an invalid value, and if a worker or a device cannot be used. Raises
        UsageError for options that contradict each other, and if an option was typed but the command
        loads no model.
        """
        from llmcli.model_loader.rpc_workers import join_workers
        from llmcli.runtime.requests.placement_options import NO_PLACEMENT

        if not self.typed:
            return NO_PLACEMENT
        if not runs_model:
            names = " and ".join(self.spellings)
            raise UsageError(
                f"{names} {'has' if len(self.typed) == 1 else 'have'} no effect: "
                "this command runs no model here",
                hint=f"leave out {names}",
            )
        options = self.parse()
        join_workers(self.rpc, ui)
        from llmcli.planning.placement.used_devices import resolve_devices

        return resolve_devices(options)

    def parse(self) -> "PlacementOptions":
        """Return the values, without looking at the devices of this machine. Raises UserError or
        UsageError.
        """
        from llmcli.runtime.binding.placement.model_placement import (
            NO_DEVICES,
            NUMA_STRATEGIES,
            SPLIT_MODES,
        )
        from llmcli.runtime.requests.placement_options import PlacementOptions

        devices = _parse_devices(self.device)
        if devices == NO_DEVICES and (useless := self._device_flags()):
            raise UsageError(
                f"-dev none uses no device, so {useless[0]} has no effect",
                hint=f"leave out -dev none or {useless[0]}",
            )
        split_mode = _choose("-sm", self.split_mode, SPLIT_MODES, "layer")
        if self.main_gpu is not None and split_mode != "none":
            raise UsageError(
                f"--main-gpu names the only device, which -sm {split_mode} does not have",
                hint=f"-sm none -mg {self.main_gpu}, or -dev NAME",
            )
        return PlacementOptions(
            tensor_split=_parse_split(self.tensor_split),
            cpu_moe=self._parse_expert_layers(),
            kv_offload=not self.no_kv_offload,
            devices=devices,
            split_mode=split_mode,
            main_gpu=self.main_gpu or 0,
            tensor_overrides=_parse_overrides(self.override_tensor or ()),
            load_mode=self._parse_load_mode(),
            numa=_choose("--numa", self.numa, NUMA_STRATEGIES, ""),
        )

    def _device_flags(self) -> list[str]:
        """Return the spellings of the typed options that have no effect without devices."""
        needing = ("rpc", "tensor_split", "split_mode", "main_gpu")
        return [_spell(name) for name in needing if name in self.typed]

    @property
    def moves_work(self) -> bool:
        """Return whether a typed option asks for devices besides the processor."""
        return bool(self._device_flags() or self.override_tensor) or (
            self.device is not None and self.device.strip() != "none"
        )

    def _parse_expert_layers(self) -> str:
        """Return how many layers keep their experts on the host: a number, "auto" or "all"."""
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise UsageError(
                f"--cpu-moe keeps the experts of all layers on the host, --n-cpu-moe those of"
                f" {self.n_cpu_moe}",
                hint="leave out one of them",
            )
        text = "all" if self.cpu_moe else (self.n_cpu_moe or "auto").strip().lower()
        if text not in ("auto", "all") and not re.fullmatch(r"[0-9]{1,6}", text):
            raise UserError(f"--n-cpu-moe is {self.n_cpu_moe!r}", hint=LAYERS_HINT)
        return text

    def _parse_load_mode(self) -> str:
        """Return one of LOAD_MODES, from --load-mode or from the older options."""
        from llmcli.runtime.binding.placement.model_placement import LOAD_MODES

        older = [flag for flag in ("mlock", "mmap", "no_mmap") if getattr(self, flag)]
        if self.mmap and self.no_mmap:
            raise UsageError(
                "--mmap and --no-mmap contradict each other", hint="leave out one of them"
            )
        if self.load_mode is not None and older:
            raise UsageError(
                f"--load-mode and {_spell(older[0])} both say how the file is loaded",
                hint=f"leave out {_spell(older[0])}",
            )
        if self.mlock:
            return "mlock" if self.no_mmap else "mmap+mlock"
        chosen = "mmap" if self.mmap else "none" if self.no_mmap else "auto"
        return _choose("--load-mode", self.load_mode, LOAD_MODES, chosen)


NO_PLACEMENT_FLAGS = PlacementFlags()


def _spell(name: str) -> str:
    """Return the long spelling of the option of a field."""
    return "--" + name.replace("_", "-")


def _choose(flag: str, text: str | None, allowed: "Sequence[str]", default: str) -> str:
    """Return a value among `allowed` in lower case; `default` for None. Raises UserError."""
    if text is None:
        return default
    if text.lower() not in allowed:
        raise UserError(f"{flag} is {text!r}", hint=f"{flag} takes one of: {', '.join(allowed)}")
    return text.lower()


def _parse_split(text: str | None) -> tuple[float, ...]:
    """Return the proportions in a value of --tensor-split: (3.0, 1.0) for "3,1". Empty for None.
    Raises UserError for an invalid value.
    """
    if text is None:
        return ()
    try:
        proportions = tuple(float(number) for number in text.replace("/", ",").split(","))
    except ValueError:
        proportions = ()
    if (
        not proportions
        or not all(math.isfinite(proportion) and proportion >= 0 for proportion in proportions)
        or not any(proportions)
    ):
        raise UserError(f"--tensor-split is {text!r}", hint="-ts takes proportions, such as 3,1")
    return proportions


def _parse_devices(text: str | None) -> tuple[str, ...]:
    """Return the names in a value of --device; empty for None. Raises UserError."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if "" in names or ("none" in names and len(names) > 1):
        raise UserError(
            f"--device is {text!r}", hint="-dev takes names, such as CUDA0,CUDA1, or none"
        )
    if len(set(names)) < len(names):
        raise UserError(f"--device {text} names a device twice", hint="name each device once")
    return names


def _parse_overrides(texts: "list[str] | tuple[str, ...]") -> "tuple[TensorOverride, ...]":
    """Return the overrides in values of --override-tensor. Raises UserError."""
    from llmcli.planning.placement.tensor_patterns import check_pattern
    from llmcli.runtime.binding.placement.model_placement import TensorOverride

    overrides = []
    for part in (part for text in texts for part in text.split(",")):
        pattern, _, buffer = part.partition("=")
        if not pattern or not buffer.strip():
            raise UserError(
                f"--override-tensor: {part!r} is not PATTERN=BUFFER",
                hint=r"for example: -ot 'blk\.[0-9]\.ffn=CPU'",
            )
        check_pattern(pattern)
        overrides.append(TensorOverride(pattern, buffer.strip()))
    return tuple(overrides)
