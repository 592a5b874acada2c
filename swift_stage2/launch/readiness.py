"""Whether a server really answers ``/infer/``, or listens. ``/health/`` proves nothing: it outlives the engine.

Beside a learner of another launch a stock server is asked nothing: a request could meet a sync round and hang it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession

_PAUSE_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


class ListeningProbe:
    """A server is ready when it listens, as a stock one does once its model is loaded."""

    def __init__(self, listens: Callable[[], bool], timeout_s: float) -> None:
        self.last_error = "nothing listens there"
        self.refusal: str | None = None
        self._listens = listens
        self._end = time.monotonic() + timeout_s

    @property
    def answered(self) -> bool:
        """True while it listens; raises what ``listens`` does."""
        return self._listens()

    @property
    def expired(self) -> bool:
        """True when the time is over."""
        return time.monotonic() >= self._end

    def close(self) -> None:
        """There is nothing to end."""


class ReadinessProbe:
    """Asks one server for one token until it answers or the time is over, on a thread of its own.

    One POST may take all the time there is: a stock server computes what was asked even when nobody
    waits for it any more, so short attempts would pile up.
    """

    def __init__(self, name: str, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self.last_error = "no answer yet"
        self.refusal: str | None = None
        """What no waiting mends: another API key, or a fault of the probe itself."""
        self._session = ServerSession(base_url, api_key)
        self._end = time.monotonic() + timeout_s
        self._answered = threading.Event()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"readiness-{name}", daemon=True)
        self._thread.start()

    @property
    def answered(self) -> bool:
        """True once the server has answered."""
        return self._answered.is_set()

    @property
    def expired(self) -> bool:
        """True when the time is over without an answer."""
        return not self.answered and time.monotonic() >= self._end

    def close(self) -> None:
        """Stops asking. A POST in flight ends with its server, or with this process."""
        self._cancelled.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _ask(self) -> None:
        config = protocol.request_config(
            max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1
        )
        body = {
            "infer_requests": [{"messages": [{"role": "user", "content": "?"}]}],
            "request_config": config,
        }
        with self._session:
            while not self._cancelled.is_set() and (left_s := self._end - time.monotonic()) > 0:
                try:
                    protocol.parse_infer_reply(self._session.post(protocol.INFER, body, Deadline(left_s)), 1)
                except (ServerFault, ProtocolError) as exc:
                    self.last_error = str(exc)
                    if isinstance(exc, ServerFault) and exc.refuses_key:
                        self.refusal = str(exc)
                        return
                    self._cancelled.wait(timeout=_PAUSE_S)
                except Exception as exc:  # top of the thread: its end would look like a server that is silent
                    self.refusal = f"the probe itself failed: {type(exc).__name__}: {exc}"
                    return
                else:
                    self._answered.set()
                    return


Readiness = ListeningProbe | ReadinessProbe
