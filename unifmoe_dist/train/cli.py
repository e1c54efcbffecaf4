"""Command lines: typed options from the configuration classes, and errors as one sentence."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from unifmoe_dist import resources
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.checked import words_of
from unifmoe_dist.config.named import Option, as_word, by_dotted_name, described, kinds_of, made_of
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.leaving import leave_if_joined
from unifmoe_dist.runtime import failure, heartbeat, signals, terminal
from unifmoe_dist.train.old_runs import unwritten
from unifmoe_dist.train.option_files import nearest, read_options, read_word
from unifmoe_dist.train.options import OptionParser
from unifmoe_dist.train.run import resumes


def train_parser(prog: str | None = None) -> OptionParser:
    """Parser of every TrainConfig field, a YAML file through --config, and --print-config; it gives what was given."""
    parser = _TrainParser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        description="Train UniF-MoE (or its dense twin) on DeepSpeed. Without options: the main job, handwritten "
        "digits with one rotation held out.",
        epilog="A switch may stand alone or be turned off: --baseline, --no-baseline, --baseline false. "
        "launch/train.py --estimate [--num-gpus-per-node N] [--num-nodes N] [--gpu-memory-gb 24] trains nothing "
        "and shows the memory that a run needs; needs no GPU and no data.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", action=_File, help="YAML file of options; later ones override it.")
    parser.add_argument("--print-config", action="store_true", help="Print the options as YAML, and exit.")
    groups: dict[str, Any] = {}
    for option in described(TrainConfig):
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        text = f"{option.text} ({option.values}; default: {as_word(option.default)})".replace("%", "%%")
        own: dict[str, Any] = {"action": _Set, "kind": option.kind}
        if bool in (option.kind, *get_args(option.kind)):
            group.add_argument(f"--no-{option.name}", dest=option.name, nargs=0, help=argparse.SUPPRESS, **own)
            own |= {"nargs": "?", "const": "true"}
        group.add_argument(f"--{option.name}", metavar=_metavar(option), help=text, **own)
    return parser


def _metavar(option: Option) -> str:
    choices = words_of(option.kind)
    if Literal in (get_origin(option.kind), *map(get_origin, get_args(option.kind))) or option.kind is bool:
        return f"{{{','.join(choices)}}}"
    return option.name.rpartition(".")[2].upper()


class _TrainParser(OptionParser):
    def unknown(self, word: str) -> str:
        """What is wrong with a word that is no option, or too many."""
        options = ["config", *kinds_of(TrainConfig)]
        if not word.startswith("-"):
            return f"{word!r} is one word too many; an option's value stands behind its name, as in --steps 200."
        name = word.removeprefix("--")
        if example := next((option for option in options if option.startswith(f"{name}.")), None):
            return f"{word} holds options, which are given one by one, such as --{example}."
        if name.replace("_", "-") in _LAUNCHERS:
            return f"{word} is an option of the launcher, so it stands before launch/train.py, not after it."
        return f"there is no option {word}; {nearest(name, options)}"


_LAUNCHERS = ("num-gpus", "num-accelerators", "num-nodes", "master-port", "hostfile", "nproc-per-node", "nnodes")


class _Set(argparse.Action):
    """Keeps an option's value, of its kind; --no-NAME, which takes none, turns a switch off."""

    def __init__(self, *args: Any, kind: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kind = kind

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, read_word(self.dest, self.kind, "false" if self.nargs == 0 else values))


class _File(argparse.Action):
    """Keeps all that a file gives."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        path = Path(resources.config(values))
        if values and not path.exists():
            raise UserError(f"--config: there is no file {values}.")
        if not values or not path.is_file():
            shown = repr(str(path.absolute())) if values else "empty"
            raise UserError(f"--config {shown} is no file; give a YAML file of options.")
        vars(namespace).update(read_options(path))


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
    words = [word for word in arguments if not word.startswith(("--local_rank", "--local-rank"))]  # of launchers
    given = vars(train_parser(prog).parse_args(words))
    printed = given.pop("print_config", False)
    run = Path(given.get("output") or "")
    if resumes(given.get("resume", False), run) and (run / "config.yaml").is_file():
        given = {**_written(run / "config.yaml"), **given}
    if printed:
        print(dump_train_config(made_of(TrainConfig, given)), end="")
        sys.exit()
    return {**by_dotted_name(asdict(TrainConfig())), **given}


def _written(path: Path) -> dict[str, Any]:
    """The options that a run wrote, and what its version did where they lack some."""
    found = read_options(path)
    return {**unwritten(found), **found}


def load_train_config(path: str) -> TrainConfig:
    """Read the resolved configuration that a run wrote.

    Raises:
        UserError: the file is missing or is not a valid configuration.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no {path}; give the folder that a training run wrote.")
    options = _written(Path(path))
    ignored = find_task(options.get("data.task", TrainConfig().data.task)).ignored  # earlier versions let them pass
    return made_of(TrainConfig, {name: value for name, value in options.items() if name not in ignored})


def dump_train_config(config: TrainConfig) -> str:
    """The configuration as YAML, every field written out."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


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
