"""Whether ms-swift knows every argument of section ``swift``: a program that ``launch`` runs while servers start.

Only names are looked at; values are ms-swift's to judge when training starts. A process of its own, because the
launcher never loads ms-swift. Exit status 2 and one line for a name that is unknown.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable

from swift_stage2.config import load_config
from swift_stage2.config.binding import closest
from swift_stage2.errors import ConfigError, UserError

_USER_MISTAKE = 2


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for the first name that is none of ``known``, nor the beginning of one."""
    for name in names:
        if any(word.startswith(name) for word in known):  # ms-swift's parser takes abbreviations
            continue
        near = closest(name, tuple(known))
        hint = f"; did you mean {near!r}?" if near else "; remove it"
        raise ConfigError(f"ms-swift must know every argument of section swift, got {name!r}{hint}")


def known_names() -> frozenset[str]:
    """The names that ms-swift's parser for training takes."""
    from swift_stage2.cpu_torchvision import declare_operators

    declare_operators()  # before ms-swift imports torchvision
    from swift.arguments import SftArguments

    return frozenset(item.name for item in dataclasses.fields(SftArguments) if item.init)


def main(config_path: str) -> int:
    """Checks one configuration file."""
    try:
        refuse_unknown(load_config(config_path).swift, known_names())
    except UserError as error:
        print(f"{config_path}: {error}", flush=True)
        return _USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
