from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, Malformed
from hushfleet.wire.format.topics import ParsedTopic, Topics, check_new_name

TOPICS = Topics("plant-7")
DIGEST = bytes(range(32))
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


def test_every_topic_is_as_written_in_the_specification() -> None:
    assert TOPICS.server == "hushfleet/1/plant-7/server"
    assert TOPICS.task == "hushfleet/1/plant-7/task"
    assert TOPICS.round == "hushfleet/1/plant-7/round"
    assert TOPICS.blob(DIGEST) == "hushfleet/1/plant-7/blob/" + "".join(f"{i:02x}" for i in range(32))
    assert TOPICS.state("pi-1") == "hushfleet/1/plant-7/c/pi-1/up/state"
    assert TOPICS.msg("pi-1") == "hushfleet/1/plant-7/c/pi-1/up/msg"
    assert TOPICS.chunk("pi-1") == "hushfleet/1/plant-7/c/pi-1/up/chunk"
    assert TOPICS.down("pi-1") == "hushfleet/1/plant-7/c/pi-1/down"
    assert TOPICS.all_chunks == "hushfleet/1/plant-7/c/+/up/chunk"


@given(federation=NAMES, device=NAMES)
def test_parse_is_the_inverse_within_aws_limits(federation: str, device: str) -> None:
    topics = Topics(federation)
    expected = {
        topics.server: ParsedTopic("server"),
        topics.task: ParsedTopic("task"),
        topics.round: ParsedTopic("round"),
        topics.blob(DIGEST): ParsedTopic("blob", digest=DIGEST),
        topics.state(device): ParsedTopic("state", device=device),
        topics.msg(device): ParsedTopic("msg", device=device),
        topics.chunk(device): ParsedTopic("chunk", device=device),
        topics.down(device): ParsedTopic("down", device=device),
    }
    assert len(expected) == 8
    for topic, parsed in expected.items():
        assert topics.parse(topic) == parsed
        assert topic.count("/") <= 6
        assert len(topic.encode()) <= 256


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "hushfleet/1/plant-7",
        "hushfleet/1/plant-7/",
        "hushfleet/1/other/server",
        "hushfleet/2/plant-7/server",
        "x/hushfleet/1/plant-7/server",
        "hushfleet/1/plant-7/server/",
        "hushfleet/1/plant-7/c/Pi/down",
        "hushfleet/1/plant-7/c//down",
        "hushfleet/1/plant-7/c/pi\n/down",
        "hushfleet/1/plant-7/c/pi/up",
        "hushfleet/1/plant-7/c/pi/up/state/x",
        "hushfleet/1/plant-7/blob/" + "AB" * 32,
        "hushfleet/1/plant-7/blob/" + "ab" * 31,
        "hushfleet/1/plant-7/blob/" + "ab" * 32 + "\n",
    ],
)
def test_foreign_topics_are_malformed(topic: str) -> None:
    with pytest.raises(Malformed):
        TOPICS.parse(topic)


@given(st.text(max_size=80))
def test_parse_raises_nothing_but_malformed(text: str) -> None:
    for topic in (text, f"{TOPICS.prefix}/{text}", f"{TOPICS.prefix}/c/{text}"):
        try:
            TOPICS.parse(topic)
        except Malformed:
            continue
        assert topic.startswith(f"{TOPICS.prefix}/")


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "Ä", "UPPER", "-x", "a" * 64, "a\n"])
def test_names_that_do_not_fit_a_topic_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(BadInput, match="1 to 63"):
        Topics(name)
    with pytest.raises(BadInput, match="1 to 63"):
        TOPICS.down(name)


def test_a_digest_of_another_length_is_refused() -> None:
    with pytest.raises(BadInput, match="32 bytes, not 31"):
        TOPICS.blob(bytes(31))


def test_a_new_name_has_no_dot_and_old_ones_still_serve() -> None:
    """RabbitMQ delivers `a.b` as `a/b`."""
    assert check_new_name("green-1", "the id") == "green-1"
    with pytest.raises(BadInput, match=r"the id 'green\.1' has a '\.'.*take 'green-1'"):
        check_new_name("green.1", "the id")
    assert TOPICS.parse(TOPICS.state("green.1")).device == "green.1"
