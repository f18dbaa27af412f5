"""A talk with the fake model, and what it printed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.chat.session import Session
from llmcli.chat.talk import Talk
from llmcli.runtime.sampling import defaults
from llmcli.ui import UI
from tests.fakes import fake_runner


@pytest.fixture
def talk(home: Path) -> Callable[..., Talk]:
    """Make a Talk whose model says `reply`, greedily."""

    def make(reply: Any = b"hello", **more: Any) -> Talk:
        session = Session(defaults().with_values({"temp": 0}))
        return Talk("fake", fake_runner(reply, **more), session, config.load(), UI(color=False))

    return make
