"""Every decoder of the kit that reads bytes from elsewhere: real bytes to begin with, and what it may raise.

A target's input is what an attacker is free to choose. Where a checksum or a signature stands in front of a parser,
`finish` puts it on, so that the parser behind it is what is tested.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import lzma
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.results.events import EventTail
from hushfleet.data.arrays import Data, load_arrays
from hushfleet.data.csv_file import load_csv_set
from hushfleet.data.images import read_image
from hushfleet.data.sets import read_idx
from hushfleet.edge_client.board.config import load_config
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, GraphRefused, HushfleetError, LedgerError, StoreError, WireError
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.methods.state import PublicState
from hushfleet.params import ParamLayout
from hushfleet.release.archive import unpack
from hushfleet.release.manifest import Manifest, SignedManifest
from hushfleet.secure import prime_field
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.unmasking_share import AnswerHeader, decode_answer, encode_answer
from hushfleet.simulator.studies.reproduce.kept import KeptCell
from hushfleet.wire.format import messages as m
from hushfleet.wire.format.chunks import Assembler, parse_frame, split
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codecs
from hushfleet.wire.format.difference import apply_difference, encode_difference
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity
from hushfleet.wire.format.quantized import decode_values, encode_values
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import UpdateHeader, read_header
from hushfleet.wire.format.update_values import decode_masked, decode_update, encode_masked, encode_update

ROOT = Path(__file__).resolve().parents[2]
KEY = Identity.from_bytes(bytes(range(32)))
DIGEST = bytes(range(32))
FEDERATION = "demo"
COUNTS = [150, 50]
CODING = Coding(COUNTS, (0.5, 0.5), bytes(16))
VALUES = np.random.default_rng(1).standard_normal(200).astype(np.float32)
LAYOUT = ParamLayout(("a.weight", "b.weight"), ((15, 10), (50,)))


@dataclass(frozen=True)
class Target:
    """:param seeds: real inputs, whose making may take a moment; :param allowed: what `decode` may raise.
    :param finish: makes the bytes that `decode` reads of what the attacker chose.
    """

    name: str
    decode: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    allowed: tuple[type[Exception], ...]
    finish: Callable[[bytes], bytes] = bytes

    def run(self, data: bytes) -> bool:
        """Whether it was accepted; an exception that is not allowed, or has no text, goes through."""
        try:
            self.decode(self.finish(data))
        except self.allowed as error:
            if not str(error):
                raise AssertionError("it is refused without a reason") from error
            return False
        return True


def _messages() -> list[bytes]:
    plan = m.RoundPlan(
        "demo-1f", 2, 20, "open", DIGEST, 800, {"pi-1": DIGEST[:16]}, 2, 600.0, {"clip_norm": 0.5},
        (m.DifferenceRef(DIGEST[:8], DIGEST, 90),),
    )  # fmt: skip
    asks = m.RoundPlan(
        "demo-1f",
        2,
        20,
        "unmask",
        DIGEST,
        800,
        {},
        1,
        600.0,
        secure=m.SecurePlan(BlobRef(DIGEST, 90), 0.5, b"\xff\x80"),
    )
    return [
        m.encode_message(message, KEY, federation=FEDERATION)
        for message in (
            m.ServerState(3, "ready", KEY.public_key), m.TaskNotice("demo-1f", DIGEST, 5000, 3), plan, asks,
            m.Birth("pi-1", 7, "training", "pi-4", "0.1.0", KEY.public_key, 900),
            m.Want(DIGEST, 5000, ((0, 1), (4, 7))),
            m.Offer("demo-1f", 2, DIGEST, 5000), m.Decline("demo-1f", 2, "budget", "epsilon would be 9.1"),
            m.Ack("demo-1f", 2, DIGEST), m.Missing("demo-1f", 2, DIGEST, ((3, 9),)),
            m.Refused("demo-1f", 2, DIGEST, "late", "round 3 is open"), m.Ask(7, DIGEST[:16]),
            m.NotEnrolled("pi-1", KEY.public_key, "ask the operator"),
            m.Known(3, DIGEST[:16], 7, True, "demo-1f", 2, "open", 1, DIGEST),
        )
    ]  # fmt: skip


def _signed(data: bytes, context: bytes = b"") -> bytes:
    return data + KEY.sign(context + data)


def _unsigned(made: list[bytes]) -> list[bytes]:
    return [data[:-SIGNATURE_BYTES] for data in made]


def _framed(data: bytes) -> bytes:
    """A kind and a body become a message with the right length and signature."""
    head = m.MAGIC + bytes([m.version_of(data[0]) if data else m.VERSION])
    return _signed(head + data[:1] + struct.pack("<I", len(data[1:])) + data[1:], f"hushfleet {FEDERATION}\0".encode())


def _updates() -> list[bytes]:
    made = []
    for codec in (codec.name for codec in codecs()):
        steps = () if "float" in codec else (0.5, 0.25)
        header = UpdateHeader(
            "demo-1f", 2, "pi-1", codec, 200, steps, (1.0, 0.5), (1.0, 1.0), bytes(16), 3, 1.5, 1.25, 2
        )
        made.append(encode_update(header, VALUES, counts=COUNTS, identity=KEY, public=b"mask").data)
    return made


def _masked() -> list[bytes]:
    header = UpdateHeader("demo-1f", 2, "pi-1", "masked", 200, (), (1.0, 0.5), (1.0, 1.0), bytes(16), 3, 1.5, 1.25, 2)
    return [encode_masked(header, prime_field.to_bytes(np.arange(300, dtype=np.uint32), 16), identity=KEY)]


def _read_masked(data: bytes) -> None:
    with suppress(BadInput):
        prime_field.from_bytes(decode_masked(data, public_key=KEY.public_key)[1], 16)


def _answers() -> list[bytes]:
    return [
        encode_answer(AnswerHeader.of("demo-1f", 2, "pi-1", b"\xff\x80", bits), range(50), identity=KEY)
        for bits in prime_field.PRIMES
    ]


def _membership_lists() -> list[bytes]:
    keys = {f"pi-{number}": Identity.from_bytes(bytes([number] * 32)).public_key for number in range(3)}
    membership_list = MembershipList.of(keys)
    return [membership_list.to_bytes(), membership_list.signed(KEY, at=1e9, nonce=bytes(range(32))).to_bytes()]


def _frames() -> list[bytes]:
    return list(split(bytes(range(256)) * 8, 400))


def _checked(data: bytes) -> bytes:
    """A frame with the right checksum, which lies in bytes 52 to 56."""
    return data[:52] + struct.pack("<I", zlib.crc32(data[56:], zlib.crc32(data[:52]))) + data[56:]


def _assembled(data: bytes) -> None:
    parse_frame(data)
    whole = Assembler(DIGEST, 2048, 400)
    for each in (data, *_frames()[:2]):
        with suppress(WireError):
            whole.add(each)


def _coded() -> list[bytes]:
    steps = (0.1, 1e-4, 4.0, 30.0, 1e3)
    return [encode_values(VALUES, Coding([200], [step], bytes(16))) for step in steps]


def _forms() -> list[bytes]:
    sent = np.empty_like(VALUES)
    return [bytes([place]) + codec.encode(VALUES, CODING, sent) for place, codec in enumerate(codecs())]


def _decoded_form(data: bytes) -> None:
    codec = codecs()[data[0] % len(codecs()) if data else 0]
    codec.decode(data[1:], CODING, None)


def _difference() -> list[bytes]:
    how = {"task": "t-1", "round": 1, "counts": COUNTS}
    target = VALUES + np.float32(0.1) * VALUES[::-1]
    return [encode_difference(VALUES, target, steps=steps, **how).data for steps in ([0.1, 0.1], [1, 9])]


def _states() -> list[bytes]:
    mask = np.arange(200) % 3 == 0
    return [PublicState.initial(200).to_bytes(), PublicState(mask, 5).to_bytes()]


def _packages() -> list[bytes]:
    model = ModelSpec(
        "tiny", LAYOUT, (1, 2, 2), ("a", "b"), (0.0,), (1.0,), (), BlobRef(DIGEST, 90), BlobRef(DIGEST, 80)
    )
    privacy = PrivacySpec("device", "strict", clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
    return [TaskSpec("demo-1f", 5, "dp-fedavg", {"batch_size": 4}, privacy, WireSpec(), model, 64).to_bytes()]


@cache
def _graphs() -> list[bytes]:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 6, 6]),
              helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 1, 3, 3])]  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["b", "i"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Shape", ["b"], ["s"], start=0, end=1),
        helper.make_node("Concat", ["s", "n"], ["t"], axis=0),
        helper.make_node("Reshape", ["b", "t"], ["c"]),
        helper.make_node("Transpose", ["c"], ["d"], perm=[1, 0]),
        helper.make_node("MatMul", ["d", "c"], ["e"]),
        helper.make_node("Slice", ["e", "z", "n2", "z", "o"], ["f"]),
        helper.make_node("ReduceSum", ["f", "z"], ["y"], keepdims=0),
    ]
    constants = {"n": [-1], "z": [0], "n2": [4], "o": [2]}
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [18])],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return [model.SerializeToString()]


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="hushfleet-fuzz-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def decode_file(data: bytes) -> object:
        path = _folder() / name
        path.write_bytes(data)
        return read(path)

    return decode_file


def _images() -> list[bytes]:
    import io

    from PIL import Image

    made = []
    for kind in ("PNG", "JPEG", "BMP", "GIF"):
        buffer = io.BytesIO()
        Image.fromarray(np.resize(np.arange(251, dtype=np.uint8), (32, 32, 3))).save(buffer, kind)
        made.append(buffer.getvalue())
    return made


def _idx() -> list[bytes]:
    import gzip

    plain = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(24)
    return [plain, gzip.compress(plain, mtime=0), b"\0\0\x08\x01" + struct.pack(">I", 5) + bytes(5)]


CSV = (b"label,a,b\nx,1,2.5\ny,3,-4e-3\nx,5,6\n", b'\xef\xbb\xbfdevice,label,"a"\r\n1,0,7\r\n2,1,"8"\r\n')


def _array_files() -> list[bytes]:
    made = []
    for dtype in (np.uint8, np.float32):
        path = _folder() / "made.npz"
        Data(np.arange(120, dtype=dtype).reshape(10, 3, 4), [0, 1] * 5, train_device=["a", "b"] * 5).save(path)
        made.append(path.read_bytes())
    return made


@cache
def _stores() -> list[bytes]:
    path = _folder() / "made" / "store.sqlite"
    with DeviceStore(path, device="a", durable=False):
        pass
    return [path.read_bytes()]


def _opened_store(path: Path) -> None:
    for beside in path.parent.glob("fuzzed.sqlite-*"):
        beside.unlink()
    with DeviceStore(path, device="a", durable=False) as store:
        store.ledger.entries()
        store.waiting()


def _cells() -> list[bytes]:
    plain = {
        "schema": 1, "cell": "t/1", "digest": "ab", "quick": False, "task": {"name": "a"},
        "accuracies": {"accuracy_global": [0.5, None]}, "epsilon_server": "inf", "epsilon_release": 2.0,
        "noise_multiplier": 1.0, "rounds": 2, "uplink_bytes": 9, "seconds": 1.5, "samples": 3.0, "tested": 4.0,
        "runtime": "native", "processor": "x", "versions": {"numpy": "2"},
    }  # fmt: skip
    return [json.dumps(plain).encode()]


def _texts(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))[:4]]


TOPICS = Topics("field")
EVENTS = b'{"event": "round_open", "round": 1, "t": 1.5}\n{"event": "update", "epsilon": "inf", "device": "a"}\n'
WIRE, FILES, STORES = (WireError,), (BadInput,), (StoreError, LedgerError)


def _release() -> tuple[SignedManifest, bytes]:
    """The head of a release, and its payload before compression: an archive of a folder with two files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (("a", None), ("a/b.py", b"b = 1\n"), ("c.txt", bytes(600))):
            entry = tarfile.TarInfo(name)
            if content is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(content)
            tar.addfile(entry, None if content is None else io.BytesIO(content))
    payload = archive.getvalue()
    return SignedManifest.sign(_manifest(payload), Identity.from_bytes(bytes(32))), payload


