"""One client may fill a queue, and the others still get in."""

from llmcli.serve.engine_thread.client_shares import ClientShares


def test_a_client_that_has_filled_the_queue_keeps_no_other_client_out() -> None:
    shares = ClientShares(68)
    assert shares.take_places("much", 1024)  # an empty queue has room for every request
    assert not shares.take_places("much")
    assert shares.take_places("second", 34) and not shares.take_places("second")
    assert shares.take_places("third", 22) and not shares.take_places("third")
    shares.return_places("second", 1)
    assert not shares.take_places("second", 1), "its share is a third of the places now"


def test_the_places_are_free_again_after_the_requests() -> None:
    shares = ClientShares(4)
    assert shares.take_places("a", 3) and shares.take_places("b") and not shares.take_places("a")
    shares.return_places("a", 3)
    shares.return_places("b")
    assert shares.n_open == 0
    assert shares.take_places("a", 4) and not shares.take_places("a")


def test_no_more_clients_get_in_than_the_queue_has_places() -> None:
    shares = ClientShares(8)
    assert shares.take_places("much", 100)
    assert sum(shares.take_places(f"client {number}") for number in range(100)) == 7
