"""Command lines: typed options from the configuration classes, and errors as one sentence."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from unifmoe_dist import resources
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import by_dotted_name, kinds_of, made_of
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.leaving import leave_if_joined
from unifmoe_dist.runtime import failure, heartbeat, signals, terminal
from unifmoe_dist.train.old_runs import unwritten_words
from unifmoe_dist.train.option_errors import check_file, mistake_in_file, mistake_in_words
from unifmoe_dist.train.run import resumes


def train_parser(prog: str | None = None) -> ArgumentParser:
    """Parser of every TrainConfig field, a YAML file through --config, and --print-config."""
    # Otherwise a value such as `model: some.module.Class` would be imported, which runs that module.
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["unifmoe_dist.config"])
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        description="Train UniF-MoE (or its dense twin) on DeepSpeed. Without options: the main job, handwritten "
        "digits with one rotation held out.",
        epilog="A switch may stand alone or be turned off: --baseline, --no-baseline, --baseline false.\n"
        "launch/train.py --estimate [--num-gpus-per-node N] [--num-nodes N] [--gpu-memory-gb 24] trains nothing "
        "and shows the memory that a run needs; needs no GPU and no data.",
        exit_on_error=False,
        allow_abbrev=False,  # a typing mistake must not pass for another option
        print_config="--print-config",
    )
    parser.add_argument("--config", action="config", help="YAML file of options; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


def parse_train_config(arguments: Sequence[str], prog: str | None = None) -> TrainConfig:
    """Turn command-line words into a configuration.

    A run that is resumed keeps the options it was started with; words on the command line change them.

    Raises:
        UserError: an unknown key, a wrong value or type, options that do not go together or a missing file.
    """
    return made_of(TrainConfig, parse_options(arguments, prog))


def parse_options(arguments: Sequence[str], prog: str | None = None) -> dict[str, Any]:
    """All options of a command line by dotted name, as `parse_train_config` takes them; only their types are checked.

    Raises:
        UserError: an unknown key, a wrong type or a missing file.
    """
    parser, words = train_parser(prog), _tidy(arguments)
    for path in _files(words):
        _read_alone(parser, path)
    try:
        parsed = parser.parse_args(words)
        run = Path(parsed.output or "")
        saved = run / "config.yaml"
        if resumes(parsed.resume, run) and saved.is_file():
            _read_alone(parser, saved)
            parsed = parser.parse_args(["--config", str(saved), *unwritten_words(saved), *words])
    except (ArgumentError, ImportError, UnicodeDecodeError) as error:  # a value names a module; a file is no text

        def fits(name: str, word: str) -> bool:
            return _takes(partial(parser.parse_args, [f"--{name}={word}"]))

        mistake = mistake_in_words(words, fits)
        raise UserError(mistake or _as_it_is(error)) from error
    return _by_name(parsed)


def _by_name(parsed: Namespace) -> dict[str, Any]:
    return {name: value for name, value in by_dotted_name(parsed.as_dict()).items() if name != "config"}


def _read_alone(parser: ArgumentParser, path: Path) -> Namespace:
    """The options of a file and the defaults of others; mistakes are said with the file's name."""
    found = check_file(path)
    try:
        return parser.parse_args(["--config", str(path)])
    except (ArgumentError, ImportError) as error:

        def fits(name: str, value: object) -> bool:
            return _takes(partial(parser.parse_object, {name: value}))

        mistake = mistake_in_file(path, found, fits)
        raise UserError(mistake or f"{path}: {_as_it_is(error)}") from error


def _takes(parse: Callable[[], Namespace]) -> bool:
    """Whether a parser refuses nothing."""
    try:
        parse()
    except (ArgumentError, ImportError):
        return False
    return True


def _as_it_is(error: Exception) -> str:
    """The parser's own words."""
    return f"{' '.join(str(error).split()).rstrip('.')}; see --help for every option."


def _files(words: Sequence[str]) -> list[Path]:
    """Files that --config names, those that exist."""
    named = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    named += [word for before, word in zip(words, words[1:], strict=False) if before == "--config"]
    return [Path(name) for name in named if Path(name).is_file()]


def load_train_config(path: str) -> TrainConfig:
    """Read the resolved configuration that a run wrote.

    Raises:
        UserError: the file is missing or is not a valid configuration.
    """
    parser = train_parser()
    if not Path(path).is_file():
        raise UserError(f"there is no {path}; give the folder that a training run wrote.")
    parsed = _read_alone(parser, Path(path))
    if missing := unwritten_words(Path(path)):
        parsed = parser.parse_args(["--config", path, *missing])
    options = _by_name(parsed)
    ignored = find_task(options["data.task"]).ignored  # earlier versions let them pass
    return made_of(TrainConfig, {name: value for name, value in options.items() if name not in ignored})


def dump_train_config(config: TrainConfig) -> str:
    """The configuration as YAML, every field written out."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def _tidy(arguments: Sequence[str]) -> list[str]:
    """Drop the --local_rank that launchers add, let switches stand alone, and find configurations that are shipped."""
    words = [word for word in arguments if not word.startswith(("--local_rank", "--local-rank"))]
    switches = {name for name, kind in kinds_of(TrainConfig).items() if bool in (kind, *get_args(kind))}
    alone = [i + 1 == len(words) or words[i + 1].startswith("-") for i in range(len(words))]
    for i, word in enumerate(words):
        if word.removeprefix("--") in switches and alone[i]:
            words[i] = f"{word}=true"
        elif word.startswith("--no-") and word.removeprefix("--no-") in switches:
            words[i] = f"--{word.removeprefix('--no-')}=false"
    for i, word in enumerate(words):
        if word.startswith("--config="):
            words[i] = "--config=" + resources.config(word.removeprefix("--config="))
        elif i and words[i - 1] == "--config":
            words[i] = resources.config(word)
    return words


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """Run a command. A UserError prints one sentence, once per node, and exits with status 2 without a traceback.

    Any other error prints its traceback and exits with status 1 at once, and takes the other ranks down instead of
    letting them wait for this one. Where nobody reads on, as after `| head`, a command ends without a word.
    """
    signals.imported()
    terminal.prepare()
    try:
        try:
            with heartbeat.beating():
                main(sys.argv[1:])
        except SystemExit as error:
            if failure.in_job():
                failure.leave_for(error)
            _flush()
            if error.code is None or isinstance(error.code, int):
                leave_if_joined(error.code or 0)
            raise
        _flush()
        leave_if_joined()
    except SystemExit:
        raise
    except BaseException as error:
        if not isinstance(error, BrokenPipeError) or not _reader_left():
            failure.leave_for(error)
        if failure.in_job():
            failure.leave_for(UserError("nobody reads this job's output any more; write it to a file."))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written at the end
        sys.exit(128 + signal.SIGPIPE)


def _flush() -> None:
    if sys.stdout is not None:  # closed from the start
        sys.stdout.flush()


def _reader_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
