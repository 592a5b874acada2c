from __future__ import annotations

from swift_stage2.launch.wait_notice import WaitNotice


def test_it_speaks_once_per_interval_with_the_seconds_passed_and_allowed() -> None:
    now, said = [100.0], list[str]()
    notice = WaitNotice(said.append, every_s=30, now_s=lambda: now[0])
    for moment in (100.0, 129.0, 130.0, 131.0, 165.0, 190.0, 195.0):
        now[0] = moment
        notice.remind("waiting for server0 to load", 300)
    assert said == [f"waiting for server0 to load, {seconds} s of 300 s" for seconds in (30, 65, 95)]
