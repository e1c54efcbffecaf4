"""Checkpoints that know no world size: whole tensors by name, experts by global index, in safetensors.

    checkpoints/
      latest  best              names of folders, replaced atomically
      step-000100/
        manifest.json           every file with size and sha256; written last
        dense.safetensors       weights every rank has                    (rank 0)
        dense-optimizer.safetensors   "<name>/fp32", "<name>/exp_avg", ...
        experts-000-003.safetensors   weights of the residual experts at places 0..2    (the ranks that own them)
        experts-000-003-optimizer.safetensors
        algorithm-dense.safetensors ...   the same files for what only the training algorithm needs, if anything;
                                names start with "algorithm."
        progress.json           step, schedule, loss scale, metrics so far
        random-00000.safetensors      generator states of rank 0 ...

A folder is written under a temporary name, flushed to the disk and renamed once every rank is done, so a name that
exists is whole, whatever is killed and even if the power fails. Older checkpoints go only when `latest` is in place.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BIASES, bias_like
from unifmoe_dist.files import flush, publish, save_tensors, sha256, write_text
from unifmoe_dist.lending import here
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed
from unifmoe_dist.train.random_state import random_state, restore_random_state
from unifmoe_dist.upcycling import moe_layers

FORMAT = 1
EXTRA = "algorithm"
"""Marks files, and tensors, of modules that only training needs."""


Places = dict[str, tuple[str, Sequence[int]]]


def expert_names(model: nn.Module) -> Places:
    """Names of residual-expert parameters -> (checkpoint prefix, global indices of the experts held here)."""
    found = {}
    for layer_name, layer in moe_layers(model).items():
        for name, _ in layer.experts.named_parameters():
            prefix = f"{layer_name}.experts" if layer_name else "experts"
            found[f"{prefix}.{name}"] = (prefix, layer.held)
    return found


def _expert_key(name: str, prefix: str, expert: int) -> str:
    """blocks.2.mlp.experts.keys, expert 3 -> blocks.2.mlp.experts.3.keys"""
    return f"{prefix}.{expert}{name[len(prefix) :]}"


def split_by_expert(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace every tensor of stacked local experts by one tensor per expert, under its global index."""
    places = expert_names(model)
    return {key: part for name, tensor in tensors.items() for key, part in _by_expert(places, name, tensor)}


