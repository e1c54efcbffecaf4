"""DomainBed: layouts, protocol, transforms, batches that are read ahead, and a whole run on tiny data."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.tiny_images import make_benchmark, write_image
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.domainbed import domainbed_task, split
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.data.images import MEAN, STD, EvaluationTransform, TrainingTransform
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.studies.run_report import load_run
from unifmoe_dist.train.batches import TrainBatches, evaluation_batches
from unifmoe_dist.train.build import build_optimizer, install_layers
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.export import export, load_exported
from unifmoe_dist.train.read_ahead import read_ahead
from unifmoe_dist.train.trainer import choose_folder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")


@pytest.fixture(scope="module")
def pacs(tmp_path_factory) -> Path:
    """A tiny PACS; each environment has 7 classes of 6 images."""
    return make_benchmark(tmp_path_factory.mktemp("pacs"), "pacs", per_class=6, size=40)


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


# -- bad layouts --------------------------------------------------------------------------------------------------


def remove(*parts: str):
    return lambda dataset: shutil.rmtree(dataset.joinpath(*parts))


def empty(dataset: Path) -> None:
    for file in (dataset / "cartoon/dog").iterdir():
        file.unlink()


BAD = {
    "environment": (remove("sketch"), ["no folder sketch", "environment Sketch", "PACS/sketch/CLASS/IMAGE"]),
    "class": (remove("photo", "guitar"), ["photo does not hold the classes of PACS", "lacks guitar"]),
    "extra class": (lambda d: (d / "photo/cat").mkdir(), ["photo", "has cat besides", "labels would not agree"]),
    "empty class": (empty, ["cartoon/dog holds no images"]),
    "not an image": (lambda d: (d / "photo/dog/a.txt").touch(), ["photo/dog/a.txt is not an image"]),
    "no environments": (lambda d: [shutil.rmtree(f) for f in d.iterdir()], ["is not PACS's folder", "prepare pacs"]),
    "nothing": (shutil.rmtree, ["is not PACS's folder", "art_painting, cartoon, photo, sketch"]),
    "file for a folder": (lambda d: (shutil.rmtree(d / "photo"), (d / "photo").touch()), ["no folder photo"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_layout_is_one_sentence(kind, tmp_path):
    dataset = make_benchmark(tmp_path, "pacs", per_class=1, size=4)
    damage, words = BAD[kind]
    damage(dataset)
    with pytest.raises(UserError) as caught:
        domainbed_task("pacs", "art", dataset)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_classes_that_differ_between_environments(tmp_path):
    dataset = make_benchmark(tmp_path, "officehome", per_class=1, size=4)
    os.rename(dataset / "Product/class_007", dataset / "Product/Class_7")
    message = "Product does not hold the classes of .*Art: it lacks class_007 and has Class_7 besides"
    with pytest.raises(UserError, match=message):
        list_images(BENCHMARKS["officehome"], dataset)
    shutil.rmtree(dataset / "Art/class_000")
    with pytest.raises(UserError, match="Art has 64 class folders, but OfficeHome has 65"):
        list_images(BENCHMARKS["officehome"], dataset)


def test_folders_that_cannot_be_read(pacs, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="art_painting cannot be read .Permission denied.; check its rights"):
        list_images(BENCHMARKS["pacs"], pacs)


def test_an_environment_needs_images_for_both_splits(tmp_path):
    dataset = make_benchmark(tmp_path, "vlcs", per_class=1, size=4)
    task = domainbed_task("vlcs", 0, dataset)
    assert [len(data) for data in (*task.train, *task.validation)] == [4, 4, 4, 1, 1, 1]  # five images: the least
    for environment in BENCHMARKS["vlcs"].environments:
        shutil.rmtree(dataset / environment.folder / "dog")
    four = replace(BENCHMARKS["vlcs"], classes=("bird", "car", "chair", "person"))
    with mock.patch.dict(BENCHMARKS, vlcs=four):
        with pytest.raises(UserError, match="Caltech101 holds 4 images, too few for an out-split of 20 %"):
            domainbed_task("vlcs", 0, dataset)


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_a_file_that_is_no_image_is_named(content, tmp_path):
    dataset = make_benchmark(tmp_path, "vlcs", per_class=2, size=24)
    task = domainbed_task("vlcs", 0, dataset)
    victim = task.train[0].folder.file(int(task.train[0].rows[0]))
    victim.write_bytes(content) if content is not None else victim.unlink()
    with pytest.raises(UserError, match=f"{victim.name} cannot be read as an image .*data.py verify"):
        task.train[0][0]


def test_truncated_images_are_read_as_far_as_they_go(tmp_path):
    write_image(tmp_path / "a.jpg", 0, 0, 0, size=64)
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    from unifmoe_dist.data.images import decode

    image, complete = decode(tmp_path / "a.jpg")
    assert image.size == (64, 64) and not complete


# -- transforms ---------------------------------------------------------------------------------------------------


def test_evaluation_resizes_directly_and_normalises():
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 30:] = (255, 128, 0)  # left black, right orange: a centre crop would lose the sides
    out = EvaluationTransform(32)(Image.fromarray(pixels))
    assert out.shape == (3, 32, 32) and out.dtype == torch.float32
    normalise = [[(v / 255 - m) / s for v, m, s in zip(c, MEAN, STD, strict=True)] for c in ((0, 0, 0), (255, 128, 0))]
    torch.testing.assert_close(out[:, 5, 5], torch.tensor(normalise[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[:, 5, 26], torch.tensor(normalise[1]), atol=1e-5, rtol=0)


def test_training_augments_from_its_generator_alone():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8))
    augment, before = TrainingTransform(32), torch.get_rng_state()
    views = [augment((image, 5), torch.Generator().manual_seed(seed)) for seed in range(300)]
    again = [augment((image, 5), torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(label == 5 and view.shape == (3, 32, 32) for view, label in views)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(views, again, strict=False))
    assert len({view.numpy().tobytes() for view, _ in views}) == 300
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    colours = torch.stack([view for view, _ in views]) * deviation + mean
    grey = ((colours - colours.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-3).float().mean()
    assert 0.04 < grey < 0.17  # one in ten


def test_half_of_the_views_are_flipped():
    ramp = np.repeat(np.linspace(60, 200, 100)[None, :, None], 100, 0).repeat(3, 2).astype(np.uint8)
    falling = 0
    for seed in range(200):
        view, _ = TrainingTransform(32)((Image.fromarray(ramp), 0), torch.Generator().manual_seed(seed))
        row = view[0, 16]
        falling += bool(row[-1] < row[0])
    assert 75 < falling < 125


# -- batches ------------------------------------------------------------------------------------------------------


def tensors_of(batches) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(inputs["x"].clone(), labels.clone()) for inputs, labels in batches]


def read_in_both_ways(rank, world, root):
    """Batches without and with workers: in order, again, after a jump, and for evaluation."""
    task = domainbed_task("pacs", "photo", root, image_size=16)
    before = torch.get_rng_state()
    result = {}
    for workers in (0, 2):
        batches = TrainBatches(task, 4, 7, 0, 1, 2, workers)
        read = [tensors_of(batches.step(step)) for step in (0, 1, 2)]
        read += [tensors_of(batches.step(1)), tensors_of(batches.step(3)), tensors_of(batches.step(9))]
        scored = evaluation_batches(task.test[0], task, 8, 1, 2, workers)
        result[workers] = read, [(*tensors_of([batch]), weight) for batch, weight in scored]
    return result, torch.equal(before, torch.get_rng_state())


def assert_equal(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
        return
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


def test_draws_with_replacement(pacs):
    """As DomainBed's sampler: every item of a batch is any item of the environment, whatever came before."""
    task = domainbed_task("pacs", "photo", pacs, image_size=16)
    plain, drawn = (TrainBatches(task, 8, 7, 0, 1, 1, replacement=r) for r in (False, True))
    size = len(task.train[1])
    epochs = [i for step in range(size) for i in plain.indices(1, step)]
    assert all(sorted(epochs[e * size : (e + 1) * size]) == list(range(size)) for e in range(8))
    draws = [drawn.indices(1, step) for step in range(600)]
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=size).double()
    mean = counts.sum() / size
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    assert abs(chi_square - (size - 1)) < 6 * (2 * (size - 1)) ** 0.5
    repeats = sum(len(set(batch)) < 8 for batch in draws) / 600
    expected = 1 - math.prod((size - i) / size for i in range(8))
    assert abs(repeats - expected) < 6 * (expected * (1 - expected) / 600) ** 0.5
    assert draws[3] == TrainBatches(task, 8, 7, 0, 1, 1, replacement=True).indices(1, 3) != drawn.indices(0, 3)
    halves = [tensors_of(TrainBatches(task, 8, 7, half, 2, 1, replacement=True).step(3)) for half in (0, 1)]
    assert_equal([half[0] for half in halves], tensors_of(TrainBatches(task, 8, 7, 0, 1, 2, replacement=True).step(3)))


