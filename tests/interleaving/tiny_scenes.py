"""Scenes of a dozen yield points each, for ``exhaustive``: one property of fence or queue, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from interleaving.virtual_threading import Event, TimeNames, active

from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue, Reservation
from swift_stage2.errors import FenceShutDown
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.scheduling.version_clock import VersionClock


@dataclass
class Weights:
    """Of a server: what it holds, and how many calls it computes."""

    version: int = 0
    num_running: int = 0


def await_ticket(fence: InferFence, changed: Event) -> InferTicket:
    """As the rollout client does it: asks again whenever the fence has told of a change."""
    while True:
        changed.clear()
        if (ticket := fence.enter()) is not None:
            return ticket
        if not changed.wait(100.0):
            active().fail("a waiter slept through what it waited for")


def fence_scene(fence_type: type[InferFence], num_posters: int, num_rounds: int) -> Callable[[], None]:
    """Posters against a learner that closes without waiting, pushes once it is drained, and reopens."""

    def work() -> None:
        fence, weights, clock, changed = (
            fence_type(),
            Weights(),
            VersionClock(),
            [Event() for _ in range(num_posters)],
        )
        fence.on_change = lambda: [each.set() for each in changed]  # type: ignore[assignment]
        InferFence.reopen(fence, 0)

        def post(poster: int) -> None:
            ticket = await_ticket(fence, changed[poster])
            weights.num_running += 1
            version = weights.version
            active().point("computes")
            weights.num_running -= 1
            if ticket.version != version:
                active().fail(f"a ticket says version {ticket.version}, computed with {version}")
            fence.leave()

        def learn() -> None:
            for _ in range(num_rounds):
                while not fence.close():
                    TimeNames.sleep(1.0)  # a step
                if weights.num_running:
                    active().fail("drained, and an /infer/ runs")
                active().point("pushes")
                if weights.num_running:
                    active().fail("an /infer/ runs during a push")
                weights.version += 1
                fence.reopen(clock.advance(clock.current + 1))

        for number in range(num_posters):
            active().spawn(partial(post, number), f"poster {number}")
        active().spawn(learn, "learner")

    return work


def shutdown_scene(num_posters: int) -> Callable[[], None]:
    """Nobody who waits for a ticket is left behind by a shutdown."""

    def work() -> None:
        fence, changed = InferFence(), [Event() for _ in range(num_posters)]
        fence.on_change = lambda: [each.set() for each in changed]  # type: ignore[assignment]

        def post(poster: int) -> None:
            try:
                await_ticket(fence, changed[poster])
                active().fail("a ticket came out of a fence that never opened")
            except FenceShutDown:
                if active().now > 1.0:
                    active().fail("a shutdown must wake every waiter within a second")

        for number in range(num_posters):
            active().spawn(partial(post, number), f"poster {number}")
        active().spawn(fence.shutdown, "learner")

    return work


@dataclass(frozen=True, slots=True)
class TinyPack:
    version: int
    number: int


def reservation_scene(
    queue_type: type[ReadyQueue], *, releases: bool, num_producers: int, num_offers: int
) -> Callable[[], None]:
    """A learner reserves, waits for its peers, and takes or releases, while producers overflow the queue."""

    def work() -> None:
        promised: list[TinyPack] = []
        dropped: list[TinyPack] = []
        trained: list[TinyPack] = []
        clock = VersionClock()

        def drop(pack: TinyPack, reason: DropReason) -> None:
            if pack in promised:
                active().fail(f"a reserved pack is dropped: {reason}")
            dropped.append(pack)

        queue = queue_type(2, 0, drop)
        for number in (100, 101):
            queue.offer(TinyPack(0, number), current_version=0)

        def learn() -> None:
            reservation: Reservation | None = queue.reserve(2, current_version=clock.current)
            if reservation is None:
                active().fail("two fresh packs are ready and not given")
            assert reservation is not None
            promised.extend(reservation._packs)
            active().point("agrees")
            clock.advance(1)  # as by a proof that nobody foresaw
            if releases:
                promised.clear()
                reservation.release()
            else:
                trained.extend(reservation.take())
                if trained != promised:
                    active().fail(f"{promised} were promised, got {trained}")

        def produce(producer: int) -> None:
            for number in range(num_offers):
                pack = TinyPack(clock.current, 10 * producer + number)
                queue.offer(pack, current_version=clock.current)

        def judge() -> None:
            offered = 2 + num_producers * num_offers
            ended = [*trained, *dropped, *queue._ready]
            if len(ended) != offered or len(set(ended)) != offered:
                active().fail(f"of {offered} packs {len(set(ended))} are accounted for")

        active().spawn(learn, "learner")
        for producer in range(num_producers):
            active().spawn(partial(produce, producer), f"producer {producer}")
        active().at(1.0, judge, "judge")  # when all have ended

    return work
