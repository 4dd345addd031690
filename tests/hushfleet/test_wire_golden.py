"""Golden bytes: what version 1 of the wire format looks like, so that no change of it goes unnoticed.

A device in the field may run an older release than its aggregator. If one of these tests fails, either the
change is a mistake, or the version byte must grow and docs/wire.md must say so.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hushfleet.wire.chunks import parse_frame, split
from hushfleet.wire.difference import apply_difference, encode_difference
from hushfleet.wire.identity import Identity
from hushfleet.wire.messages import (
    Ack,
    Birth,
    Decline,
    DifferenceRef,
    Message,
    Missing,
    NotEnrolled,
    Offer,
    Refused,
    RoundPlan,
    ServerState,
    TaskNotice,
    Want,
    decode_message,
    encode_message,
)
from hushfleet.wire.update import UpdateHeader, decode_update, encode_update

DEVICE = Identity.from_bytes(bytes(range(32)))
DIGEST = bytes(range(32))
MESSAGES: list[Message] = [
    ServerState(3, "ready", DEVICE.public_key),
    TaskNotice("demo-1f", DIGEST, 5000),
    RoundPlan("demo-1f", 2, 20, "open", DIGEST, 400, {"pi-1": DIGEST[:16], "pi-2": DIGEST[16:]}, 2, 600.0),
    Birth("pi-1", 7, "training", "pi-4", "0.1.0", DEVICE.public_key, 900),
    Want(DIGEST, 5000, ((0, 1), (4, 7))),
    Offer("demo-1f", 2, DIGEST, 5000),
    Decline("demo-1f", 2, "budget", "epsilon would be 9.1"),
    Ack("demo-1f", 2, DIGEST),
    Missing("demo-1f", 2, DIGEST, ((3, 9),)),
    Refused("demo-1f", 2, DIGEST, "late", "round 3 is open"),
    NotEnrolled("pi-1", DEVICE.public_key, "ask the operator"),
]
VALUES = np.array([0.0, 1.0, -1.0, 2.5, -40.0, 0.125, 3.0, -7.75], np.float32)
COUNTS = [5, 3]

GOLDEN_MESSAGES: dict[str, str] = {
    "ServerState": (
        "484601014300000083a773657373696f6e03a57374617465a57265616479aa7075626c69635f6b6579c42003a107bff3"
        "ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b842000d0372a8a5980dc2d978ed56a803b147e0ec27"
        "45bc1a9500f6b6fbdb095a50d1947eb9ba26e64f62aeb5c00a6536980553ff7e2c3e17e3259dbf1216ff03"
    ),
    "TaskNotice": (
        "484601023f00000083a47461736ba764656d6f2d3166a6646967657374c420000102030405060708090a0b0c0d0e0f10"
        "1112131415161718191a1b1c1d1e1fa473697a65cd1388e14e8b04e8ee80e2bdada79f759f3e7dfb7ca3fbc02fe0d2da"
        "60a819ff4171810f4cd4dca51fcb15645f0610111a8db35317a4edb1df0bc19cf321e0728eb100"
    ),
    "RoundPlan": (
        "48460103bf00000089a47461736ba764656d6f2d3166a5726f756e6402a6726f756e647314a57068617365a46f70656e"
        "ad676c6f62616c5f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "ac676c6f62616c5f6279746573cd0190a6636f686f727482a470692d31c410000102030405060708090a0b0c0d0e0fa4"
        "70692d32c410101112131415161718191a1b1c1d1e1fab6e6f6973655f73706c697402aa646561646c696e655f73cb40"
        "82c000000000009db2aba0b57cee6cf7498f8d62e47149a8898da5657f0442e5ba450b99aae84e87ea0d8384f0eb0643"
        "5498c6c9bbd5c691592160e552be644ef3ecc6f341b40d"
    ),
    "Birth": (
        "484601047900000087a6646576696365a470692d31a773657373696f6e07a57374617465a8747261696e696e67a5626f"
        "617264a470692d34a776657273696f6ea5302e312e30aa7075626c69635f6b6579c42003a107bff3ce10be1d70dd18e7"
        "4bc09967e4d6309ba50d5f1ddc8664125531b8aa6d656d6f72795f6d6962cd038404ee3268d09cbf3dc2202259f4355d"
        "349425aee4cfdc7bcfdc5cb8fc64ed668f7c90c5dbde40c63a36f43a906c9118ef98b53970b83f0e357de3480e9f86a5"
        "03"
    ),
    "Want": (
        "484601054100000083a6646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
        "1e1fa473697a65cd1388a76d697373696e67929200019204075d7ff9bc86c7ab1b16ea18c17279a6b7f11ca891e79136"
        "c970fda77c724808d5a637e02235fafe2a6eea1eada6786553c053524c9f7c149ae0dabc5209e32a08"
    ),
    "Offer": (
        "484601064600000084a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa473697a65cd1388ec58ab370b8c7ec8d9e44a6bff17121ee4c5"
        "2f12e26f88e05255ad654cecd480b6266f94c6d0b34b4d7be277a41fdba94452410996af812057c855140283cc0d"
    ),
    "Decline": (
        "484601073d00000084a47461736ba764656d6f2d3166a5726f756e6402a4636f6465a6627564676574a6726561736f6e"
        "b4657073696c6f6e20776f756c6420626520392e31d9f89cab9651c148fef27b5084f84097f029680dff69ebbd731b82"
        "70c52de1042e88245ec0eb7343914834f04989ec73444f049ea9763811b7385aebab8c020b"
    ),
    "Ack": (
        "484601083e00000083a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa736ace03575669f2663d0e865811e4b29153a311a4ebfb6db49"
        "8b06438bf32bed9fcfb198baa548a5b5ec918fa4fdb12eef3af7e1d977050571716038dcc70d"
    ),
    "Missing": (
        "484601094a00000084a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa76d697373696e6791920309116f65876414cfe60def748de74e"
        "bb99a8b508cf0ac702b09a7bc26e9552906b50d1f20eb36fd51c706975c2661b69e0682cd9905ac4ae98a6b7a9de770c"
        "b00c"
    ),
    "Refused": (
        "4846010a5f00000085a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa4636f6465a46c617465a6726561736f6eaf726f756e64203320"
        "6973206f70656e175efa869afbc2d29ff1394ea0482397a749cfc0ca97ae6cd0a16bf72d68a0cce177b8c91ac81a6886"
        "4a0dd62aa64a676c4fa3b8cf35befc87f85aa01831f205"
    ),
    "NotEnrolled": (
        "4846010b5200000083a6646576696365a470692d31aa7075626c69635f6b6579c42003a107bff3ce10be1d70dd18e74b"
        "c09967e4d6309ba50d5f1ddc8664125531b8a6726561736f6eb061736b20746865206f70657261746f7210c4c77d2d4e"
        "b16e98b84795adb81f43e2f775cde203fbd4f85f551d9ef72e867019a6587736f8182c725e327f71894b6be0315a44fb"
        "6b7f1ed0786297214b06"
    ),
}

GOLDEN_CHUNK = (
    "484301000952387d9ab2f055e63e130c091df57721d69e1da003701732e26ef454e5859b1b0000000a00000002000000"
    "03000000b814169b7368666c656574"
)

GOLDEN_FLOAT32 = (
    "48550200ef0000008da47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a5636f646563a7"
    "666c6f61743332ab76616c75655f636f756e7408a5737465707390aa6e6f6973655f7374647392cb3ff0000000000000"
    "cb3fe0000000000000aa636c69705f6e6f726d7392cb3ff0000000000000cb7ff0000000000000ad7075626c69635f64"
    "6967657374c410000102030405060708090a0b0c0d0e0fae726f756e64735f6368617267656403ae657073696c6f6e5f"
    "736572766572cb7ff0000000000000b16d756c7469706c6965725f736572766572cb3ff4000000000000ab6e6f697365"
    "5f73706c69740220000000000000000000803f000080bf00002040000020c20000003e000040400000f8c0040000006d"
    "61736b6eca7045a46f8a16c4965eba3fb52c0c4b5190224e542f750ff9f1c9f5535a9639c2fdf07dc126ad5264f2eb78"
    "87b26c4a5f203eea81a89b92a5fdc2cfb7c10c"
)

GOLDEN_QUANTIZED = (
    "48550200030100008da47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a5636f646563a9"
    "7175616e74697a6564ab76616c75655f636f756e7408a5737465707392cb3fe0000000000000cb3fd0000000000000aa"
    "6e6f6973655f7374647392cb3ff0000000000000cb3fe0000000000000aa636c69705f6e6f726d7392cb3ff000000000"
    "0000cb7ff0000000000000ad7075626c69635f646967657374c410000102030405060708090a0b0c0d0e0fae726f756e"
    "64735f6368617267656403ae657073696c6f6e5f736572766572cb7ff0000000000000b16d756c7469706c6965725f73"
    "6572766572cb3ff4000000000000ab6e6f6973655f73706c6974021300000001000000000a000000636061e69acf2061"
    "0b00040000006d61736b2d401447d3a54aa0d340fc9976d64e76a343a41cc389f47713f5a2429f1568f9cab8c7d63d44"
    "a8d83a5d9df5372f8145aaed69b212b5116dcbfe7000ec32e504"
)

GOLDEN_FLOAT16 = (
    "48550200ef0000008da47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a5636f646563a7"
    "666c6f61743136ab76616c75655f636f756e7408a5737465707390aa6e6f6973655f7374647392cb3ff0000000000000"
    "cb3fe0000000000000aa636c69705f6e6f726d7392cb3ff0000000000000cb7ff0000000000000ad7075626c69635f64"
    "6967657374c410000102030405060708090a0b0c0d0e0fae726f756e64735f6368617267656403ae657073696c6f6e5f"
    "736572766572cb7ff0000000000000b16d756c7469706c6965725f736572766572cb3ff4000000000000ab6e6f697365"
    "5f73706c697402100000000000003c00bc004100d100300042c0c7040000006d61736b3dab2a7579226a4f0a04f4a7a6"
    "3147e737eb81387ac05df1f321fd643a0f72f0e98b9f9a90631b3fe8db19ec396e51d67c434262ad88aecba513861dbc"
    "dec30a"
)

GOLDEN_ONE_BIT = (
    "48550200010100008da47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a5636f646563a7"
    "6f6e652d626974ab76616c75655f636f756e7408a5737465707392cb3ff4000000000000cb3fe4000000000000aa6e6f"
    "6973655f7374647392cb3ff0000000000000cb3fe0000000000000aa636c69705f6e6f726d7392cb3ff0000000000000"
    "cb7ff0000000000000ad7075626c69635f646967657374c410000102030405060708090a0b0c0d0e0fae726f756e6473"
    "5f6368617267656403ae657073696c6f6e5f736572766572cb7ff0000000000000b16d756c7469706c6965725f736572"
    "766572cb3ff4000000000000ab6e6f6973655f73706c6974020100000029040000006d61736bd87c5f48008e3a964963"
    "76394fa9335a0bc5ac5d73ab20555c69a27e6c1d0ddbe8b4bc72cd5b5df4d08c10a3347cf16f5c18ad73f156952912c4"
    "628359f7c809"
)

# float32 bits of the decoded values, so that no rounding of this page hides a difference
GOLDEN_DECODED = "00d4433d2013813f60df91bf10112540233c1fc200f1fc3dd88c42408cc0fbc0"


GOLDEN_PLAN_WITH_DIFFERENCES = (
    "48460103190100008ba47461736ba764656d6f2d3166a5726f756e6402a6726f756e647314a57068617365a46f70656e"
    "ad676c6f62616c5f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "ac676c6f62616c5f6279746573cd0190a6636f686f727480ab6e6f6973655f73706c697402aa646561646c696e655f73"
    "cb4082c00000000000a8636f6e74726f6c7381a9636c69705f6e6f726dcb3fe0000000000000ab646966666572656e63"
    "65739293c4080001020304050607c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "5a93c40808090a0b0c0d0e0fc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd01"
    "2c4b05b4dc1006224611dc02d32a4e83b3bdf319e7f3a102a6202dc6cb7fe136e2d012a126ae9e6a963dc170567d2cf8"
    "27983e75bd60164c664f6ea9997400dd01"
)

GOLDEN_DIFFERENCE = (
    "484401007e00000085a47461736ba764656d6f2d3166a5726f756e6402a462617365c4206a9a126564f58bb22e5cd2ef"
    "b58d117ddc023d562d5a86fc904994a08c92c19ea6726573756c74c4205ba686d176b09d91938f028ea26915b45211d7"
    "ea74fa94b23f7ddc0172bf07c2a5737465707392cb3fd0000000000000cb000000000000000001010000000a00000063"
    "616460f8e7c0c80000"
)

GOLDEN_RESULT = "0000c03f0000e03f000040c00000003f000020420000e0400000e0400000e040"


def header(codec: str) -> UpdateHeader:
    steps = {"quantized": (0.5, 0.25), "one-bit": (1.25, 0.625)}.get(codec, ())
    return UpdateHeader(
        "demo-1f", 2, "pi-1", codec, 8, steps, (1.0, 0.5), (1.0, math.inf), bytes(range(16)), 3, math.inf, 1.25, 2
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages(message: Message) -> None:
    golden = bytes.fromhex(GOLDEN_MESSAGES[type(message).__name__])
    assert encode_message(message, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == message


def test_a_plan_with_the_fields_that_came_later() -> None:
    golden = bytes.fromhex(GOLDEN_PLAN_WITH_DIFFERENCES)
    differences = (DifferenceRef(DIGEST[:8], DIGEST, 90), DifferenceRef(DIGEST[8:16], DIGEST, 300))
    plan = RoundPlan("demo-1f", 2, 20, "open", DIGEST, 400, {}, 2, 600.0, {"clip_norm": 0.5}, differences)
    assert encode_message(plan, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == plan


def test_difference() -> None:
    """Only applying it is pinned, as for updates."""
    base = np.array([1, 2, -3, 0.5, 0, 7, 7, 7], np.float32)
    result = apply_difference(bytes.fromhex(GOLDEN_DIFFERENCE), base, task="demo-1f", counts=COUNTS)
    assert result.astype("<f4").tobytes() == bytes.fromhex(GOLDEN_RESULT)
    assert result.tolist() == [1.5, 1.75, -3.0, 0.5, 40.0, 7.0, 7.0, 7.0]
    target = base + np.array([0.5, -0.25, 0.1, 0, 40, 0, 0, 0], np.float32)
    made = encode_difference(base, target, task="demo-1f", round=2, counts=COUNTS, steps=[0.25, 0.25])
    assert made.result.tobytes() == result.tobytes()


def test_chunk() -> None:
    golden = bytes.fromhex(GOLDEN_CHUNK)
    blob = b"hushfleet" * 3
    assert list(split(blob, 10))[2] == golden
    chunk = parse_frame(golden)
    assert (chunk.size, chunk.chunk_bytes, chunk.index, chunk.count, bytes(chunk.payload)) == (
        27, 10, 2, 3, b"shfleet"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "golden", "values"),
    [
        ("float32", GOLDEN_FLOAT32, VALUES),
        ("float16", GOLDEN_FLOAT16, VALUES),
        ("one-bit", GOLDEN_ONE_BIT, np.copysign(np.repeat(np.float32([1.25, 0.625]), COUNTS), VALUES)),
    ],
)
def test_updates_without_an_entropy_coder(codec: str, golden: str, values: np.ndarray) -> None:
    encoded = encode_update(header(codec), VALUES, counts=COUNTS, identity=DEVICE, public=b"mask")
    assert encoded.data == bytes.fromhex(golden)
    decoded = decode_update(encoded.data, public_key=DEVICE.public_key, counts=COUNTS)
    assert decoded.header == header(codec)
    assert decoded.values.tolist() == values.tolist()
    assert decoded.public == b"mask"


def test_quantized_update() -> None:
    """Only decoding is pinned: another release of zlib may deflate the same symbols to other bytes."""
    decoded = decode_update(bytes.fromhex(GOLDEN_QUANTIZED), public_key=DEVICE.public_key, counts=COUNTS)
    assert decoded.header == header("quantized")
    assert decoded.values.astype("<f4").tobytes() == bytes.fromhex(GOLDEN_DECODED)
    assert decoded.public == b"mask"
    encoded = encode_update(header("quantized"), VALUES, counts=COUNTS, identity=DEVICE)
    assert encoded.sent.tobytes() == decoded.values.tobytes()
    assert (np.abs(decoded.values - VALUES) <= np.repeat([0.25, 0.125], COUNTS)).all()