@pytest.mark.parametrize("moe", ["unif", "gmoe", "none"])
def test_its_adam_decays_everything(moe):
    """After some steps the weights are those of `torch.optim.Adam(model.parameters(), lr, weight_decay=...)`."""
    words = [
        "--config",
        str(ROOT / "configs/domainbed/terraincognita.yaml"),
        "--data.held_out",
        "L38",
        "--model.moe",
        moe,
        "--model.layers",
        "[1]",
        "--optim.weight_decay",
        "0.1",
    ]
    config = parse_train_config(words)
    models, ranks = [], Ranks(0, 1, torch.device("cpu"))
    for _ in range(2):
        torch.manual_seed(0)
        models.append(install_layers(config, build_backbone(TINY, 7, 32, "none")).eval())
    ours = build_optimizer(config, models[0], ranks)
    images = torch.randn(2, 3, 32, 32)
    theirs = torch.optim.Adam(models[1].parameters(), lr=config.optim.lr, weight_decay=0.1)
    for _ in range(2):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2])).backward()
            optimizer.step()
    for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other), name
    config.optim.decay = "matrices"
    exempt = [group for group in build_optimizer(config, models[0], ranks).param_groups if not group["weight_decay"]]
    assert len(exempt) == 1 and len(exempt[0]["params"]) > 50


