"""Official archives into DomainBed's layout, downloads that go on, and verification."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import io
import json
import random
import shlex
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tasks import domainbed_task
from tests.support.tiny_images import class_names, make_benchmark, write_image
from unifmoe_dist.data.archives import unpack
from unifmoe_dist.data.benchmarks import BENCHMARKS, Archive
from unifmoe_dist.data.download import download
from unifmoe_dist.data.prepare import fetch_archives, fetch_duplicates, prepare
from unifmoe_dist.data.verify import verify
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.build import build_task
from unifmoe_dist.train.cli import parse_train_config

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("launch_data", ROOT / "launch/data.py")
command = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(command)
pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")


def pack(folder: Path, archive: Path, inside: str) -> Path:
    """Pack a folder's content below the name `inside`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as target:
            for file in sorted(folder.rglob("*")):
                target.write(file, Path(inside) / file.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz") as target:
            target.add(folder, inside)
    return archive


# -- preparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,file,inside",
    [
        ("pacs", "PACS.zip", "kfold"),
        ("vlcs", "VLCS.tar.gz", "VLCS"),
        ("officehome", "office_home.zip", "OfficeHomeDataset_10072016"),
        ("terraincognita", "sorted.tar.gz", "a/b"),
    ],
)
def test_an_official_archive_becomes_domainbeds_layout(name, file, inside, tmp_path):
    source = make_benchmark(tmp_path / "source", name, per_class=1, size=4)
    archive = pack(source, tmp_path / file, inside)
    folder = prepare(BENCHMARKS[name], [archive], tmp_path / "root", progress=False)
    assert folder == tmp_path / "root" / BENCHMARKS[name].folder
    assert [path.name for path in (tmp_path / "root").iterdir()] == [folder.name]  # nothing is left behind
    expected = {path.relative_to(source): path.read_bytes() for path in source.rglob("*.jpg")}
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.jpg")} == expected
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["archives"] == [
        {"file": file, "bytes": archive.stat().st_size, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    ]
    first = BENCHMARKS[name].environments[0].folder
    assert manifest["environments"][first]["images"] == BENCHMARKS[name].num_classes
    assert list(manifest["environments"][first]["classes"]) == list(class_names(BENCHMARKS[name]))
    with pytest.raises(UserError, match="exists already"):
        prepare(BENCHMARKS[name], [archive], tmp_path / "root", progress=False)


def make_terra(folder: Path) -> list[Path]:
    """The official form: images in one folder, COCO annotations in several files. One image has two classes."""
    terra = BENCHMARKS["terraincognita"]
    assert terra.classes is not None
    kinds = [*terra.classes, "car"]
    images, notes = [], []
    for location in (38, 46, 100, 43, 7):
        for label in range(len(kinds)):
            name = f"{location}-{label}.jpg"
            write_image(folder / "eccv_18_all_images_sm" / name, label, location, 0, size=4)
            images.append({"id": name[:-4], "file_name": name, "location": location})
            notes.append({"image_id": name[:-4], "category_id": label})
    notes += [{"image_id": "38-0", "category_id": 3}, {"image_id": "38-0", "category_id": 3}]
    categories = [{"id": label, "name": kind} for label, kind in enumerate(kinds)]
    annotations = folder / "eccv_18_annotation_files"
    annotations.mkdir()
    for number, name in enumerate(("train_annotations", "cis_val_annotations")):
        part = {"images": images[number::2], "annotations": notes[1 - number :: 2], "categories": categories}
        (annotations / f"{name}.json").write_text(json.dumps(part))
    return [
        pack(folder / "eccv_18_all_images_sm", folder / "images.tar.gz", "eccv_18_all_images_sm"),
        pack(annotations, folder / "notes.tar.gz", "eccv_18_annotation_files"),
    ]


def test_camera_trap_images_are_sorted_by_location_and_class(tmp_path):
    archives = make_terra(tmp_path / "official")
    folder = prepare(BENCHMARKS["terraincognita"], archives, tmp_path, progress=False)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.jpg")}
    kinds = BENCHMARKS["terraincognita"].classes
    expected = {f"location_{p}/{kind}/{p}-{i}.jpg" for p in (38, 46, 100, 43) for i, kind in enumerate(kinds)}
    assert found == expected | {"location_38/coyote/38-0.jpg"}
    with pytest.raises(UserError, match="no folder eccv_18_all_images_sm"):
        prepare(BENCHMARKS["terraincognita"], archives[1:], tmp_path / "again", progress=False)


def test_what_does_not_become_a_data_set_leaves_nothing(tmp_path):
    pacs, root = BENCHMARKS["pacs"], tmp_path / "root"
    source = make_benchmark(tmp_path / "source", "vlcs", per_class=1, size=4)
    other = pack(source, tmp_path / "VLCS.zip", "VLCS")
    broken = tmp_path / "broken.zip"
    broken.write_bytes(other.read_bytes()[:-200])
    text = tmp_path / "page.zip"
    text.write_text("<html>quota exceeded</html>")
    cases = [
        ([other], "hold none of PACS's folders art_painting"),
        ([text], "neither a zip nor a tar file"),
        ([broken], "neither a zip nor a tar file|damaged"),
        ([tmp_path / "absent.zip"], "does not exist"),
    ]
    for archives, message in cases:
        with pytest.raises(UserError, match=message):
            prepare(pacs, archives, root, progress=False)
    known = replace(pacs, archives=(Archive("VLCS.zip", "http://nowhere", sha256="0" * 64),))
    with pytest.raises(UserError, match="has sha256 .* not 000"):
        prepare(known, [other], root, progress=False)
    assert not root.exists() or not list(root.iterdir())


@pytest.mark.parametrize("kind", ["zip", "zip link", "tar", "tar link"])
def test_nothing_is_written_outside(kind, tmp_path):
    archive = tmp_path / "bad"
    if kind.startswith("zip"):
        with zipfile.ZipFile(archive, "w") as target:
            member = zipfile.ZipInfo("link" if "link" in kind else "../outside")
            member.external_attr = (0o120777 if "link" in kind else 0o100644) << 16
            target.writestr(member, "/etc")
    else:
        with tarfile.open(archive, "w") as target:
            info = tarfile.TarInfo("link" if "link" in kind else "../outside")
            if "link" in kind:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            target.addfile(info, io.BytesIO())
    with pytest.raises(UserError, match="leads outside"):
        unpack(archive, tmp_path / "in", progress=False)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("offset,value", [(6, 1), (8, 99)])
def test_a_zip_that_is_encrypted_or_compressed_in_an_unknown_way(offset, value, tmp_path):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as target:
        target.writestr("name", "text")
    content = bytearray(archive.read_bytes())
    for signature, more in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):  # the member's own header, and the directory's
        content[content.index(signature) + offset + more] = value
    archive.write_bytes(content)
    with pytest.raises(UserError, match="cannot be unpacked .*(encrypted|compression)"):
        unpack(archive, tmp_path / "in", progress=False)


