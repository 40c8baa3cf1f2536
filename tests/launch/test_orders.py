"""Messages of the keeper's sockets come whole, with their descriptors, whatever their length."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.launch.processes.orders import Order, Signal, close, order_of, pair, receive, send

words = st.text(max_size=30)
orders = st.builds(
    Order,
    words,
    words,
    st.integers(0, 1 << 40),
    words,
    words,
    words,
    st.none() | st.dictionaries(words, words),
    words,
) | st.builds(Signal, words, st.integers(1, 1 << 22), st.integers(0, 64))


@given(st.lists(orders, max_size=20))
def test_orders_come_as_they_were_sent(sent):
    ours, theirs = pair()
    with ours, theirs:
        assert all(send(ours, order.to_line()) for order in sent)
        received = [receive(theirs) for _ in sent]
        assert [order_of(each[0]) for each in received] == sent
        assert all(each[1] is None for each in received) and receive(theirs) is None
        ours.close()
        assert receive(theirs) == (b"", None)


@pytest.mark.parametrize("length", [1, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 3 << 20])
def test_long_ones_too_with_what_goes_along(length):
    ours, theirs = pair()
    reader, writer = os.pipe()
    with ours, theirs:
        line = os.urandom(length // 2).hex().encode() + b"x" * (length % 2)
        assert send(ours, line, writer)
        got, passed = receive(theirs)
        assert got == line
        os.write(passed, b"here")
        assert os.read(reader, 10) == b"here"
    for each in (reader, writer, passed):
        close(each)


def test_a_full_socket_takes_nothing_and_says_so():
    ours, theirs = pair()
    with ours, theirs:
        taken = 0
        while send(ours, b"x" * 1000):
            taken += 1
        assert [receive(theirs) for _ in range(taken)] == [(b"x" * 1000, None)] * taken
        assert receive(theirs) is None and send(ours, b"again")
