"""A report's page: what is escaped, what its axes show."""

from __future__ import annotations

import csv

import torch
from jinja2 import ChoiceLoader, DictLoader, PackageLoader

from tests.support.pages import Reader
from unifmoe_dist.studies import templating
from unifmoe_dist.studies.page import Number, prose, write_page
from unifmoe_dist.studies.run_report.loaded_run import layer_names
from unifmoe_dist.studies.run_report.run_page import demand_threshold
from unifmoe_dist.studies.training_plots import compute_figure, curves_figure, usage_figure

EVERY_MACRO = """
{% from "blocks.html" import section, paragraph, code, show %}
{% do blocks.head.update(title=evil, subtitle=evil, key_numbers=[[evil, number(1), evil]]) %}
{% call section(evil) %}
{% call paragraph() %}{{ evil }}{% endcall %}
{{ code(evil, evil) }}
{% set t = table("t") %}
{% for row in rows %}{% do t.row(row) %}{% endfor %}
{% call show(t) %}{{ evil }}{% endcall %}
{% endcall %}
"""


def test_a_page_escapes_all_that_it_is_given(tmp_path, monkeypatch):
    own = DictLoader({"every_macro.html": EVERY_MACRO})
    monkeypatch.setattr(templating, "PackageLoader", lambda package: ChoiceLoader([own, PackageLoader(package)]))
    evil = "<script>alert('&')</script>"
    rows = [{evil: evil, "value": Number(0.1, ".0%", evil)}, {evil: "none", "value": Number(float("nan"))}]
    path = write_page(tmp_path / "new", "every_macro.html", evil=evil, rows=rows)
    assert path == tmp_path / "new/report.html"
    read = Reader(path.read_text())
    assert not read.named("script") and read.text.count(evil) == 14
    assert read.tables["t"][1][1].startswith("0.1") and read.tables["t"][2] == ["none", "–"]
    with (tmp_path / "new/tables/t.csv").open() as handle:
        assert list(csv.reader(handle)) == [[evil, "value"], [evil, "0.1"], ["none", ""]]


def test_symbols_and_options_are_set_as_such():
    assert prose("C_B < 8, N_A & k_ε; see --router-steps, not a--b or x_C_B") == (
        "C<sub>B</sub> &lt; 8, N<sub>A</sub> &amp; k<sub>ε</sub>; see <code>--router-steps</code>, not a--b or x_C_B"
    )


def test_layers_go_by_their_number():
    modules = ["blocks.3.mlp", "blocks.10.mlp.0"]
    assert layer_names(modules) == {"blocks.3.mlp": "layer 3", "blocks.10.mlp.0": "layer 10"}
    assert layer_names(["bert.encoder.layer.5.intermediate"]) == {"bert.encoder.layer.5.intermediate": "layer 5"}
    for unclear in (["a.1.mlp", "b.1.mlp"], ["head", "mlp"]):
        assert layer_names(unclear) == dict(zip(unclear, unclear, strict=True))


def test_a_fixed_number_of_experts_has_no_curve_of_computation():
    def records(*values: float) -> list[dict]:
        layer = {"expert_count": 2.0, "shared_demand": 0.0, "expert_load": [1.0, 1.0], "block_load": [0.0, 0.0]}
        return [
            {"kind": "train", "step": step, "layers": {"mlp": {**layer, "block_compute": value}}}
            for step, value in enumerate(values)
        ]

    assert compute_figure({"": records(16, 16 + 1e-9)}) is None
    figure = compute_figure({"fixed": records(16, 16), "varied": records(16, 12)})
    assert figure is not None and [len(axis.lines) for axis in figure.axes] == [1, 1]  # C_B and k; no alpha
    assert len(usage_figure(records(16)[0]).axes) == 1  # nothing is shared: loads of experts alone
    shared = records(16)[0]
    shared["layers"]["mlp"]["block_load"] = [0.5, 0.0]
    assert len(usage_figure(shared).axes) == 2


def test_the_task_loss_is_not_flattened_by_an_auxiliary_loss():
    """It falls from 2.1 to 0.3 while the Gram loss falls from 1 to 1e-5: each has its axis and fills its height."""
    train = [
        {"kind": "train", "step": step, "task_loss": 2.3 - 0.2 * step, "div_loss": 10.0 ** (-step / 2), "accuracy": 0}
        for step in range(1, 11)
    ]
    (loss, auxiliary, score) = curves_figure({"": train}).axes
    assert [len(axis.get_lines()) for axis in (loss, auxiliary)] == [1, 1] and score.get_ylabel() == "accuracy (%)"
    for axis, key in ((loss, "task_loss"), (auxiliary, "div_loss")):
        values = [record[key] for record in train]
        low, high = (axis.transData.transform((1, value))[1] for value in (min(values), max(values)))
        bottom, top = (axis.transAxes.transform((0, part))[1] for part in (0, 1))
        assert (high - low) / (top - bottom) > 0.8, key
    assert len(curves_figure({"": [{**record, "div_loss": 0.0} for record in train]}).axes) == 2


def test_high_demand_is_the_top_tenth():
    compute = torch.tensor([8] * 85 + [12] * 6 + [20] * 9)
    assert demand_threshold(compute) == 20
    assert demand_threshold(torch.tensor([8] * 91 + [12] * 6 + [20] * 3)) == 12
    assert demand_threshold(torch.tensor([8, 9])) == 9  # half of them, but the highest there is
    assert demand_threshold(torch.tensor([8, 8])) == 9  # nothing stands out
