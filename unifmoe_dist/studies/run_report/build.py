"""The report of one run, or of two side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.html import Page, Section, write_page
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.run_report.comparison import comparison_record, comparison_sections
from unifmoe_dist.studies.run_report.loading import LoadedRun
from unifmoe_dist.studies.run_report.observation_sections import observation_sections
from unifmoe_dist.studies.run_report.run_sections import (
    cost_section,
    environment_section,
    key_numbers,
    load_section,
    option_section,
    training_section,
)
from unifmoe_dist.studies.run_report.segments import element_sections
from unifmoe_dist.studies.run_report.study import RunStudy, StudyOptions, find_masks, study
from unifmoe_dist.studies.run_report.usage_sections import usage_sections
from unifmoe_dist.train.checkpoint import write_text

NUMBERS = "numbers.json"


def write_report(runs: Sequence[LoadedRun], output: Path, options: StudyOptions, command: str) -> Path:
    """Study one run or two and write the report; returns the page's path.

    Args:
        runs: The run, and perhaps another to compare it with; their names differ.
        output: Folder of the page and of what belongs to it. Files of an older report there are replaced.
        options: How much is computed.
        command: What to type for the same report, for its reader.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)  # before the work, not after
        masks = find_masks(runs, options)
        found = [study(runs[0], options, masks[0])]
        for run, own in zip(runs[1:], masks[1:], strict=True):
            found.append(study(run, replace(options, methods=False), own))  # one set of methods will do
        heartbeat.doing("writing the page and its figures")
        page = build_page(found, command)
        write_text(output / NUMBERS, json.dumps(numbers(found), indent=1))
        return write_page(page, output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error}); choose another folder.") from error


def numbers(found: Sequence[RunStudy]) -> dict[str, Any]:
    """Everything that was computed, as JSON can hold it."""
    record: dict[str, Any] = {"runs": [one.record() for one in found]}
    if len(found) == 2:
        record["comparison"] = comparison_record(found[0], found[1])
    return plain(record)


def build_page(found: Sequence[RunStudy], command: str) -> Page:
    """The page: numbers and curves first, then what the layers do, then cost, options and how to repeat."""
    runs = [one.run for one in found]
    first = found[0]
    sections: list[Section] = []
    if len(found) == 2:
        sections += comparison_sections(found[0], found[1])
    sections += training_section(runs)
    for number, one in enumerate(found, start=1):
        prefix = f"run-{number}-" if len(found) > 1 else ""
        own = [*load_section(one, prefix), *usage_sections(one, prefix)]
        own += [*element_sections(one.run, one.elements, prefix), *observation_sections(one, prefix)]
        sections += [_named(section, one.run.name) for section in own] if len(found) > 1 else own
    sections.append(cost_section([one.costs for one in found], with_published=not any(run.is_text for run in runs)))
    for number, run in enumerate(runs, start=1):
        several = len(runs) > 1
        heading = f"Configuration of {run.name}" if several else "Configuration"
        sections.append(option_section(run, f"run-{number}-" if several else "", heading))
    sections.append(environment_section(runs, command))
    names = [run.name for run in runs]
    return Page(
        title=f"{_title(first.run)}: {first.run.name}" if len(runs) == 1 else " and ".join(names) + ", side by side",
        subtitle=_describe(first.run)
        if len(runs) == 1
        else "; ".join(f"{run.name}: {_title(run)}, {_describe(run)}" for run in runs),
        key_numbers=key_numbers(first) if len(found) == 1 else [],
        sections=sections,
    )


def _named(section: Section, name: str) -> Section:
    return Section(f"{name}: {section.title[0].lower()}{section.title[1:]}", section.blocks)


def _title(run: LoadedRun) -> str:
    return f"{run.method} on {run.config.data.task}"


def _describe(run: LoadedRun) -> str:
    layers = f"MoE in layers {', '.join(map(str, run.config.model.layers))}" if run.layers else "dense"
    return f"{layers}, seed {run.config.seed}, checkpoint of step {run.step}"
