"""Golden bytes: what version 2 of the wire format looks like, so that no change of it goes unnoticed.

A device in the field may run an older release than its aggregator. If one of these tests fails, either the
change is a mistake, or the version byte must grow and docs/wire.md must say so. `support.independent_reader`, which
knows docs/wire.md alone, reads the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import numpy as np
import pytest

from hushfleet.methods.state import PublicState
from hushfleet.schema import from_plain
from hushfleet.secure import prime_field
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.unmasking_share import AnswerHeader, decode_answer, encode_answer
from hushfleet.wire.format import messages
from hushfleet.wire.format.chunks import parse_frame, split
from hushfleet.wire.format.difference import apply_difference, encode_difference
from hushfleet.wire.format.fleet_messages import (
    CarriedRounds,
    EnrolAnswer,
    EnrolRequest,
    ReleaseNews,
    ReleaseOffer,
    proven_by_token,
    token_seed,
)
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.identity import Identity, verify
from hushfleet.wire.format.messages import (
    Ack,
    Ask,
    Birth,
    Decline,
    DifferenceRef,
    Known,
    Message,
    Missing,
    NotEnrolled,
    Offer,
    Refused,
    RoundPlan,
    SecurePlan,
    SeenCharges,
    ServerState,
    TaskNotice,
    Want,
)
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import decode_masked, decode_update, encode_masked, encode_update
from support import independent_reader

encode_message = partial(messages.encode_message, federation="demo")
decode_message = partial(messages.decode_message, federation="demo")
DEVICE = Identity.from_bytes(bytes(range(32)))
DIGEST = bytes(range(32))
CARRIED = CarriedRounds(
    "demo-1f", ((1, 4), (6, 7)), "device", "one device's update", "gaussian", 1.25, 2, 1.0, 1, ("accuracy",)
)
MESSAGES: list[Message] = [
    ServerState(3, "ready", DEVICE.public_key),
    TaskNotice("demo-1f", DIGEST, 5000, 3),
    RoundPlan("demo-1f", 2, 20, "open", DIGEST, 400, {"pi-1": DIGEST[:16], "pi-2": DIGEST[16:]}, 2, 600.0, epoch=3),
    Birth("pi-1", 7, "training", "pi-4", "0.1.0", DEVICE.public_key, 900),
    Want(DIGEST, 5000, ((0, 1), (4, 7))),
    Offer("demo-1f", 2, DIGEST, 5000),
    Decline("demo-1f", 2, "budget", "epsilon would be 9.1"),
    Ack("demo-1f", 2, DIGEST),
    Missing("demo-1f", 2, DIGEST, ((3, 9),)),
    Refused("demo-1f", 2, DIGEST, "late", "round 3 is open"),
    NotEnrolled("pi-1", DEVICE.public_key, "ask the operator"),
    Ask(7, DIGEST[:16]),
    Known(3, DIGEST[:16], 7, True, "demo-1f", 2, "open", 1, DIGEST),
    EnrolRequest("pi-1", b"csr", DEVICE.public_key, DIGEST, DIGEST[:16], "pi-4", "0.3.0", ("demo-1f", 2)),
    EnrolAnswer("pi-1", DIGEST[:16], "granted", b"pem", "", 600, (CARRIED,), ("demo-1f", 6)),
    Health(
        "pi-1", 7, "0.3.0", 60, 40, None, 55, False, "budget", None, 1_800_000_000, "good", "cp313-aarch64", "0.3.1", 1,
        "cpu",
    ),
    ReleaseOffer("pi-1", "0.3.1", b"manifest", DIGEST, 5000, 2),
    ReleaseNews(b"statement of root", b"word of the day"),
]  # fmt: skip
VALUES = np.array([0.0, 1.0, -1.0, 2.5, -40.0, 0.125, 3.0, -7.75], np.float32)
COUNTS = [5, 3]

GOLDEN_MESSAGES: dict[str, str] = {
    "ServerState": (
        "484603014100000083a565706f636803a57374617465a57265616479aa7075626c69635f6b6579c42003a107bff3ce10"
        "be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8e636d076949bac42d6a94288ca68e588c2053aaee0dd58"
        "bb136189706d7a54f06b62748c46967e158dd95e2c167fded4d562794fc176548eab4812db00627002"
    ),
    "TaskNotice": (
        "484603024600000084a47461736ba764656d6f2d3166a6646967657374c420000102030405060708090a0b0c0d0e0f10"
        "1112131415161718191a1b1c1d1e1fa473697a65cd1388a565706f636803e1acb5e27c09b5711095f524ee08254b864e"
        "1d75a232b5445cd0f86b8ed374dfe7ea68b07dede21c468b735738ec0994e09316c69bf37229471b8d43fe3d9a0b"
    ),
    "RoundPlan": (
        "48460303c60000008aa47461736ba764656d6f2d3166a5726f756e6402a6726f756e647314a57068617365a46f70656e"
        "ad676c6f62616c5f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "ac676c6f62616c5f6279746573cd0190a6636f686f727482a470692d31c410000102030405060708090a0b0c0d0e0fa4"
        "70692d32c410101112131415161718191a1b1c1d1e1fab6e6f6973655f73706c697402aa646561646c696e655f73cb40"
        "82c00000000000a565706f636803ea954ad82c53f1ea790f24894815ed256c038cc5b7a6530a17ed5dbfabc1aa03de91"
        "bbe2e94161e661e93fe645e09625b40f4601c98c6647f197a13a88629b06"
    ),
    "Birth": (
        "484603047900000087a6646576696365a470692d31a773657373696f6e07a57374617465a8747261696e696e67a5626f"
        "617264a470692d34a776657273696f6ea5302e312e30aa7075626c69635f6b6579c42003a107bff3ce10be1d70dd18e7"
        "4bc09967e4d6309ba50d5f1ddc8664125531b8aa6d656d6f72795f6d6962cd0384fd16c6219f2584a0279f0cebd20780"
        "d0b3b5900f051c664e1b80c65b31cc212a959ce6e1f7d6b784dfb3a568f02cb246621f9b14aecd6a39f35670c42aad8f"
        "06"
    ),
    "Want": (
        "484602054100000083a6646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
        "1e1fa473697a65cd1388a76d697373696e67929200019204070dee5ce8c081b21012cfedad453dffede018d81daf1a69"
        "21efe8d6e09885be9ff9a8354ceb4152b6940af279bd48aa295418fdf8e3aa618852bc15613211e709"
    ),
    "Offer": (
        "484603064600000084a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa473697a65cd13882b30698511d38a6318baab22dbdd0a023248"
        "83230f55501ab93dbac92fe9c369b12253642d1be1f9a16b5bd073fa1d270698964b5f5bc43645d2736b312cf208"
    ),
    "Decline": (
        "484603073d00000084a47461736ba764656d6f2d3166a5726f756e6402a4636f6465a6627564676574a6726561736f6e"
        "b4657073696c6f6e20776f756c6420626520392e314e7666d1abf702c37b813b8c9a2ab5dd61ea78d1b86413131f618a"
        "fff7abc397d6fe59862a38541eea0526d5c7a1a6ef2215da19173af4d24b7cbbec11d3fe0f"
    ),
    "Ack": (
        "484603083e00000083a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1f4b4d983ec8f773b2e090b5558db1f48b537fad617439fe590b59"
        "9995d3434c16cb3f06b0df45a95146dd851842ce4763091ecbba7fb3adfe98bfb0dfc490960c"
    ),
    "Missing": (
        "484603094a00000084a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa76d697373696e6791920309a4e2544ab98417a226f096f2105c"
        "5cbcb3ca805a7a22e034d8669913410c461adc6d561fd6ada1d16917a51ac130dbc0d36371b73b41cbd6941603399931"
        "e600"
    ),
    "Refused": (
        "4846030a5f00000085a47461736ba764656d6f2d3166a5726f756e6402a6646967657374c42000010203040506070809"
        "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa4636f6465a46c617465a6726561736f6eaf726f756e64203320"
        "6973206f70656e7ccbfb648710f9416288a7ff4e499571b063afa5f02f87ebed777f558fd53a287fae7922e0809aaf4e"
        "a5ee50d232f1536ea5cf9de050779d4e315ffc5bc3060f"
    ),
    "NotEnrolled": (
        "4846030b5200000083a6646576696365a470692d31aa7075626c69635f6b6579c42003a107bff3ce10be1d70dd18e74b"
        "c09967e4d6309ba50d5f1ddc8664125531b8a6726561736f6eb061736b20746865206f70657261746f723fb30636d944"
        "9e97dbeaf01d5e5a9be4e5912c71430d1db3cb3f860aae011bb91220f6bff9c87ee697fb54e0bdf2900352ecf443d54f"
        "933ac21e61007a1abd0d"
    ),
    "Ask": (
        "4846030c2200000082a773657373696f6e07a56e6f6e6365c410000102030405060708090a0b0c0d0e0fd8c85573e54b"
        "f56f900e8f882850d4ca770de03efe2dd15ce91db4a4b8f5ad501ba5a248d60e209695065d19695aad67bdc8810eb2a5"
        "73f904b6f7e05bf29e0e"
    ),
    "Known": (
        "4846030d8900000089a565706f636803a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa773657373696f6e"
        "07a5796f757273c3a47461736ba764656d6f2d3166a5726f756e6402a57068617365a46f70656eaa6c6173745f726f75"
        "6e6401ab6c6173745f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
        "1fc435d0f2cf9985a92f3b9d40d966fb2117cf78d4c58cd47a29c3d56fddd6ba7d2b11a8c9c23e2410df6dfc42ec9949"
        "3f05c25893ea3ff597d1b276bf1d0ebe04"
    ),
    "EnrolRequest": (
        "4846020eac00000088a6646576696365a470692d31a3637372c403637372aa7075626c69635f6b6579c42003a107bff3"
        "ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8a570726f6f66c420000102030405060708090a0b0c"
        "0d0e0f101112131415161718191a1b1c1d1e1fa56e6f6e6365c410000102030405060708090a0b0c0d0e0fa5626f6172"
        "64a470692d34a776657273696f6ea5302e332e30a5616674657292a764656d6f2d316602205854334e0dfd256991ed82"
        "628882aaf03985e02d47ac2543d6323a8bbff3671b0103f8b36eed0cc2c85b88e90fa6a26ceacd869d8f854d3ee97eca"
        "8224e00c"
    ),
    "EnrolAnswer": (
        "4846020f1c01000088a6646576696365a470692d31a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa77665"
        "7264696374a76772616e746564ab6365727469666963617465c40370656da6726561736f6ea0a772657472795f73cd02"
        "58a763617272696564918aa47461736ba764656d6f2d3166a6726f756e647392920104920607a4756e6974a664657669"
        "6365a961646a6163656e6379b36f6e6520646576696365277320757064617465a96d656368616e69736da86761757373"
        "69616eb06e6f6973655f6d756c7469706c696572cb3ff4000000000000ab6e6f6973655f73706c697402ab73616d706c"
        "655f72617465cb3ff0000000000000a5737465707301a372617791a86163637572616379a575705f746f92a764656d6f"
        "2d31660621e301709cd580738108702958177741a4661b1b463637331f5dd7fe7c7702383dda8c49060407c87666b0db"
        "d46ac6420ec7137325736aa6fb6de44434e5be0c"
    ),
    "Health": (
        "48460210e3000000de0010a6646576696365a470692d31a773657373696f6e07a776657273696f6ea5302e332e30a875"
        "7074696d655f733cac6469736b5f70657263656e7428ae6d656d6f72795f70657263656e74c0ad74656d706572617475"
        "72655f6337a97468726f74746c6564c2ac6c6173745f6465636c696e65a6627564676574aa6c6173745f6572726f72c0"
        "af63657274696669636174655f656e64ce6b49d200a4736c6f74a4676f6f64a8706c6174666f726dad63703331332d61"
        "617263683634a57472696564a5302e332e31a7617474656d707401ab616363656c657261746f72a3637075ce6f53f45c"
        "606120a24a0d3372fdeae49e2b03bd88c70262796d1b37f8057ede240f0cca24f4091daf35f9997de9d8c8b9e00a3fb8"
        "0719eec587bfdece496006"
    ),
    "ReleaseOffer": (
        "484602116800000086a6646576696365a470692d31a776657273696f6ea5302e332e31a86d616e6966657374c4086d61"
        "6e6966657374a6646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa4"
        "73697a65cd1388a7617474656d707402a9e9df60a4bd57e6ebcb330cff9392bc1b3de7ac1f8c9b8fd9812e025b6159eb"
        "f3fe5165c2fc967c83f1cb0769cae3d4e7ade34a4062c107fcbf4418db40fc07"
    ),
    "ReleaseNews": (
        "484603123100000082a46b657973c41173746174656d656e74206f6620726f6f74a66e6577657374c40f776f7264206f"
        "66207468652064617974cc030d24589d6e7d9c0aecbbc7ca14138e10e26b607b74e1bf54a00b1a7b27bbe27e1da65dfd"
        "e8637380efb959b241da4be71a7107d4f5df1d1832f25f2507"
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
    "48460303200100008ca47461736ba764656d6f2d3166a5726f756e6402a6726f756e647314a57068617365a46f70656e"
    "ad676c6f62616c5f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "ac676c6f62616c5f6279746573cd0190a6636f686f727480ab6e6f6973655f73706c697402aa646561646c696e655f73"
    "cb4082c00000000000a8636f6e74726f6c7381a9636c69705f6e6f726dcb3fe0000000000000ab646966666572656e63"
    "65739293c4080001020304050607c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "5a93c40808090a0b0c0d0e0fc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd01"
    "2ca565706f6368031908f8cc3b75da4b033307f55da438994fef3961ee0ed8098556b83510445167c36f29ef57db0e63"
    "83e4f217d3eee51e77afed22aee58498d5b84a136f096401"
)

GOLDEN_PLAN_OF_A_SUM = (
    "48460303f60000008ba47461736ba764656d6f2d3166a5726f756e6402a6726f756e647314a57068617365a6756e6d61"
    "736bad676c6f62616c5f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
    "1e1fac676c6f62616c5f6279746573cd0190a6636f686f727480ab6e6f6973655f73706c697401aa646561646c696e65"
    "5f73cb4082c00000000000a565706f636803a673656375726583a6726f7374657282a6646967657374c4200001020304"
    "05060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa473697a65cdc350a472617465cb3fe00000000000"
    "00a8696e636c75646564c402fe80494f30a6b3d4e04746d86c2c122202d05ed4d1656ef55432f0814fc44d6e380f1064"
    "dab2d0647a2f14c4540814e1b4dd8056787d995e46967ef3b1e107b78f07"
)

GOLDEN_MASKED = (
    "48550200ee0000008da47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a5636f646563a6"
    "6d61736b6564ab76616c75655f636f756e7408a5737465707390aa6e6f6973655f7374647392cb3ff0000000000000cb"
    "3fe0000000000000aa636c69705f6e6f726d7392cb3ff0000000000000cb7ff0000000000000ad7075626c69635f6469"
    "67657374c410000102030405060708090a0b0c0d0e0fae726f756e64735f6368617267656403ae657073696c6f6e5f73"
    "6572766572cb7ff0000000000000b16d756c7469706c6965725f736572766572cb3ff4000000000000ab6e6f6973655f"
    "73706c69740216000000e6ffe7ffe8ffe9ffeaffebffecffedffeeffeffff0ff00000000b58fc277e903363196c8291c"
    "e9dc98a5ccaa092955b127d05f73a4b6025af4408507cf9d1e9e5e7e00a5c9108ac14e11f81d63b377fce46a7299d69a"
    "44e6f50b"
)

GOLDEN_ANSWER = (
    "484d01005200000085a47461736ba764656d6f2d3166a5726f756e6402a6646576696365a470692d31a8696e636c7564"
    "6564c420a3c089c0737c6c7e7c728a1e278e2adfb260503fbbf27bb5fd36275ac21a62bea46269747318000000010000"
    "000100fcffff85802690a8205b4a27739e523ac60f821670ada2fc1fe2846740ef3c6a3e1646772867b73a2679ff07aa"
    "869ca31b7b873e8a2fea4a04e35174ed782f8f70ea02"
)

GOLDEN_DIFFERENCE = (
    "484401007e00000085a47461736ba764656d6f2d3166a5726f756e6402a462617365c4206a9a126564f58bb22e5cd2ef"
    "b58d117ddc023d562d5a86fc904994a08c92c19ea6726573756c74c4205ba686d176b09d91938f028ea26915b45211d7"
    "ea74fa94b23f7ddc0172bf07c2a5737465707392cb3fd0000000000000cb000000000000000001010000000a00000063"
    "616460f8e7c0c80000"
)

GOLDEN_RESULT = "0000c03f0000e03f000040c00000003f000020420000e0400000e0400000e040"


# participations 3; of 20 parameters the places 0, 3 and 17 are personal
GOLDEN_PUBLIC_STATE = "03000000789c9bc0e0000001f300d1"
GOLDEN_PUBLIC_DIGEST = "a29e5f2d05b28842d23acc1110230054"

GOLDEN_MEMBERSHIP_LIST = (
    "89a76465766963657392a470692d31a470692d32a46b657973c44003a107bff3ce10be1d70dd18e74bc09967e4d6309b"
    "a50d5f1ddc8664125531b879b5562e8fe654f94078b112e8a98ba7901f853ae695bed7e0e3910bad049664aa66656465"
    "726174696f6eaa677265656e686f757365af686f6e6573745f6672616374696f6ecb3fe8000000000000ab6d696e5f64"
    "65766963657302a66e756d626572ce6ab13b80a464617465ce6ab13b80a56e6f6e6365c420000102030405060708090a"
    "0b0c0d0e0f101112131415161718191a1b1c1d1e1fa97369676e6174757265c440df582d1991e046511235e6ed67d3fa"
    "0285de40d901736c7643482f3d8edf55b1b6960e57a9f88a7a9f309fe911a2e9f72a178bd29e57d43aa47b73f20058db"
    "0e"
)


GOLDEN_KNOWN_WITH_CHARGES = (
    "4846030dbb0000008aa565706f636803a56e6f6e6365c410000102030405060708090a0b0c0d0e0fa773657373696f6e"
    "07a5796f757273c3a47461736ba764656d6f2d3166a5726f756e6402a57068617365a46f70656eaa6c6173745f726f75"
    "6e6401ab6c6173745f646967657374c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
    "1fa47365656e84a6726f756e64730ea6776569676874cb400c000000000000a47461736ba764656d6f2d3165a5726f75"
    "6e64076b437beec5bcde49fd46b050bf5de57dd9250b971cf0d953890d564f148b948e0e4eec50a7813aec1cbb51974b"
    "65c728aa8fa1a368f8d5e6c47fd2dc8ed05603"
)
SUM = SecurePlan(BlobRef(DIGEST, 50_000), 0.5, b"\xfe\x80")


def header(codec: str) -> UpdateHeader:
    steps = {"quantized": (0.5, 0.25), "one-bit": (1.25, 0.625)}.get(codec, ())
    return UpdateHeader(
        "demo-1f", 2, "pi-1", codec, 8, steps, (1.0, 0.5), (1.0, math.inf), bytes(range(16)), 3, math.inf, 1.25, 2
    )


def read_independently(golden: bytes, message: Message) -> None:
    kind, read = independent_reader.message(golden, "demo")
    assert messages.type_of(kind) is type(message)
    assert from_plain(type(message), read.fields) == message
    verify(DEVICE.public_key, read.signed, read.signature)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages(message: Message) -> None:
    golden = bytes.fromhex(GOLDEN_MESSAGES[type(message).__name__])
    assert encode_message(message, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == message
    read_independently(golden, message)


def test_a_plan_with_the_fields_that_came_later() -> None:
    golden = bytes.fromhex(GOLDEN_PLAN_WITH_DIFFERENCES)
    differences = (DifferenceRef(DIGEST[:8], DIGEST, 90), DifferenceRef(DIGEST[8:16], DIGEST, 300))
    plan = RoundPlan("demo-1f", 2, 20, "open", DIGEST, 400, {}, 2, 600.0, {"clip_norm": 0.5}, differences, 3)
    assert encode_message(plan, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == plan
    read_independently(golden, plan)


def test_an_answer_that_names_the_charges_of_a_key() -> None:
    """A board whose key has charged nothing gets the bytes above."""
    golden = bytes.fromhex(GOLDEN_KNOWN_WITH_CHARGES)
    known = Known(3, DIGEST[:16], 7, True, "demo-1f", 2, "open", 1, DIGEST, SeenCharges(14, 3.5, "demo-1e", 7))
    assert encode_message(known, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == known
    read_independently(golden, known)


def test_a_plan_that_asks_the_committee_of_a_secure_aggregation() -> None:
    golden = bytes.fromhex(GOLDEN_PLAN_OF_A_SUM)
    plan = RoundPlan("demo-1f", 2, 20, "unmask", DIGEST, 400, {}, 1, 600.0, epoch=3, secure=SUM)
    assert encode_message(plan, DEVICE) == golden
    assert decode_message(golden, public_key=DEVICE.public_key) == plan
    read_independently(golden, plan)


def test_masked_update() -> None:
    golden, values = bytes.fromhex(GOLDEN_MASKED), np.arange(65510, 65521, dtype=np.uint32)
    assert encode_masked(header("masked"), prime_field.to_bytes(values, 16), identity=DEVICE) == golden
    decoded, data = decode_masked(golden, public_key=DEVICE.public_key)
    assert decoded == header("masked")
    assert prime_field.from_bytes(data, 16).tolist() == values.tolist()
    assert independent_reader.field_elements(independent_reader.update(golden).values, 16).tolist() == values.tolist()


def test_answer_of_a_member() -> None:
    golden, values = bytes.fromhex(GOLDEN_ANSWER), np.array([0, 1, 256, 16777212], np.uint32)
    header = AnswerHeader.of("demo-1f", 2, "pi-1", SUM.included, 24)
    assert encode_answer(header, values, identity=DEVICE) == golden
    decoded = decode_answer(golden, public_key=DEVICE.public_key)
    assert decoded.header == header
    assert decoded.values.tolist() == values.tolist()
    read = independent_reader.answer(golden)
    assert from_plain(AnswerHeader, read.fields) == header
    assert independent_reader.field_elements(read.values, 24).tolist() == values.tolist()
    verify(DEVICE.public_key, read.signed, read.signature)


def test_difference() -> None:
    """Only applying it is pinned, as for updates."""
    base = np.array([1, 2, -3, 0.5, 0, 7, 7, 7], np.float32)
    result = apply_difference(bytes.fromhex(GOLDEN_DIFFERENCE), base, task="demo-1f", counts=COUNTS)
    assert result.astype("<f4").tobytes() == bytes.fromhex(GOLDEN_RESULT)
    assert result.tolist() == [1.5, 1.75, -3.0, 0.5, 40.0, 7.0, 7.0, 7.0]
    assert independent_reader.difference(bytes.fromhex(GOLDEN_DIFFERENCE), base, COUNTS).tobytes() == result.tobytes()
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
    assert independent_reader.chunk(golden) == (chunk.digest, 27, 20, b"shfleet")


def test_public_state() -> None:
    """Only reading is pinned: another release of zlib may deflate the same mask to other bytes."""
    golden = bytes.fromhex(GOLDEN_PUBLIC_STATE)
    state = PublicState.from_bytes(golden, size=20)
    assert (state.participations, np.flatnonzero(state.mask).tolist()) == (3, [0, 3, 17])
    assert state.digest().hex() == GOLDEN_PUBLIC_DIGEST
    participations, mask, digest = independent_reader.public_state(golden, 20)
    assert (participations, np.flatnonzero(mask).tolist(), digest) == (3, [0, 3, 17], state.digest())


def test_membership_list() -> None:
    golden, operator = bytes.fromhex(GOLDEN_MEMBERSHIP_LIST), Identity.from_bytes(bytes(range(1, 33)))
    keys = {"pi-1": DEVICE.public_key, "pi-2": operator.public_key}
    membership_list = MembershipList.of(keys, federation="greenhouse", honest_fraction=0.75, min_devices=2)
    assert membership_list.signed(operator, at=1_790_000_000, after=7, nonce=bytes(range(32))).to_bytes() == golden
    read, signed, signature = independent_reader.membership_list(golden)
    assert read == keys
    verify(operator.public_key, signed, signature)


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
    read = independent_reader.update(encoded.data)
    assert from_plain(UpdateHeader, read.fields) == header(codec)
    assert independent_reader.values(read, COUNTS).tobytes() == decoded.values.tobytes()
    assert read.public_state == b"mask"
    verify(DEVICE.public_key, read.signed, read.signature)


def test_quantized_update() -> None:
    """Only decoding is pinned: another release of zlib may deflate the same symbols to other bytes."""
    decoded = decode_update(bytes.fromhex(GOLDEN_QUANTIZED), public_key=DEVICE.public_key, counts=COUNTS)
    assert decoded.header == header("quantized")
    assert decoded.values.astype("<f4").tobytes() == bytes.fromhex(GOLDEN_DECODED)
    assert decoded.public == b"mask"
    read = independent_reader.update(bytes.fromhex(GOLDEN_QUANTIZED))
    assert independent_reader.values(read, COUNTS).tobytes() == decoded.values.tobytes()
    encoded = encode_update(header("quantized"), VALUES, counts=COUNTS, identity=DEVICE)
    assert encoded.sent.tobytes() == decoded.values.tobytes()
    assert (np.abs(decoded.values - VALUES) <= np.repeat([0.25, 0.125], COUNTS)).all()


def test_the_proof_of_a_token() -> None:
    """A card that was written earlier must enrol with every later version that speaks the same wire version."""
    seed = token_seed(hashlib.sha256(b"a token of a card").digest())
    signed = proven_by_token(federation="demo", device="pi-1", csr=b"csr", public_key=DEVICE.public_key)
    key = Identity.from_bytes(seed)
    assert key.public_key.hex() == "737e7c16020a9fadcf68260cc57124a2d55bd544549fe679f22d3469107b1242"
    assert key.sign(signed).hex() == (
        "f7a9b6550c2870bfb2dc8a50650302e467ea25a2d782310ad1b87525351b701c"
        "70a058b6359ea542c3eb6f7c4577703d679b4c43df31aaa347288bfedf9f5a01"
    )
