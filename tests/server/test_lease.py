"""Who owns a server; time is an argument."""

import pytest

from swift.rollout.server.access import Lease, Refused


def test_a_run_that_took_it_keeps_it_by_being_active():
    lease = Lease(lifetime_s=60)
    assert lease.take("a", "host 1", now=0) is True
    lease.renew("a", now=50)
    with pytest.raises(Refused) as caught:
        lease.take("b", "host 2", now=100)
    assert caught.value.status == 409
    assert "a (host 1)" in caught.value.problem
    assert caught.value.facts["expires_in_s"] == 10


def test_a_silent_run_can_be_replaced_and_then_is_told_so():
    lease = Lease(lifetime_s=60)
    lease.take("a", "host 1", now=0)
    assert lease.take("b", "host 2", now=61) is True
    with pytest.raises(Refused, match="host 2"):
        lease.renew("a", now=62)


def test_a_silent_run_that_nobody_replaced_goes_on():
    lease = Lease(lifetime_s=60)
    lease.take("a", "", now=0)
    lease.renew("a", now=1000)
    with pytest.raises(Refused):
        lease.take("b", "", now=1059)


def test_nothing_expires_while_the_engines_are_restored():
    lease = Lease(lifetime_s=60)
    lease.take("a", "host 1", now=0)
    with lease.during_reset():
        assert lease.expired(now=100) is None
        with pytest.raises(Refused) as caught:
            lease.take("b", "host 2", now=100)
        assert caught.value.facts["expires_in_s"] == 0
        with pytest.raises(Refused):
            lease.renew(None, now=100)
        lease.renew("a", now=100)
    assert lease.expired(now=150) is None
    assert lease.expired(now=161).run_id == "a"
    assert lease.take("b", "host 2", now=161) is True


def test_a_run_that_never_took_it_is_told_to():
    with pytest.raises(Refused) as caught:
        Lease().renew("a", now=0)
    assert caught.value.kind == "no_lease"


def test_clients_without_a_run_pass_while_nobody_holds_it():
    lease = Lease(lifetime_s=60)
    lease.renew(None, now=0)
    lease.take("a", "host", now=0)
    with pytest.raises(Refused, match="held by run a"):
        lease.renew(None, now=1)
    assert lease.release("b") is False
    assert lease.release("a") is True
    lease.renew(None, now=2)
