"""The options that say on which devices a model runs, with llama.cpp's spellings: for commands with
the run options (PLACEMENT_FLAGS) and, as an option group, for the others (PlacementGroup).
"""

from dataclasses import dataclass
from typing import Annotated

from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import flag_option, option_group
from llmcli.model_loader.placement_flags import PlacementFlags


@dataclass(frozen=True, slots=True)
class PlacementFlag:
    """One option. `name`: its field of PlacementFlags. `kind`: str, int, bool (a switch) or list
    (repeatable).
    """

    name: str
    spellings: tuple[str, ...]
    kind: type
    help: str
    metavar: str | None = None


PLACEMENT_FLAGS = (
    PlacementFlag(
        "rpc",
        ("--rpc",),
        str,
        "place part of the model on these workers (llmcli worker --rpc)",
        "HOST:PORT,...",
    ),
    PlacementFlag(
        "device",
        ("-dev", "--device"),
        str,
        "the devices to use, in this order; none: only the processor [all]",
        "NAME,NAME,...",
    ),
    PlacementFlag(
        "split_mode",
        ("-sm", "--split-mode"),
        str,
        "several devices share: none (one is used), layer, row, tensor [layer]",
        "MODE",
    ),
    PlacementFlag(
        "main_gpu",
        ("-mg", "--main-gpu"),
        int,
        "with -sm none: the number of the device, from 0 [0]",
        "N",
    ),
    PlacementFlag(
        "tensor_split",
        ("-ts", "--tensor-split"),
        str,
        "proportions of the layers: workers' devices first, then local GPUs [by free memory]",
        "N,N,...",
    ),
    PlacementFlag(
        "n_cpu_moe",
        ("-ncmoe", "--n-cpu-moe"),
        str,
        "layers that keep their experts in the host's memory: a number, all [auto]",
        "N",
    ),
    PlacementFlag("cpu_moe", ("-cmoe", "--cpu-moe"), bool, "keep all experts in the host's memory"),
    PlacementFlag(
        "override_tensor",
        ("-ot", "--override-tensor"),
        list,
        "put tensors whose names match a pattern into a device's buffer or CPU; repeatable",
        "PATTERN=BUFFER,...",
    ),
    PlacementFlag(
        "no_kv_offload",
        ("-nkvo", "--no-kv-offload"),
        bool,
        "keep the KV cache in the host's memory",
    ),
    PlacementFlag(
        "load_mode",
        ("-lm", "--load-mode"),
        str,
        "weights on the host: mmap (in the mapped file), none (in memory), mlock, mmap+mlock (locked) "
        "[auto]",
        "MODE",
    ),
    PlacementFlag("mlock", ("--mlock",), bool, "same as -lm mmap+mlock"),
    PlacementFlag("mmap", ("--mmap",), bool, "same as -lm mmap"),
    PlacementFlag("no_mmap", ("--no-mmap",), bool, "same as -lm none; with --mlock: -lm mlock"),
    PlacementFlag(
        "numa",
        ("--numa",),
        str,
        "threads on several NUMA nodes: distribute, isolate, numactl",
        "HOW",
    ),
)


PlacementGroup = Annotated[
    PlacementFlags,
    option_group(panels.PLACEMENT, **{flag.name: flag_option(flag) for flag in PLACEMENT_FLAGS}),
]