def test_workers_change_no_batch_and_no_random_state(pacs):
    ((result, untouched),) = run_ranks(1, read_in_both_ways, str(pacs))
    assert untouched
    assert_equal(result[0], result[2])
    (first, second, _, second_again, *_), scored = result[2]
    assert_equal(second, second_again)
    assert not torch.equal(first[0][0], second[0][0])
    # A step is the same items whether two ranks share it or one takes it in two micro-batches.
    task = domainbed_task("pacs", "photo", pacs, image_size=16)
    assert_equal([tensors_of(TrainBatches(task, 4, 7, half, 2, 1).step(1))[0] for half in (0, 1)], second)
    assert sum(int(weight.sum()) for _, weight in scored) == 17 and len(scored) == 3


def fail_in_workers(rank, world, root):
    messages = []
    task = domainbed_task("pacs", "photo", root, image_size=16)
    victim = task.test[0].folder.file(int(task.test[0].rows[3]))
    content = victim.read_bytes()
    victim.write_bytes(b"broken")
    for batches in (evaluation_batches(task.test[0], task, 4, 0, 1, 2), read_ahead(die, [1], 1)):
        try:
            list(batches)
        except UserError as error:
            messages.append(str(error))
    victim.write_bytes(content)
    stream = read_ahead(own_process, iter(int, 1), 1)
    pids = {next(stream)}
    for name in ("TERM", "INT", "USR1"):  # from elsewhere, as when a whole job is told to stop
        subprocess.run(["bash", "-c", f"kill -{name} {pids.copy().pop()}"], check=True)
        pids.add(next(stream))
    return messages, victim.name, len(pids)


