"""What is measured to tell how much each tensor's rounding costs: what is put into codes together,
and into which.

Each tensor with a choice alone (or a layer's group), in plain codes near PROBED bits: this serves
every method. Then in the run's own codes each role's tensors together, for the errors that a method
leaves are taken under the moments that it made its codes by, and on other text it leaves more: near
PROBED bits and near COARSE ones, for what two bits cost is no multiple of that. By ggml's codes of
a Llama (hidden 512) at Q3_K_M's bytes attn_v in Q2_K was thought so cheap that 1.3 % more bytes for
it took 29 % of the divergence (2026-11-23). And each type of an embedding that is also the head:
the words that are looked up have its plain error, the head the one by its moments, and which of
them counts depends on the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant import native, recipe
from quant.source import Weight

Types = Mapping[str, Sequence[str]]  # what each tensor could have

KQUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # for rows that do not fill superblocks
# bits a value of the type a tensor is measured in, or the next: errors that are seen, and still
# small
PROBED = 4.5
COARSE = 2.6  # and of the other one that a role is measured in, where it has such a choice
GROUPS = {"q": "qk", "k": "qk", "gate": "gate_up", "up": "gate_up"}
ROLES, COARSER, TYPES = (
    1 << 28,
    3 << 27,
    1 << 29,
)  # what is measured in the run's own codes is numbered from here on


@dataclass(frozen=True, slots=True)
class Probe:
    """What is measured together: the tensors of `names`, in plain codes or in the run's `own`, in
    the types nearest to so many `bits` a value or in `kind`.
    """

    number: int
    names: tuple[str, ...]
    own: bool = False
    kind: str = ""
    bits: float = PROBED

    @property
    def label(self) -> str:
        """For people."""
        if self.own and len(self.names) > 1:
            return (
                f"{len(self.names)} tensors of {recipe.role(self.names[0])} near {self.bits} bits"
            )
        return " ".join([", ".join(self.names), self.kind]).strip()


def alone(types: Types, grouped: bool) -> list[Probe]:
    """One measurement for each tensor that has a choice, or for each group of a layer: q with k,
    gate with up.

    Those without one are counted as well: a number means the same tensor whatever `types` leave it
    to choose from.
    """
    found: dict[tuple[int, str], list[str]] = {}
    for name in types:
        part = recipe.role(name)
        group = GROUPS.get(part, "") if grouped else ""
        found.setdefault((recipe.order(name)[0], group) if group else (-2, name), []).append(name)
    chosen = [tuple(name for name in group if len(types[name]) > 1) for group in found.values()]
    return [Probe(number, names) for number, names in enumerate(chosen) if names]


def together(types: Types) -> list[Probe]:
    """One for each role that has tensors with a choice, and one for those of its that have a
    coarser type to choose.
    """
    found: dict[str, list[str]] = {}
    for name, kinds in types.items():
        if len(kinds) > 1 and name != tied(types):
            found.setdefault(recipe.role(name), []).append(name)
    roles = [
        Probe(ROLES + number, tuple(names), own=True) for number, names in enumerate(found.values())
    ]
    coarser = [
        [name for name in one.names if near(types[name], COARSE) != near(types[name])]
        for one in roles
    ]
    return roles + [
        Probe(COARSER + number, tuple(names), own=True, bits=COARSE)
        for number, names in enumerate(coarser)
        if names
    ]


def each_type(types: Types) -> list[Probe]:
    """One for each type of an embedding that is also the head."""
    name = tied(types)
    return [
        Probe(TYPES + number, (name,), own=True, kind=kind)
        for number, kind in enumerate(types.get(name, ()))
    ]


def probes(types: Types, grouped: bool) -> list[Probe]:
    """All that is measured, in this order."""
    return [*alone(types, grouped), *together(types), *each_type(types)]


def tied(types: Types) -> str:
    """The embedding, where it has a choice of types and is also the head; or nothing."""
    name = recipe.EMBEDDINGS[0]
    return name if recipe.HEAD not in types and len(types.get(name, ())) > 1 else ""


def probed(weight: Weight) -> str:
    """The type of plain codes that a tensor is measured in, whatever the run's types, method and
    importance.
    """
    return near(
        [
            kind
            for kind in (*KQUANTS, *LEGACY)
            if kind != weight.type and not weight.columns % native.block(kind).values
        ]
    )


def near(kinds: Sequence[str], wanted: float = PROBED) -> str:
    """The type nearest to so many bits a value."""
    return min(kinds, key=lambda kind: abs(bits(kind) - wanted), default="F16")


def bits(kind: str) -> float:
    """Of a value in a type."""
    return native.block(kind).nbytes * 8 / native.block(kind).values
