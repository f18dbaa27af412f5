"""A model that is quantized group by group, each behind those that are finished: shards that
llama.cpp always runs.

What is looked up is made first, then block after block, at last the rest, which a tied embedding is
part of. There is a shard for each; it holds the source's tensors until the finished ones take its
place. A killed run finds them. At the end they become one file. It knows plans and files, no models
and no texts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quant import container, native
from quant import quantize as road
from quant.methods.base import Second
from quant.planning import Plan, Shard, Step, known
from quant.recipe import EMBEDDINGS, HEAD, order
from quant.source import Weight, stored_rows
from quant.tensors import FLOATS


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are made together: `number` is the shard's, `plan` makes them, `unmade` the same
    as they were.
    """

    number: int
    name: str
    plan: Plan
    unmade: Plan

    @property
    def wanted(self) -> frozenset[str]:
        """Those whose second moments the method would have."""
        needing = (
            step for step in self.plan.steps if step.method and step.method.needs == "moments"
        )
        return frozenset(step.weight.name for step in needing)


class Prefix:
    """The shards of a plan in a folder. `floats` is the same model as llama.cpp runs it
    unquantized.
    """

    def __init__(self, plan: Plan, floats: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        steps = {step.weight.name: step for step in floats.steps}
        named = groups(plan.steps)
        count, total = len(named), len(plan.steps)
        begun = json.dumps({"unmade": plan.settings})
        self.groups = tuple(
            Group(
                number,
                name,
                replace(plan, steps=group, most=0, shard=Shard(number, count, total)),
                replace(
                    plan,
                    steps=tuple(steps[step.weight.name] for step in group),
                    most=0,
                    settings=begun,
                    shard=Shard(number, count, total),
                ),
            )
            for number, (name, group) in enumerate(named.items())
        )

    @property
    def model(self) -> Path:
        """What llama.cpp opens."""
        return self.file(self.groups[0])

    @property
    def in_turn(self) -> tuple[Group, ...]:
        """The groups as they are made: the first shard, which has the header, is the last."""
        return (*self.groups[1:], self.groups[0])

    def file(self, group: Group) -> Path:
        """A group's shard."""
        return self.folder / f"model-{group.number + 1:05}-of-{len(self.groups):05}.gguf"

    def made(self, group: Group) -> bool:
        """Whether a group is finished."""
        return road.finished(group.plan, self.file(group))

    def begin(self, threads: int) -> Iterator[Group]:
        """Lay out what is not there; told group by group. What stands behind a group that is not
        finished is as in the source.
        """
        whole = True
        for group in self.in_turn:
            whole = whole and self.made(group)
            if not whole:
                road.run(group.unmade, self.file(group), threads=threads)
            yield group

    def make(
        self, group: Group, seconds: Mapping[str, Second], work: road.Work
    ) -> tuple[Step, ...]:
        """Make a group by its second moments; what its tensors were made by."""
        steps = known(group.plan, seconds)
        work.write(replace(group.plan, steps=steps), self.file(group))
        return steps

    def whole(self) -> Plan:
        """The plan of one file that the finished shards are copied into."""
        there = {tensor.name: tensor for tensor in container.read(self.model).tensors}
        return replace(
            self.plan,
            steps=tuple(_copied(step, there[step.weight.name]) for step in self.plan.steps),
        )


def groups(steps: Sequence[Step]) -> dict[str, tuple[Step, ...]]:
    """The rest, which the header goes with, what is looked up, and each block, by their names."""
    names = {step.weight.name for step in steps}
    looked_up = EMBEDDINGS if HEAD in names else EMBEDDINGS[1:]
    rest: list[Step] = []
    first: list[Step] = []
    blocks: dict[int, list[Step]] = {}
    for step in steps:
        block = order(step.weight.name)[0]
        own = first if step.weight.name in looked_up else rest
        (blocks.setdefault(block, []) if block >= 0 else own).append(step)
    found = {
        "the rest": rest,
        "what is looked up": first,
        **{f"block {at}": blocks[at] for at in sorted(blocks)},
    }
    return {name: tuple(group) for name, group in found.items() if group}


def _copied(step: Step, there: container.TensorInfo) -> Step:
    """A finished tensor as it is."""
    width = native.row_bytes(there.type, there.columns)
    read = stored_rows(there.file, there.offset, width, there.name)
    assert (there.type, there.shape) == (step.type, step.weight.shape), there
    return replace(step, weight=Weight(there.name, there.shape, there.type, read), method=None)


def unquantized(plan: Plan) -> Plan:
    """The plan of the same source as it is run: a GGUF's tensors as they are stored, a folder's in
    its floats.
    """
    source = plan.source
    if source.path.is_dir():
        return road.plan(source, source.dtype if source.dtype in FLOATS else "F32")
    steps = (
        replace(step, type=step.weight.type, nbytes=step.weight.nbytes, method=None)
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))
