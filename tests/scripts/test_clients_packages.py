"""Every script of a client is run, and every package has a version."""

from pathlib import Path

import pytest

from scripts.clients.packages import (
    CLIENTS,
    ENVIRONMENTS,
    NPM,
    NPM_PACKAGES,
    NPM_TOOL_SERVERS,
    TOOL_SERVERS,
)

FOLDER = Path(__file__).parents[2] / "scripts" / "clients"


def test_every_script_belongs_to_one_client() -> None:
    scripts = [client.script for client in CLIENTS]
    assert sorted(scripts) == sorted(path.name for path in FOLDER.glob("with_*"))
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_every_environment_is_used() -> None:
    assert {client.environment for client in CLIENTS} == {*ENVIRONMENTS, NPM}


OF_NPM = (*NPM_PACKAGES, *NPM_TOOL_SERVERS)


@pytest.mark.parametrize("package", [*sum(ENVIRONMENTS.values(), ()), *TOOL_SERVERS, *OF_NPM])
def test_a_package_has_a_version(package: str) -> None:
    name, _, version = package.rpartition("==" if package not in OF_NPM else "@")
    assert name and version[0].isdigit()
