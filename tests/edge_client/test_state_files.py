"""The list of names in a board's state directory has every file that a client writes, and no other."""

from __future__ import annotations

import ast
import datetime
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from PIL import Image

from hushfleet.atomic_file import PART_SUFFIX, write_whole
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, FleetSection, OwnDataSection
from hushfleet.edge_client.board.notes import WaitingNote
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.fleet.enrol import CertificateRequest
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.newest import News
from hushfleet.edge_client.fleet.renewal import Renewal
from hushfleet.edge_client.fleet.second_place import SecondPlace
from hushfleet.edge_client.fleet.slots import Slots
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.fleet.trial import prove
from hushfleet.edge_client.fleet.updates import ReleaseDuty
from hushfleet.edge_client.storage import state_files
from hushfleet.edge_client.storage.state_files import BEFORE_THE_STORE, LOCK_SUFFIX, REMNANTS, SQLITE_SUFFIXES, STORE
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.job import Job
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.errors import LostStore
from hushfleet.release.archive import read_head
from hushfleet.release.statements import Newest, Signed
from hushfleet.simulator.world.hub import LocalHub, LocalLink
from hushfleet.wire.format.fleet_messages import EnrolAnswer, EnrolRequest, ReleaseNews, ReleaseOffer
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import decode_message, encode_message
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.link.interface import LinkEvent
from support.edge import DEVICE, Bench, Clock, Package, ScriptedAggregator, Stop
from support.releases import DAILY, put_in, put_trust, statement
from support.slots import pack_files

ROOT = Path(__file__).resolve().parents[3]
OF_EARLIER_VERSIONS = {"data.txt"}
KNOWN = {STORE, *(STORE + suffix for suffix in (*SQLITE_SUFFIXES, LOCK_SUFFIX)), *REMNANTS, *BEFORE_THE_STORE}
KEY, SERVICE = Identity.generate(), Identity.generate()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of a training that fails, on purpose


def certificate(tls: TlsIdentity) -> bytes:
    """A certificate for the board's own key, which its service signs."""
    request, key = x509.load_der_x509_csr(tls.request()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(request.subject).issuer_name(request.subject)
    builder = builder.public_key(request.public_key()).serial_number(1)
    dated = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=9))
    return dated.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