def die(key):
    os.kill(os.getpid(), signal.SIGKILL)


def own_process(key):
    return os.getpid()


def test_errors_in_workers_are_one_sentence_and_they_outlive_stop_signals(pacs):
    """The last stream stays open: a rank that leaves takes its workers along."""
    (((broken, lost), name, processes),) = run_ranks(1, fail_in_workers, str(pacs))
    assert processes == 1
    assert f"{name} cannot be read as an image" in broken and "\n" not in broken and "worker" not in broken
    assert "a process that reads data ahead was lost" in lost and "lower data.workers" in lost and "\n" not in lost


# -- the backbone -------------------------------------------------------------------------------------------------

TINY = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Weights for 224 pixels and 1,000 classes in the layout of DeiT's official checkpoints."""
    torch.manual_seed(1)
    weights = build_backbone(TINY, 1000, 224, "none").state_dict()
    path = tmp_path_factory.mktemp("weights") / "deit.pth"
    torch.save({"model": weights}, path)
    return path, weights


def test_local_weights_are_loaded_and_fitted(published, tmp_path):
    path, weights = published
    from safetensors.torch import save_file

    (tmp_path / "folder").mkdir()
    save_file(weights, tmp_path / "folder" / "model.safetensors")
    for source in (path, path.parent, tmp_path / "folder"):
        torch.manual_seed(2)
        model = build_backbone(TINY, 7, 32, str(source), dropout=0.1, drop_path=0.1)
        state = model.state_dict()
        assert state["head.weight"].shape == (7, 192) and state["pos_embed"].shape == (1, 5, 192)
        for name, weight in weights.items():
            assert name.startswith("head.") or name == "pos_embed" or torch.equal(state[name], weight), name
        torch.testing.assert_close(state["pos_embed"][:, 0], weights["pos_embed"][:, 0])
    same = build_backbone(TINY, 1000, 224, str(path)).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())  # the classifier too


def test_a_distilled_backbone_has_two_classifiers(tmp_path):
    """Both were trained on the file's classes: where those are others, both are new."""
    distilled, path = "deit_tiny_distilled_patch16_224", tmp_path / "deit.pth"
    weights = build_backbone(distilled, 1000, 32, "none").state_dict()
    torch.save({"model": weights}, path)
    state = build_backbone(distilled, 7, 32, str(path)).state_dict()
    assert state["head.weight"].shape == state["head_dist.weight"].shape == (7, 192)
    assert all(torch.equal(state[name], weights[name]) for name in weights if not name.startswith("head"))
    same = build_backbone(distilled, 1000, 32, str(path)).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())


def test_dropout_is_on_outputs_and_depth_is_stochastic():
    model = build_backbone(TINY, 7, 32, "none", dropout=0.2, drop_path=0.1)
    assert [(b.mlp.drop1.p, b.mlp.drop2.p, b.attn.proj_drop.p) for b in model.blocks] == [(0.0, 0.2, 0.2)] * 12
    assert model.pos_drop.p == 0.2 and model.blocks[11].drop_path2.drop_prob == pytest.approx(0.1)
    image = torch.randn(1, 3, 32, 32)
    assert not torch.equal(model.train()(image), model(image)) and torch.equal(model.eval()(image), model(image))


