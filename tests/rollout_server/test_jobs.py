"""A failure that is told to its caller holds no frames, whatever it is a consequence of."""

from __future__ import annotations

from swift_stage2.rollout_server.engine import _let_go_of_frames


def test_an_exception_that_is_its_own_cause_ends() -> None:
    def fail() -> BaseException:
        try:
            try:
                raise ValueError("inner")
            except ValueError as error:
                raise error from error
        except ValueError as error:
            return error

    failure = fail()
    assert failure.__cause__ is failure
    _let_go_of_frames(failure)
    assert failure.__traceback__ is None