def test_a_compressed_archive_that_is_damaged_inside(tmp_path):
    archive = tmp_path / "a.tar.xz"
    with tarfile.open(archive, "w:xz") as target:
        info = tarfile.TarInfo("name")
        info.size = 200_000
        target.addfile(info, io.BytesIO(random.Random(0).randbytes(info.size)))
    content = bytearray(archive.read_bytes())
    for place in range(100_000, 190_000, 1000):
        content[place] ^= 255
    archive.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        unpack(archive, tmp_path / "in", progress=False)


# -- verifying ----------------------------------------------------------------------------------------------------


def test_verify_finds_what_is_wrong(tmp_path, capsys):
    source = make_benchmark(tmp_path / "source", "vlcs", per_class=2, size=64)
    folder = prepare(BENCHMARKS["vlcs"], [pack(source, tmp_path / "a.zip", "VLCS")], tmp_path, progress=False)
    sizes = tuple(replace(environment, images=10) for environment in BENCHMARKS["vlcs"].environments)
    small = replace(BENCHMARKS["vlcs"], environments=sizes)
    report = verify(small, tmp_path, progress=False)
    assert report.good and report.images == 40 and [e.changed for e in report.environments] == [False] * 4
    assert report.environments[0].classes == dict.fromkeys(BENCHMARKS["vlcs"].classes, 2)

    (folder / "SUN09/dog/001.png").write_bytes(b"no image")
    whole = (folder / "LabelMe/car/000.jpg").read_bytes()
    (folder / "LabelMe/car/000.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "Caltech101/bird/001.png").unlink()
    for workers in (0, 2):
        report = verify(small, folder, workers, progress=False)
        assert not report.good and [e.changed for e in report.environments] == [True, True, True, False]
        assert [path for path, _ in report.corrupt] == [str(folder / "SUN09/dog/001.png")]
        assert report.truncated == [str(folder / "LabelMe/car/000.jpg")] and report.images == 39
    with pytest.raises(SystemExit) as status:
        command.main(["verify", "vlcs", "--root", str(tmp_path), "--workers", "0", "--quiet"])
    with pytest.raises(UserError, match="--workers must be at least 0, not -1"):
        command.main(["verify", "vlcs", "--root", str(tmp_path), "--workers", "-1", "--quiet"])
    printed = capsys.readouterr().out
    assert status.value.code == 1 and printed.endswith("NOT as published\n")
    expected = (
        "39 images (10,729 published)",
        "SUN09 (SUN09): 10 images (3,282 published)",
        "CORRUPT",
        "DIFFERS",
        "fewest bird (1)",
        "truncated",
    )
    assert all(words in printed for words in expected), printed


def test_the_command_prepares_what_training_reads(tmp_path, capsys):
    source = make_benchmark(tmp_path / "source", "pacs", per_class=1, size=4)
    archive = pack(source, tmp_path / "PACS.zip", "kfold")
    command.main(["prepare", "pacs", "--archive", str(archive), "--root", str(tmp_path / "data"), "--quiet"])
    root = shlex.quote(str(tmp_path / "data"))
    assert f"configs/domainbed/pacs.yaml --data.root {root} --data.held_out Sketch" in capsys.readouterr().out
    assert domainbed_task("pacs", "Art", tmp_path / "data").num_classes == 7
    with pytest.raises(UserError, match="drive.google.com.* as PACS.zip and give it with --archive"):
        command.main(["prepare", "pacs", "--root", str(tmp_path / "other")])


@pytest.mark.parametrize("root", ["data", None])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_training_finds_what_was_prepared_without_a_root(name, root, tmp_path, monkeypatch, capsys):
    """The sequence of docs/reproduce.md, in the folder where both commands are run, and without any --root."""
    monkeypatch.chdir(tmp_path)
    archive = pack(make_benchmark(tmp_path / "source", name, per_class=1, size=4), Path("A.zip"), "inside")
    held_out = BENCHMARKS[name].environments[-1].name
    config = parse_train_config(["--config", str(ROOT / f"configs/domainbed/{name}.yaml"), "--data.held_out", held_out])
    with pytest.raises(UserError, match=f"was not found: none of data/{name}, .* and data/.* holds .* --root data`"):
        build_task(config)
    where = [] if root is None else ["--root", root]
    command.main(["prepare", name, "--archive", str(archive), *where, "--quiet"])
    assert "--data.root" not in capsys.readouterr().out
    task = build_task(config)
    assert len(task.train) == len(BENCHMARKS[name].environments) - 1 and len(task.test[0]) > 0
    for options in ([], ["--root", "data"] if root else ["--root", f"data/{name}"]):
        with pytest.raises(SystemExit):  # four images in place of thousands
            command.main(["verify", name, "--workers", "0", "--quiet", *options])
        assert "DIFFERS" not in capsys.readouterr().out


# -- downloading --------------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content`; breaks off after `limit` bytes of a reply, `failures` times."""

    content, limit, failures, ranges, log = b"", 0, 0, True, []  # noqa: RUF012
    tag = '"1"'

    def do_GET(self) -> None:
        kind = type(self)
        wanted = self.headers.get("Range")
        kind.log.append(wanted)
        if self.path == "/absent":
            self.send_error(404)
            return
        start = 0
        if wanted and kind.ranges and self.headers.get("If-Range") == kind.tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(kind.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(kind.content)}")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        self.send_header("ETag", kind.tag)
        body = kind.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind.failures:
            kind.failures -= 1
            self.wfile.write(body[: kind.limit])
        else:
            self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def server():
    class Own(Server):
        content, log = bytes(range(256)) * 4000, []  # noqa: RUF012

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    Own.url = f"http://127.0.0.1:{running.server_port}"
    yield Own
    running.shutdown()
    running.server_close()


def fetch(server, path: Path, **options) -> None:
    download(f"{server.url}/file", path, progress=False, pause=0.01, **options)


def test_a_download_that_breaks_off_goes_on(server, tmp_path):
    server.failures, server.limit = 2, 300_000
    checksum = hashlib.sha256(server.content).hexdigest()
    fetch(server, tmp_path / "file", checksum=checksum)
    assert (tmp_path / "file").read_bytes() == server.content
    assert server.log == [None, "bytes=300000-", "bytes=600000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    fetch(server, tmp_path / "file", checksum=checksum)
    assert len(server.log) == 3  # it is there: nothing is asked for


def test_a_later_call_goes_on_and_notices_a_new_version(server, tmp_path):
    server.failures, server.limit = 5, 10_000
    with pytest.raises(UserError, match="broken off after 50,000 of 1,024,000 bytes.*same command goes on from there"):
        fetch(server, tmp_path / "file")
    assert (tmp_path / "file.part").stat().st_size == 50_000 and not (tmp_path / "file").exists()
    server.tag, server.content = '"2"', b"new" * 100_000
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == server.content


def test_servers_without_ranges_and_files_that_had_arrived(server, tmp_path):
    server.failures, server.limit, server.ranges = 1, 10_000, False
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == server.content
    server.ranges = True
    (tmp_path / "more.part").write_bytes(server.content)
    (tmp_path / "more.part.version").write_text(server.tag)
    fetch(server, tmp_path / "more")
    assert (tmp_path / "more").read_bytes() == server.content


def test_refusals_and_wrong_checksums(server, tmp_path):
    with pytest.raises(UserError, match="404"):
        download(f"{server.url}/absent", tmp_path / "file", progress=False)
    with pytest.raises(UserError, match="has sha256 .* not abc; delete it"):
        fetch(server, tmp_path / "file", checksum="abc")
    assert not (tmp_path / "file").exists()
    server.url = "http://127.0.0.1:9"
    with pytest.raises(UserError, match="cannot be downloaded .*refused"):
        fetch(server, tmp_path / "other")


def test_archives_are_downloaded_and_duplicates_put_beside_them(server, tmp_path):
    source = make_benchmark(tmp_path / "source", "domainnet", per_class=1, size=4)
    server.content = pack(source, tmp_path / "all.zip", ".").read_bytes()
    domainnet = replace(BENCHMARKS["domainnet"], archives=(Archive("all.zip", f"{server.url}/all.zip"),))
    archives = fetch_archives(domainnet, tmp_path / "archives", progress=False)
    listed = b"sketch/class_000/000.jpg\n"
    server.content = listed
    duplicates = replace(domainnet.duplicates, url=f"{server.url}/list", sha256=hashlib.sha256(listed).hexdigest())
    fetch_duplicates(duplicates, tmp_path / "archives", progress=False)
    with pytest.raises(UserError, match="sketch/class_000 holds no images"):  # the only one of its class is listed
        prepare(domainnet, archives, tmp_path, progress=False)
    (tmp_path / "archives" / duplicates.file).write_text("sketch/class_000/001.jpg\n")
    folder = prepare(domainnet, archives, tmp_path, progress=False)
    assert (folder / "domain_net_duplicates.txt").is_file() and len(list(folder.glob("*/*/*.jpg"))) == 6 * 345
