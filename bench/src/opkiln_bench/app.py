"""`opkiln-bench`: a Hydra app that measures, and commands that read what it measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
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


class FolderCheck(Callback):
    """Tells in one line where the run's folder cannot be made: Hydra's own try is a traceback."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self.check(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.check(config)

    def check(self, config: DictConfig) -> None:
        from opkiln_bench.catalogue import CatalogueError
        from opkiln_bench.validate import check_folder

        try:
            check_folder("output.runs_dir", Path(config.output.runs_dir))
        except CatalogueError as error:
            print(f"opkiln-bench: {error}", file=sys.stderr)
            sys.exit(2)  # no exception: Hydra turns those of a callback into warnings


def main() -> None:
    """The console script: a command by name, everything else is Hydra's."""
    from opkiln_bench import commands

    if len(sys.argv) > 1:
        if sys.argv[1] in commands.COMMANDS:
            sys.exit(commands.main(sys.argv[1:]))
        if told := commands.unknown(sys.argv[1]):
            print(told, file=sys.stderr)
            sys.exit(2)
    measure()


if __name__ == "__main__":
    main()
