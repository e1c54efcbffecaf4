"""A scaling study: a grid of layouts, each measured on ranks started here, kept in a CSV that a re-run continues."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import write_text
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.local_ranks import check_world_size, run_local_ranks
from unifmoe_dist.studies.records import csv_text, markdown
from unifmoe_dist.studies.rehearsal.hosts import Network
from unifmoe_dist.studies.scaling.measured_step import Layout, Measurement, Point, Study, measure, train_config
from unifmoe_dist.studies.scaling.recorded_routing import write_routing
from unifmoe_dist.train.options import writing_to


def grid(
    experts: Sequence[int],
    ranks: Sequence[int],
    expert_parallel: Sequence[int],
    batch: Sequence[int],
    dispatchers: Sequence[str],
    zero: Sequence[int],
    megabits: Sequence[int] = (0,),
) -> tuple[list[Layout], int]:
    """Every layout of the grid that can exist, in the order of rank counts, and the number of those that cannot.

    Of `expert_parallel` sizes 0 is the largest that divides both K and the world size. Where every rank holds all
    experts, each dispatcher is "local".

    Raises:
        UserError: no combination is possible, or a number is below 1.
    """
    for name, values in (("--experts", experts), ("--ranks", ranks), ("--batch", batch)):
        if min(values) < 1:
            raise UserError(f"{name} must be at least 1, not {min(values)}.")
    if min(megabits) < 0:
        raise UserError(f"--megabits must be at least 0, not {min(megabits)}.")
    for world in ranks:
        check_world_size(world)
    layouts: dict[Layout, None] = {}  # a set that keeps the order
    left_out, choices = 0, (sorted(set(ranks)), sorted(set(experts)), expert_parallel, batch, dispatchers, zero)
    for world, k, size, images, name, stage, rate in product(*choices, megabits):
        size = size or (1 if name == "local" else math.gcd(k, world))
        if k % size or world % size or (name == "local" and size > 1) or (rate and world % 2):
            left_out += 1
            continue
        dispatcher = "local" if size == 1 else "alltoall" if name == "auto" else name
        layouts[Layout(k, world, size, images, dispatcher, stage, rate)] = None
    if not layouts:
        raise UserError(
            "no combination of --experts, --ranks and --expert-parallel-size is possible: the size must divide both "
            "other numbers, dispatcher local needs size 1, and two hosts share ranks evenly."
        )
    return list(layouts), left_out


def default_ranks() -> list[int]:
    """1, 2, 4 ... up to the GPUs here; 1, 2 and 4 on the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 4
    return [2**i for i in range(int(math.log2(max(gpus, 1))) + 1)]


def run_study(layouts: Sequence[Layout], study: Study, folder: Path, progress: bool = True) -> list[Point]:
    """Measure the layouts that `folder`/scaling.csv does not hold yet, one row each, and return all of them.

    Raises UserError where the folder holds a study of another shape, a layout is refused, or, after the others, failed.
    """
    for layout in layouts:
        train_config(layout, study)  # refuses what cannot work before any rank starts
    with writing_to(folder):
        agree_on_study(folder, study)
    done = {p.layout: p for p in read_points(folder)}
    missing = [layout for layout in layouts if layout not in done]
    failures = []
    known = len(layouts) - len(missing)
    with tqdm(total=len(layouts), initial=known, desc="scaling", unit="point", disable=not progress) as bar:
        for layout in missing:
            bar.set_postfix_str(str(layout))
            heartbeat.doing(f"{len(done)} of {len(layouts)} points done, at {layout}")
            try:
                with _hosts(layout.megabits) as first:
                    of_ranks = run_local_ranks(layout.ranks, measure, layout, study, first, threads=study.threads)
            except RuntimeError as error:  # out of memory, say: the others can still be measured
                failures.append(f"{layout}: {str(error).strip().splitlines()[-1]}")
                tqdm.write(f"{layout} failed: {error}")
            else:
                result, routing = of_ranks[0]
                done[layout] = Point(layout, result)
                path = routing_file(folder, layout)
                path.parent.mkdir(exist_ok=True)
                write_routing(path, {str(i): layer for i, layer in enumerate(routing)}, str(layout))
                write_points(folder, done.values())
            bar.update()
    if failures:
        raise UserError(
            f"{len(failures)} of {len(layouts)} points failed; the others are in {folder / 'scaling.csv'}, and the "
            f"same command tries the missing ones again. First failure: {failures[0]}"
        )
    return [done[layout] for layout in layouts]


