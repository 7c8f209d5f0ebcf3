"""``python -m tasks.enwik8 fit|validate|test|length``: byte models from the command line."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from plots.checkpoints import load_checkpoint
from plots.runs import RunError
from tasks.callbacks import Claim, ProgressBar, Randomness, Recorder
from tasks.checkpoints import Checkpoints, WholeFiles
from tasks.enwik8.data import ByteData
from tasks.enwik8.length.command import main as length
from tasks.language_modeling import LanguageModeling, NonFiniteError
from tasks.run_directory import RunDirectory

_TRAINER_DEFAULTS = {
    "max_steps": 600,
    "max_epochs": -1,  # training batches have no end
    "check_val_every_n_epoch": None,
    "val_check_interval": 100,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # ByteData deals out batches and windows itself
    "enable_checkpointing": False,  # tasks.callbacks.Checkpoints does it
    "enable_model_summary": False,
}


class _Finished(Exception):
    """There is nothing left to do."""


class Enwik8CLI(LightningCLI):
    """LightningCLI whose runs live in a folder of their own, go on where they stopped and record what they did.

    Args:
        args: Arguments of the command line.
        at_end: What is entered here is left when the command ends, however it ends.
    """

    def __init__(self, args: Sequence[str] | None, at_end: ExitStack) -> None:
        self.at_end = at_end
        super().__init__(
            LanguageModeling,
            ByteData,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults=_TRAINER_DEFAULTS,
            parser_kwargs={"allow_abbrev": False},
            args=_with_hyperparameters(list(sys.argv[1:] if args is None else args)),
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Those of the trainer that mean something here."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what is not the trainer's, the model's or the data's."""
        parser.add_argument(
            "--run_dir",
            default="runs/enwik8/default/seed-0",
            help="folder of the run, runs/<experiment>/<arm>/seed-<k>; the same call goes on where it stopped",
        )
        parser.add_argument("--checkpoint_every", type=int, default=200, help="optimizer steps between two checkpoints")
        parser.link_arguments("seed_everything", "data.seed")

    def _parse_ckpt_path(self) -> None:
        """A checkpoint's hyperparameters were made defaults before parsing, so that the call can overrule them."""

    def before_instantiate_classes(self) -> None:
        """Refuse, before anything is built, a folder that belongs to another run; find what to go on from."""
        config = self.config[str(self.subcommand)]
        config.weights_only = True  # a checkpoint is data; no code in it is run
        self.run_directory = RunDirectory(Path(config.run_dir))
        self.is_fitting = self.subcommand == "fit"
        if not self.is_fitting:
            if not config.ckpt_path:
                raise RunError(f"{self.subcommand} needs weights: give --ckpt_path RUN_DIR/checkpoints/last.ckpt")
            return
        if config.trainer.max_steps < 1:
            raise RunError(
                f"training batches have no end: --trainer.max_steps must be at least 1, got {config.trainer.max_steps}"
            )
        if config.trainer.fast_dev_run:
            raise RunError("--trainer.fast_dev_run keeps nothing of a run; for a short one give --trainer.max_steps")
        if config.checkpoint_every < 1:
            raise RunError(f"--checkpoint_every must be at least 1, got {config.checkpoint_every}")
        text = self.parser.dump(self.config, skip_unset=False)
        self.settings = yaml.safe_load(text)["fit"]
        run = self.run_directory
        is_first = getattr(rank_zero_only, "rank", 0) == 0  # set from the launcher's variables
        if is_first:
            self.at_end.enter_context(run.alone())
        # All processes of a distributed run decide alike: nothing is written before every one of them has.
        self.starts_elsewhere = bool(config.ckpt_path) and not run.began_with(self.settings)
        if self.starts_elsewhere:
            return
        run.check(self.settings)
        if run.is_finished:
            raise _Finished(f"{run.path} is finished: {_sentence(run.info)}")
        if run.last_checkpoint:
            load_checkpoint(run.last_checkpoint)  # says so if the file is damaged
            config.ckpt_path = str(run.last_checkpoint)
        if is_first:
            if run.info.get("diverged"):
                run.update({"diverged": None})  # this call has not
            print(f"{run.path} {'goes on from its last checkpoint' if run.last_checkpoint else 'begins'}", flush=True)

    def after_instantiate_classes(self) -> None:
        """Let checkpoints say how the network was made, so that they can be loaded without its config."""
        if self.is_fitting:
            self.model.hparams["network"] = self.settings["model"]["network"]

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build the trainer with the callbacks and loggers that make a run's folder."""
        config = self.config_init[str(self.subcommand)]
        self.recorder = Recorder(self.run_directory, self.is_fitting)
        own: list[Callback] = [self.recorder]
        if config.trainer.enable_progress_bar is not False:
            own.append(ProgressBar())
        loggers: Any = False
        if self.is_fitting:
            path = self.run_directory.path
            loggers = [self.run_directory.metrics, TensorBoardLogger(path, name="", version="tensorboard")]
            # In this order: what a step changes, what is recorded of it, what is saved.
            claim = Claim(self.run_directory, self.settings, self.starts_elsewhere)
            checkpoints = Checkpoints(self.run_directory, config.checkpoint_every)
            own = [claim, Randomness(config.seed_everything), *own, checkpoints]
        plugins = config.trainer.plugins or []
        return super().instantiate_trainer(
            default_root_dir=str(self.run_directory.path),
            logger=loggers,
            callbacks=[*(config.trainer.callbacks or []), *own],
            plugins=[*(plugins if isinstance(plugins, list) else [plugins]), WholeFiles()],
            **kwargs,
        )

    def after_fit(self) -> None:
        """Measure where the last step has not been, and close the record."""
        trainer, run = self.trainer, self.run_directory
        if trainer.global_step < trainer.max_steps:
            return
        if self.recorder.validated_step != trainer.global_step:
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        if trainer.is_global_zero:
            experiment, arm = run.path.resolve().parts[-3:-1]
            names = {"experiment": experiment, "arm": arm, "seed": self.config_init["fit"].seed_everything}
            run.update(names | {"finished": True})
            print(f"{run.path} is finished: {_sentence(run.info)}")

    def after_validate(self) -> None:
        """Say what was measured, and keep it beside the run it belongs to."""
        self._keep("validation")

    def after_test(self) -> None:
        """As :meth:`after_validate`."""
        self._keep("test")

    def _keep(self, split: str) -> None:
        result = self.recorder.result
        if not self.trainer.is_global_zero or not result:
            return
        print(f"{split}: {_sentence({'validation': result})}")
        checkpoint = Path(self.config_init[str(self.subcommand)].ckpt_path)
        result |= {"checkpoint": str(checkpoint), "step": load_checkpoint(checkpoint).get("global_step")}
        own = checkpoint.resolve().is_relative_to(self.run_directory.path.resolve())
        if own and self.run_directory.info:
            earlier = self.run_directory.info.get("evaluations", [])
            self.run_directory.update({"evaluations": [*earlier, result]})


