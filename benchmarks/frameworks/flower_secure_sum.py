"""Measures Flower's SecAgg+: the costs of one client, and of the server, in a round of a given number of clients.

`benchmarks/secure_sum.py` starts it in a separate environment; its only argument is one JSON text. The clients run
Flower's own `secaggplus_mod`, with the messages that `SecAggPlusWorkflow` would send them. One client and its
neighbours run several times: as on our side the shortest time counts, and not the first one, which still loads modules.
The server's work is measured on one vector, one seed and one key of each kind, and counted for all.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_subtraction
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.serde import recorddict_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from flwr.supercore.task_identity import TaskIdentity

MOD_RANGE = 1 << 32
ROUNDS = 3


class Client:
    """:param size: how many values it sends."""

    def __init__(self, node: int, size: int) -> None:
        self.node, self._size = node, size
        self._context = Context(1, node, {}, RecordDict(), {})
        self.cpu_s, self.up, self.down = 0.0, 0, 0

    def step(self, config: dict[str, Any]) -> ConfigRecord:
        """Runs one of the four stages."""
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(config)})
        message = Message(content=content, dst_node_id=self.node, message_type="train", group_id="1")
        self.down += len(recorddict_to_proto(content).SerializeToString())
        began = time.process_time()
        reply = secaggplus_mod(message, self._context, self._fit)
        self.cpu_s += time.process_time() - began
        self.up += len(recorddict_to_proto(reply.content).SerializeToString())
        return reply.content.config_records[RECORD_KEY_CONFIGS]

    def _fit(self, message: Message, context: Context) -> Message:
        """Returns an update without any training cost."""
        values = np.full(self._size, 0.125, np.float32)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values]), 500, {})
        return Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)


def timed(work: Any, *arguments: Any) -> tuple[Any, float]:
    began, least = time.process_time(), float("inf")
    while True:
        start = time.process_time()
        found = work(*arguments)
        least = min(least, time.process_time() - start)
        if time.process_time() - began > 0.1:
            return found, least


class Round(NamedTuple):
    """A round as seen by its first client.

    :param keys: both public keys of each client.
    :param masked: its masked vector, in parts.
    """

    own: Client
    keys: dict[str, list[bytes]]
    masked: list[bytes]
    answer: ConfigRecord


def run_round(clients: int, size: int, shares: int, threshold: int, drop_out: float) -> Round:
    """Runs all four stages of one client, and the stages of its neighbours that it needs."""
    nodes = [Client(1000 + index, size) for index in range(shares)]
    own = nodes[0]
    setup = {
        Key.STAGE: Stage.SETUP,
        Key.SAMPLE_NUMBER: clients,
        Key.SHARE_NUMBER: shares,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: 8.0,
        Key.TARGET_RANGE: 1 << 22,
        Key.MOD_RANGE: MOD_RANGE,
        Key.MAX_WEIGHT: 1000.0,
    }
    keys = {}
    for node in nodes:
        reply = node.step(dict(setup))
        keys[str(node.node)] = [reply[Key.PUBLIC_KEY_1], reply[Key.PUBLIC_KEY_2]]
    to_own, sources = [], []
    for node in nodes:
        reply = node.step({**keys, Key.STAGE: Stage.SHARE_KEYS})
        for destination, text in zip(reply[Key.DESTINATION_LIST], reply[Key.CIPHERTEXT_LIST], strict=True):
            if destination == own.node:
                to_own.append(text)
                sources.append(node.node)
    masked = own.step({Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.CIPHERTEXT_LIST: to_own, Key.SOURCE_LIST: sources})[
        Key.MASKED_PARAMETERS
    ]
    dead = round(drop_out * shares)
    active = [node.node for node in nodes[: shares - dead]]
    lost = [node.node for node in nodes[shares - dead :]]
    unmask = {Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: lost}
    return Round(own, keys, masked, own.step(unmask))


def main() -> None:
    logging.disable(logging.WARNING)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    job = json.loads(sys.argv[1])
    clients, size, shares = job["clients"], job["size"], min(job["shares"], job["clients"])
    threshold = max(2, round(job["threshold"] * shares))
    rounds = [run_round(clients, size, shares, threshold, job["drop_out"]) for _ in range(ROUNDS)]
    own, keys, masked, answer = rounds[-1]
    dead = round(job["drop_out"] * shares)

    # the server: the costs of each vector, each survivor and each lost client
    vector, read_s = timed(lambda: [bytes_to_ndarray(each) for each in masked])
    _, add_s = timed(parameters_addition, vector, vector)
    _, subtract_s = timed(parameters_subtraction, vector, vector)
    state = own._context.state.config_records[RECORD_KEY_STATE]
    seed = state["rd_seed"]
    _, expand_s = timed(pseudo_rand_gen, seed, MOD_RANGE, [each.shape for each in vector])
    _, combine_s = timed(combine_shares, create_shares(seed, threshold, shares)[: shares - dead])
    of_other = list(keys.values())[1][0]
    private, public = bytes_to_private_key(state["sk1"]), bytes_to_public_key(of_other)
    _, exchange_s = timed(generate_shared_key, private, public)
    gone = round(job["drop_out"] * clients)
    here = clients - gone
    server_s = here * (read_s + add_s + combine_s + expand_s + subtract_s)
    server_s += gone * (combine_s + (shares - 1) * (exchange_s + expand_s + add_s))
    assert len(answer[Key.SHARE_LIST]) == shares
    device_s = min(each.own.cpu_s for each in rounds)
    print(json.dumps({"device_s": device_s, "up": own.up, "down": own.down, "server_s": server_s}))


if __name__ == "__main__":
    main()
