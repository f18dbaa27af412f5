"""A Ray cluster: start, look, require the extra."""

import logging
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.hardware.rpc_workers import unreachable_workers

OBJECT_STORE_BYTES = (
    80 << 20
)  # bytes of the object store of our own Ray: requests and answers are small


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Resources of a Ray cluster: live machines, CPUs, bytes of memory for tasks, and Ray's
    version.
    """

    machines: int
    cpus: float
    memory: int
    version: str


def read_cluster(address: str) -> RayCluster:
    """Return the resources of a cluster. Raises UserError if there is none."""
    import ray

    with open_cluster(address, 0) as machines:
        resources = ray.cluster_resources()
        return RayCluster(
            machines, resources.get("CPU", 0.0), int(resources.get("memory", 0)), ray.__version__
        )


@contextmanager
def open_cluster(address: str | None, cpus: float) -> Iterator[int]:
    """Connect to a Ray cluster, or start our own Ray on this machine with this many CPUs; yield the
    number of machines. Raises UserError if that fails.
    """
    import ray

    if (
        address and ":" in address and unreachable_workers([address])
    ):  # Ray itself would try for minutes
        raise UserError(
            f"no Ray at {address}: nothing listens there",
            hint="ray status on a machine of the cluster",
        )
    for name in ("ray", "ray.serve", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"ray\.")  # advice for Ray's developers
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(num_cpus=-(-cpus // 1), object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "this machine"
        raise UserError(
            f"Ray does not start at {where}: {error}", hint="ray status checks a cluster"
        ) from None
    try:
        yield sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


LOCAL_RAY = "local"  # --ray: a Ray cluster of this process on this machine


def require_ray(local: bool) -> None:
    """Import Ray; raises UserError if it is not installed.

    Ray listens on all addresses of a machine and executes what it receives. A local cluster
    therefore accepts only this process, by a token that must be set before the import.
    """
    from llmcli import config

    config.configure_ray(secrets.token_hex(32) if local else None)
    try:
        import ray  # noqa: F401 (Serve and Data come with the extra)
    except ImportError:
        raise UserError("Ray is not installed", hint="pip install 'llmcli[ray]'") from None
