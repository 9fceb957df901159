"""The files of checkpoints: what ``latest.json`` may say, which files are kept, whose a folder is, and what is read of
another number of workers."""

import json
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest

from horovod_onebit import CheckpointError, checkpoints
from horovod_onebit.checkpoints import extra, files, lock

KEYS = ["0" * 16, "1" * 16, "2" * 16, "3" * 16]


class Optimizer:
    """Something that a weak reference can be made of."""


def save(folder, key, **arguments):
    path = files.worker_file(folder, key, 0, "pt")
    files.replace(path, lambda temporary: temporary.write_text(key))
    files.complete(folder, key, 1, 7, ("pt",), {path.name: files.Digest.of(path)}, **arguments)


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
        ({"format": 2}, "another version"),
    ],
)
def test_what_is_wrong_with_latest_json_is_named(tmp_path, change, message):
    save(tmp_path, KEYS[0])
    latest = tmp_path / "latest.json"
    latest.write_text(json.dumps(json.loads(latest.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        files.history(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\0", '{"format": 1}'])
def test_what_is_no_latest_json(tmp_path, text):
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json"):
        files.history(tmp_path)
    before = sorted(tmp_path.iterdir())
    files.sweep_leftovers(tmp_path, ("pt",))
    assert sorted(tmp_path.iterdir()) == before


def test_the_last_two_are_kept_and_what_failed_saves_left_is_removed(tmp_path):
    for key in KEYS[:3]:
        save(tmp_path, key)
    (tmp_path / f"tmp.{KEYS[3]}.shared.pt").write_text("a worker died")
    files.worker_file(tmp_path, KEYS[3], 4, "pt").write_text("too")
    files.sweep_leftovers(tmp_path, ("pt",))
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert names == {"latest.json", f"{KEYS[2]}.worker-0000.pt", f"previous/{KEYS[1]}.worker-0000.pt"}
    assert [one.key for one in files.history(tmp_path)] == [KEYS[2], KEYS[1]]
    save(tmp_path, KEYS[3], good=KEYS[1])
    assert [one.key for one in files.history(tmp_path)] == [KEYS[3], KEYS[1]]
    assert files.find(tmp_path, f"{KEYS[1]}.worker-0000.pt").read_text() == KEYS[1]


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


def test_values_that_are_packed_come_back():
    blobs = []
    packer = extra.Packer(
        lambda value: False, lambda a: blobs.append(a) or len(blobs) - 1, (dict, list), text_keys=True
    )
    value = {
        "a": np.float32(1.5), "b": np.arange(6.0).reshape(2, 3)[:, ::2], "t": (1, [2]), 1: {(1, "a"): b"\0"},
        extra.TAG: "mine", "nan": float("inf"), "time": np.datetime64("2020-01-01"),
    }  # fmt: skip
    found = extra.unpack(json.loads(json.dumps(packer.pack(value, "extra"))), lambda i: blobs[i])
    np.testing.assert_array_equal(found.pop("b"), value.pop("b"))
    assert found == value
    assert type(found["a"]) is np.float32
    inside = {}
    inside["self"] = [inside]
    with pytest.raises(TypeError, match=r"extra\['self'\]\[0\] contains itself"):
        packer.pack(inside, "extra")


SIZE = 12


def write_own(path, rank):
    """Of three workers, each of which serves a third; the first has nothing of ``late`` but what it serves."""
    own = np.random.default_rng(rank).standard_normal((3, SIZE)).astype(np.float32)
    arrays = {"w": own[0], "late": own[1]} if rank else {"w": own[0]}
    with path.open("wb") as file:
        np.savez(file, **arrays, **{"onebit.server.0": own[2, : SIZE // 3], "onebit.server.1": own[2, SIZE // 3 :][:4]})


class One(checkpoints.Face):
    """A worker alone, whose files are NumPy's, with memory for one of them."""

    suffixes, rank, workers = ("npz", "npz"), 0, 1

    def __init__(self):
        self.read, self.taken = [], []

    def gather(self, value):
        return [value]

    def read_own(self, path, key):
        assert [one() for one in self.read] == [None] * len(self.read)
        with np.load(path) as file:
            feedback = dict(file)
        self.read += map(weakref.ref, feedback.values())
        start = SIZE // 3 * int(path.stem[-4:])
        served = {f"onebit.server.{i}": [(name, start, start + 4)] for i, name in enumerate(("w", "late"))}
        return {"feedback": feedback, "divisor": 3, "served": served, "number": int(path.stem[-4:])}

    def read_shared(self, path, first, key):
        return checkpoints.Shared(None, None, "extra")

    def take_over(self, shared, about):
        self.taken.append("shared")

    def spread(self, about, own):
        self.taken.append(own)

    def nothing(self, *arguments):
        pass

    check = check_arguments = check_saving = flush = owner = steps = write_own = write_shared = nothing


@pytest.fixture
def of_three(tmp_path):
    paths = [files.worker_file(tmp_path, KEYS[0], rank, "npz") for rank in range(3)]
    for rank, path in enumerate(paths):
        write_own(path, rank)
    shared = files.shared_file(tmp_path, KEYS[0], "npz")
    shared.write_text("")
    digests = {path.name: files.Digest.of(path) for path in (*paths, shared)}
    files.complete(tmp_path, KEYS[0], 3, 7, ("npz",), digests)
    return paths


def test_the_files_of_other_workers_are_read_one_by_one(of_three):
    face = One()
    assert checkpoints.load(face, of_three[0].parent, previous=False) == "extra"
    _, own = face.taken
    saved = [np.random.default_rng(rank).standard_normal((3, SIZE)).astype(np.float32) for rank in range(3)]
    served = [np.concatenate([one[2, i : i + 4] for one in saved]) for i in (0, 4)]
    w, late = sum(one[0] for one in saved) / 3 + served[0], (saved[1][1] + saved[2][1]) / 3 + served[1]
    np.testing.assert_allclose(own["feedback"].pop("w"), w, rtol=1e-5)
    np.testing.assert_allclose(own["feedback"].pop("late"), late, rtol=1e-5)
    assert own == {"feedback": {}, "divisor": None, "served": {}, "encodes": None, "gradients": None, "number": 0}


@pytest.mark.parametrize("damaged", range(3))
def test_a_damaged_file_of_any_of_them_changes_nothing(of_three, damaged):
    face, path = One(), of_three[damaged]
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=rf"worker 0: .*{path.name} is damaged"):
        checkpoints.load(face, path.parent, previous=False)
    assert face.taken == []
