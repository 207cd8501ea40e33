"""`opkiln-bench`: a Hydra app that measures, and commands that read what it measured."""

from __future__ import annotations

import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from opkiln_bench import searchpath, settings

settings.register()
searchpath.register()


class JobFailed(RuntimeError):
    """One job of a multirun failed; the others go on, and the whole command exits with 1."""


@hydra.main(version_base="1.3", config_path="pkg://opkiln_bench.conf", config_name="config")
def measure(cfg: DictConfig) -> None:
    """One run, in one process, on one device."""
    from opkiln_bench.runner import run  # torch is not needed for --help and --cfg

    settings_object: Any = OmegaConf.to_object(cfg)
    code = run(settings_object, OmegaConf.to_container(cfg, resolve=True))
    if code in (1, 2) and HydraConfig.get().mode == RunMode.MULTIRUN:
        # an exit would end the jobs after this one too; an exception is this job's own
        raise JobFailed(f"a row has no right result of ours, or a wrong setting (exit code {code})")
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
