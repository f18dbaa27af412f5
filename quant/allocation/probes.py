"""Probes: the sets of tensors that are quantized together to measure how much their rounding costs.

There are three kinds:

- Each tensor with a choice of types, or each group of a layer (q with k, gate with up), alone in
  plain codes near PROBE_BITS bits. These measurements do not depend on the quantization method.
- All tensors of a role together in the run's own codes, near PROBE_BITS bits and near
  COARSE_PROBE_BITS bits. They correct two errors of prediction: a method's error is measured with
  the moments it optimized for and is larger on other text, and the cost of two bits is not a fixed
  multiple of the cost of four bits.
- Each type of an embedding that is also the output head. The rows that are looked up have the plain
  error, the head has the error weighted by its moments, and which of the two matters more depends
  on the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.native import ggml
from quant.recipes import tensor_types
from quant.source.source import Weight

TypeChoices = Mapping[str, Sequence[str]]  # the types that each tensor may have

K_QUANT_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
LEGACY_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
)  # for rows whose length is no multiple of 256
# bits per value that a probe's type should have; the nearest type is taken. At 4.5 bits errors are
# large enough to measure and still small
PROBE_BITS = 4.5
# bits per value of the second measurement of a role whose tensors have such a type
COARSE_PROBE_BITS = 2.6
GROUP_OF_ROLE = {"q": "qk", "k": "qk", "gate": "gate_up", "up": "gate_up"}
# numbers of the first probe of each kind in the run's own codes
FIRST_ROLE_PROBE, FIRST_COARSE_PROBE, FIRST_TYPE_PROBE = 1 << 28, 3 << 27, 1 << 29


@dataclass(frozen=True, slots=True)
class SensitivityProbe:
    """The tensors `names`, measured together.

    Their codes are the run's own if `uses_run_codes` is set, else plain codes. Their type is
    `kind`, or if that is empty, each tensor's type nearest to `bits` bits per value.
    """

    number: int
    names: tuple[str, ...]
    uses_run_codes: bool = False
    kind: str = ""
    bits: float = PROBE_BITS

    @property
    def label(self) -> str:
        """Description for messages."""
        if self.uses_run_codes and len(self.names) > 1:
            return f"{len(self.names)} tensors of {tensor_types.tensor_role(self.names[0])} near {self.bits} bits"
        return " ".join([", ".join(self.names), self.kind]).strip()


def tensor_probes(types: TypeChoices, grouped: bool) -> list[SensitivityProbe]:
    """Return one probe for each tensor that has a choice, or with `grouped` one for each group of a
    layer: q with k, gate with up.

    Tensors without a choice are counted in the numbers as well, so that a number means the same
    tensor whatever types are allowed.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for name in types:
        part = tensor_types.tensor_role(name)
        group = GROUP_OF_ROLE.get(part, "") if grouped else ""
        groups.setdefault(
            (tensor_types.tensor_order(name)[0], group) if group else (-2, name), []
        ).append(name)
    choosable = [tuple(name for name in group if len(types[name]) > 1) for group in groups.values()]
    return [SensitivityProbe(number, names) for number, names in enumerate(choosable) if names]


def role_probes(types: TypeChoices) -> list[SensitivityProbe]:
    """Return one probe for each role with a choice of types, and a second one for those of its
    tensors that have a type near COARSE_PROBE_BITS.
    """
    names_by_role: dict[str, list[str]] = {}
    for name, kinds in types.items():
        if len(kinds) > 1 and name != tied_embedding(types):
            names_by_role.setdefault(tensor_types.tensor_role(name), []).append(name)
    roles = [
        SensitivityProbe(FIRST_ROLE_PROBE + number, tuple(names), uses_run_codes=True)
        for number, names in enumerate(names_by_role.values())
    ]
    coarser = [
        [
            name
            for name in probe.names
            if nearest_type(types[name], COARSE_PROBE_BITS) != nearest_type(types[name])
        ]
        for probe in roles
    ]
    return roles + [
        SensitivityProbe(
            FIRST_COARSE_PROBE + number, tuple(names), uses_run_codes=True, bits=COARSE_PROBE_BITS
        )
        for number, names in enumerate(coarser)
        if names
    ]


def type_probes(types: TypeChoices) -> list[SensitivityProbe]:
    """Return one probe for each type of an embedding that is also the head."""
    name = tied_embedding(types)
    return [
        SensitivityProbe(FIRST_TYPE_PROBE + number, (name,), uses_run_codes=True, kind=kind)
        for number, kind in enumerate(types.get(name, ()))
    ]


def all_probes(types: TypeChoices, grouped: bool) -> list[SensitivityProbe]:
    """Return all probes in order."""
    return [*tensor_probes(types, grouped), *role_probes(types), *type_probes(types)]


def tied_embedding(types: TypeChoices) -> str:
    """Return the embedding's name if it has a choice of types and is also the head, else ""."""
    name = tensor_types.EMBEDDING_NAMES[0]
    return name if tensor_types.HEAD_NAME not in types and len(types.get(name, ())) > 1 else ""


def probe_type(weight: Weight) -> str:
    """Return the type of plain codes that a tensor is measured in. It does not depend on the run's
    types, method and importance.
    """
    return nearest_type(
        [
            kind
            for kind in (*K_QUANT_TYPES, *LEGACY_TYPES)
            if kind != weight.type and not weight.columns % ggml.block_size(kind).values
        ]
    )


def nearest_type(kinds: Sequence[str], wanted: float = PROBE_BITS) -> str:
    """Return the type nearest to `wanted` bits per value."""
    return min(kinds, key=lambda kind: abs(bits_per_value(kind) - wanted), default="F16")


def bits_per_value(kind: str) -> float:
    """Return the bits per value of a type."""
    return ggml.block_size(kind).nbytes * 8 / ggml.block_size(kind).values
