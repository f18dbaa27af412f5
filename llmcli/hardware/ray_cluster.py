"""Check that the library Ray is installed, connect to a Ray cluster or start a local one, and read
the resources of a cluster.
"""

import logging
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmcli.errors import UserError
from llmcli.hardware.rpc_workers import unreachable_workers

# Memory of a local cluster's object store. It is small, because requests and answers are small.
OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The resources of a Ray cluster."""

    machines: int  # number of running machines
    cpus: float  # number of CPUs
    memory: int  # bytes of memory for tasks
    version: str  # of Ray


def read_cluster(address: str) -> RayCluster:
    """Return the resources of the Ray cluster at `address`. Raises UserError if there is no
    cluster.
    """
    import ray

    with open_cluster(address, 0) as machines:
        resources = ray.cluster_resources()
        return RayCluster(
            machines, resources.get("CPU", 0.0), int(resources.get("memory", 0)), ray.__version__
        )


@contextmanager
def open_cluster(address: str | None, cpus: float) -> Iterator[int]:
    """Connect to the Ray cluster at `address` for the `with` block, and yield its number of
    machines. If `address` is None, start a local cluster with `cpus` CPUs. Raises UserError if this
    fails.
    """
    import ray

    # checked first, because Ray itself would try for minutes
    if address and ":" in address and unreachable_workers([address]):
        raise UserError(
            f"no Ray at {address}: nothing listens there",
            hint="ray status on a machine of the cluster",
        )
    for name in ("ray", "ray.serve", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"ray\.")  # they are for developers of Ray
    quiet_options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                num_cpus=-(-cpus // 1), object_store_memory=OBJECT_STORE_BYTES, **quiet_options
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "this machine"
        raise UserError(
            f"Ray does not start at {where}: {error}", hint="ray status checks a cluster"
        ) from None
    try:
        yield sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


# the value of --ray that starts a Ray cluster on this machine, for this process only
LOCAL_RAY = "local"


def require_ray(local: bool) -> None:
    """Import Ray. Raises UserError if it is not installed. `local`: whether Ray will run only on
    this machine.

    Ray listens on all addresses of a machine and executes the code that it receives. So a local
    cluster gets a secret token, which only this process knows. Ray reads the token when it is
    imported.
    """
    from llmcli import config

    config.configure_ray(secrets.token_hex(32) if local else None)
    try:
        import ray  # noqa: F401 (Serve and Data come with the extra)
    except ImportError:
        raise UserError("Ray is not installed", hint="pip install 'llmcli[ray]'") from None
