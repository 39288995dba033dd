"""How the ranks of a tensor-parallel model find each other, when the first of them needs it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torch import distributed

from hf_cb.errors import RankError, describe
from hf_cb.manager.ranks.driver import Driver
from hf_cb.manager.ranks.follower import Follower
from hf_cb.manager.ranks.obeying import Obeying
from hf_cb.manager.ranks.team import ranks, wait_patiently
from hf_cb.models.sharding import tp_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONNECT_S = 60.0  # for those that have come to connect
HELLO_S = 10.0  # for a connection to say who it is
POLL_S = 0.02
_KINDS = ("orders", "news")

_lock = threading.Lock()
_teams: dict[str, Driver | Follower] = {}  # by the name of their group
_meetings: Counter[str] = Counter()


def team_of(model: PreTrainedModel) -> Driver | Follower | None:
    """The ranks that a model's layers are spread over, in touch with each other; None for a model of one process.

    Raises:
        RankError: the others have not come.
    """
    group = tp_group(model)
    if group is None:
        return None
    with _lock:
        team = _teams.get(group.group_name)
        if team is None or team.group is not group:
            team = _teams[group.group_name] = _meet(group)
    if team.pid != os.getpid():
        raise RankError(f"This process was forked from rank {team.rank}'s, and the others do not know it.")
    team.number_of(model)
    return team


def driver_of(model: PreTrainedModel) -> Driver | None:
    """`team_of` on the rank that drives."""
    team = team_of(model)
    if isinstance(team, Follower):
        raise RankError(f"This is rank {team.rank}: it follows rank 0, which has to do this.")
    return team


def _meet(group: Any) -> Driver | Follower:
    """The store through which the processes have found each other tells the driver's address."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    name = "-".join(map(str, distributed.get_process_group_ranks(group)))
    store = distributed.PrefixStore(
        f"hf_cb/{name}/{_meetings[name]}", distributed.distributed_c10d._get_default_store()
    )
    try:
        store.set(f"host/{rank}", socket.gethostname())
        team = _gather(group, store, size) if rank == 0 else _join(group, store, rank)
    except (distributed.DistError, OSError) as error:  # of the store, if the process that has it is gone
        raise RankError(f"The ranks cannot reach each other ({describe(error)}).") from error
    _meetings[name] += 1  # now: one that has failed is tried again by all in the same place
    return team


def _gather(group: Any, store: Any, size: int) -> Driver:
    def missing() -> list[int]:
        return [rank for rank in range(size) if not store.check([f"host/{rank}"])]

    if not _wait(lambda: not missing(), lambda: f"Rank 0 waits for {ranks(missing())} of {size}."):
        raise RankError(f"Of {size} ranks, {missing()} did not come: every rank has to make the same calls.")
    hosts = {store.get(f"host/{rank}") for rank in range(size)}
    host = "127.0.0.1" if len(hosts) == 1 else socket.gethostname()
    token = secrets.token_bytes(32)
    connections: dict[str, dict[int, Connection]] = {kind: {} for kind in _KINDS}
    with _listener(host) as listener:
        listener.settimeout(1.0)
        store.set("driver", json.dumps([host, listener.getsockname()[1], token.hex()]))
        end = time.monotonic() + CONNECT_S
        while any(len(found) < size - 1 for found in connections.values()):
            if time.monotonic() > end:
                store.delete_key("driver")
                found = {rank for rank in range(1, size) if all(rank in of_kind for of_kind in connections.values())}
                lost = sorted(set(range(1, size)) - found)
                raise RankError(f"{ranks(lost).capitalize()} did not connect to {host} within {CONNECT_S:g} s.")
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            said = _hello(_connection(peer), token)
            if said is not None:
                connection, rank, kind = said
                connections[kind][rank] = connection
    return Driver(group, connections["orders"], connections["news"])


def _join(group: Any, store: Any, rank: int) -> Follower:
    if not _wait(lambda: store.check(["driver"]), lambda: f"Rank {rank} waits for rank 0."):
        raise RankError("Rank 0 did not come: every rank has to make the same calls.")
    host, port, token = json.loads(store.get("driver"))
    sockets: dict[str, socket.socket] = {}
    for kind in _KINDS:
        peer = socket.create_connection((host, port), timeout=CONNECT_S)
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = Connection(peer.dup().detach())
        hello.send_bytes(bytes.fromhex(token) + json.dumps([rank, kind]).encode())
        sockets[kind] = peer
    return Follower(group, rank, sockets["orders"], sockets["news"], Obeying)


def _wait(condition: Callable[[], bool], describe_wait: Callable[[], str]) -> bool:
    """Whether it has become true in time. Interrupts come through, as they would not inside of the store."""

    def becomes_true(timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not (true := condition()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return true

    return wait_patiently(becomes_true, describe_wait)


def _listener(host: str) -> socket.socket:
    """Where the others can reach it: on one machine nobody else can."""
    if host == "127.0.0.1":
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _connection(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(peer.detach())


def _hello(connection: Connection, token: bytes) -> tuple[Connection, int, str] | None:
    """Who has connected; None for a stranger: what comes later is unpickled, so the token comes first."""
    try:
        said = connection.recv_bytes(maxlength=256) if connection.poll(HELLO_S) else b""
    except (EOFError, OSError):
        said = b""
    if not secrets.compare_digest(said[: len(token)], token):
        connection.close()
        return None
    rank, kind = json.loads(said[len(token) :])
    return connection, int(rank), str(kind)