def _by_expert(places: Places, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name not in places:
        yield name, tensor
        return
    prefix, held = places[name]
    rows = tensor.view(len(held), -1) if tensor.ndim == 1 else tensor  # a bias
    yield from ((_expert_key(name, prefix, expert), row) for expert, row in zip(held, rows, strict=True))


def save(
    folder: Path,
    model: nn.Module,
    engine: Any,
    ranks: Ranks,
    progress: dict[str, Any],
    schedule: Any,
    extra: nn.Module | None = None,
) -> Path:
    """Write one checkpoint; collective. Returns its folder, which exists only once it is whole.

    `extra` holds modules that are trained besides the model.

    Raises:
        UserError: the disk is full or cannot be written; the checkpoints that exist stay as they are.
    """
    final = folder / f"step-{progress['step']:06d}"
    temporary = folder / f".writing-{final.name}"
    with _explained(final):
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    ranks.barrier()

    mine = {f"random-{ranks.rank:05d}": random_state(), **_files(model, engine, ranks)}
    if extra is not None and any(True for _ in extra.parameters()):
        for stem, tensors in _files(extra, engine, ranks).items():
            mine[f"{EXTRA}-{stem}"] = {f"{EXTRA}.{name}": tensor for name, tensor in tensors.items()}
    with _explained(final):
        entries = {}
        for stem, tensors in mine.items():
            path = temporary / f"{stem}.safetensors"
            save_tensors(tensors, path)
            flush(path)
            entries[path.name] = _entry(path)
    written = ranks.gather(entries)  # also a barrier: everything is on the disk
    if ranks.rank == 0:
        record = {
            **progress,
            "format": FORMAT,
            "world_size": ranks.world_size,
            "lr": schedule.get_last_lr()[0],
            "schedule": {k: v for k, v in schedule.state_dict().items() if isinstance(v, (int, float))},
            **deepspeed.collect_scalars(engine),
        }
        with _explained(final):
            _publish(temporary, final, record, {name: entry for part in written for name, entry in part.items()})
    ranks.barrier()
    return final


def _publish(temporary: Path, final: Path, record: dict[str, Any], files: dict[str, Any]) -> None:
    """Let a checkpoint whose `files` are on the disk appear, with its progress and manifest."""
    write_text(temporary / "progress.json", json.dumps(record, indent=1))
    files["progress.json"] = _entry(temporary / "progress.json")
    write_text(temporary / "manifest.json", json.dumps(dict(sorted(files.items())), indent=1))
    if final.exists():  # left by a run that was killed before `latest` named it
        shutil.rmtree(final)
    publish(temporary, final)
    write_text(final.parent / "latest", final.name)


def _files(model: nn.Module, engine: Any, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """The contents of the files that this rank writes for a model, by stem; collective."""
    places = expert_names(model)
    sharded = set(places) if ranks.expert_group is not None else set()
    states = deepspeed.collect(engine, model)
    weights = {name: here(t).detach().cpu() for name, t in model.state_dict(keep_vars=True).items()}
    for name in _rank_sums(model):
        weights[name] = ranks.all_sum(weights[name]).to(weights[name].dtype)
    files: dict[str, dict[str, Tensor]] = {}

    def add(stem: str, names: set[str]) -> None:
        chosen = [part for name in weights if name in names for part in _by_expert(places, name, weights[name])]
        # safetensors refuses tensors that share memory, such as tied embeddings: each gets its own.
        files[stem] = {key: part.clone(memory_format=torch.contiguous_format) for key, part in chosen}
        files[f"{stem}-optimizer"] = {
            f"{key}/{kind}": part.contiguous()
            for name, state in states.items()
            if name in names
            for kind, tensor in state.items()
            for key, part in _by_expert(places, name, tensor)
        }

    if ranks.rank == 0:
        add("dense", {*weights} - sharded)
    if sharded and ranks.expert_replica == 0:
        count = len(next(iter(places.values()))[1])
        first = count * ranks.expert_rank
        add(f"experts-{first:03d}-{first + count:03d}", sharded)
    return files


@contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Say which checkpoint could not be written, and that the others are intact."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        pointer = final.parent / "latest"
        kept = f"; {pointer.read_text().strip()} is intact, continue from it with --resume" if pointer.is_file() else ""
        raise UserError(
            f"checkpoint {final} could not be written ({error}): free space or choose another --output{kept}."
        ) from error


def latest(run: Path, name: str = "latest") -> Path:
    """The folder of the last (or "best", or "step-N") complete checkpoint of a run, with its manifest checked.

    Raises:
        UserError: there is none, or a file is missing, cut short or altered.
    """
    checkpoints = run / "checkpoints"
    pointers = [pointer for pointer in ("best", "latest") if (checkpoints / pointer).is_file()]
    if name == "latest" and name not in pointers and (unnamed := complete(checkpoints)):
        name = unnamed[-1].name  # the run was killed before it could name its first
    target = (checkpoints / name).read_text().strip() if name in pointers else name
    number = target.removeprefix("step-")
    folder = checkpoints / (f"step-{int(number):06d}" if number.isdecimal() else target)
    if name in pointers and not number.isdecimal():  # it could lead anywhere
        raise UserError(f"{checkpoints / name} holds {target!r}, which names no checkpoint; write step-N into it.")
    if name not in pointers and not (number.isdecimal() and folder.is_dir()):
        kept = [path.name for path in complete(checkpoints)]
        anew = "delete it and start the run anew" if (run / "config.yaml").is_file() else "start the run"
        advice = f"it holds: {', '.join(pointers + kept)}" if kept else f"{anew} without --resume"
        raise UserError(f"{run} holds no checkpoint {name}; {advice}.")
    verify(folder)
    return folder


def complete(checkpoints: Path) -> list[Path]:
    """Folders of the checkpoints that were finished, oldest first. Their files are not read."""
    found = [p for p in checkpoints.glob("step-*") if (p / "manifest.json").is_file()]
    return sorted(found, key=lambda path: _order(path.name))


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        UserError: naming the first file that does not agree, and the newest other checkpoint.
    """
    others = [path.name for path in complete(folder.parent) if path != folder]
    instead = f"write {others[-1]} into {folder.parent / 'latest'} to continue from there" if others else "start anew"
    damaged = f"it is damaged; delete that folder and {instead}."
    try:
        files = json.loads((folder / "manifest.json").read_text())
        json.loads((folder / "progress.json").read_text())
        entries = [(Path(name).name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"checkpoint {folder} has no readable manifest or progress file; {damaged}") from error
    for name, size, digest in entries:
        path = folder / name
        if not path.is_file():
            raise UserError(f"checkpoint {folder} lacks {name}; {damaged}")
        if path.stat().st_size != size or sha256(path) != digest:
            raise UserError(f"checkpoint file {path} is not what was written; {damaged}")


def load_progress(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "progress.json").read_text())


class _Tensors:
    """All tensors of a checkpoint by name, read lazily from files that stay open."""

    def __init__(self, folder: Path, optimizer: bool) -> None:
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name.startswith("random-") or path.stem.endswith("-optimizer") != optimizer:
                continue
            try:
                handle = safe_open(path, "pt")
            except SafetensorError as error:
                raise UserError(f"checkpoint file {path} cannot be read ({error}); it is damaged.") from error
            self.files.update(dict.fromkeys(handle.keys(), handle))

    def read(self, name: str) -> Tensor:
        if name not in self.files:
            raise UserError(f"the checkpoint holds no tensor {name}; it belongs to another model configuration.")
        return self.files[name].get_tensor(name)

    def read_for(self, places: Places, name: str, start: str = "", end: str = "") -> Tensor:
        """A parameter as this rank holds it: local experts stacked, at their `places` in the model.

        The checkpoint's name is the model's between `start` and `end`.
        """
        if name not in places:
            return self.read(start + name + end)
        prefix, held = places[name]
        return torch.stack([self.read(start + _expert_key(name, prefix, expert) + end) for expert in held])


def _shaped(tensor: Tensor, name: str, own: Tensor) -> Tensor:
    """A bias of experts as the model holds it; files have one row an expert, older ones of the shared expert too."""
    return bias_like(tensor, own) if name.rsplit(".", 1)[-1] in BIASES else tensor


def load_weights(folder: Path, model: nn.Module, start: str = "") -> None:
    """Copy the weights into a model built the same way, at this rank's share of the experts.

    `start` begins the names that the checkpoint gives to the model's tensors.

    Raises:
        UserError: a file is damaged; a tensor is missing or has another shape.
    """
    tensors, places = _Tensors(folder, optimizer=False), expert_names(model)
    own = {name: here(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    state = {name: _shaped(tensors.read_for(places, name, start), name, own[name]) for name in own}
    resized = {f"{name}.{each}".lstrip(".") for name, layer in moe_layers(model).items() for each in layer.resized}
    for name, tensor in state.items():
        if tensor.shape != own[name].shape and name not in resized:
            raise UserError(
                f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, the model needs {tuple(own[name].shape)}; "
                "the model options differ from those of the saved run."
            )
    model.load_state_dict(state)


def load(
    folder: Path, model: nn.Module, engine: Any, ranks: Ranks, schedule: Any, extra: nn.Module | None = None
) -> dict[str, Any]:
    """Restore weights, optimiser, schedule, loss scale and this rank's generators. Returns the saved progress."""
    parts = {"": model} if extra is None else {"": model, f"{EXTRA}.": extra}
    for start, part in parts.items():
        load_weights(folder, part, start)
        for name in _rank_sums(part) if ranks.rank else ():  # the first rank keeps the sums
            part.get_buffer(name).zero_()
    progress = load_progress(folder)
    tensors = _Tensors(folder, optimizer=True)
    kinds = sorted({key.rsplit("/", 1)[1] for key in tensors.files})
    states = {}
    for start, part in parts.items():
        places = expert_names(part)
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                state = {
                    kind: _shaped(tensors.read_for(places, name, start, f"/{kind}"), name, parameter) for kind in kinds
                }
                states[parameter] = state
    deepspeed.restore(engine, states, progress)
    # The first group's rate stands for all: their number differs between layouts, as sharded experts form their own.
    rates = [progress["lr"] * (peak / schedule.base_lrs[0]) for peak in schedule.base_lrs]
    known = schedule.state_dict()  # a name that it does not have would become an attribute of the schedule
    saved = {key: value for key, value in progress["schedule"].items() if key in known}
    schedule.load_state_dict({**known, **saved, "_last_lr": rates})
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    own_random = folder / f"random-{ranks.rank:05d}.safetensors"
    if own_random.is_file() and progress["world_size"] == ranks.world_size:
        try:
            restore_random_state(load_file(own_random))
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{own_random} holds no state of random generators ({error}); the checkpoint is damaged: start anew, "
                f"or write another one's name into {folder.parent / 'latest'}."
            ) from error
    return progress


def _rank_sums(model: nn.Module) -> list[str]:
    """Buffers to which every rank adds what its own tokens give."""
    return [f"{name}.{each}".lstrip(".") for name, layer in moe_layers(model).items() for each in layer.rank_sums]


def _order(name: str) -> tuple[int, str]:
    """Sorts names as their numbers do, past step 999,999 as well."""
    return len(name), name


def prune(folder: Path, keep: int) -> None:
    """Delete what is not needed to go on.

    Kept are `latest`, `best` and the `keep` - 1 newest before `latest`. Others go: older ones, leftovers of
    interrupted writes, and checkpoints after `latest`, which a run that was killed or rewound will write again.
    """
    pointers = {p.name: p.read_text().strip() for p in (folder / "latest", folder / "best") if p.is_file()}
    names = [path.name for path in complete(folder) if _order(path.name) <= _order(pointers["latest"])]
    kept = {*pointers.values(), *names[-keep:]}
    for path in folder.iterdir():
        if path.is_dir() and path.name not in kept and path.name.startswith(("step-", ".writing-")):
            shutil.rmtree(path, ignore_errors=True)


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
