"""One rank's process as a follower sees it: real samples, matches and completions, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builders import completion_of
from ledger_run import LedgerRun

from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.telemetry.events import Match


class FollowedRun(LedgerRun):
    """``text`` of an answer tells run and sample, so that no other could stand for it."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(run_dir, **options)
        self.run_id = str(options.get("run_id", "run"))

    def text(self, key: SampleKey) -> str:
        return f"{self.run_id} answers {list(key)}"

    def write_text(self, keys: Sequence[SampleKey]) -> None:
        """As the match of a row that is kept, which the pipeline tells before it tells that it is matched."""
        for key in keys:
            facts = {"target": "wanted", "truncated": False, "dropped": {}, "reward": {}, "images": ()}
            facts |= {"truth": (), "predicted": (), "pairs": (), "space": (10, 10)}
            self.log.write(Match(sample=key, version=1, rollout=self.text(key), **facts))

    def record_text(self, keys: Sequence[SampleKey]) -> None:
        """As a recording has it, when an answer comes."""
        for key in keys:
            self.log.write(completion_of(self._rollout(key)))

    def finish(self, count: int) -> list[SampleKey]:
        """So many rollouts are drawn, answered and matched."""
        keys = self.draw(count)
        self.write_text(keys)
        self.match(keys)
        return keys

    def tear(self) -> None:
        """A kill in the middle of a line."""
        with self.path.open("ab") as file:
            file.write(b'{"kind":"matched","time":1.5,"sa')

    def _rollout(self, key: SampleKey) -> Rollout:
        spans = (VersionSpan(1, 0, 1),)
        return Rollout(Sample(key, {"images": []}), self.text(key), (1,), (2,), False, 3, "http://s", spans)


def killed_and_resumed(run_dir: Path, num_ranks: int) -> list[str]:
    """A whole run: ranks that were killed in the middle of a line, resumed, and ended in order.

    Returns the answers that were matched, of one rank behind the other.
    """
    told: list[str] = []
    for rank in range(num_ranks):
        of_rank = {"rank": rank, "world_size": num_ranks, "num_rows": 30}
        first = FollowedRun(run_dir, run_id="a", **of_rank)
        keys = first.finish(3)
        first.pack(keys)
        first.train(keys)
        state = first.save("s1")
        lost = first.finish(2)  # which the second process draws and answers again
        first.tear()
        second = FollowedRun(run_dir, run_id="b", state=state, **of_rank)
        more = second.finish(4)
        assert more[:2] == lost
        second.pack(more[:3])
        second.train(more[:3])
        second.end()
        told += [*map(first.text, [*keys, *lost]), *map(second.text, more)]
    return told