def _manifest(payload: bytes) -> Manifest:
    digest = hashlib.sha256(payload).hexdigest()
    return Manifest("1.2.3", "cp313", "aarch64", 1, 3, (), 0, {}, digest, max(1, len(payload)), 1 << 16, 16)


def _unpacked(data: bytes) -> None:
    """As a board does once signature and hash are right; nothing may come to lie beside the folder."""
    with tempfile.TemporaryDirectory() as name:
        outside = Path(name)
        unpack(io.BytesIO(lzma.compress(data, preset=0)), _manifest(data), outside / "inside")
        assert [each.name for each in outside.iterdir()] == ["inside"]
        assert not any(each.is_symlink() for each in outside.rglob("*"))
        assert sum(each.stat().st_size for each in outside.rglob("*") if each.is_file()) <= 1 << 16


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("message", lambda data: m.decode_message(data, federation=FEDERATION, public_key=KEY.public_key),
               lambda: [data[3:4] + data[8:] for data in _unsigned(_messages())], WIRE, _framed),
        Target("message-raw", lambda data: m.decode_message(data, federation=FEDERATION), _messages, WIRE),
        Target("update", lambda data: decode_update(data, public_key=KEY.public_key, counts=COUNTS),
               lambda: _unsigned(_updates()), WIRE, _signed),
        Target("update-header", read_header, _updates, WIRE),
        Target("masked-update", _read_masked, lambda: _unsigned(_masked()), WIRE, _signed),
        Target("member-answer", lambda data: decode_answer(data, public_key=KEY.public_key),
               lambda: _unsigned(_answers()), WIRE, _signed),
        Target("roster", MembershipList.from_bytes, _membership_lists, WIRE),
        Target("chunk", _assembled, _frames, WIRE, _checked),
        Target("coded-values", lambda data: decode_values(data, Coding([200], [1.0], bytes(16))),
               _coded, WIRE),
        Target("forms", _decoded_form, _forms, WIRE),
        Target("difference", lambda data: apply_difference(data, VALUES, task="t-1", counts=COUNTS), _difference, WIRE),
        Target("public-state", lambda data: PublicState.from_bytes(data, size=200), _states, WIRE),
        Target("task-package", TaskSpec.from_bytes, _packages, WIRE),
        Target("graph", lambda data: check_cost(check_graph(data), batch=16, memory_bytes=1 << 28), _graphs,
               (GraphRefused,)),
        Target("topic", lambda data: TOPICS.parse(data.decode("utf-8", "replace")),
               lambda: [TOPICS.state("pi-1").encode(), TOPICS.blob(DIGEST).encode()], WIRE),
        Target("private-arrays", unpack_arrays,
               lambda: [pack_arrays({"a": np.arange(5.0), "b": np.ones((2, 3), bool)})], (ValueError, TypeError)),
        Target("task-file", _of_file("task.toml", load_task), lambda: _texts("tasks/*.toml"), FILES),
        Target("device-file", _of_file("device.toml", load_config), lambda: _texts("examples/device.toml"), FILES),
        Target("idx", _of_file("images.idx", read_idx), _idx, FILES),
        Target("csv", _of_file("mine.csv", lambda path: load_csv_set(path).dataset("mine")), lambda: [*CSV], FILES),
        Target("arrays", _of_file("mine.npz", lambda path: load_arrays(path).dataset("mine")), _array_files, FILES),
        Target("image", _of_file("image.png", lambda path: read_image(path, input_shape=(3, 8, 8))), _images, FILES),
        Target("events", _of_file("events.jsonl", lambda path: EventTail(path).read()), lambda: [EVENTS], ()),
        Target("kept-cell", _of_file("cell.json", KeptCell.load), _cells, FILES),
        Target("release-head", SignedManifest.from_bytes, lambda: [_release()[0].to_bytes()], WIRE),
        Target("release-payload", _unpacked, lambda: [_release()[1]], WIRE),
        Target("device-store", _of_file("fuzzed.sqlite", _opened_store), _stores, (HushfleetError,)),
    )
}  # fmt: skip
