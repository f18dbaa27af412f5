"""Block-by-block quantization (`--sequential`): tensors are quantized in groups, each with moments
that are measured in the model with all earlier groups already quantized.

The first group is the embeddings, then each block is a group. The last group is all other tensors,
which include a tied embedding. Each group is a shard of a model that llama.cpp can run at any time:
a shard contains the source's tensors until the quantized ones replace it. An interrupted run
resumes from the shards; at the end they are merged into one file.
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
from quant.quantize.plan import Plan, TensorPlan, apply_moments, plan_quantization
from quant.quantize.shards import Shard
from quant.recipes.tensor_types import EMBEDDING_NAMES, HEAD_NAME, tensor_order
from quant.source.source import Weight, make_file_row_reader


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are quantized together, in shard `number`. `plan` writes the shard with
    quantized tensors, `unquantized_plan` writes it with the source's tensors.
    """

    number: int
    name: str
    plan: Plan
    unquantized_plan: Plan

    @property
    def moment_weights(self) -> frozenset[str]:
        """Names of the weights whose method needs second moments of their input."""
        steps = (step for step in self.plan.steps if step.method and step.method.needs == "moments")
        return frozenset(step.weight.name for step in steps)


class BlockwiseModel:
    """A model in a folder that is quantized group by group, with one shard for each group.

    `plan` is the plan of the quantized model, and `floats` that of the unquantized one.
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
        header and the tensors outside of blocks, comes last.
        """
        return (*self.groups[1:], self.groups[0])

    def group_path(self, group: TensorGroup) -> Path:
        """Return the path of a group's shard."""
        return self.folder / f"model-{group.number + 1:05}-of-{len(self.groups):05}.gguf"

    def is_finished(self, group: TensorGroup) -> bool:
        """Return whether a group's shard has its quantized tensors."""
        return write.is_finished(group.plan, self.group_path(group))

    def write_missing(self, threads: int) -> Iterator[TensorGroup]:
        """Write the missing shards, and yield each group after its shard exists. Groups after the
        first unfinished one are written unquantized, even if their shards are finished, because a
        group's moments are measured with all later groups unquantized.
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
        """Quantize a group with the second moments of its inputs (by tensor name) and write its
        shard. Return the plans of its tensors.
        """
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
    """Return the tensors of each group by its name, in the order of the shards: first the tensors
    outside of blocks, whose shard has the header, then the embeddings, then each block.
    """
    names = {step.weight.name for step in steps}
    embedding_names = EMBEDDING_NAMES if HEAD_NAME in names else EMBEDDING_NAMES[1:]
    others: list[TensorPlan] = []
    embeddings: list[TensorPlan] = []
    blocks: dict[int, list[TensorPlan]] = {}
    for step in steps:
        block = tensor_order(step.weight.name)[0]
        outside = embeddings if step.weight.name in embedding_names else others
        (blocks.setdefault(block, []) if block >= 0 else outside).append(step)
    groups = {
        "other tensors": others,
        "embeddings": embeddings,
        **{f"block {at}": blocks[at] for at in sorted(blocks)},
    }
    return {name: tuple(group) for name, group in groups.items() if group}


def _copy_step(step: TensorPlan, finished: header.TensorInfo) -> TensorPlan:
    """Return the plan that copies a tensor from its finished shard. `finished` is the tensor in the
    shard.
    """
    width = ggml.row_bytes(finished.type, finished.columns)
    read = make_file_row_reader(finished.file, finished.offset, width, finished.name)
    assert (finished.type, finished.shape) == (step.type, step.weight.shape), finished
    return replace(
        step, weight=Weight(finished.name, finished.shape, finished.type, read), method=None
    )


def unquantized_plan(plan: Plan) -> Plan:
    """Return the plan of the unquantized model. The tensors of a GGUF source stay as they are
    stored; those of a checkpoint folder are converted to the folder's float type.
    """
    source = plan.source
    if source.path.is_dir():
        return plan_quantization(source, source.dtype if source.dtype in FLOAT_DTYPES else "F32")
    steps = (
        replace(step, type=step.weight.type, nbytes=step.weight.nbytes, method=None)
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))
