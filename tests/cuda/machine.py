"""Runs the PTX that the CUDA kernels compile to, on a machine without a GPU: what Numba's simulator cannot try.

All threads of a launch go through the program together, as columns of NumPy arrays; of threads that have parted, those
with the lowest instruction go first, so that they meet again. Memory is the process's own. Stricter than a GPU: an
access outside of the tensors that the launch's table describes, one that is not aligned, a load as of constants from
where the launch writes, two threads that store to one place, a load from shared memory of what another warp has stored
with no barrier since, a warp operation that lanes are missing from, and a barrier that threads are missing from are
errors. Source: PTX ISA 8.8.
"""

import ctypes
import re
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from horovod_onebit import codecs
from horovod_onebit.kernels.cuda.loops import WIDTH, Column
from horovod_onebit.kernels.reference import CHUNK, num_blocks

TYPES = {"f16": "f2", "f32": "f4", "f64": "f8", "pred": "?"}
TYPES |= {
    f"{ours}{8 * n}": f"{numpys}{n}" for ours, numpys in (("s", "i"), ("u", "u"), ("b", "u")) for n in (1, 2, 4, 8)
}
WARP = 32
FIRST_ADDRESS = 1 << 16
MEMORY = np.frombuffer((ctypes.c_uint8 * ((1 << 47) - FIRST_ADDRESS)).from_address(FIRST_ADDRESS), np.uint8)
WAITING, DONE = 1 << 30, 1 << 31

TENSORS = [c for c in Column if Column.GRADIENT <= c <= Column.NEW_RESIDUAL]
STATE = (Column.MOMENTUM, Column.VARIANCE, Column.WEIGHT)
WRITTEN = {
    "encode": (Column.NEW_RESIDUAL, Column.OUT),
    "restore": (Column.RESIDUAL,),
    "apply": STATE,
    "move": STATE,
}

COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


class MachineError(Exception):
    """What a GPU would not do, or not the same way each time."""


def _shift(kind):
    def shift(a, b):
        width = 8 * a.dtype.itemsize
        moved = kind(a, np.minimum(b, width - 1).astype(a.dtype))
        return np.where(b < width, moved, -(a < 0).astype(a.dtype) if a.dtype.kind == "i" else a.dtype.type(0))

    return shift


def _divide(a, b):
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "u":
        return a // b
    return np.where((a < 0) != (b < 0), -(np.abs(a) // np.abs(b)), np.abs(a) // np.abs(b))


def _fma(a, b, c):
    product = a * b  # of float32 widened, as it always is here, and so exact
    if not np.array_equal(product.astype(np.longdouble), a.astype(np.longdouble) * b, equal_nan=True):
        raise MachineError("fma of a product that is not exact")
    return product + c


def _insert(a, b, start, length):
    mask = ((np.uint64(1) << length.astype("u8")) - np.uint64(1)) << start.astype("u8")
    return ((b & ~mask) | ((a << start.astype("u8")) & mask)).astype(b.dtype)


OPERATIONS = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "bfi": _insert, "div": _divide, "fma": _fma, "max": np.fmax,
    "min": np.fmin, "mul": np.multiply, "neg": np.negative, "not": np.invert, "or": np.bitwise_or,
    "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "sqrt": np.sqrt, "sub": np.subtract,
    "xor": np.bitwise_xor,
}  # fmt: skip


class Program:
    """One kernel. ``counts`` says how many instructions a warp has executed, by name, over all launches."""

    def __init__(self, ptx):
        body = ptx[ptx.index("{") + 1 : ptx.rindex("}")]
        shared = re.findall(r"\.shared \.align 8 \.b8 _cudapy_smem_\d+\[(\d+)\]", ptx)
        if len(shared) > 1:
            raise MachineError(f"{len(shared)} arrays in shared memory; this machine knows one")
        self.shared = int(shared[0]) if shared else 0
        self.classes = {name: TYPES[kind] for kind, name in re.findall(r"\.reg \.(\w+)\s+%(\w+)<\d+>;", body)}
        self.code, self.labels = [], {}
        for line in body.splitlines():
            text = line.split("//")[0].strip().rstrip(";").strip()
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.code)
            elif text and not text.startswith("."):
                self.code.append(self._parse(text))
        self.counts = Counter()

    @staticmethod
    def _parse(text):
        guard = re.match(r"@(!?)%(\w+)\s+", text)
        text = text[guard.end() :] if guard else text
        name, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        return guard and (guard[1], guard[2]), name.strip().split("."), operands

    def launch(self, blocks, threads, parameters, reads, writes):
        """Run ``blocks`` of ``threads``, which may read and write these bytes, as (first, one beyond the last)."""
        _Launch(self, blocks, threads, parameters, reads, writes).run()


