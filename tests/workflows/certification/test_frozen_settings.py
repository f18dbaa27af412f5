"""The settings of the methods are those that were frozen, with a date."""

import pytest

from llmcli.workflows.certification import frozen_settings
from quant.methods import hessian_factor


def test_the_settings_in_use_are_those_of_the_file() -> None:
    """A changed setting needs a new date: python -m
    llmcli.workflows.certification.frozen_settings
    """
    assert frozen_settings.frozen_date()


def test_a_changed_setting_has_no_date_and_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = frozen_settings.digest_settings(frozen_settings.settings_in_use())
    monkeypatch.setattr(hessian_factor, "DAMPING", 0.01)
    assert frozen_settings.frozen_date() == ""
    assert frozen_settings.digest_settings(frozen_settings.settings_in_use()) != before
