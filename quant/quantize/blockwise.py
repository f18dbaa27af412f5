"""Block-by-block quantization (`--sequential`): each group of tensors is quantized with moments of
the model whose earlier groups are already quantized.

The first group is the embeddings, then each block is a group, and the last group is all other
tensors, which include a tied embedding. Each group is a shard of a model that llama.cpp can run at
any time: a shard contains the source's tensors until the quantized ones replace it. An interrupted
run resumes from the shards; at the end they are merged into one file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quant.calibration.statistics import SecondMoments
from quant.checkpoint.safetensors import FLOAT_DTYPES
from quant.gguf import header
from quant.model_file import read_header
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import Plan, Shard, TensorPlan, apply_moments, plan_quantization
from quant.recipes.tensor_types import EMBEDDING_NAMES, HEAD_NAME, tensor_order
from quant.source.source import Weight, make_file_row_reader


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are quantized together, in shard `number`. `plan` writes the shard with
    quantized tensors, `unquantized_plan` with the source's tensors.
    """

    number: int
    name: str
    plan: Plan
    unquantized_plan: Plan

    @property
    def moment_weights(self) -> frozenset[str]:
        """The weights whose method needs second moments."""
        needing = (
            step for step in self.plan.steps if step.method and step.method.needs == "moments"
        )
        return frozenset(step.weight.name for step in needing)


class BlockwiseModel:
    """A model in a folder, with a shard for each group of the plan's tensors. `floats` is the plan
    of the unquantized model.
    """

    def __init__(self, plan: Plan, floats: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        steps = {step.weight.name: step for step in floats.steps}
        named_groups = group_tensors(plan.steps)
        count, total = len(named_groups), len(plan.steps)
        unquantized_settings = json.dumps({"unmade": plan.settings})
        self.groups = tuple(
            TensorGroup(
                number,
                name,
                replace(plan, steps=group, max_shard_bytes=0, shard=Shard(number, count, total)),
                replace(
                    plan,
                    steps=tuple(steps[step.weight.name] for step in group),
                    max_shard_bytes=0,
                    settings=unquantized_settings,
                    shard=Shard(number, count, total),
                ),
            )
            for number, (name, group) in enumerate(named_groups.items())
        )

    @property
    def model_path(self) -> Path:
        """The path of the first shard, from which llama.cpp opens the model."""
        return self.group_path(self.groups[0])

    @property
    def ordered_groups(self) -> tuple[TensorGroup, ...]:
        """The groups in the order in which they are quantized. The first shard, which has the
        header, is the last.
        """
        return (*self.groups[1:], self.groups[0])

    def group_path(self, group: TensorGroup) -> Path:
        """Return the path of a group's shard."""
        return self.folder / f"model-{group.number + 1:05}-of-{len(self.groups):05}.gguf"

    def is_finished(self, group: TensorGroup) -> bool:
        """Return whether a group's shard has its quantized tensors."""
        return write.is_finished(group.plan, self.group_path(group))

    def write_missing(self, threads: int) -> Iterator[TensorGroup]:
        """Write the shards that are missing, and yield each group. All groups after the first
        unfinished group are written unquantized.
        """
        is_prefix_finished = True
        for group in self.ordered_groups:
            is_prefix_finished = is_prefix_finished and self.is_finished(group)
            if not is_prefix_finished:
                write.write_model(group.unquantized_plan, self.group_path(group), threads=threads)
            yield group

    def quantize_group(
        self, group: TensorGroup, moments: Mapping[str, SecondMoments], work: write.WriteRun
    ) -> tuple[TensorPlan, ...]:
        """Quantize a group with the second moments of its inputs; return the plans of its tensors."""
        steps = apply_moments(group.plan, moments)
        work.write_file(replace(group.plan, steps=steps), self.group_path(group))
        return steps

    def merged_plan(self) -> Plan:
        """Return the plan of the single file into which the finished shards are copied."""
        finished = {
            tensor.name: tensor for tensor in read_header.read_header(self.model_path).tensors
        }
        return replace(
            self.plan,
            steps=tuple(_copy_step(step, finished[step.weight.name]) for step in self.plan.steps),
        )


def group_tensors(steps: Sequence[TensorPlan]) -> dict[str, tuple[TensorPlan, ...]]:
    """Return the tensors by group: first the tensors that are not in a block, which go with the
    header, then the embeddings, then each block.
    """
    names = {step.weight.name for step in steps}
    looked_up = EMBEDDING_NAMES if HEAD_NAME in names else EMBEDDING_NAMES[1:]
    others: list[TensorPlan] = []
    embeddings: list[TensorPlan] = []
    blocks: dict[int, list[TensorPlan]] = {}
    for step in steps:
        block = tensor_order(step.weight.name)[0]
        outside = embeddings if step.weight.name in looked_up else others
        (blocks.setdefault(block, []) if block >= 0 else outside).append(step)
    named = {
        "other tensors": others,
        "embeddings": embeddings,
        **{f"block {at}": blocks[at] for at in sorted(blocks)},
    }
    return {name: tuple(group) for name, group in named.items() if group}


def _copy_step(step: TensorPlan, there: header.TensorInfo) -> TensorPlan:
    """Return the plan that copies a tensor from its finished shard."""
    width = ggml.row_bytes(there.type, there.columns)
    read = make_file_row_reader(there.file, there.offset, width, there.name)
    assert (there.type, there.shape) == (step.type, step.weight.shape), there
    return replace(step, weight=Weight(there.name, there.shape, there.type, read), method=None)


def unquantized_plan(plan: Plan) -> Plan:
    """Return the plan of the unquantized model: the tensors of a GGUF stay as they are stored,
    those of a checkpoint folder get its float type.
    """
    source = plan.source
    if source.path.is_dir():
        return plan_quantization(source, source.dtype if source.dtype in FLOAT_DTYPES else "F32")
    steps = (
        replace(step, type=step.weight.type, nbytes=step.weight.nbytes, method=None)
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))
