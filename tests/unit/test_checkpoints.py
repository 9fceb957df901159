"""The files of checkpoints: what ``latest.json`` may say, which files are kept, whose a folder is, and what is read of
another number of workers."""

import json
import os
import subprocess
import sys
import weakref
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest

from horovod_onebit import CheckpointError, checkpoints
from horovod_onebit.checkpoints import archive, files, lock

KEYS = ["0" * 16, "1" * 16, "2" * 16, "3" * 16]


class Optimizer:
    """Something that a weak reference can be made of."""


def save(folder, key, **arguments):
    path = files.worker_file(folder, key, 0)
    files.replace(path, lambda temporary: temporary.write_text(key))
    files.complete(folder, key, 1, 7, {path.name: files.Digest.of(path)}, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": None}, "key is None"),
        ({"key": "../../etc/passwd"}, "key is '../../etc/passwd'"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": "2"}, "workers is '2'"),
        ({"workers": True}, "workers is True"),
        ({"step": -1}, "step is -1"),
        ({"files": [1]}, "files is"),
        ({"files": {"a": {"bytes": "x", "blake2b": ""}}}, "files is"),
        ({"previous": 3}, "int, expected an object"),
        ({"previous": {"key": KEYS[0]}}, "no 'workers'"),
        ({"format": 3}, "another version"),
    ],
)
def test_what_is_wrong_with_latest_json_is_named(tmp_path, change, message):
    save(tmp_path, KEYS[0])
    latest = tmp_path / "latest.json"
    latest.write_text(json.dumps(json.loads(latest.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        files.history(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\0", '{"format": 2}'])
def test_what_is_no_latest_json(tmp_path, text):
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json"):
        files.history(tmp_path)
    files.worker_file(tmp_path, KEYS[0], 0).write_text("of a checkpoint that latest.json may name")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"Nothing is saved there.*move it away"):
        files.sweep_leftovers(tmp_path)
    with pytest.raises(ValueError, match=r"latest\.json"):
        save(tmp_path, KEYS[1])
    assert {*before} <= {*tmp_path.iterdir()}
    assert (tmp_path / "latest.json").read_text() == text


def test_the_last_two_are_kept_and_what_failed_saves_left_is_removed(tmp_path):
    for key in KEYS[:3]:
        save(tmp_path, key)
    (tmp_path / f"tmp.{KEYS[3]}.shared.npz").write_text("a worker died")
    files.worker_file(tmp_path, KEYS[3], 4).write_text("too")
    files.sweep_leftovers(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert names == {"latest.json", f"{KEYS[2]}.worker-0000.npz", f"previous/{KEYS[1]}.worker-0000.npz"}
    assert [one.key for one in files.history(tmp_path)] == [KEYS[2], KEYS[1]]
    save(tmp_path, KEYS[3], good=KEYS[1])
    assert [one.key for one in files.history(tmp_path)] == [KEYS[3], KEYS[1]]
    assert files.find(tmp_path, f"{KEYS[1]}.worker-0000.npz").read_text() == KEYS[1]


def test_a_file_that_was_changed_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    digest = files.Digest.of(path)
    files.check(path, digest)
    path.write_bytes(b"abd")
    with pytest.raises(ValueError, match="digest"):
        files.check(path, digest)
    path.write_bytes(b"ab")
    with pytest.raises(ValueError, match="2 bytes and had 3"):
        files.check(path, digest)


def test_a_fork_does_not_keep_the_folder_and_a_killed_job_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    code = (
        "import os, pathlib, sys, time\n"
        "from horovod_onebit.checkpoints import lock\n"
        "class Optimizer: pass\n"
        "one = Optimizer()\n"
        "lock.acquire(pathlib.Path(sys.argv[1]), one, '')\n"
        "if os.fork() == 0:\n"  # a loader of data that outlives the job
        "    time.sleep(60)\n"
        "print('holds', flush=True)\n"
        "time.sleep(60)\n"
    )
    one = Optimizer()
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as job:
        assert job.stdout.readline() == b"holds\n"
        with pytest.raises(RuntimeError, match=rf"process {job.pid} on"):
            lock.acquire(tmp_path, one, "")
        job.kill()
        job.wait()
        lock.acquire(tmp_path, one, "")
        os.killpg(job.pid, 9)  # the loader
    lock.release(tmp_path)


def test_the_first_save_after_loading_replaces_no_checkpoint_of_another_job(tmp_path):
    optimizer = Optimizer()
    save(tmp_path, KEYS[0])
    lock.remember(tmp_path, KEYS[0], KEYS[0])  # this job has loaded it
    save(tmp_path, KEYS[1])  # another one saves, and ends
    with pytest.raises(RuntimeError, match="another job has saved a checkpoint"):
        lock.acquire(tmp_path, optimizer, "")
    lock.remember(tmp_path, KEYS[1], KEYS[1])
    lock.acquire(tmp_path, optimizer, "")
    lock.release(tmp_path)


def test_a_worker_that_has_come_later_saves_for_its_job(tmp_path):
    """Under elastic it may be worker 0 one day."""
    save(tmp_path, KEYS[0])
    assert not lock.acquire(tmp_path, Optimizer(), "", {KEYS[0]})
    lock.release(tmp_path)
    with pytest.raises(RuntimeError, match="another job has saved a checkpoint"):
        lock.acquire(tmp_path, Optimizer(), "", {KEYS[1]})
    assert lock.acquire(tmp_path, Optimizer(), "")  # nobody knows it
    lock.release(tmp_path)


@pytest.mark.parametrize("killed", [False, True])
def test_checkpoints_of_another_run_are_set_aside(tmp_path, killed):
    for key in KEYS[:2]:
        save(tmp_path, key)
    found, latest = files.history(tmp_path), (tmp_path / "latest.json").read_bytes()
    apart = tmp_path / f"of-{KEYS[1]}"
    if killed:  # the job that was about to do it
        apart.mkdir()
        (tmp_path / next(iter(found[0].files))).rename(apart / next(iter(found[0].files)))
    assert files.set_aside(tmp_path) == apart
    assert not files.history(tmp_path)
    files.sweep_leftovers(tmp_path)
    save(tmp_path, KEYS[2])
    save(tmp_path, KEYS[3])
    assert files.history(apart) == found
    assert (apart / "latest.json").read_bytes() == latest
    for one in found:
        for name, digest in one.files.items():
            files.check(files.find(apart, name), digest)


def test_a_checkpoint_of_before_is_refused_and_left_as_it_is(tmp_path):
    save(tmp_path, KEYS[0])
    latest = tmp_path / "latest.json"
    latest.write_text(json.dumps(json.loads(latest.read_text()) | {"format": 1}))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for call in (
        lambda: checkpoints.load(One(), tmp_path, previous=False),
        lambda: checkpoints.save(One(), tmp_path, None),
        lambda: checkpoints.load_alone(tmp_path, ["model"], lambda: None, print, archive.Converter(), previous=False),
    ):
        with pytest.raises(CheckpointError, match=r"of horovod-onebit 0\.1, .* not read\. Load the weights alone with"):
            call()
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != lock.NAME} == before


class Half(float):
    """Of a framework."""


class Halves(archive.Converter):
    def encode(self, value):
        twice = np.full(2, 2 * value)
        return archive.Encoded("half", {"size": 2}, twice, float(value)) if type(value) is Half else None

    def decode(self, found):
        return Half(found.array[1] / found.value["size"]) if found.kind == "half" else super().decode(found)


VALUES = {
    "float32": np.float32(1.5), "bool": np.bool_(True), "text": np.str_(""), "time": np.datetime64("2020-01-01"),
    "big": np.arange(3, dtype=">i4"), "columns": np.arange(6.0).reshape(2, 3)[:, ::2], "one": np.array(7, np.uint8),
    "empty": np.zeros((0, 2), np.float16), "texts": np.array([["a", "bcd"]]), "complex": np.array([1j, np.nan]),
    "numbers": [1, -0.0, float("inf"), 2**70, 1 + 2j, None, True], "bytes": (b"\0\xff", bytearray(b"3")),
    "set": {(1, "a")}, "odd\0\udcff": np.zeros(1),
    "keys": {1: {(2, "a"): True}, None: 3, 1.5: [], "1": {}}, "ordered": OrderedDict(b=np.ones(1), a=(2,)),
    "counter": Counter({30: 1}), "path": Path("/data"), archive.TAG: "mine", "a/b": np.ones(1),
    "a": {"b": np.zeros(1)}, "halves": [Half(0.5), Half(0.5), Half(1.5)],
}  # fmt: skip


def assert_same(found, value):
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(found, value)
        assert found.dtype == value.dtype
        assert found.flags.writeable
    elif isinstance(value, dict):
        assert [*found] == [*value]
        for key, own in zip(found, value, strict=True):
            assert type(key) is type(own)
            assert_same(found[key], value[own])
    elif isinstance(value, (list, tuple)):
        for one, other in zip(found, value, strict=True):
            assert_same(one, other)
    else:
        assert repr(found) == repr(value)


def test_values_come_back_as_they_were(tmp_path):
    path = tmp_path / "one.npz"
    archive.write(path, "key", {"extra": VALUES, "other": np.arange(4)}, Halves())
    assert_same(archive.read(path, "key", Halves())["extra"], VALUES)
    assert_same(archive.read(path, "key", Halves(), ["other"]), {"other": np.arange(4)})
    with np.load(path) as file:
        np.testing.assert_array_equal(file["extra/columns"], VALUES["columns"])
        assert len([name for name in file.files if "halves" in name]) == 2  # what shares its memory is there once
    with pytest.raises(ValueError, match="kind 'half' is of another framework"):
        archive.read(path, "key", archive.Converter())
    with pytest.raises(ValueError, match="does not belong to this checkpoint"):
        archive.read(path, "another key", Halves())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_take_no_room(tmp_path, dtype):
    file, size = tmp_path / "one.npz", 100_000
    values = {"zeros": np.zeros(size, dtype), "minus": np.full(size, -0.0, dtype), "others": np.ones(size, dtype)}
    archive.write(file, "key", values, archive.Converter())
    assert values["others"].nbytes < file.stat().st_size < 1.1 * values["others"].nbytes
    for found in (archive.read(file, "key", archive.Converter()), np.load(file)):
        for name, value in values.items():
            np.testing.assert_array_equal(found[name].view(np.uint8), value.view(np.uint8))


def test_dtypes_that_numpy_lacks_are_stored_as_bits(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    path, value = tmp_path / "one.npz", np.array([[1.5, -0.0, np.inf]], bfloat16)
    archive.write(path, "key", {"a": value}, archive.Converter())
    assert_same(archive.read(path, "key", archive.Converter())["a"], value)
    with np.load(path) as file:
        np.testing.assert_array_equal(file["a"], value.view(np.uint16))


def test_what_cannot_be_stored_is_named():
    inside = {}
    inside["self"] = [inside]
    for value, message in (
        (inside, r"extra\['self'\]\[0\] contains itself"),
        ({"a": [np.array([None])]}, r"extra\['a'\]\[0\] is a NumPy array of object"),
        ({"a": np.void(b"3")}, r"extra\['a'\] is numpy.void"),
        ({"a": Half(1.0)}, r"extra\['a'\] is .*Half, which cannot be stored: expected numbers"),
        ({np.int64(3): 1}, r"extra has the key np.int64\(3\), a int64"),
    ):
        with pytest.raises(TypeError, match=message):
            archive.check(value, "extra", archive.Converter())


@pytest.mark.parametrize("dtype", ["|O", "O,i4", "V8"])
def test_bytes_of_a_file_are_not_taken_for_an_object(tmp_path, dtype):
    """NumPy would follow them as a pointer."""
    path, saved = tmp_path / "file", np.int64(0x4141414141414141)
    archive.write(path, "key", {"x": saved}, archive.Converter())
    assert archive.read(path, "key", archive.Converter()) == {"x": saved}
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    forged = {name: part.replace(b'"<i8"', f'"{dtype}"'.encode()) for name, part in parts.items()}
    assert forged != parts
    with zipfile.ZipFile(path, "w") as file:
        for name, part in forged.items():
            file.writestr(name, part)
    with pytest.raises(ValueError, match="a scalar of"):
        archive.read(path, "key", archive.Converter())


SIZE = 12


def own_of(rank):
    """Of three workers, each of which serves a third; the first has nothing of ``late`` but what it serves."""
    own = np.random.default_rng(rank).standard_normal((3, SIZE)).astype(np.float32)
    feedback = {"w": own[0], "late": own[1]} if rank else {"w": own[0]}
    feedback |= {"onebit.server.0": own[2, : SIZE // 3], "onebit.server.1": own[2, SIZE // 3 :][:4]}
    start = SIZE // 3 * rank
    served = {f"onebit.server.{i}": [(name, start, start + 4)] for i, name in enumerate(("w", "late"))}
    return {"feedback": feedback, "divisor": 3, "served": served}


class One(checkpoints.Face):
    """A worker alone."""

    rank, workers = 0, 1

    def __init__(self):
        self.taken = []

    def gather(self, value):
        return [value]

    def take_over(self, shared, about):
        self.taken.append("shared")

    def spread(self, about, own):
        self.taken.append(own)

    def owner(self):
        return self, ""

    def nothing(self, *arguments):
        pass

    about = check = check_arguments = flush = steps = own = shared = nothing


@pytest.fixture
def of_three(tmp_path):
    paths = [files.worker_file(tmp_path, KEYS[0], rank) for rank in range(3)]
    for rank, path in enumerate(paths):
        archive.write(path, KEYS[0], own_of(rank), archive.Converter())
    shared = files.shared_file(tmp_path, KEYS[0])
    archive.write(shared, KEYS[0], {"kind": "step", "extra": "extra"}, archive.Converter())
    digests = {path.name: files.Digest.of(path) for path in (*paths, shared)}
    files.complete(tmp_path, KEYS[0], 3, 7, digests)
    return paths


def test_the_files_of_other_workers_are_read_one_by_one(of_three, monkeypatch):
    face, read, seen = One(), archive.read, []

    def one_by_one(*arguments):
        assert not any(one() is not None for one in seen)
        found = read(*arguments)
        seen.extend(map(weakref.ref, found.get("feedback", {}).values()))
        return found

    monkeypatch.setattr(archive, "read", one_by_one)
    assert checkpoints.load(face, of_three[0].parent, previous=False) == "extra"
    _, own = face.taken
    saved = [np.random.default_rng(rank).standard_normal((3, SIZE)).astype(np.float32) for rank in range(3)]
    served = [np.concatenate([one[2, i : i + 4] for one in saved]) for i in (0, 4)]
    w, late = sum(one[0] for one in saved) / 3 + served[0], (saved[1][1] + saved[2][1]) / 3 + served[1]
    np.testing.assert_allclose(own["feedback"].pop("w"), w, rtol=1e-5)
    np.testing.assert_allclose(own["feedback"].pop("late"), late, rtol=1e-5)
    assert len(seen) == 11
    assert own == {"feedback": {}, "divisor": None, "served": {}, "encodes": None, "gradients": None, "state": None}


@pytest.mark.parametrize("damaged", range(3))
def test_a_damaged_file_of_any_of_them_changes_nothing(of_three, damaged):
    face, path = One(), of_three[damaged]
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=rf"worker 0: .*{path.name} is damaged"):
        checkpoints.load(face, path.parent, previous=False)
    assert face.taken == []