def test_weights_that_cannot_be_had(published, tmp_path):
    def message(name, pretrained):
        with pytest.raises(UserError) as caught:
            build_backbone(name, 7, 32, pretrained)
        return str(caught.value)

    assert "--model.pretrained FILE" in message(TINY, None)  # tests are offline
    assert "nowhere.pth does not exist" in message(TINY, "nowhere.pth")
    assert "holds 0 weight files" in message(TINY, str(tmp_path))
    (tmp_path / "a.pth").write_bytes(b"nonsense")
    assert "does not fit the backbone" in message(TINY, str(tmp_path / "a.pth"))
    torch.save({"model": {"layer.weight": torch.zeros(2)}}, tmp_path / "b.pth")
    assert "lacks 150 weights" in message(TINY, str(tmp_path / "b.pth"))
    assert "does not fit the backbone" in message("vit_small_patch16_224", str(published[0]))
    assert "did you mean deit_small_patch16_224" in message("deit_smal_patch16_224", "none")
    assert "is no ViT" in message("resnet18", "none")


# -- configurations -----------------------------------------------------------------------------------------------

PAPER = {
    "pacs": (3e-5, 1e-6, 5001),
    "vlcs": (3e-5, 1e-6, 5001),
    "officehome": (1e-5, 1e-6, 5001),
    "terraincognita": (5e-5, 1e-4, 5001),
    "domainnet": (5e-5, 0.0, 15001),
}


@pytest.mark.parametrize("name", PAPER)
def test_configurations_hold_the_papers_settings(name):
    held_out = BENCHMARKS[name].environments[-1].name
    words = ["--config", str(ROOT / f"configs/domainbed/{name}.yaml"), "--data.held_out", held_out]
    config = parse_train_config(words)
    config.validate(4)
    model, data, optim = config.model, config.data, config.optim
    assert (data.task, data.held_out, data.batch_size, data.eval_batch_size) == (name, held_out, 32, 64)
    assert (optim.name, optim.lr, optim.weight_decay, config.steps) == ("adam", *PAPER[name])
    assert (optim.schedule, optim.warmup_steps, optim.grad_clip, optim.lambda_div) == ("constant", 0, 0.0, 0.01)
    assert (model.backbone, model.layers) == ("deit_small_patch16_224", [8, 10])
    assert (model.moe, model.num_experts, model.num_blocks) == ("unif", 6, 8)
    assert (model.hidden_dropout, model.dropout, model.drop_path) == (0.1, 0.0, 0.1)
    assert (data.image_size, data.split_seed, data.sampling, optim.decay) == (224, None, "replacement", "all")
    assert config.eval_every == (500 if name == "domainnet" else 300)


