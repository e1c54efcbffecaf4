"""The report of one run, or of two side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import write_text
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.page import Page, Section, write_page
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

NUMBERS = "numbers.json"


def report_runs(runs: Sequence[LoadedRun], output: Path, options: StudyOptions, command: str) -> Path:
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
        first, *others = zip(runs, find_masks(runs, options), strict=True)
        alone = replace(options, methods=False)  # one set of methods will do
        found = [study(first[0], options, first[1]), *(study(run, alone, masks) for run, masks in others)]
        heartbeat.doing("writing the page and its figures")
        page = build_page(found, command)
        record: dict[str, Any] = {"runs": [one.record() for one in found]}
        if others:
            record["comparison"] = comparison_record(*found)
        write_text(output / NUMBERS, json.dumps(plain(record), indent=1))
        return write_page(page, output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error}); choose another folder.") from error


def build_page(found: Sequence[RunStudy], command: str) -> Page:
    """The page: numbers and curves first, then what the layers do, then cost, options and how to repeat."""
    runs, several = [one.run for one in found], len(found) > 1
    sections = comparison_sections(*found) if several else []
    sections += training_section(runs)
    configurations = []
    for number, one in enumerate(found, start=1):
        prefix, name = (f"run-{number}-", one.run.name) if several else ("", "")
        own = [*load_section(one, prefix), *usage_sections(one, prefix)]
        own += [*element_sections(one.run, one.elements, prefix), *observation_sections(one, prefix)]
        sections += [Section(f"{name}: {s.title[0].lower()}{s.title[1:]}", s.blocks) for s in own] if several else own
        heading = f"Configuration of {name}" if several else "Configuration"
        configurations.append(option_section(one.run, prefix, heading))
    sections += [cost_section(found), *configurations, environment_section(runs, command)]
    titles = [f"{run.method} on {run.config.data.task}" for run in runs]
    if not several:
        return Page(f"{titles[0]}: {runs[0].name}", _describe(runs[0]), key_numbers(found[0]), sections)
    subtitle = "; ".join(f"{run.name}: {title}, {_describe(run)}" for run, title in zip(runs, titles, strict=True))
    return Page(" and ".join(run.name for run in runs) + ", side by side", subtitle, [], sections)


def _describe(run: LoadedRun) -> str:
    layers = f"MoE in layers {', '.join(map(str, run.config.model.layers))}" if run.layers else "dense"
    return f"{layers}, seed {run.config.seed}, checkpoint of step {run.step}"
