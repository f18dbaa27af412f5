"""The places of a queue, divided between its clients.

A single client may take all places, as many as its first request needs. Then a client without
unfinished requests still finds room: as long as it has fewer requests than its share, which is the
number of places divided by the number of clients.
"""

from collections import Counter


class ClientShares:
    """The unfinished requests of each client. `places`: how many there are together."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._open: Counter[str] = Counter()

    @property
    def n_open(self) -> int:
        """The unfinished requests of all clients."""
        return self._open.total()

    def take_places(self, client: str, count: int = 1) -> bool:
        """Count `count` more requests of a client, and return True. If the queue is full and the
        client has its share, count none and return False. An empty queue has room for every
        request, which could otherwise never be answered.
        """
        n_open = self.n_open
        n_clients = len(self._open) + (client not in self._open)
        has_room = not n_open or n_open + count <= self.places
        if not has_room and self._open[client] + count > self.places // n_clients:
            return False
        self._open[client] += count
        return True

    def return_places(self, client: str, count: int = 1) -> None:
        """Count `count` requests of a client as finished."""
        self._open[client] -= count
        if self._open[client] <= 0:
            del self._open[client]
