"""Ray Serve's way of choosing a replica, by `prefixes.py`. Each of Serve's handles has a router of its own."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxinfer.cluster.calls import Call
from jaxinfer.cluster.prefixes import Prefixes


class PrefixRouter(RequestRouter):
    """Sends a Call, the first argument of a request, to the replica that has the longest beginning of its prompt."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve, once."""
        del kwargs
        self._prefixes = Prefixes()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come and go."""
        super().update_replicas(replicas)
        self._prefixes.update(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve before its next update: the replica is not chosen again."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.update(one.unique_id for one in self.curr_replicas if one != replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica a rank of its own: the next one is asked only where one takes no more requests."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = _call(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # once all have been asked
        names = self._prefixes.choose(call.keys, call.avoid) if call else self._prefixes.choose(())
        return [[by_name[name]] for name in names if name in by_name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has taken a request."""
        del result
        call = _call(pending_request)
        self._prefixes.sent(replica_id.unique_id, call.keys if call else ())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended, however it did."""
        del internal_request_id
        self._prefixes.ended(replica_id.unique_id)


def _call(request: PendingRequest | None) -> Call | None:
    """What a request carries; None for one that has no prompt."""
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, Call) else None
