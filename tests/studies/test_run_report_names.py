"""What runs are called in a report, and the folder that a report has of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import analyze


@pytest.mark.parametrize(
    "folders,labels",
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["s/emoji/noto/unif/seed0", "s/emoji/fluent/unif/seed0"], ["noto", "fluent"]),
        (["s/noto/unif/seed0", "s/noto/top2/seed0", "s/fluent/top2/seed0"], ["noto/unif", "noto/top2", "fluent/top2"]),
    ],
)
def test_runs_of_a_sweep_go_by_what_tells_them_apart(folders, labels):
    assert analyze.run_labels(list(map(Path, folders))) == labels


@pytest.mark.parametrize(
    "words,name",
    [
        ("", "analysis"),
        ("--tokens 9 --delta 0.9", "analysis"),
        ("--masks masks", "analysis-masks"),
        ("--masks x/parts --cost", "analysis-masks-parts-cost"),
        ("--methods", "analysis-methods"),
        ("--checkpoint step-000007", "analysis-step-000007"),
        ("--compare runs/other", "analysis-with-other"),
        ("--compare runs/b/dense/seed0 --cost", "analysis-cost-with-b-dense-seed0"),
        ("--compare runs/a/dense/seed0", "analysis-with-dense-seed0"),
        ("--compare runs/a/unif", "analysis-with-unif"),
        ("runs/other runs/third", "analysis-with-2-others"),
        ("runs/other --class Alarm_Clock", "analysis-alarm-clock-with-other"),
    ],
)
def test_a_kind_of_report_has_a_folder_of_its_own(words, name):
    run = "runs/mine" if "other" in words else "runs/a/unif/seed0"
    assert analyze.folder_name(analyze._parser().parse_args([run, *words.split()])) == name