class Connected(LocalLink):
    """The link of a release on trial; time passes while it waits for events."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(LocalHub(), DEVICE, None)
        self._stop = stop

    def receive(self, longest_s: float) -> LinkEvent | None:
        self._stop.wait(longest_s)
        return super().receive(0.0)


class Board:
    """A board with a fleet, releases and a camera. `seen` has every name that was in its state directory."""

    def __init__(self, home: Path, config: DeviceConfig) -> None:
        self.home, self.state, self.seen = home, home / "state", set[str]()
        self.state.mkdir(parents=True)
        (self.state / state_files.ENROL_TOKEN).write_text("t" * 40)  # of its card
        self.slots = Slots(home / "opt", self.state)
        (home / "opt").mkdir()
        self.slots.first(self.release("1.0"))
        put_trust(home / "opt", KEY.public_key.hex())
        for index, folder in enumerate(("images/3", "images/7", "held/3", "inbox", "camera") * 4):
            self.take_picture(index, folder)
        fleet = FleetSection(
            SERVICE.public_key.hex(), "mqtts://localhost:1", str(self.state / state_files.ENROL_TOKEN),
            releases=str(home / "opt"),
        )  # fmt: skip
        where = {name: str(home / name) for name in ("inbox", "unlabelled")}
        data = OwnDataSection("folder", str(home / "images"), held_out=str(home / "held"), keep="90d", **where)
        limits = replace(config.limits, tell_new=True, tell_drift=True)
        device = replace(config.device, state_dir=str(self.state))
        self.config = replace(config, device=device, simulation=None, fleet=fleet, data=data, limits=limits)
        self.file = home / "device.toml"
        self.file.write_text(
            f'[device]\nid = "{DEVICE}"\nstate_dir = "{self.state}"\n[broker]\nurl = "mqtt://localhost"\n'
            f'[data]\nkind = "folder"\npath = "{home}/images"\ninbox = "{home}/inbox"\nheld_out = "{home}/held"\n'
            "[limits]\nepsilon_server = 1000\n"
        )
        self.look()

    def take_picture(self, index: int, folder: str) -> None:
        path = self.home / folder / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (8, 8), np.uint8)).save(path)
        os.utime(path, (1e9, 1e9))  # nobody is writing it any more

    def look(self) -> None:
        self.seen.update(os.listdir(self.state))

    @contextmanager
    def has_store(self) -> Iterator[DeviceStore]:
        with DeviceStore(self.config.store_path, device=DEVICE) as store:
            yield store
            self.look()
        self.look()

    def release(self, version: str) -> Path:
        content = self.home / f"content-{version}"
        content.mkdir()
        (content / "file").write_bytes(os.urandom(1000))
        return pack_files(content, self.home / f"{version}.hfr", version, KEY)

    def try_release(self) -> None:
        """The release that was handed over is installed, started and found good."""
        self.look()
        self.slots.install()
        self.slots.begin()

        def a_minute() -> None:
            self.look()
            self.slots.check()

        stop = Stop(Clock(), a_minute)
        assert prove(self.config, lambda store: Connected(stop), stop, Supervisor(None, None))
        self.look()


def enrol(board: Board, store: DeviceStore) -> None:
    tls = TlsIdentity(board.state, device=DEVICE)
    asking = CertificateRequest(board.config, store, tls)
    WaitingNote(board.state / state_files.WAITING, {}, clock=Clock()).is_("certificate", "a certificate")
    request = decode_message(asking.frame(), federation="test")
    assert isinstance(request, EnrolRequest)
    answer = EnrolAnswer(DEVICE, request.nonce, "granted", certificate(tls), "", 0, ())
    asking.take(encode_message(answer, SERVICE, federation="test"))
    assert asking.granted


def hear_of_releases(board: Board, agent: Agent, duties: list[Any]) -> None:
    newest = Signed(Newest(1_750_000_000, {})).with_signature(DAILY).to_line()
    news = ReleaseNews(statement(KEY.public_key.hex(), number=2).to_line().encode(), newest.encode())
    path = board.release("1.1")
    with path.open("rb") as file:
        head = read_head(file)
    data = path.read_bytes()
    digest = hashlib.sha256(data).digest()
    offer = ReleaseOffer(DEVICE, "1.1", head.to_bytes(), digest, len(data), 1)
    for message in (news, offer):
        for duty in duties:
            topic = agent.topics.fleet(DEVICE)
            duty.take(agent.topics.parse(topic), encode_message(message, SERVICE, federation="test"))
    board.look()


def take_part(board: Board, store: DeviceStore, package: Package) -> None:
    """Trains, answers a question, and trains with a model with which training fails."""
    hub, clock = LocalHub(), Clock()
    server = ScriptedAggregator(hub, package)
    tls = TlsIdentity(board.state, device=DEVICE)
    news, updates = News(board.config, clock=clock), ReleaseDuty(board.config, store, now=clock())
    assert board.config.fleet is not None
    second = SecondPlace(board.config.fleet, store, now=clock())
    duties = [Renewal(board.config, store, tls, clock=clock), news, updates, second]
    health = BoardHealth(board.config, now=clock())
    agent = Agent(
        board.config, lambda will: hub.link(DEVICE, will), store, clock=clock, stop=Stop(clock), duties=duties,
        health=health, workshop=InProcess(clock=clock),
    )  # fmt: skip
    bench = Bench(hub, server, board.config, clock, store, agent)
    agent.start()
    server.announce()
    hear_of_releases(board, agent, duties)
    for round in (1, 2, 5):
        if round == 2:
            board.take_picture(99, "images/7")
            server.global_params = np.full_like(package.initial, 1e38)
        server.open_round(round, cohort={DEVICE: public_digest(bench)})
        bench.acked(round)
        bench.steps(10)
        board.look()
    package, graphs = agent.tasks.runtime.package()
    job = Job(board.config, package, graphs, server.plan(5), b"", 0, features="make")
    with ChildProcess(board.state / state_files.FEATURES)._opened(job):
        board.look()
    agent.close()
    updates.close()
    news.close()


def public_digest(bench: Bench) -> bytes:
    state = bench.store.load_state(bench.server.package.spec.task)
    return (bench.server.initial_public() if state is None else state.public).digest()


@pytest.fixture
def board(tmp_path: Path, config: DeviceConfig) -> Board:
    return Board(tmp_path / "board", config)


@pytest.fixture
def lived(board: Board, linear: Package, capsys: pytest.CaptureFixture[str]) -> Board:
    """A board that has done everything that a client does."""
    put_in(board.state, board.release("1.0.1"))
    board.try_release()
    before = {name for name in board.seen if not name.startswith(STORE)}
    assert before == set(BEFORE_THE_STORE), "and a fresh card starts with these"
    with board.has_store() as store:
        enrol(board, store)
        question = QuestionSpec("evaluation", every=5, noise_multiplier=4.0, held_out=0.3)
        take_part(board, store, linear.with_spec(question=question, after_new=1))
    photo = next((board.home / "inbox").iterdir())
    for command in (
        ["status", str(board.file), "--details"],
        ["predict", str(board.file), str(photo)],
        ["add", str(board.file), str(photo), "--label", "3"],
    ):
        assert main(command) == 0, capsys.readouterr().err
    board.look()
    put_in(board.state, board.release("1.2"))
    board.try_release()
    return board


def test_a_client_that_does_everything_writes_these_names_and_no_others(lived: Board) -> None:
    assert lived.seen <= KNOWN, "a new file? `state_files` must say whether it shows that there was a store"
    from_sqlite = {
        name for name in KNOWN if name.endswith(SQLITE_SUFFIXES)
    }  # which of these SQLite keeps is its affair
    assert lived.seen >= KNOWN - from_sqlite - OF_EARLIER_VERSIONS, "a name that nothing writes any more"


def test_no_client_starts_anew_beside_any_of_them(lived: Board, tmp_path: Path) -> None:
    """Each file alone, as it was written, and the part of it that a kill leaves."""
    for name in sorted(set(os.listdir(lived.state)) - {STORE, *BEFORE_THE_STORE}):
        for suffix in ("", PART_SUFFIX):
            state = tmp_path / f"{name}{suffix}"
            state.mkdir()
            (state / f"{name}{suffix}").write_bytes((lived.state / name).read_bytes())
            if name == STORE + LOCK_SUFFIX and suffix:
                continue  # it is not written in parts
            with pytest.raises(LostStore, match="is missing, but beside it there is still"):
                DeviceStore(state / STORE, device=DEVICE)
            assert not (state / STORE).exists()


def test_a_part_is_named_as_the_list_expects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *args: (names.extend(os.listdir(tmp_path)), real(*args)))
    write_whole(tmp_path / "a.json", b"{}", durable=False)
    assert names == [f"a.json{PART_SUFFIX}"]


def test_no_other_file_of_the_client_spells_such_a_name() -> None:
    elsewhere = {state_files.INCOMING, state_files.HEALTHY, state_files.RELEASE_KEYS}  # words, and a file of root's
    names, found = KNOWN - elsewhere, []
    for path in sorted((ROOT / "edge_client").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names and path.name != "state_files.py":
                found.append(f"{path.name}:{node.lineno}: {node.value}")
    assert found == []