@pytest.mark.parametrize(
    "name,value",
    [
        ("data.workers", "-1"),
        ("data.image_size", "0"),
        ("model.dropout", "1"),
        ("model.drop_path", "-0.1"),
        ("model.hidden_dropout", "1"),
        ("model.hidden_dropout", "-0.1"),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        parse_train_config([f"--{name}", value]).validate(1)


# -- a whole run --------------------------------------------------------------------------------------------------

RUN = [
    "--config",
    str(ROOT / "configs/domainbed/pacs.yaml"),
    "--data.held_out",
    "sketch",
    "--data.image_size",
    "32",
    "--model.backbone",
    TINY,
    "--model.pretrained",
    "none",
    "--model.layers",
    "[9,11]",
    "--data.batch_size",
    "4",
    "--optim.lr",
    "1e-3",
    "--log_every",
    "1",
    "--eval_every",
    "4",
    "--progress",
    "false",
]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(pacs, tmp_path_factory) -> Path:
    """A run of 9 steps on one rank, without workers."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*RUN, "--data.root", str(pacs), "--data.workers", "0", "--output", str(folder / "run"), "--steps", "9"]
    job = run_job(folder, 1, words, timeout=120)
    assert job.statuses == [0], job.output
    assert "UniF-MoE on pacs (Sketch held out): test accuracy " in job.output  # its end is for people
    assert f"python launch/analyze.py {folder / 'run'}" in job.output and '"score"' not in job.output
    return folder / "run"


def test_a_run_selects_by_out_splits_and_reports_the_held_out_in_split(whole, tmp_path):
    summary = json.loads((whole / "summary.json").read_text())
    checks = {line["step"]: line for line in metrics(whole) if line["kind"] == "validation"}
    assert list(checks) == [4, 8, 9]  # every 4 steps, and the last
    for line in checks.values():
        assert len(line["per_environment"]) == 3
        assert line["accuracy"] == pytest.approx(sum(line["per_environment"]) / 3)
    best = max(checks, key=lambda step: checks[step]["accuracy"])  # the first of equals
    assert (summary["best_step"], summary["validation_accuracy"]) == (best, checks[best]["accuracy"])
    assert (summary["task"], summary["held_out"], summary["steps"]) == ("pacs", "Sketch", 9)
    # By hand: the best checkpoint on the 34 images of Sketch's in-split.
    config = load_train_config(str(whole / "config.yaml"))
    model = load_exported(export(whole, tmp_path / "exported"))
    (test,) = domainbed_task("pacs", 3, config.data.root, 0, image_size=32).test
    with torch.no_grad():
        hits = [int(model(test[i][0][None]).argmax() == test[i][1]) for i in range(len(test))]
    assert len(hits) == 34 and summary["test_accuracy"] == pytest.approx(sum(hits) / 34)


def test_a_run_is_scored_with_data_elsewhere(whole, pacs, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    text = (moved / "config.yaml").read_text().replace(str(pacs), "/nowhere")
    (moved / "config.yaml").write_text(text.replace("pretrained: none", "pretrained: /no.pth"))
    assert "/nowhere" in (moved / "config.yaml").read_text()
    blind = run_job(tmp_path, 1, [str(moved)], script="evaluate", timeout=120)
    assert blind.statuses == [2] and "error: data.root" in blind.output and "/nowhere" in blind.output
    job = run_job(tmp_path, 1, [str(moved), "--data-root", str(pacs)], script="evaluate", timeout=120)
    assert job.statuses == [0], job.output
    found = json.loads(job.output[job.output.index("{") : job.output.rindex("}") + 1])
    assert found["accuracy"] == json.loads((whole / "summary.json").read_text())["test_accuracy"]
    loaded = load_run(moved, data_root=pacs)  # what analysis reads
    assert len(loaded.task.test[0]) == 34


def test_a_run_with_workers_that_is_resumed_equals_the_whole_run(whole, pacs, tmp_path):
    """To the last bit, dropout and augmentation included; the second part reads without workers."""
    words = [*RUN, "--data.root", str(pacs), "--output", str(tmp_path / "run")]
    for more in (["--steps", "4", "--data.workers", "2"], ["--steps", "9", "--data.workers", "0", "--resume"]):
        job = run_job(tmp_path, 1, [*words, *more], timeout=200)
        assert job.statuses == [0], job.output
    assert metrics(tmp_path / "run") == metrics(whole)
    kept = ("test_accuracy", "validation_accuracy", "best_step", "mean_block_compute")
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (tmp_path / "run", whole))
    assert [ours[name] for name in kept] == [theirs[name] for name in kept]


def test_resuming_knows_an_environment_by_any_name(whole):
    words = ["--resume", "--output", str(whole)]
    for same in ("Sketch", "3"):
        assert choose_folder(parse_train_config([*words, "--data.held_out", same])) == whole
    for name, value in (("data.held_out", "photo"), ("data.task", "vlcs")):
        with pytest.raises(UserError, match=f"was trained with {name}"):
            choose_folder(parse_train_config([*words, f"--{name}", value]))


def test_a_run_without_data_says_how_to_get_it(tmp_path):
    words = [*RUN, "--data.root", str(tmp_path / "none"), "--output", str(tmp_path / "run")]
    job = run_job(tmp_path, 1, words)
    assert job.statuses == [2] and "error: data.root" in job.output and "launch/data.py prepare pacs" in job.output
    assert "Traceback" not in job.output
