"""Whether anything listens at an address: a connection that is opened and closed, no call of any protocol."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def why_deaf(base_url: str, timeout_s: float) -> str:
    """Why no connection to the URL's host and port opens within the time; empty when one does."""
    parts = urlsplit(base_url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=timeout_s).close()
    except OSError as error:
        return str(error)
    return ""
