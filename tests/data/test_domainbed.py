"""DomainBed: layouts, protocol, transforms, batches that are read ahead, and a whole run on tiny data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from tests.support.tasks import domainbed_task
from tests.support.tiny_images import make_benchmark
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.domainbed import split
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.errors import UserError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")


def files_of(dataset) -> set[Path]:
    return {dataset.folder.file(row) for row in dataset.rows}


# -- environments and splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,held_out,index",
    [
        ("pacs", "Art", 0),
        ("pacs", "art_painting", 0),
        ("pacs", "SKETCH", 3),
        ("pacs", "2", 2),
        ("pacs", 1, 1),
        ("terraincognita", "L100", 0),
        ("terraincognita", "l38", 1),
        ("terraincognita", "location_46", 3),
        ("officehome", "Real World", 3),
        ("officehome", "real_world", 3),
        ("officehome", "realworld", 3),
        ("vlcs", "caltech101", 0),
        ("domainnet", "quickdraw", 3),
        ("domainnet", "0", 0),
    ],
)
def test_environments_have_names_folders_and_indices(name, held_out, index):
    assert BENCHMARKS[name].environment_index(held_out) == index


@pytest.mark.parametrize("bad", ["Arts", "", "4", -1, 4, True, "rot75"])
def test_an_unknown_environment_lists_the_choices(bad):
    with pytest.raises(
        UserError, match="give --data.held_out one of Art, Cartoon, Photo, Sketch, or an index from 0 to 3"
    ) as caught:
        BENCHMARKS["pacs"].environment_index(bad)
    assert repr(bad) in str(caught.value)


def test_published_counts_add_up():
    totals = {name: benchmark.images for name, benchmark in BENCHMARKS.items()}
    assert totals == {"pacs": 9991, "vlcs": 10729, "officehome": 15588, "terraincognita": 24788, "domainnet": 586575}
    for benchmark in BENCHMARKS.values():  # DomainBed's order is that of sorted folders; splits depend on it
        folders = [environment.folder for environment in benchmark.environments]
        assert folders == sorted(folders)
        assert benchmark.classes is None or list(benchmark.classes) == sorted(benchmark.classes)
        assert benchmark.classes is None or len(benchmark.classes) == benchmark.num_classes


def test_splits_are_domainbeds():
    """By hand: md5("(0, 0)") mod 2^31 = 894182419 seeds a legacy shuffle; the first fifth is the out-split."""
    assert [part.tolist() for part in split(10, 0, 0)] == [[8, 1, 4, 5, 0, 9, 6, 7], [2, 3]]
    assert [part.tolist() for part in split(11, 0, 1)] == [[6, 5, 8, 9, 7, 1, 2, 10, 4], [0, 3]]
    assert [part.tolist() for part in split(11, 1, 1)] == [[9, 3, 1, 2, 5, 10, 0, 7, 4], [8, 6]]
    expected = np.random.RandomState(1796103049).permutation(25).tolist()
    assert [part.tolist() for part in split(25, 0, 3)] == [expected[5:], expected[:5]]


@pytest.mark.parametrize("held_out", [0, 3])
def test_protocol_of_a_held_out_environment(held_out, pacs):
    task = domainbed_task("pacs", held_out, pacs, split_seed=3)
    every = [domainbed_task("pacs", index, pacs, split_seed=3) for index in range(4)]
    names = ["Art", "Cartoon", "Photo", "Sketch"]
    assert task.environments == tuple(name for name in names if name != names[held_out])
    assert [len(data) for data in (*task.train, *task.validation, *task.test)] == [34] * 3 + [8] * 3 + [34]
    folder = pacs / BENCHMARKS["pacs"].environments[held_out].folder
    seen = set.union(*map(files_of, [*task.train, *task.validation]))
    assert not any(file.is_relative_to(folder) for file in seen)
    for inside, outside in zip(task.train, task.validation, strict=True):
        assert not files_of(inside) & files_of(outside) and len(files_of(inside) | files_of(outside)) == 42
    in_split = every[(held_out + 1) % 4].train[held_out if (held_out + 1) % 4 > held_out else held_out - 1]
    assert files_of(task.test[0]) == files_of(in_split)  # the same in-split that others train on
    assert files_of(task.test[0]) != files_of(domainbed_task("pacs", held_out, pacs, split_seed=4).test[0])


@pytest.mark.parametrize("name", ["vlcs", "officehome", "terraincognita", "domainnet"])
def test_every_layout_is_read_as_domainbed_reads_it(name, tmp_path):
    """Images, labels and their order are those of torchvision's ImageFolder, which DomainBed uses."""
    dataset = make_benchmark(tmp_path, name, per_class=1, size=4)
    (dataset / "list.txt").write_text("ignored, as is what file managers leave behind")
    (dataset / BENCHMARKS[name].environments[0].folder / ".DS_Store").touch()
    for root in (tmp_path, dataset):
        folders = list_images(BENCHMARKS[name], root)
    assert len(folders) == len(BENCHMARKS[name].environments)
    for environment, folder in zip(BENCHMARKS[name].environments, folders, strict=True):
        reference = ImageFolder(str(dataset / environment.folder))
        assert [str(folder.file(i)) for i in range(len(folder))] == [path for path, _ in reference.samples]
        assert folder.labels.tolist() == reference.targets and list(folder.classes) == reference.classes
        assert len(folder) == BENCHMARKS[name].num_classes


def test_listed_duplicates_are_left_out(tmp_path):
    dataset = make_benchmark(tmp_path, "domainnet", per_class=2, size=4)
    listed = ["clipart/class_000/000.jpg", "sketch/class_344/001.png"]
    with pytest.warns(UserWarning, match="without domain_net_duplicates.txt .* duplicates stay in"):
        before = list_images(BENCHMARKS["domainnet"], dataset)
    (dataset / "domain_net_duplicates.txt").write_text("\n".join([*listed, "real/class_000/absent.jpg"]) + "\n")
    with pytest.warns(UserWarning, match="results cannot be compared") as warned:
        after = list_images(BENCHMARKS["domainnet"], dataset)
    assert not any("duplicates stay in" in str(warning.message) for warning in warned)
    first, second = (
        {str(folder.file(i).relative_to(dataset)) for folder in found for i in range(len(folder))}
        for found in (before, after)
    )
    assert first - second == set(listed) and len(second) == 6 * 345 * 2 - 2


def test_complete_data_gives_no_warning(tmp_path, monkeypatch, recwarn):
    dataset = make_benchmark(tmp_path, "vlcs", per_class=1, size=4)
    benchmark = BENCHMARKS["vlcs"]
    monkeypatch.setattr(type(benchmark), "images", 4 * 5)
    list_images(benchmark, dataset)
    assert not recwarn.list
