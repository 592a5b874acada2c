"""One rank's process as a follower sees it: real ledger, real matches, real recording, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ledger_run import LedgerRun

from swift_stage2.records import MatchQuality, ObjectMatch, Rollout, Sample, SampleKey, Target, VersionSpan
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.ledger import (
    MatchLog,
    Purpose,
    RecordEntry,
    completion_of,
    matches_path,
    record_path,
)

_MATCH = ObjectMatch(predicted=(("cat", (1, 2, 3, 4)),), truth=(("cat", (1, 2, 3, 4)),), pairs=((0, 0, 0.5),))
_QUALITY = MatchQuality(1, 1, 1, 0.5, 0, 0)


class FollowedRun(LedgerRun):
    """``text`` of an answer tells run and sample, so that no other could stand for it."""

    def __init__(self, run_dir: Path, *, rank: int = 0, world_size: int = 1, **options: object) -> None:
        super().__init__(run_dir, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        self.run_id = str(options.get("run_id", "run"))
        self._matches = MatchLog(AuditLog(matches_path(run_dir, rank), rank), range(1000))
        self._record = AuditLog(record_path(run_dir, rank), rank)

    def text(self, key: SampleKey) -> str:
        return f"{self.run_id} answers {key.entry}"

    def write_text(self, keys: Sequence[SampleKey], purpose: Purpose = "training") -> None:
        """Into the matches, as the pipeline does before it tells the ledger."""
        for key in keys:
            target = Target("wanted", (1,), (1.0,), _QUALITY, _MATCH)
            self._matches.write(purpose, self._rollout(key), target, (10, 10))

    def record_text(self, keys: Sequence[SampleKey]) -> None:
        """Into the recording, as the pipeline does when an answer comes."""
        for key in keys:
            self._record.write(RecordEntry.COMPLETION, **completion_of(self._rollout(key)))

    def finish(self, count: int) -> list[SampleKey]:
        """So many rollouts are drawn, answered and matched."""
        keys = self.draw(count)
        self.write_text(keys)
        self.match(keys)
        return keys

    def train_finished(self, keys: list[SampleKey], pack_id: str = "p") -> None:
        self.pack(keys, pack_id)
        self.train(keys, pack_id)

    def tear(self) -> None:
        """A kill in the middle of a line."""
        with self.path.open("ab") as file:
            file.write(b'{"kind":"matched","time":1.5,"ra')

    def _rollout(self, key: SampleKey) -> Rollout:
        spans = (VersionSpan(1, 0, 1),)
        return Rollout(Sample(key, {"images": []}), self.text(key), (1,), (2,), False, 3, "http://s", spans)


def killed_and_resumed(run_dir: Path, num_ranks: int) -> list[str]:
    """A whole run: ranks that were killed in the middle of a line, resumed, and ended in order.

    Returns the answers that were matched, of one rank behind the other.
    """
    told: list[str] = []
    for rank in range(num_ranks):
        first = FollowedRun(run_dir, rank=rank, world_size=num_ranks, num_rows=30, run_id="a")
        keys = first.finish(3)
        first.train_finished(keys)
        state = first.save("s1")
        lost = first.finish(2)  # which the second process draws and answers again
        first.tear()
        second = FollowedRun(run_dir, rank=rank, world_size=num_ranks, run_id="b", num_rows=30, state=state)
        more = second.finish(4)
        assert more[:2] == lost
        second.train_finished(more[:3])
        second.ledger.close()
        told += [*map(first.text, [*keys, *lost]), *map(second.text, more)]
    return told
