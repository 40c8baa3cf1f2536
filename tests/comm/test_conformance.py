"""Every transport passes the same battery, on the plain flag words and, where it is built, on the native ones."""

import pytest

from afserve.comm.mailbox import flags
from afserve.comm.native import native_library
from afserve.comm.transports import connect
from afserve.credentials import NOBODYS, Credentials
from afserve.tls import Certificates
from tests.comm.conformance import BATTERY, LAYOUT, PATIENCE, Ends


def opener(kind, credentials=NOBODYS):
    def open_ends(attention, experts, layout):
        pairs = [
            connect.listen(kind, expert=f, attention_nodes=attention, layout=layout, credentials=credentials)
            for f in range(experts)
        ]
        addresses = [address for _, address in pairs]
        fronts = [
            connect.connect(addresses, attention=a, layout=layout, timeout=PATIENCE, credentials=credentials)
            for a in range(attention)
        ]
        return Ends(fronts, [end for end, _ in pairs])

    return open_ends


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "kind", [kind for kind in connect.kinds() if kind != "symm"]
)  # between processes only: kernels/triton
def test_battery(kind, check):
    check(opener(kind))


@pytest.mark.slow
@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_battery_over_tls(check, issued):
    check(opener("tcp", Credentials("secret", Certificates(issued("attention", "expert")))))


@pytest.mark.slow
@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_battery_over_two_hosts(check, elsewhere):
    """As if every second expert node were on another host: to those, rows travel over TCP."""

    def open_ends(attention, experts, layout):
        pairs = [
            connect.listen("pairs", expert=f, attention_nodes=attention, layout=layout)
            for f in range(experts)
        ]
        addresses = [
            address.replace("pairs:", "pairs:not-") if f % 2 == elsewhere else address
            for f, (_, address) in enumerate(pairs)
        ]
        fronts = [
            connect.connect(addresses, attention=a, layout=layout, timeout=PATIENCE) for a in range(attention)
        ]
        return Ends(fronts, [end for end, _ in pairs])

    check(open_ends)


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_battery_without_the_native_library(check, monkeypatch):
    monkeypatch.setattr("afserve.comm.mailbox.lanes.open_board", flags.PlainBoard)
    check(opener("shm"))


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [kind for kind in ("shm", "tcp", "dist") if kind in connect.kinds()])
def test_battery_where_no_memory_may_stay(kind, check, monkeypatch):
    monkeypatch.setattr("afserve.comm.mailbox.lanes.KEPT_BYTES", 0)
    check(opener(kind))


def test_native_board_is_used_where_it_is_built():
    native = native_library()
    if native is None:
        pytest.skip("the native library is not built")
    end, _ = connect.listen("shm", expert=0, attention_nodes=1, layout=LAYOUT)
    assert isinstance(end._lanes._board, native.FlagBoard)
    end.close()
