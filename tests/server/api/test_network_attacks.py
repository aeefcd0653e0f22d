"""What is thrown at the sockets of a server in the battery of attacks, against one that is alone with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.api.conftest import LiveServer, eventually
from tests.server.attacks.network import ATTACKS


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_leaves_nothing_behind(server: LiveServer, attack: Callable[[int], None]) -> None:
    attack(server.port)
    # A connection may be closed before what it held is given back.
    eventually(lambda: server.idle and not server.connections and not server.service.bodies.total, timeout=30)
    assert server.complete().status_code == 200