def _sentence(info: dict[str, Any]) -> str:
    """What was measured, with all that the figure depends on."""
    result = info.get("validation")
    if result is None:
        return "not validated"
    scored = f"{result['bytes_scored']:,}"
    if result["bytes_scored"] < result.get("split_targets", 0):
        scored += f" of {result['split_targets']:,}"
    return (
        f"{result['bpc']:.4f} bpc on the {result['split']} split of {result['data']} "
        f"({scored} bytes scored, {result['evaluation']}, context up to {result['context']:,} bytes"
        + (f", at least {result['stride']:,})" if result["stride"] else ")")
    )


def _with_hyperparameters(args: list[str]) -> list[str]:
    """Put the model of ``--ckpt_path`` in front of all other settings, so that it holds unless told otherwise."""
    paths = [b for a, b in itertools.pairwise(args) if a == "--ckpt_path"]
    paths += [a.partition("=")[2] for a in args if a.startswith("--ckpt_path=")]
    if not paths or not Path(paths[-1]).is_file():
        return args
    hyperparameters = load_checkpoint(Path(paths[-1])).get("hyper_parameters", {})
    hyperparameters.pop("_instantiator", None)
    if not hyperparameters:
        return args
    return [args[0], "--config", yaml.safe_dump({"model": hyperparameters}), *args[1:]]


def _end_with_stdin() -> None:
    """Whoever started this process holds the other end of its input: once they are gone, it goes too."""
    while os.read(0, 1024):  # not sys.stdin, whose lock this thread would hold when Python shuts down
        pass
    os._exit(1)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; a fault of the call ends in one message and an exit status that is not 0."""
    if os.environ.get("LINROPE_END_WITH_STDIN"):
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    warnings.filterwarnings("ignore", module="lightning")
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["length"]:  # no subcommand of the trainer's, and it trains nothing that is kept
        return length(given[1:])
    try:
        with ExitStack() as at_end:
            Enwik8CLI(args, at_end)
    except _Finished as finished:
        print(finished)
    except Exception as error:
        if os.environ.get("LINROPE_TRACEBACK"):
            raise
        message = str(error).replace("\n\t", "\n  ")
        if not isinstance(error, (RunError, NonFiniteError, ValueError, OSError, RuntimeError)):
            message = f"{type(error).__name__}: {message}"
        print(f"error: {message}\n(LINROPE_TRACEBACK=1 shows where)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