@contextmanager
def _hosts(megabits: int) -> Iterator[list[int]]:
    """First processes of two hosts with so fast a link, or nothing for 0."""
    if not megabits:
        yield []
        return
    with Network() as network:
        network.limit(megabits)
        yield [host.pid for host in network.hosts]


def agree_on_study(folder: Path, study: Study) -> None:
    """Note in a folder what its points have in common. Raises UserError where it notes something else."""
    path = folder / "study.json"
    if path.is_file():
        kept = asdict(read_study(folder))
        other = [f"{name} {value}" for name, value in kept.items() if value != getattr(study, name)]
        if other:
            raise UserError(
                f"{folder} holds a study with {', '.join(other)}; use the same options or another --output."
            )
    path.write_text(json.dumps(asdict(study), indent=1))


def read_study(folder: Path) -> Study:
    """What the points of a folder have in common. Raises UserError where that is missing or damaged."""
    path = folder / "study.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no study.json; give the --output folder of a scaling sweep.")
    try:
        return Study(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not describe a study ({error}); choose another folder.") from error


def routing_file(folder: Path, layout: Layout) -> Path:
    """Where a study keeps what tokens decided in one step of a point."""
    return folder / "routing" / f"{str(layout).replace(' ', '-')}.npz"


def write_points(folder: Path, points: Iterable[Point]) -> None:
    """Replace the points of a study."""
    write_text(folder / "scaling.csv", csv_text([{**asdict(p.layout), **asdict(p.result)} for p in points]))


def read_points(folder: Path) -> list[Point]:
    """All points of a study; a last line that was cut short is left out. Raises UserError for another file."""
    path = folder / "scaling.csv"
    if not path.is_file():
        return []
    types: dict[str, Any] = {"int": int, "float": float, "str": str}

    def typed(kind: Any, row: dict[str, str]) -> Any:
        return kind(**{f.name: types[str(f.type)](row[f.name]) for f in fields(kind)})

    try:
        rows = csv.DictReader(io.StringIO(path.read_text().rpartition("\n")[0]))
        return [Point(typed(Layout, row), typed(Measurement, row)) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold the points of a study; delete it to measure them again.") from error


def format_points(points: Iterable[Point]) -> str:
    """Markdown table of the main figures."""
    rows = [
        {
            "ranks": p.layout.ranks,
            "K": p.layout.experts,
            "expert-parallel size": p.layout.expert_parallel,
            "batch": p.layout.batch,
            "dispatcher": p.layout.dispatcher,
            "ZeRO": p.layout.zero,
            "Mbit/s": p.layout.megabits or "",
            "tokens/s": f"{p.result.tokens_per_second:,.0f}",
            "step (ms)": f"{1e3 * p.result.step:.1f}",
            "bytes/token, sent": f"{p.result.sent_bytes:,.0f}",
            "minimum": f"{p.result.minimum_bytes:,.0f}",
            "Tutel, padded": f"{p.result.tutel_bytes:,.0f}",
            "memory/rank (MB)": f"{p.result.memory / 1e6:,.0f}",
            "busiest expert / mean": f"{p.result.load_imbalance:.2f}",
            "C_B": f"{p.result.blocks_per_token:.1f}",
            "k": f"{p.result.experts_per_token:.2f}",
            "dropped": p.result.dropped,
        }
        for p in points
    ]
    return markdown(rows, left=("dispatcher",))
