"""`opkiln-bench`: a Hydra app that measures, and four commands that read what it measured."""

from __future__ import annotations

import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from opkiln_bench import searchpath, settings

settings.register()
searchpath.register()


@hydra.main(version_base="1.3", config_path="pkg://opkiln_bench.conf", config_name="config")
def measure(cfg: DictConfig) -> None:
    """One run, in one process, on one device."""
    from opkiln_bench.runner import run  # torch is not needed for --help and --cfg

    settings_object: Any = OmegaConf.to_object(cfg)
    code = run(settings_object, OmegaConf.to_container(cfg, resolve=True))
    if code:
        sys.exit(code)


def main() -> None:
    """The console script: a command by name, everything else is Hydra's."""
    from opkiln_bench import commands

    if len(sys.argv) > 1 and sys.argv[1] in commands.COMMANDS:
        sys.exit(commands.main(sys.argv[1:]))
    measure()


if __name__ == "__main__":
    main()
