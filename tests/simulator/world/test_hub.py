from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, LinkLost, TooLarge
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.simulator.world.hub import STEADY, Cable, Cables, Chaos, LocalHub, LocalLink, Roughness, matches
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp, Will, check_filter, publish_packet_bytes


def opened(hub: LocalHub, client_id: str, *filters: str, will: Will | None = None) -> LocalLink:
    link = hub.link(client_id, will=will)
    link.open()
    assert link.receive(0) == LinkUp()
    for topic_filter in filters:
        link.subscribe(topic_filter)
    return link


def received(link: LocalLink) -> list[object]:
    events = []
    while (event := link.receive(0)) is not None:
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/+", "a/b", True),
        ("a/+", "a/", True),
        ("a/+", "a", False),
        ("a/+/c", "a/b/c", True),
        ("a/+/c", "a/b/d", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("#", "a/b", True),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("+", "a/b", False),
    ],
)
def test_wildcards_match_as_in_the_standard(topic_filter: str, topic: str, expected: bool) -> None:
    assert matches(topic_filter, topic) is expected


@pytest.mark.parametrize("topic_filter", ["", "a/#/b", "a+", "a/b#", "+a/b"])
def test_misplaced_wildcards_are_refused(topic_filter: str) -> None:
    with pytest.raises(BadInput):
        check_filter(topic_filter)


def test_messages_reach_subscribers_once_and_in_order() -> None:
    hub = LocalHub()
    sender = opened(hub, "sender")
    receiver = opened(hub, "receiver", "x/+", "x/#")
    for number in range(5):
        sender.publish("x/y", b"%d" % number)
    sender.publish("z", b"elsewhere")
    assert received(receiver) == [Delivery("x/y", b"%d" % number, False) for number in range(5)]
    assert received(sender) == []
    receiver.unsubscribe("x/+")
    receiver.unsubscribe("x/#")
    sender.publish("x/y", b"late")
    assert received(receiver) == []


def test_retained_messages_come_to_later_subscribers_and_are_cleared_by_empty_ones() -> None:
    hub = LocalHub()
    sender = opened(hub, "sender")
    early = opened(hub, "early", "x/#")
    sender.publish("x/y", b"first", retain=True)
    sender.publish("x/y", b"second", retain=True)
    assert received(early) == [Delivery("x/y", b"first", False), Delivery("x/y", b"second", False)]
    assert received(opened(hub, "late", "x/y")) == [Delivery("x/y", b"second", True)]
    sender.publish("x/y", b"", retain=True)
    assert received(opened(hub, "later", "x/y")) == []


def test_a_cut_publishes_the_will_and_a_goodbye_does_not() -> None:
    hub = LocalHub()
    watcher = opened(hub, "watcher", "c/+/state")
    cut = opened(hub, "cut", "down", will=Will("c/cut/state", b"lost"))
    polite = opened(hub, "polite", will=Will("c/polite/state", b"lost"))
    polite.close()
    hub.cut("cut", "power")
    assert received(watcher) == [Delivery("c/cut/state", b"lost", False)]
    assert received(cut) == [LinkDown("power")]
    assert hub.retained == {"c/cut/state": b"lost"}
    for link in (cut, polite):
        with pytest.raises(LinkLost):
            link.publish("x", b"")


def test_a_restored_link_has_its_subscriptions_but_not_what_passed_meanwhile() -> None:
    hub = LocalHub()
    sender = opened(hub, "sender")
    link = opened(hub, "link", "down", "round")
    hub.cut("link")
    sender.publish("down", b"missed")
    sender.publish("round", b"plan", retain=True)
    hub.restore("link")
    sender.publish("down", b"new")
    assert received(link) == [
        LinkDown("the connection was cut"),
        LinkUp(),
        Delivery("round", b"plan", True),
        Delivery("down", b"new", False),
    ]
    hub.restore("link")
    hub.restore("nobody")
    assert received(link) == []


def test_a_second_link_with_the_same_id_takes_over() -> None:
    hub = LocalHub()
    first = opened(hub, "pi", will=Will("state", b"lost"))
    second = opened(hub, "pi", "x")
    (event,) = received(first)
    assert isinstance(event, LinkDown)
    assert "same client id" in event.reason
    assert hub.retained == {"state": b"lost"}
    second.publish("x", b"mine")
    assert received(second) == [Delivery("x", b"mine", False)]


