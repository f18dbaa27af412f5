"""Probes: sets of tensors that are quantized together, while the rest of the model stays unchanged,
to measure how far the model then diverges from the original.

There are four kinds of probes:

- Single tensors and groups of a layer (q with k, gate with up), in plain codes near PROBE_BITS bits
  per value. Plain codes use neither the run's quantization method nor its importance, so the
  measurements are valid for every method.
- All tensors of a role (all attn_v, for example), in the codes of the run's own method, near
  PROBE_BITS bits and near COARSE_PROBE_BITS bits. They correct two errors of prediction. A method's
  error is predicted from the moments that it optimized for, and is larger on other text. The cost
  of two bits is not a fixed multiple of the cost of four bits.
- All tensors of a role that may get an IQ type, in the one nearest to CODEBOOK_PROBE_BITS. Codes of
  IQ types come from a codebook, by a search of their own, so that predictions for them are wrong by
  another factor than those for other types.
- An embedding that is also the output head, in each type that it may get. Its rows are looked up,
  where the plain error counts, and multiplied, where the error weighted by the moments counts.
  Which of the two matters more depends on the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quant.native import ggml
from quant.recipes import tensor_types
from quant.source.source import Weight

TypeChoices = Mapping[str, Sequence[str]]  # tensor name -> the types that the tensor may get

K_QUANT_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
LEGACY_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
)  # for rows whose length is no multiple of 256
# IQ types, for tensors with statistics of their input: without them their search finds bad codes.
IQ_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
LEGACY_IQ_TYPES = ("IQ4_NL",)
# A probe uses the type nearest to this many bits per value. Its errors are large enough to measure,
# but small enough that the divergence still grows with their square.
PROBE_BITS = 4.5
# bits per value of the second probe of a role
COARSE_PROBE_BITS = 2.6
# bits per value of the probe of a role in an IQ type
CODEBOOK_PROBE_BITS = 3.0
# First numbers of the probes in the run's own codes. Smaller numbers are those of plain codes.
FIRST_ROLE_PROBE, FIRST_COARSE_PROBE, FIRST_CODEBOOK_PROBE = 1 << 28, 3 << 27, 7 << 26
FIRST_TYPE_PROBE = 1 << 29


@dataclass(frozen=True, slots=True)
class SensitivityProbe:
    """The tensors `names`, which are quantized and measured together. `number` identifies the
    probe's record in the file of measurements.

    The codes come from the run's own quantization method if `uses_run_codes` is set, else they are
    plain codes. All tensors get the type `kind`. If `kind` is empty, each tensor gets its possible
    type that is nearest to `bits` bits per value, among IQ types if `uses_codebook` is set, else
    among the others.
    """

    number: int
    names: tuple[str, ...]
    uses_run_codes: bool = False
    kind: str = ""
    bits: float = PROBE_BITS
    uses_codebook: bool = False

    def type_of(self, kinds: Sequence[str]) -> str:
        """Return the type that a tensor with the possible types `kinds` gets in this probe."""
        return self.kind or nearest_type(kinds_of_probe(kinds, self.uses_codebook), self.bits)

    @property
    def label(self) -> str:
        """Description of the probe for messages."""
        if self.uses_run_codes and len(self.names) > 1:
            kinds = " in IQ types" if self.uses_codebook else ""
            return f"{len(self.names)} tensors of {tensor_types.tensor_role(self.names[0])} near {self.bits} bits{kinds}"
        return " ".join([", ".join(self.names), self.kind]).strip()


def tensor_probes(types: TypeChoices, grouped: bool) -> list[SensitivityProbe]:
    """Return one probe for each tensor that has a choice of types. With `grouped`, q and k of a
    layer share one probe, and so do gate and up.

    Tensors without a choice also take a number. Therefore a number means the same tensor in every
    run, whatever types the user allows.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for name in types:
        role = tensor_types.tensor_role(name)
        group = tensor_types.GROUP_OF_ROLE.get(role, "") if grouped else ""
        groups.setdefault(
            (tensor_types.tensor_order(name)[0], group) if group else (-2, name), []
        ).append(name)
    choosable = [tuple(name for name in group if len(types[name]) > 1) for group in groups.values()]
    return [SensitivityProbe(number, names) for number, names in enumerate(choosable) if names]


