"""What a node's data plane warns of is said in the run's log, which is where a user looks."""

import logging

from afserve.control.node.beginning import noting
from afserve.control.wire.values import Noted


def test_warnings_of_the_data_plane_are_noted_while_the_node_serves():
    said: list[Noted] = []
    log = logging.getLogger("afserve.comm")
    with noting(said.append):
        log.warning("port %d: %s was turned away", 7, "127.0.0.1")
        log.info("not this")
        logging.getLogger("afserve.server").warning("nor this")
    log.warning("nor this")
    assert said == [Noted("port 7: 127.0.0.1 was turned away", warning=True)]
