"""Two hosts, which are Linux namespaces of this machine."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.rehearsal.hosts import Network


@pytest.fixture(name="two_hosts")
def network_of_two():
    """Two hosts, whose own names mean 127.0.1.1, as Debian's installer has it."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Network(quirks={name: f"127.0.1.1 {name}" for name in ("node0", "node1")}))
        except UserError as error:
            pytest.skip(str(error))
        yield hosts
