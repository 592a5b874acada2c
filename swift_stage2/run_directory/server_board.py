"""The servers of a run, as its learner tells of them in the run directory, and requests to add one, left there for it.

``RUN_DIR/servers/board.json`` is written by rank 0 alone. A request is a file of its own, whole from its first moment;
who takes it away deals with it. So one that still lies there after a while has met no learner.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swift_stage2.config import ServerConfig
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError, UserError
from swift_stage2.whole_file import read_regular, write_whole

_FOLDER = "servers"
_BOARD = "board.json"
_REQUESTS = "add-*.json"
_KEY = re.compile(r"(?:(?:rollout\.)?servers\[(\d+)\]\.)?\b(base_url|group_(?:port|host|bind))\b")


@dataclass(frozen=True, slots=True)
class ServerStanding:
    """One server, as rank 0 sees it."""

    base_url: str
    state: str
    """``unproven``, ``proven`` or ``suspect``, as in the round schedule."""
    is_added: bool = False
    """True if ``servers add`` added it; False if the configuration names it."""
    proof: str = ""
    """The weights that a proven one holds, in words."""
    fault: str = ""
    """Why it is suspect; empty for one that has joined and is not through its first transfer."""


@dataclass(frozen=True, slots=True)
class ServerBoard:
    """All that a run tells of its servers; empty as long as it has not begun."""

    servers: tuple[ServerStanding, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)
    """By request: why it was refused."""
    has_ended: bool = False

    def write(self, run_dir: Path) -> None:
        """Puts it in the place of the one before. Raises OSError."""
        write_whole(run_dir / _FOLDER / _BOARD, json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> ServerBoard:
        """The last one that the run in ``run_dir`` has written.

        Raises:
            UserError: there is none, or none of this release.
        """
        path = run_dir / _FOLDER / _BOARD
        try:
            board = bind(cls, json.loads(read_regular(path)))
            if not all(isinstance(why, str) for why in board.refusals.values()):
                raise TypeError(f"refusals are texts, got {board.refusals}")
            return board
        except (FileNotFoundError, NotADirectoryError) as error:
            if runs := list(run_dir.glob(f"*/{_FOLDER}/{_BOARD}")):
                newest = max(runs, key=lambda each: each.stat().st_mtime).parents[1]
                raise UserError(
                    f"RUN_DIR must be a run's own directory, got {run_dir} with {len(runs)} of them in it; name the "
                    f"one that is meant, the newest is {newest}"
                ) from error
            raise UserError(
                f"RUN_DIR must be the directory of a run with channel B that has begun to train, got {run_dir} without "
                f"{_FOLDER}/{_BOARD}; name the directory that holds the run's audit/, once its first step has come"
            ) from error
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, ConfigError) as error:
            raise UserError(
                f"{path} must be as this release writes it, cannot read it: "
                f"{str(error).partition('; ')[0]}; use the release that trains there, or "
                "bring the file here as the run wrote it"
            ) from error


def in_arguments(message: str, index: int | None = None) -> str:
    """``message`` about a server's section, the entry ``index`` of ``rollout.servers``, in the words of the command."""

    def argument(found: re.Match[str]) -> str:
        if found[1] is not None and int(found[1]) != index:
            return found[0]  # another server's
        return "URL" if found[2] == "base_url" else f"--{found[2].replace('_', '-')}"

    return _KEY.sub(argument, message)


def leave_request(run_dir: Path, server: ServerConfig) -> Path:
    """Asks the learner of ``run_dir`` to add ``server``; returns the file, which goes when it is taken.

    Raises:
        UserError: the directory cannot be written.
    """
    path = run_dir / _FOLDER / _REQUESTS.replace("*", secrets.token_hex(8))
    try:
        write_whole(path, json.dumps(asdict(server)))
    except OSError as error:
        raise UserError(
            f"RUN_DIR must be writable, for a request is left there, got {run_dir} ({error}); run the command as the "
            "user of the run"
        ) from error
    return path


def take_requests(run_dir: Path) -> list[tuple[str, ServerConfig | ConfigError]]:
    """Takes all requests away: the name of each, with the server or with what is wrong with it."""
    taken: list[tuple[str, ServerConfig | ConfigError]] = []
    for path in sorted((run_dir / _FOLDER).glob(_REQUESTS)):
        try:
            text = read_regular(path).decode(errors="replace")
            path.unlink()
        except FileNotFoundError:
            continue  # whoever left it has just given up
        except OSError as error:  # it stays, and keeps nobody else's from being taken
            taken.append(
                (path.name, ConfigError(f"the run must be able to take a request away, got {error}"))
            )
        else:
            taken.append((path.name, _parse(text)))
    return taken


def withdraw_request(request: Path) -> bool:
    """Takes a request back; False if it was taken before, so that the learner deals with it."""
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True


def clear_requests(run_dir: Path) -> list[str]:
    """Makes the folder, and takes away what was asked of an earlier process: the names. Raises OSError."""
    (run_dir / _FOLDER).mkdir(parents=True, exist_ok=True)
    return [name for name, _ in take_requests(run_dir)]


def _parse(text: str) -> ServerConfig | ConfigError:
    try:
        data: Any = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError(f"a request must be a JSON object, got {text[:80]!r}")
        return bind(ServerConfig, data)
    except ConfigError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ConfigError(
            f"a request must be JSON, got {text[:80]!r} ({error}); leave it to swift-stage2 servers add"
        )
