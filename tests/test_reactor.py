"""The turn that the bus thread lends to a caller that waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch

import weightbus
from tests.harness import wait_until, weights
from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError
from weightbus.reactor import Reactor, Wait

LATER = Deadline.after(3600)


class Noted:
    """A service of one pipe: which threads ticked, and what came."""

    polling = False

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.threads: list[int] = []
        self.got = b""
        self.fail: BaseException | None = None

    def sources(self) -> list[Any]:
        return [self.read]

    def tick(self, fired: Collection[Any]) -> bool:
        self.threads.append(threading.get_ident())
        if self.fail is not None:
            raise self.fail
        if self.read in fired:
            self.got += os.read(self.read, 100)
            return True
        return False


@pytest.fixture
def noted() -> Iterator[tuple[Reactor, Noted]]:
    reactor, service = Reactor("test"), Noted()
    reactor.call(lambda: reactor.add(service))
    yield reactor, service
    reactor.close()
    os.close(service.read)
    os.close(service.write)


def flat(seed: int) -> dict[str, torch.Tensor]:
    return {name.replace(".", "_"): tensor for name, tensor in weights(seed).items()}


def after(delay_s: float, call: Any) -> threading.Timer:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def test_a_guest_that_waits_does_the_work_itself(noted: tuple[Reactor, Noted]) -> None:
    reactor, service = noted
    me = threading.get_ident()
    reactor.attach()
    after(0.1, lambda: os.write(service.write, b"x"))
    assert reactor.wait(lambda: service.got == b"x", LATER)
    assert service.threads[-1] == me
    assert me in [reactor.call(threading.get_ident) for _ in range(20)]

    reactor.detach()
    service.threads.clear()
    os.write(service.write, b"y")
    assert reactor.wait(lambda: service.got == b"xy", LATER)
    assert me not in service.threads


def test_the_bus_thread_stands_in_for_a_guest_that_stays_away(noted: tuple[Reactor, Noted]) -> None:
    reactor, service = noted
    reactor.attach()
    for _ in range(3):
        reactor.call(lambda: None)
        service.got = b""
        os.write(service.write, b"x")
        wait_until(lambda: service.got == b"x")  # not in the bus: as if it packed
        assert service.threads[-1] != threading.get_ident()
    reactor.detach()


def test_a_guest_that_never_waits_looks_at_messages_too(
    noted: tuple[Reactor, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbus.reactor.AWAY_S", 60.0)  # nobody stands in for it
    reactor, service = noted
    reactor.attach()
    reactor.call(lambda: None)
    os.write(service.write, b"x")
    limit = Deadline.after(10)
    while service.got != b"x" and not limit.expired:
        reactor.submit(lambda: None, steps=1)
    assert service.got == b"x"
    assert service.threads[-1] == threading.get_ident()
    reactor.detach()


def test_what_woke_the_bus_thread_as_it_gives_up_the_turn_is_not_lost(
    noted: tuple[Reactor, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbus.reactor.IDLE_POLL_S", 30.0)  # what is not told is seen after that
    reactor, _ = noted
    told, done = list[int](), list[int]()

    def script() -> Any:
        yield Wait(lambda: bool(told))
        done.append(1)

    reactor.attach()
    reactor.call(lambda: None)
    reactor.call(lambda: reactor.start(script()))
    time.sleep(0.05)  # away: the bus thread has the turn
    told.append(1)
    assert reactor._take_turn(), "its wake-up is the one that would have told of the script"
    reactor._left()
    start = time.monotonic()
    assert reactor.wait(lambda: bool(done), Deadline.after(10))
    assert time.monotonic() - start < 5, "it was seen at the deadline only"
    reactor.detach()


def test_others_wait_and_hand_in_while_a_guest_has_the_turn(noted: tuple[Reactor, Noted]) -> None:
    reactor, service = noted
    done: list[int] = []

    def other() -> None:
        done.append(reactor.call(threading.get_ident))
        assert reactor.wait(lambda: service.got == b"z", LATER)
        reactor.submit(lambda: done.append(0))

    thread = threading.Thread(target=other)
    reactor.attach()
    after(0.05, thread.start)
    after(0.3, lambda: os.write(service.write, b"z"))
    assert reactor.wait(lambda: len(done) == 2, LATER)
    thread.join(5)
    assert done[0] == threading.get_ident(), "who waits works, for others too"
    reactor.detach()


def test_the_deadline_of_a_guest_and_of_a_script_are_kept(noted: tuple[Reactor, Noted]) -> None:
    reactor, _ = noted
    reactor.attach()
    ended: list[bool] = []

    def script() -> Any:
        ended.append((yield Wait(lambda: False, Deadline.after(0.1))))

    reactor.call(lambda: reactor.start(script()))
    start = time.monotonic()
    assert not reactor.wait(lambda: False, Deadline.after(0.3))
    assert time.monotonic() - start >= 0.3
    assert ended == [False]
    reactor.detach()


def test_a_service_that_raises_in_a_guest_s_turn_ends_the_bus_by_name(noted: tuple[Reactor, Noted]) -> None:
    reactor, service = noted
    reactor.attach()
    reactor.call(lambda: None)
    after(0.05, lambda: (setattr(service, "fail", ZeroDivisionError("in a tick")), os.write(service.write, b"x")))
    with pytest.raises(LocalProtocolError, match="in a tick") as raised:
        reactor.wait(lambda: False, LATER)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    wait_until(lambda: not reactor._thread.is_alive())


def test_closing_while_a_guest_polls_ends_its_wait(noted: tuple[Reactor, Noted]) -> None:
    reactor, service = noted
    reactor.attach()

    def close() -> None:
        reactor.call(lambda: reactor.remove(service))
        reactor.close()

    timer = after(0.1, close)
    with pytest.raises(EndpointClosed):
        reactor.wait(lambda: False, LATER)
    timer.join(10)
    assert not timer.is_alive() and not reactor._thread.is_alive()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where this process was started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_caller_waits_leaves_the_bus_in_use() -> None:
    values = flat(1)
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1, stall_timeout=5.0) as bus:
        module = torch.nn.Module()
        for name, tensor in values.items():
            module.register_buffer(name, torch.zeros_like(tensor))
        options = {"adapter": "torch", "adapter_options": {"module": module}}
        with weightbus.WeightBus.receiver(bus.address, **options) as rx:
            for _ in range(3):
                timer = after(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    rx.recv(timeout=30)
                timer.join()
            sent: list[Any] = []
            sending = threading.Thread(target=lambda: sent.append(bus.send(values, version=1, timeout=20)))
            sending.start()
            assert rx.recv(timeout=30).outcomes == {"engine": "READY(1)"}
            sending.join(20)
        assert sent[0].outcomes == {"engine": "READY(1)"}
        assert all(torch.equal(getattr(module, name), t) for name, t in values.items())


def test_a_caller_in_another_mode_of_torch_makes_no_tensors_for_the_bus() -> None:
    """Slots and copies that are inference tensors, or on a default device, would not serve the next refit."""
    values = flat(2)
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1) as bus:
        module = torch.nn.ParameterDict({name: torch.zeros_like(t) for name, t in values.items()})
        options = {"adapter": "torch", "adapter_options": {"module": module}, "stage": "host"}
        with weightbus.WeightBus.receiver(bus.address, **options) as rx:
            for version in range(3):
                sending = threading.Thread(target=lambda v=version: bus.send(values, version=v, timeout=20))
                sending.start()
                with torch.inference_mode(version == 0):
                    rx.recv(timeout=30)
                sending.join(20)
                assert all(torch.equal(module[name], t) for name, t in values.items())
                values = {name: t + 1 for name, t in values.items()}
