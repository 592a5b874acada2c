"""One rank's event log as a run writes it: the real source and the real writer, driven by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders import matched_of
from detection_task import make_task

from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.records import MatchQuality, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.telemetry.account import RankAccount, account_of
from swift_stage2.telemetry.event_log import EventLog, event_path, read_events
from swift_stage2.telemetry.events import AnyEvent, End, Finished, Packed, Sent, Start, StreamState

WINDOW = 2


def rows(count: int) -> list[dict[str, Any]]:
    return [{"objects": {"ref": ["x"], "bbox": [[0, 0, 1, 1]]}} for _ in range(count)]


class LedgerRun:
    """A rank's process. ``save`` returns what a checkpoint holds; ``state`` resumes from one."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_rows: int = 7,
        run_id: str = "run",
        state: str | None = None,
        num_generations: int = 1,
        log: EventLog | None = None,
        **told: Any,
    ) -> None:
        """``log`` is the process's, if others write to it as well; ``told`` is of the start, too."""
        self.path = event_path(run_dir, rank)
        self.log = log or EventLog(self.path)
        self.source = SampleSource(
            rows(num_rows),
            make_task(),
            rank=rank,
            world_size=world_size,
            seed=3,
            log=self.log,
            num_generations=num_generations,
        )
        saved = json.loads(state) if state else {"step": 0, "save_id": None}
        self.step: int = saved["step"]
        if state:
            self.source.load_state_dict(saved["source"])
        self.log.write(
            Start(
                run_id=run_id,
                step=self.step,
                world_size=world_size,
                version_window=WINDOW,
                save_id=saved["save_id"],
                state=StreamState(**self.source.state_dict()),
                **({"queue_limit": 8} | told),
            )
        )

    def draw(self, count: int) -> list[SampleKey]:
        return self.source.draw(count)

    def match(self, keys: list[SampleKey], version: int = 1) -> None:
        """From the POST to segments."""
        self.ask(keys, version=version)
        for key in keys:
            self.matched(key, version)

    def ask(
        self, keys: list[SampleKey], *, version: int = 1, server: str = "http://s", end: str = "answered"
    ) -> None:
        """One POST, from its leaving to its end."""
        samples = tuple(keys)
        self.log.write(Sent(samples=samples, server=server, seed=5, version=version))
        self.log.write(Finished(samples=samples, server=server, end=end, seconds=0.25))

    def matched(self, key: SampleKey, version: int = 1, reward: dict[str, float] | None = None) -> None:
        """Its rollout was matched."""
        spans = (VersionSpan(version, 0, 4),)
        rollout = Rollout(Sample(key, {}), "a", (1, 2, 3, 4), (5,), False, 5, "http://s", spans)
        self.log.write(matched_of(rollout, MatchQuality(1, 1, 1, 0.5, 0, 0, reward=reward or {})))

    def pack(self, keys: list[SampleKey], pack_id: str = "p") -> None:
        self.log.write(
            Packed(samples=tuple(keys), pack_id=pack_id, version=1, num_tokens=30, capacity_tokens=40)
        )

    def train(self, keys: list[SampleKey], pack_id: str = "p", *, version: int = 1) -> None:
        """The next step takes one pack."""
        self.source.settle_trained(keys, pack_id=pack_id, step=self.step, version=version)
        self.step += 1

    def train_drawn(self, count: int) -> list[SampleKey]:
        """The whole good way."""
        keys = self.draw(count)
        self.match(keys)
        self.pack(keys)
        self.train(keys)
        return keys

    def save(self, save_id: str) -> str:
        source = self.source.checkpoint(step=self.step, save_id=save_id)
        return json.dumps({"step": self.step, "save_id": save_id, "source": source})

    def end(self) -> None:
        """An orderly end."""
        self.log.close(End())

    def events(self) -> list[AnyEvent]:
        return read_events(self.path)

    def account(self) -> RankAccount:
        (account,) = account_of({0: self.events()}).ranks
        return account


def again(key: SampleKey) -> SampleKey:
    """As it is drawn after a return that used up a rollout."""
    return key._replace(attempt=key.attempt + 1)
