"""Files from others run no code and write nothing elsewhere: each test feeds in one that would, if it were trusted."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file
from torch import nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.data import archives
from unifmoe_dist.data.download import download
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.data.images import NotAnImage, decode
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import sha256
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.studies.report.entries import collect
from unifmoe_dist.studies.training_plots import curves_figure
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.export import FORMAT, load_consolidated, load_exported
from unifmoe_dist.train.random_state import random_state


class Trap:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def sprung(tmp_path):
    """The folder that only executed code makes; it must not be there when the test ends."""
    folder = tmp_path / "code was executed"
    yield folder
    assert not folder.exists()


def old(folder: Path) -> bytes:
    """A file of torch.save as it was before torch 1.6."""
    buffer = io.BytesIO()
    torch.save({"model": Trap(folder)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def saved(folder: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": Trap(folder)}, buffer)
    return buffer.getvalue()


def test_the_traps_work(tmp_path):
    for number, make in enumerate((old, saved)):
        torch.load(io.BytesIO(make(tmp_path / str(number))), weights_only=False)
        assert (tmp_path / str(number)).is_dir()


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pth", "a.pt", "a.bin", "a.safetensors"])
@pytest.mark.parametrize("make", [old, saved])
def test_weights_of_a_vision_backbone(name, make, tmp_path, sprung):
    (tmp_path / name).write_bytes(make(sprung))
    with pytest.raises(UserError, match=f"{name} does not fit the backbone"):
        build_backbone("test_vit", 3, 32, str(tmp_path / name))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("make", [old, saved])
def test_weights_of_an_encoder(name, make, tmp_path, sprung):
    Encoder(TINY, "none").classifier(2, 0.0).config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(make(sprung))
    for encoder, dropout in ((Encoder("bert-base-cased", str(tmp_path)), 0.0), (Encoder(str(tmp_path)), None)):
        with pytest.raises(UserError):
            encoder.classifier(2, dropout)


def test_a_model_folder_that_brings_its_own_code(tmp_path, sprung):
    (tmp_path / "trap.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\nclass Model: pass\n")
    autos = ("AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer")
    config = {"model_type": "trap", "architectures": ["Model"], "auto_map": dict.fromkeys(autos, "trap.Model")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Model", "auto_map": {"AutoTokenizer": ["trap.Model", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    encoder = Encoder("bert-base-cased", str(tmp_path))
    for load in (lambda: encoder.classifier(2, 0.0), encoder.tokenizer):
        with pytest.raises(UserError):
            load()


@pytest.mark.parametrize("architecture", ["pipeline", "HfArgumentParser", "AutoModel", "no_such_thing", ""])
def test_an_export_names_nothing_but_a_model(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "bert"}))
    with pytest.raises(UserError, match="none of Transformers'"):
        load_exported(tmp_path)
    shape = {"library": "transformers", "config": {"architectures": [architecture], "model_type": "bert"}}
    metadata = {"format": FORMAT, "model": json.dumps(shape)}
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(UserError, match="none of Transformers'"):
        load_consolidated(tmp_path / "a.safetensors")


@pytest.mark.parametrize("architecture", ["hf-hub:someone/model", "local-dir:/tmp", "no_such_vit"])
def test_an_export_fetches_nothing(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "num_classes": 2}))
    with pytest.raises(UserError, match="not in timm's registry"):
        load_exported(tmp_path)


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Saved:
    """A checkpoint of a small model after one step, and what takes it back."""

    def __init__(self, run: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(UniFMoELayer(UniFMoEConfig(4, 8, num_experts=2, num_blocks=2)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.engine = SimpleNamespace(optimizer=self.optimizer)
        self.ranks = Ranks(0, 1, torch.device("cpu"))
        self.run = run
        self.folder = checkpoint.save(
            run / "checkpoints", self.model, self.engine, self.ranks, {"step": 1}, self.schedule
        )

    def replace(self, name: str, content: bytes) -> None:
        """Put other content into a file, with a manifest that agrees."""
        (self.folder / name).write_bytes(content)
        manifest = json.loads((self.folder / "manifest.json").read_text())
        manifest[name] = {"bytes": len(content), "sha256": sha256(self.folder / name)}
        (self.folder / "manifest.json").write_text(json.dumps(manifest))

    def load(self) -> dict:
        folder = checkpoint.latest(self.run)
        return checkpoint.load(folder, self.model, self.engine, self.ranks, self.schedule)


@pytest.fixture
def written(tmp_path) -> Saved:
    return Saved(tmp_path / "run")


def test_a_checkpoint_as_it_was_written(written):
    assert written.load()["step"] == 1


@pytest.mark.parametrize("name", ["dense", "dense-optimizer", "random-00000"])
@pytest.mark.parametrize("make", [old, saved])
def test_a_checkpoint_with_a_pickle_in_it(name, make, written, sprung):
    written.replace(f"{name}.safetensors", make(sprung))
    with pytest.raises(UserError, match="damaged"):
        written.load()


@pytest.mark.parametrize("position", [-1.0, 625.0, 1e9, float("nan"), float("inf")])
def test_generator_states_that_point_outside_their_memory(position, written):
    state = random_state()
    state["numpy_rest"][0] = position
    save_file(state, written.folder / "random-00000.safetensors")
    written.replace("random-00000.safetensors", (written.folder / "random-00000.safetensors").read_bytes())
    with pytest.raises(UserError, match="holds no state of random generators"):
        written.load()
    np.random.rand(700)  # with such a state this would crash


@pytest.mark.parametrize("key", ["python", "numpy", "numpy_rest", "torch"])
def test_generator_states_that_are_not(key, written):
    for other in (torch.zeros(3), torch.zeros(624, dtype=torch.int64), None):
        state = {**random_state(), key: other}
        path = written.folder / "random-00000.safetensors"
        save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
        written.replace(path.name, path.read_bytes())
        if other is not None and (key, len(other)) in (("numpy", 624), ("numpy_rest", 3)):
            continue  # a state like any other
        with pytest.raises(UserError, match="holds no state of random generators"):
            written.load()


def test_progress_sets_only_what_is_there(written):
    progress = json.loads((written.folder / "progress.json").read_text())
    progress["schedule"].update(step="gone", optimizer="gone", last_epoch=7)
    written.replace("progress.json", json.dumps(progress).encode())
    written.load()
    assert written.schedule.last_epoch == 7 and callable(written.schedule.step)
    assert written.schedule.optimizer is written.optimizer


@pytest.mark.parametrize("target", ["../../other", "/etc", "step-1/..", "", "step-000001\n../x"])
def test_a_pointer_leads_to_a_checkpoint_of_the_run(target, written):
    (written.run / "checkpoints/latest").write_text(target)
    with pytest.raises(UserError, match="names no checkpoint; write step-N into it"):
        written.load()


def test_a_manifest_speaks_of_its_own_folder_only(written, tmp_path):
    (tmp_path / "secret").write_text("x")
    written.replace("../../../secret", b"x")
    with pytest.raises(UserError, match="lacks secret"):
        written.load()


# -- configurations ---------------------------------------------------------------------------------------------------

CODE = [
    "steps: !!python/object/apply:os.mkdir ['{0}']",
    "steps: !!python/name:os.mkdir",
    "!!python/module:trap x",
    "model: {{class_path: os.mkdir, init_args: {{path: '{0}'}}}}",
    "model: {{class_path: trap.Model}}",
    "data: trap.Model",
    "algorithm: {{lfme: {{class_path: trap.Model}}}}",
    "optim: {{class_path: trap.Model}}",
    "model: {{moe: trap.Model}}",
    "output: {{class_path: trap.Model}}",
    "model: {{layers: {{class_path: trap.Model}}}}",
]


@pytest.fixture
def trap(tmp_path, sprung, monkeypatch):
    """A module that can be imported and must not be."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/trap.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\nclass Model: pass\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield
    assert sys.modules.pop("trap", None) is None