def role_probes(types: TypeChoices) -> list[SensitivityProbe]:
    """Return one probe near PROBE_BITS for each role that has tensors with a choice of types. Add a
    second probe near COARSE_PROBE_BITS for the tensors of a role that have a different type there,
    and a third one for those that may get an IQ type.
    """
    names_by_role: dict[str, list[str]] = {}
    for name, kinds in types.items():
        if len(kinds) > 1 and name != tied_embedding(types):
            names_by_role.setdefault(tensor_types.tensor_role(name), []).append(name)
    fine, coarse, codebook = [], [], []
    for number, names in enumerate(names_by_role.values()):
        fine_probe = SensitivityProbe(FIRST_ROLE_PROBE + number, tuple(names), uses_run_codes=True)
        fine.append(fine_probe)
        coarse_probe = replace(
            fine_probe, number=FIRST_COARSE_PROBE + number, bits=COARSE_PROBE_BITS
        )
        coarse_names = tuple(
            name
            for name in names
            if coarse_probe.type_of(types[name]) != fine_probe.type_of(types[name])
        )
        coarse += [replace(coarse_probe, names=coarse_names)] if coarse_names else []
        codebook_probe = replace(
            fine_probe,
            number=FIRST_CODEBOOK_PROBE + number,
            bits=CODEBOOK_PROBE_BITS,
            uses_codebook=True,
        )
        iq_names = tuple(
            name
            for name in names
            if is_codebook_type(kind := codebook_probe.type_of(types[name]))
            and kind not in (fine_probe.type_of(types[name]), coarse_probe.type_of(types[name]))
        )
        codebook += [replace(codebook_probe, names=iq_names)] if iq_names else []
    return fine + coarse + codebook


def type_probes(types: TypeChoices) -> list[SensitivityProbe]:
    """Return one probe for each possible type of the embedding if it is also the output head, else
    no probes.
    """
    name = tied_embedding(types)
    return [
        SensitivityProbe(FIRST_TYPE_PROBE + number, (name,), uses_run_codes=True, kind=kind)
        for number, kind in enumerate(types.get(name, ()))
    ]


def all_probes(types: TypeChoices, grouped: bool) -> list[SensitivityProbe]:
    """Return the probes of all kinds: tensors or groups, then roles, then types."""
    return [*tensor_probes(types, grouped), *role_probes(types), *type_probes(types)]


def tied_embedding(types: TypeChoices) -> str:
    """Return the name of the embedding if it is also the output head and has a choice of types,
    else "".
    """
    name = tensor_types.EMBEDDING_NAMES[0]
    return name if tensor_types.HEAD_NAME not in types and len(types.get(name, ())) > 1 else ""


def probe_type(weight: Weight) -> str:
    """Return the type that a tensor gets in a probe with plain codes. It depends only on the
    tensor's stored type and row length, so that the measurement is valid for every list of types,
    method and importance.
    """
    return nearest_type(
        [
            kind
            for kind in (*K_QUANT_TYPES, *LEGACY_TYPES)
            if kind != weight.type and not weight.columns % ggml.block_size(kind).values
        ]
    )


def is_codebook_type(kind: str) -> bool:
    """Return whether a type is an IQ type."""
    return kind.startswith("IQ")


def kinds_of_probe(kinds: Sequence[str], uses_codebook: bool) -> list[str]:
    """Return the IQ types among `kinds`, or with `uses_codebook` unset the others. Return all of
    `kinds` if there are none of the wanted ones.
    """
    wanted = [kind for kind in kinds if is_codebook_type(kind) == uses_codebook]
    return wanted or list(kinds)


def nearest_type(kinds: Sequence[str], target_bits: float = PROBE_BITS) -> str:
    """Return the type of `kinds` whose bits per value are nearest to `target_bits`, or "F16" if
    `kinds` is empty.
    """
    return min(kinds, key=lambda kind: abs(bits_per_value(kind) - target_bits), default="F16")


def bits_per_value(kind: str) -> float:
    """Return the bits per value of a ggml type, including the scales of its blocks."""
    return ggml.block_size(kind).nbytes * 8 / ggml.block_size(kind).values
