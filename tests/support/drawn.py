"""hypothesis, for tests that a machine with a card may have to run without it: they are skipped there."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

given: Any
settings: Any
st: Any

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:
    st = MagicMock()

    def given(*_, **__):
        def skipped(test):
            @pytest.mark.skip(reason="hypothesis is not installed")
            def stand_in():
                pass

            stand_in.__name__ = test.__name__
            return stand_in

        return skipped

    def settings(*_, **__):
        return lambda test: test