@pytest.mark.parametrize("text", CODE)
def test_a_configuration_runs_nothing(text, tmp_path, sprung, trap):
    path = tmp_path / "config.yaml"
    path.write_text(text.format(sprung))
    for read in (lambda: parse_train_config(["--config", str(path)]), lambda: load_train_config(str(path))):
        with pytest.raises(UserError):
            read()


@pytest.mark.parametrize("word", ["--model=trap.Model", "--data={class_path: trap.Model}", "--optim.name=trap.Model"])
def test_an_option_runs_nothing(word, trap):
    with pytest.raises(UserError):
        parse_train_config([word])


def test_a_sweep_reads_configurations_as_data(tmp_path, sprung):
    run = {"task": "digits", "held_out": "rot0", "method": "dense", "seed": 0, "lr": None}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "summary.json").write_text('{"test_accuracy": 1, "validation_accuracy": 1}')
    (tmp_path / "config.yaml").write_text(CODE[0].format(sprung))
    with pytest.raises(UserError, match="does not hold a readable run"):
        collect(tmp_path)


# -- data sets --------------------------------------------------------------------------------------------------------


def tar(path: Path, *members: tuple[str, bytes, str]) -> Path:
    """An archive of (name, type, target of the link)."""
    with tarfile.open(path, "w") as target:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
            target.addfile(info, io.BytesIO(b"text"))
    return path


