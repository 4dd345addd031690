"""What an owner that is busy finds later, and how much of it is kept."""

from __future__ import annotations

from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp
from hushfleet.wire.link.mailbox import RECEIVED_CAP_BYTES, Mailbox


def test_many_empty_messages_fill_it_as_few_large_ones_do() -> None:
    """Each takes memory, whatever is in it: a peer that sends nothing but headers must not fill all of it."""
    mailbox = Mailbox(max_in_flight=1)
    mailbox.up()
    for _ in range(1 << 18):
        mailbox.put(Delivery("t", b"", False))
    assert mailbox.is_full
    assert mailbox.receive(0) == LinkUp()
    mailbox.receive(0)
    assert not mailbox.is_full
    mailbox.release()


def test_what_comes_before_the_subscriptions_counts_and_waits() -> None:
    mailbox = Mailbox(max_in_flight=1)
    early = Delivery("t", bytes(RECEIVED_CAP_BYTES), True)
    mailbox.put(early)
    assert mailbox.is_full
    assert mailbox.receive(0) is None
    mailbox.down("given up")
    assert mailbox.receive(0) == LinkDown("given up")
    assert not mailbox.is_full
    mailbox.put(early)
    mailbox.up()
    assert [mailbox.receive(0), mailbox.receive(0)] == [LinkUp(), early]
    mailbox.release()