def test_messages_above_the_cap_are_refused() -> None:
    hub = LocalHub(message_cap_bytes=10)
    link = opened(hub, "link", "x")
    link.publish("x", bytes(10))
    with pytest.raises(TooLarge, match="in chunks"):
        link.publish("x", bytes(11))
    assert received(link) == [Delivery("x", bytes(10), False)]


def test_chaos_loses_doubles_and_reorders_the_same_way_for_the_same_seed() -> None:
    def run(chaos: Chaos) -> list[int]:
        hub = LocalHub(chaos=chaos)
        sender = opened(hub, "sender")
        receiver = opened(hub, "receiver", "x")
        for number in range(1000):
            sender.publish("x", b"%d" % number)
        return [int(event.payload) for event in received(receiver) if isinstance(event, Delivery)]

    assert run(Chaos(seed=1)) == list(range(1000))
    dropped = run(Chaos(seed=1, drop=0.2))
    assert 700 < len(dropped) < 900
    assert dropped == sorted(set(dropped))
    doubled = run(Chaos(seed=1, duplicate=0.2))
    assert 1100 < len(doubled) < 1300
    assert sorted(set(doubled)) == list(range(1000))
    reordered = run(Chaos(seed=1, reorder=0.2))
    assert sorted(reordered) == list(range(1000))
    assert reordered != sorted(reordered)
    mixed = Chaos(seed=7, drop=0.1, duplicate=0.1, reorder=0.3)
    assert run(mixed) == run(mixed)


def test_chaos_leaves_retained_messages_alone() -> None:
    hub = LocalHub(chaos=Chaos(seed=1, drop=1.0))
    sender = opened(hub, "sender")
    receiver = opened(hub, "receiver", "x")
    sender.publish("x", b"lost")
    sender.publish("x", b"kept", retain=True)
    assert received(receiver) == [Delivery("x", b"kept", False)]


def test_many_threads_lose_nothing() -> None:
    hub = LocalHub()
    receiver = opened(hub, "receiver", "from/+")
    senders = [opened(hub, f"sender-{index}") for index in range(8)]

    def send(link: LocalLink) -> None:
        for number in range(200):
            link.publish(f"from/{link.client_id}", b"%d" % number)

    threads = [threading.Thread(target=send, args=(link,)) for link in senders]
    for thread in threads:
        thread.start()
    got: dict[str, list[int]] = {}
    for _ in range(8 * 200):
        event = receiver.receive(10.0)
        assert isinstance(event, Delivery)
        got.setdefault(event.topic, []).append(int(event.payload))
    for thread in threads:
        thread.join()
    assert got == {f"from/sender-{index}": list(range(200)) for index in range(8)}


@pytest.mark.parametrize(
    ("payload_bytes", "length_bytes"), [(0, 1), (122, 1), (123, 2), (16378, 2), (16379, 3), (2097146, 3), (2097147, 4)]
)
def test_packet_sizes_are_those_of_the_standard(payload_bytes: int, length_bytes: int) -> None:
    """Remaining length is 2 + 1 + 2 + payload for the topic "t"; it takes a byte more at 128, 16384, 2097152."""
    assert publish_packet_bytes("t", payload_bytes) == 1 + length_bytes + 5 + payload_bytes


def test_what_is_on_its_way_arrives_after_a_clean_end_and_not_after_a_power_cut() -> None:
    clock = WorldClock()
    hub = LocalHub(clock=clock)
    there = hub.link("there")
    there.subscribe("a")
    there.open()
    for name, ends_cleanly in (("one", True), ("two", False)):
        cables = Cables(
            up=Cable(clock, latency_s=1.0, s_per_byte=0.0), down=Cable(clock, latency_s=1.0, s_per_byte=0.0)
        )
        link = hub.link(name, Will("a", b"gone"), cables=cables)
        link.open()
        link.publish("a", name.encode())
        if ends_cleanly:
            link.close()
        else:
            hub.vanish(link, will_after_s=5.0)
        while clock.next_s < 100:
            clock.advance()
    heard = [there.receive(0.0) for _ in range(4)]
    assert [each.payload for each in heard if isinstance(each, Delivery)] == [b"one", b"gone"]
    assert clock.now == 6.0, "the broker notices a lost link later"