FILE, SYMBOLIC, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../outside", FILE, "")],
        [("a/../../outside", FILE, "")],
        [("link", SYMBOLIC, ".."), ("link/outside", FILE, "")],
        [("a", SYMBOLIC, "b"), ("b", SYMBOLIC, ".."), ("a/outside", FILE, "")],
        [("in", FILE, ""), ("link", HARD, "../victim"), ("link", FILE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("device", tarfile.CHRTYPE, "")],
    ],
)
def test_a_tar_stays_in_its_folder(members, tmp_path):
    (tmp_path / "victim").write_text("mine")
    with pytest.raises(UserError, match="no data set needs"):
        archives.unpack(tar(tmp_path / "a.tar", *members), tmp_path / "in", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "in", "victim"]
    assert (tmp_path / "victim").read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "in").iterdir())


def test_an_absolute_name_is_taken_below_the_folder(tmp_path):
    archives.unpack(tar(tmp_path / "a.tar", (f"{tmp_path}/outside", FILE, "")), tmp_path / "in", progress=False)
    assert not (tmp_path / "outside").exists()


def zeros(path: Path, size: int, number: int = 1) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for index in range(number):
                target.writestr(str(index), bytes(size))
    else:
        with tarfile.open(path, "w:gz") as target:
            for index in range(number):
                info = tarfile.TarInfo(str(index))
                info.size = size
                target.addfile(info, io.BytesIO(bytes(size)))
    return path


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_bombs(name, tmp_path, monkeypatch):
    bomb = zeros(tmp_path / name, 1_000_000, 3)
    archives.unpack(bomb, tmp_path / "small", progress=False)  # small enough to do no harm
    for limit, message in ((("SMALL", 1000), "more than 50 times its size"), (("MOST_FILES", 2), "or 2 files")):
        with monkeypatch.context() as patch:
            patch.setattr(archives, *limit)
            with pytest.raises(UserError, match=message):
                archives.unpack(bomb, tmp_path / limit[0], progress=False)
        assert len(list((tmp_path / limit[0]).iterdir())) < 3
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_500_000))
    with pytest.raises(UserError, match="has room for; free space"):
        archives.unpack(bomb, tmp_path / "full", progress=False)


def test_an_image_that_is_a_program(tmp_path, monkeypatch, sprung):
    """PostScript, which Pillow would give to Ghostscript."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\necho 10\ncase $1 in --version) ;; *) mkdir '{sprung}' ;; esac\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path = tmp_path / "dog.jpg"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n")
    with Image.open(path) as image, pytest.raises(OSError):
        image.load()
    assert sprung.is_dir()  # so the trap works
    sprung.rmdir()
    with pytest.raises(NotAnImage):
        decode(path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "/etc/passwd"])
def test_a_download_comes_from_the_web(url, tmp_path):
    with pytest.raises(UserError, match="begins with https:// or http://"):
        download(url, tmp_path / "a", progress=False)
    assert not (tmp_path / "a").exists()


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_of_runs_are_no_formulas(tmp_path):
    names = [r"$\frac", "_hidden", "<script>a</script>", "a\n;'\"b"]
    train = {"kind": "train", "step": 1, "task_loss": 1.0, "div_loss": 0.0, "accuracy": 0.5}
    for name in names:
        figure = curves_figure({name: [train]})
        figure.savefig(tmp_path / "a.svg")
        (text,) = (text.get_text() for text in figure.axes[0].get_legend().get_texts())
        assert text.replace("\\$", "$").strip() == f"{name}: task loss"
        assert "<script>" not in (tmp_path / "a.svg").read_text()
