"""Find the Linux control groups of this process, whose limits a container or systemd sets.

A limit may be set in the group of the process or in any group above it. `root` is the folder that
contains `proc` and `sys`; tests pass a folder with files of another machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/")
# Folders under /sys/fs/cgroup in which version 1 mounts a controller.
V1_MOUNTS = {
    "cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"),
    "memory": ("memory",),
}


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group. `version`: 1 or 2. `folder`: with the files of its controllers."""

    version: int
    folder: Path

    def read(self, name: str) -> str | None:
        """Return the text of a file of the group, without white space at its ends. Return None if
        it does not exist or may not be read.
        """
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None


def control_groups(controller: str, root: Path = SYSTEM_ROOT) -> Iterator[ControlGroup]:
    """Yield the groups of this process that `controller` ("cpu", "memory") limits: its own and those
    above it, as far as they are visible in the container. Nothing without control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, fields = line.partition(":")
        controllers, _, name = fields.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        version, mounts = (1, V1_MOUNTS[controller]) if controllers else (2, ("",))
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            # the name may lead out of a container ("/../x"), or be that of the host
            parts = [part for part in name.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield ControlGroup(version, top.joinpath(*parts[:depth]))