def _within(places, address, width):
    """Which addresses are those of ``width`` bytes inside of one of ``places``, which are sorted."""
    found = np.searchsorted(places[:, 0], address, side="right") - 1
    return (found >= 0) & (address + max(width, 1) <= places[found, 1])


class _Launch:
    def __init__(self, program, blocks, threads, parameters, reads, writes):
        self.program, self.parameters = program, parameters
        self.count, self.threads = blocks * threads, threads
        self.reads, self.writes = np.array(sorted(reads)), np.array(sorted(writes))
        numbers = np.arange(self.count)
        self.special = {"ctaid": numbers // threads, "tid": numbers % threads, "ntid": np.full(self.count, threads)}
        self.shared = np.zeros((blocks, program.shared), np.uint8)
        self.writers = np.full((blocks, program.shared // 8), -1)  # warps, since the last barrier
        self.registers = {}
        self.at = np.zeros(self.count, np.int64)
        self.after_barrier = np.zeros(self.count, np.int64)

    def run(self):
        code = self.program.code
        with np.errstate(all="ignore"):
            while True:
                now = self.at.min()
                if now == DONE:
                    return
                if now == WAITING:
                    self._release()
                    continue
                here = np.flatnonzero(self.at == now)
                if now == len(code):
                    self.at[here] = DONE
                    continue
                self._execute(here, *code[now])

    def _release(self):
        waiting = (self.at == WAITING).reshape(-1, self.threads)
        if (waiting.any(axis=1) & ~waiting.all(axis=1)).any():
            raise MachineError("a barrier that threads of the block never come to")
        barriers = self.after_barrier.reshape(-1, self.threads)[waiting.any(axis=1)]
        if (barriers != barriers[:, :1]).any():
            raise MachineError("threads of a block wait at different barriers")
        self.at = np.where(self.at == WAITING, self.after_barrier, self.at)
        self.writers[waiting.any(axis=1)] = -1

    def _execute(self, here, guard, name, operands):
        self.program.counts[".".join(name)] += len(np.unique(here // WARP))
        self.at[here] += 1
        if guard:
            taken = self._register(guard[1])[here] != (guard[0] == "!")
            here = here[taken]
        if name[0] == "bra":
            self.at[here] = self.program.labels[operands[0]]
        elif name[0] == "ret":
            self.at[here] = DONE
        elif name[0] == "bar":
            self.after_barrier[here] = self.at[here]
            self.at[here] = WAITING
        elif name[0] in ("ld", "st"):
            self._access(here, name, operands)
        else:
            self._compute(here, name, operands)

    def _register(self, name):
        if name not in self.registers:
            kind = self.program.classes[re.match(r"[a-z]+", name)[0]]
            self.registers[name] = np.zeros(self.count, kind)
        return self.registers[name]

    def _read(self, here, operand, kind):
        """The bits of an operand as numbers of ``kind``."""
        kind = np.dtype(kind)
        if operand.startswith("%"):
            special = operand[1:].removesuffix(".x")
            found = self.special.get(special)
            found = self._register(operand[1:])[here] if found is None else found[here].astype(kind)
            if found.dtype.itemsize != kind.itemsize:
                raise MachineError(f"{operand} is {found.dtype} and is read as {kind}")
            return found.view(kind)
        if operand.startswith(("0f", "0d")):
            return np.full(len(here), int(operand[2:], 16), f"u{kind.itemsize}").view(kind)
        if operand.startswith("_cudapy_smem"):
            return np.zeros(len(here), kind)
        value = int(operand, 0)
        return np.full(len(here), value & ((1 << 8 * kind.itemsize) - 1), f"u{kind.itemsize}").view(kind)

    def _write(self, here, operand, values):
        register = self._register(operand[1:])
        if register.dtype.itemsize < values.dtype.itemsize:
            raise MachineError(f"{operand} is {register.dtype} and gets {values.dtype}")
        if register.dtype.itemsize > values.dtype.itemsize:  # loads widen
            values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{register.dtype.itemsize}")
        register[here] = values.view(register.dtype)

    def _access(self, here, name, operands):
        space, kind, vector = name[1], np.dtype(TYPES[name[-1]]), 4 if "v4" in name else 1
        place, value = operands if name[0] == "st" else operands[::-1]
        base, _, offset = place.strip("[]").partition("+")
        if space == "param":
            number = self.parameters[int(base.rpartition("_")[2])]
            self._write(here, value, np.full(len(here), number, kind))
            return
        address = self._read(here, base, "i8") + int(offset or 0)
        if (address % (vector * kind.itemsize)).any():
            raise MachineError(f"{'.'.join(name)}: an address is not a multiple of {vector * kind.itemsize}")
        names = value.strip("{}").replace(" ", "").split(",")
        if space == "global":
            self._check(address, vector * kind.itemsize, name)
            memory, index = MEMORY.view(kind), (address - FIRST_ADDRESS) // kind.itemsize
        else:
            memory = self.shared.view(kind)
            index = self.special["ctaid"][here], address // kind.itemsize
            self._follow(here, (index[0], address // 8), store=name[0] == "st")
        for i, register in enumerate(names):
            where = index + i if space == "global" else index
            if name[0] == "ld":
                self._write(here, register, memory[where])
            else:
                memory[where] = self._narrowed(here, register, kind)

    def _follow(self, here, places, *, store):
        """Notice who stores to shared memory, and who loads too early."""
        if store:
            self.writers[places] = here // WARP
        elif ((self.writers[places] >= 0) & (self.writers[places] != here // WARP)).any():
            raise MachineError("loads what another warp has stored, with no barrier between them")

    def _narrowed(self, here, register, kind):
        """What a store or a conversion takes from a register, which may be wider."""
        if not register.startswith("%") or register[1:].partition(".")[0] in self.special:
            return self._read(here, register, kind)
        found = self._register(register[1:])[here]
        return found.view(f"u{found.dtype.itemsize}").astype(f"u{kind.itemsize}").view(kind)

    def _check(self, address, width, name):
        if name[0] == "st":
            if not _within(self.writes, address, width).all():
                raise MachineError("writes outside of what the launch is about")
            if len(np.unique(address)) < len(address):
                raise MachineError("threads write to one place")
        elif not _within(self.reads, address, width).all():
            raise MachineError("reads outside of what the launch is about")
        elif "nc" in name and _within(self.writes, address, 0).any():
            raise MachineError("reads what the launch writes as if it were constant")

    def _compute(self, here, name, operands):
        target, *sources = operands
        if name[0] == "setp":
            a, b = (self._read(here, s, TYPES[name[2]]) for s in sources)
            unordered = name[1].endswith("u") and len(name[1]) == 3
            value = COMPARE[name[1][:2]](a, b)
            if unordered:
                value |= np.isnan(a) | np.isnan(b)
        elif name[0] == "selp":
            a, b = (self._read(here, s, TYPES[name[1]]) for s in sources[:2])
            value = np.where(self._register(sources[2][1:])[here], a, b)
        elif name[0] == "cvt":
            value = self._narrowed(here, sources[0], np.dtype(TYPES[name[-1]])).astype(TYPES[name[-2]])
        elif name[0] == "mov":
            self._move(here, TYPES[name[1]], target, sources)
            return
        elif name[0] == "shfl":
            self._shuffle(here, name, target, sources)
            return
        else:
            value = self._arithmetic(here, name, sources)
        self._write(here, target, value)

    def _arithmetic(self, here, name, sources):
        kind = TYPES[name[-1]]
        kinds = [kind] * len(sources)
        if name[0] in ("shl", "shr"):
            kinds[1] = "u4"
        if name[0] == "bfi":
            kinds[2:] = ["u4", "u4"]
        values = [self._read(here, s, k) for s, k in zip(sources, kinds, strict=True)]
        if "wide" in name:
            values = [v.astype(f"{v.dtype.kind}{2 * v.dtype.itemsize}") for v in values]
        return OPERATIONS[name[0]](*values)

    def _move(self, here, kind, target, sources):
        """Between registers; ``{a, b}`` is a wide register's two halves, the lower one first."""
        if target.startswith("{"):
            halves = self._read(here, sources[0], kind).view(f"u{np.dtype(kind).itemsize // 2}").reshape(-1, 2)
            for i, half in enumerate(target.strip("{}").split(",")):
                self._write(here, half.strip(), np.ascontiguousarray(halves[:, i]))
        elif sources[0].startswith("{"):
            parts = [
                self._read(here, half.strip(), f"u{np.dtype(kind).itemsize // 2}")
                for half in sources[0].strip("{}").split(",")
            ]
            self._write(here, target, np.stack(parts, axis=1).reshape(-1).view(kind))
        else:
            self._write(here, target, self._read(here, sources[0], kind))

    def _shuffle(self, here, name, target, sources):
        """shfl.sync.bfly: the value of the lane whose number differs by a mask; all lanes of a warp must be there."""
        value, mask, clamp, members = (self._read(here, s, "u4") for s in sources)
        if name[2] != "bfly" or (clamp != WARP - 1).any() or (members != 0xFFFFFFFF).any():
            raise MachineError(f"a shuffle of another kind: {'.'.join(name)}")
        if not np.isin(here ^ mask.astype(here.dtype), here).all() or len(here) % WARP:
            raise MachineError("a shuffle that lanes of the warp are missing from")
        everyone = np.zeros(self.count, "u4")
        everyone[here] = value
        self._write(here, target.split("|")[0], everyone[here ^ mask.astype(here.dtype)])


def read(folder):
    """The programs in ``folder``, one file each, by name."""
    return {path.stem: Program(path.read_text()) for path in Path(folder).glob("*.ptx")}


def install(folder):
    """Let the launcher run the PTX in ``folder`` instead of the simulator."""
    from horovod_onebit.kernels import cuda
    from horovod_onebit.kernels.cuda import launch

    programs = read(folder)
    cuda.TILE_THREADS = 256

    def configured(program, blocks, threads, stream):
        return lambda table, rows: run(programs, program.name, blocks, threads, table, rows)

    launch._configured = configured
    return programs


def drive(folder, driver):
    """Let the kernels that Numba launches by ``driver``, the library of driver.c, be run from the PTX in ``folder``."""
    programs = read(folder)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))
    def launch(name, blocks, threads, arguments):
        try:
            length, rest = re.search(r"5loops(\d+)(\w+)", name.decode()).groups()
            table, rows = (ctypes.c_int64.from_address(arguments[i]).value for i in range(2))
            run(programs, rest[: int(length)], blocks, threads, table, rows)
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    drive.kept = launch, ctypes.CDLL(driver)
    drive.kept[1].launch_by(launch)
    return programs


def run(programs, name, blocks, threads, table, rows):
    """One launch, whose table says which memory it is about."""
    address = table - FIRST_ADDRESS
    known = MEMORY[address : address + 8 * WIDTH * rows].view(np.int64).reshape(rows, WIDTH)
    described = [_described(name, row) for row in known]
    reads = [(table, table + 8 * WIDTH * rows), *(r for found in described for r in found[0])]
    writes = [w for found in described for w in found[1]]
    programs[name].launch(blocks, threads, (table, rows), reads, writes)


def _described(name, row):
    """The memory that a row of a launch's table is about: what may be read, and what may be written."""
    loop, size = name.partition("_")[0], int(row[Column.SIZE])
    if loop == "pick":
        index = MEMORY[row[Column.WEIGHT] - FIRST_ADDRESS :][: 8 * size].view(np.int64)
        out = (row[Column.OUT], row[Column.OUT] + 4 * size)
        seen = [(row[Column.ROWS], row[Column.ROWS] + 4 * (index.max() + 1))]
        return [*seen, (row[Column.WEIGHT], row[Column.WEIGHT] + 8 * size), out], [out]
    if loop == "mean":
        starts = [row[column] for column in (Column.OUT, Column.ROWS)]
        out, rows = ((start, start + 4 * size * n) for start, n in zip(starts, (1, row[Column.WORKERS]), strict=True))
        return [out, rows], [out]
    codec = _codec_of(name.removeprefix(f"{loop}_").partition("_horovod")[0])
    widths = dict.fromkeys(TENSORS, 4 * size)
    if row[Column.KIND]:
        widths[Column.GRADIENT] = 2 * size
    block_size = int(row[Column.BLOCK_SIZE])
    if loop == "encode":
        widths[Column.OUT] = codec.size(size, block_size)
    elif loop == "sums":
        widths[Column.OUT] = 16 * num_blocks(size, CHUNK)
    places = {column: (row[column], row[column] + width) for column, width in widths.items() if row[column]}
    starts = [row[Column.ROWS] + i * row[Column.STRIDE] for i in range(row[Column.WORKERS])]
    messages = [(start, start + codec.size(size, block_size)) for start in starts]
    writes = [place for column, place in places.items() if column in WRITTEN.get(loop, (Column.OUT,))]
    return [*places.values(), *messages], writes


def _codec_of(text):
    """That of a program's name; None if it has none."""
    return codecs.find(text) if text in codecs.names() else None
