"""Whether ms-swift can read section ``swift`` and all servers' ``args``: a program that ``launch`` runs beside them.

Names and values are looked at as its command-line parser does, without its later checks and without a model. A process
of its own, because the launcher never loads ms-swift. Exit status 2 and one line for the first mistake.
"""

from __future__ import annotations

import dataclasses
import sys

from swift_stage2.config import ServerEngine, Stage2Config, load_config
from swift_stage2.config.swift_arguments import as_argv, refuse_unknown_names
from swift_stage2.errors import UserError

_USER_MISTAKE = 2


def check_arguments(config: Stage2Config) -> None:
    """Raises ConfigError for the first argument that ms-swift's parser does not take."""
    from swift_stage2.compat.torchvision_on_cpu import declare_operators

    declare_operators()  # before ms-swift imports torchvision
    from swift.arguments import RolloutArguments, SftArguments

    from swift_stage2.swift_parsing import refuse_unreadable

    refuse_unknown_names(config.swift, {field.name for field in dataclasses.fields(SftArguments)})
    refuse_unreadable(config.swift_arguments(), SftArguments)
    for index, server in enumerate(config.launch.servers):
        if server.engine is not ServerEngine.TRANSFORMERS:  # whose options are ours
            where = f"launch.servers[{index}].args"
            refuse_unreadable(as_argv(server.args), RolloutArguments, where=where)


def main(config_path: str) -> int:
    """Checks one configuration file."""
    try:
        check_arguments(load_config(config_path))
    except UserError as error:
        print(f"{config_path}: {error}", flush=True)
        return _USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
