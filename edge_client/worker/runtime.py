"""A task on this device, as its guardian knows it: what decides about its rounds. A worker has its graphs and data."""

from __future__ import annotations

from collections.abc import Callable

from hushfleet.edge_client.board.by_content import check_by_content
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.consent import check_stored
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.allowed import Party
from hushfleet.errors import GraphRefused, Malformed
from hushfleet.methods import method_of
from hushfleet.wire.format.spec import TaskSpec


class TaskRuntime:
    """Everything that the guardian needs for the rounds of one task.

    :param digest: SHA-256 of the task package.
    :param counted: as `Party.now`.
    :param nominal_s: the work that the task names, as a worker measured it; None: not measured.
    :param deaths: how many workers in a row have ended without an outcome.

    Raises `Malformed` or `BadInput` for a method or a configuration of it that this device does not know.
    """

    def __init__(
        self,
        *,
        digest: bytes,
        spec: TaskSpec,
        config: DeviceConfig,
        store: DeviceStore,
        counted: Callable[[], int] = lambda: 0,
    ) -> None:
        method = method_of(spec)
        if method.parts.of_classes and not spec.model.targets.are_classes:
            raise Malformed(f"method {spec.method!r} is defined for classes alone, and the task has other targets")
        if spec.data_window_s and not method.parts.takes_empty:
            raise Malformed(f"method {spec.method!r} takes no device without samples, as a window may leave it")
        config.data.check_kind(spec.model)
        check_by_content(config.data, spec)
        if spec.data_window_s and not store.ledger.rounds_charged():
            store.arrivals.forget()  # before the first training, each start trusts its own clock
        self.digest, self.spec, self._store = digest, spec, store
        self.newcomer_digest = method.newcomer_digest  # a device that has not taken part yet
        asked, in_the_field = config.limits.constant_time, config.simulation is None
        self.constant_time = in_the_field and spec.privacy.unit == "record" if asked is None else asked
        """True if the end of a round is announced at a time that does not depend on the number of records."""
        self.party = Party(
            device=config.device.id, store=store, spec=spec, method=method, limits=config.limits, now=counted
        )
        self.nominal_s: float | None = None
        self.deaths = 0

    def blobs(self) -> set[bytes]:
        """Returns the digests that must stay in the store for a restart without the network."""
        return {self.digest, *(graph.digest for graph in self.spec.model.graphs)}

    def package(self, *, graphs: bool = True) -> tuple[bytes, tuple[bytes, ...]]:
        """Returns the task package and its graphs from the store. Raises `GraphRefused` if one is gone or damaged.

        :param graphs: False: without them, which have megabytes.
        """
        wanted = [ref.digest for ref in self.spec.model.graphs if graphs]
        package, *found = (self._store.blob(digest) for digest in (self.digest, *wanted))
        if package is None or None in found:
            raise GraphRefused("a graph of the task is not in the store any more; restart the client")
        return package, tuple(graph for graph in found if graph is not None)

    def check_stored(self, entry: OutboxEntry) -> None:
        """Checks that the owner still allows a stored update. Otherwise raises `Declined`; it is then never sent."""
        try:
            for charge in self._store.ledger.charges_of(entry.task, entry.round):
                check_stored(charge, self.spec.method, self.party.limits)
        except Declined:
            self._store.set_status(entry.task, entry.round, "refused:owner")
            raise