UNSTEADY = Roughness(jitter_s=0.02, stall_every_s=4.0, stall_s=0.5)
Sent = list[tuple[float, int]]


def arrivals(sent: Sent, rough: Roughness = STEADY, *, seed: str = "1 device-1 up", s_per_byte: float = 0.0) -> Sent:
    """When packets arrive over a cable with a latency of 0.1 s, and how many bytes they have.

    :param sent: when each leaves, and its bytes.
    """
    clock, came = WorldClock(), list[tuple[float, int]]()
    cable = Cable(clock, latency_s=0.1, s_per_byte=s_per_byte, rough=rough, seed=seed)
    for at, size in sent:
        clock.at(at, lambda size=size: cable.send(size, lambda: came.append((clock.now, size))))  # type: ignore[misc]
    while clock.next_s < 1e9:
        clock.advance()
    assert cable.bytes == sum(size for _, size in sent)
    return came


def test_rate_and_latency_by_hand() -> None:
    came = arrivals([(5.0, 1000), (5.0, 2000), (9.0, 20_000)], s_per_byte=1e-6)
    assert came == [(pytest.approx(5.101), 1000), (pytest.approx(5.103), 2000), (pytest.approx(9.12), 20_000)]


@given(
    sent=st.lists(st.tuples(st.floats(0, 60), st.integers(1, 60_000)), min_size=1, max_size=30).map(sorted),
    rough=st.sampled_from([STEADY, UNSTEADY]),
)
def test_no_more_passes_than_the_rate_allows_in_order_and_each_time_the_same(sent: Sent, rough: Roughness) -> None:
    came = arrivals(sent, rough, s_per_byte=1e-4)
    assert came == arrivals(sent, rough, s_per_byte=1e-4)
    assert [size for _, size in came] == [size for _, size in sent], "in order"
    free_at = 0.0
    for (at, size), (came_at, _) in zip(sent, came, strict=True):
        free_at = max(free_at, at) + size * 1e-4
        assert came_at >= free_at + 0.1


def test_what_a_rough_link_draws_differs_by_seed_device_and_direction() -> None:
    sent = [(0.1 * each, 1) for each in range(100)]
    seeds = [f"{seed} {device} {way}" for seed, device, way in itertools.product((1, 2), ("a", "b"), ("up", "down"))]
    for rough in (Roughness(jitter_s=0.02), Roughness(stall_every_s=1.0, stall_s=0.5)):
        assert len({tuple(arrivals(sent, rough, seed=seed)) for seed in seeds}) == len(seeds)


def test_jitter_and_stalls_have_the_means_that_were_asked_for() -> None:
    sent = [(0.01 * each, 1) for each in range(400_000)]
    late = [came_at - at - 0.1 for (came_at, _), (at, _) in zip(arrivals(sent, UNSTEADY), sent, strict=True)]
    stalled = [each for each in late if each > 0.02 + 1e-9]
    begins = [now for before, now in itertools.pairwise(late) if now > max(0.1, before + 0.1)]
    assert min(late) > -1e-9
    assert len(begins) == pytest.approx(4000 / 4.5, rel=0.1)
    assert max(stalled) <= 0.75 + 0.02
    assert sum(stalled) / sum(late) > 0.5
    assert 0.01 * len(stalled) / len(begins) == pytest.approx(0.5, rel=0.1)


def test_what_is_due_in_a_stall_comes_when_it_ends() -> None:
    came = [at for at, _ in arrivals([(0.001 * each, 1) for each in range(5000)], Roughness(0.0, 1.0, 0.4))]
    steady = [at for at, _ in arrivals([(0.001 * each, 1) for each in range(5000)])]
    at, held = max((came.count(each), each) for each in came)[::-1]
    assert held > 100, "many arrive together"
    waited = [due for due, comes in zip(steady, came, strict=True) if comes == at]
    assert waited[-1] <= at < waited[-1] + 0.002, "none of the others comes meanwhile, and then all are there"
    assert 0.2 - 0.002 <= at - waited[0] <= 0.6 + 0.002
