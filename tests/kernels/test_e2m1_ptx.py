"""What the E2M1-K32 kernels' PTX computes, evaluated on the CPU: the inline snippets for every input, and the decode
kernel whole, which Triton's interpreter cannot run (Gluon, inline PTX).

The evaluator knows the instructions that these kernels compile to (PTX ISA 8.8) and refuses any other.  One thread
block is one numpy vector of threads; branches must be uniform.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
np = pytest.importorskip("numpy")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "patches/sglang/files/sglang/srt/layers/moe"))

from e2m1_k32 import gemm  # noqa: E402
from e2m1_k32.layout import DECODE_ORDER, E2M1_VALUES, dequantize, reorder  # noqa: E402
from e2m1_k32.reference import random_experts, relative_error  # noqa: E402
from e2m1_k32.tiles import DecodeTile  # noqa: E402

_spec = importlib.util.spec_from_file_location("e2m1_sass", ROOT / "tests/kernels/test_e2m1_sass.py")
sass = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sass)

SEGMENT = 40  # log2 of the address distance of two buffers


def f32(bits):
    return bits.astype(np.uint32).view(np.float32)


def bits32(values):
    return np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)


def nearest_bf16(values):
    """Float32 -> BF16 bits, to nearest even (finite values)."""
    b = bits32(values)
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16


def signed(bits, width):
    return (bits.astype(np.uint64) << np.uint64(64 - width)).view(np.int64) >> (64 - width)


class Ptx:
    """Evaluates PTX text for ``lanes`` threads; ``memory`` holds uint8 buffers, buffer i at address i << SEGMENT."""

    def __init__(self, text, lanes, memory=(), params=(), block=0):
        self.lanes, self.memory, self.params = lanes, memory, params
        self.regs = {"%ctaid.x": self.full(block), "%tid.x": np.arange(lanes, dtype=np.uint64)}
        lines = [line.split("//")[0].strip() for line in text[text.index("{") + 1 :].splitlines()]
        self.lines = [line.rstrip(";") for line in lines if line and line[0] not in ".{}"]
        self.labels = {line[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":")}

    def full(self, value):
        return np.full(self.lanes, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def value(self, name):
        if name in self.regs:
            return self.regs[name]
        if name.startswith("0f"):
            return self.full(int(name[2:], 16))
        return self.full(int(name, 0))

    def run(self):
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            if line.endswith(":"):
                continue
            guard, op, rest = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", line).groups()
            mask = np.ones(self.lanes, bool)
            if guard:
                mask = self.regs[guard.lstrip("!")].astype(bool) ^ guard.startswith("!")
            if op == "ret":
                return self
            if op == "bra":
                assert mask.all() or not mask.any(), "a branch that is not uniform"
                at = self.labels[rest] if mask.any() else at
                continue
            operands = [
                [x.strip() for x in part.strip("{} ").split(",")]
                for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\s]+", rest)
            ]
            self.step(op.split("."), operands, mask)
        return self

    def step(self, op, operands, mask):
        name, kind = op[0], op[-1]
        width = {"pred": 1, "bf16x2": 32}.get(kind) or int(kind[1:])
        if name == "ld" and op[1] == "param":
            index = int(re.search(r"_param_(\d+)", operands[1][0])[1])
            return self.put(operands[0], [self.full(self.params[index])], mask)
        if name in ("ld", "st"):
            where = operands[name == "ld"][0].strip("[] ").split("+")
            address = self.value(where[0].strip()) + np.uint64(int(where[1]) if len(where) > 1 else 0)
            names = operands[name == "st"]
            parts = [address + np.uint64(i * width // 8) for i in range(len(names))]
            if name == "st":
                return [self.store(a, self.value(n), width, mask) for a, n in zip(parts, names, strict=True)]
            return self.put(names, [self.load(a, width, mask) for a in parts], mask)
        if name == "mma":
            assert ".".join(op) == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", op
            return self.put(operands[0], self.mma(*([self.value(r) for r in group] for group in operands[1:])), mask)
        if name == "mov":
            source = [self.value(r) for r in operands[1]]
            whole = sum(s << np.uint64(i * width // len(source)) for i, s in enumerate(source))
            piece = width // len(operands[0])
            parts = [whole >> np.uint64(i * piece) for i in range(len(operands[0]))]
            return self.put(operands[0], [p & np.uint64(2**piece - 1) for p in parts], mask)
        args = [self.value(o[0]) for o in operands[1:]]
        wide = "wide" in op
        if kind[0] == "s" and name not in ("shl", "selp"):
            args = [a if wide and i == 2 else signed(a, width) for i, a in enumerate(args[:3])]
        if kind == "f32" and name != "cvt":
            args = [f32(a) for a in args]
        out = {
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "shl": lambda a, b: a << b,
            "shr": lambda a, b: a >> b,
            "bfe": lambda a, b, c: a >> b & ((np.uint64(1) << c) - np.uint64(1)),
            "add": lambda a, b: a + b,
            "mul": lambda a, b: self.bf16x2(a, b) if kind == "bf16x2" else a * b,
            "mad": lambda a, b, c: (a * b).astype(np.uint64) + c,
            "selp": lambda a, b, c: np.where(c.astype(bool), a, b),
            "setp": lambda a, b: {"lt": a < b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[op[1]],
            "cvt": lambda a: {"s64.s32": a, "rn.bf16.f32": nearest_bf16(f32(a))}[".".join(op[1:])],
            "lop3": lambda a, b, c, table: self.lop3(a, b, c, int(table[0])),
            "ex2": lambda a: np.exp2(a),
            "div": lambda a, b: a / b,
        }[name](*args)
        if kind == "f32" and name not in ("cvt", "setp"):
            out = bits32(out)
        result = 64 if wide or name == "cvt" else width
        limit = np.uint64(2**result - 1) if name != "setp" else np.uint64(1)
        return self.put(operands[0], [np.asarray(out).astype(np.uint64) & limit], mask)

    def put(self, names, values, mask):
        for name, value in zip(names, values, strict=True):
            old = self.regs.get(name, np.zeros(self.lanes, np.uint64))
            self.regs[name] = np.where(mask, value, old)

    @staticmethod
    def lop3(a, b, c, table):
        out = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    @staticmethod
    def bf16x2(a, b):
        halves = []
        for shift in (0, 16):
            x, y = ((v >> np.uint64(shift) & np.uint64(0xFFFF)) << np.uint64(16) for v in (a, b))
            halves.append(nearest_bf16(f32(x) * f32(y)))
        return halves[0] | halves[1] << np.uint64(16)

    def cells(self, address, width, mask):
        """(buffer, byte offsets [active lanes, bytes]) of an access; outside its buffer is an error."""
        address = address[mask]
        (segment,) = set((address >> np.uint64(SEGMENT)).tolist())
        offset = (address & np.uint64(2**SEGMENT - 1)).astype(np.int64)
        buffer = self.memory[segment]
        assert offset.max() + width // 8 <= len(buffer) and not (offset % (width // 8)).any()
        return buffer, offset[:, None] + np.arange(width // 8)

    def load(self, address, width, mask):
        out = np.zeros(self.lanes, np.uint64)
        if mask.any():
            buffer, at = self.cells(address, width, mask)
            out[mask] = np.ascontiguousarray(buffer[at]).view(f"u{width // 8}")[:, 0]
        return out

    def store(self, address, value, width, mask):
        if mask.any():
            buffer, at = self.cells(address, width, mask)
            buffer[at] = value[mask].astype(f"u{width // 8}")[:, None].view(np.uint8)

    def mma(self, a, b, c):
        """m16n8k16: lane 4 g + t holds A rows g, g + 8, columns 2 t.. and 2 t + 8..; B rows 2 t.., column g."""
        warps = self.lanes // 32
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        warp, lane = np.divmod(np.arange(self.lanes), 32)
        g, t = lane // 4, lane % 4
        for half in (0, 1):

            def get(register, half=half):
                return f32((register >> np.uint64(16 * half) & np.uint64(0xFFFF)) << np.uint64(16))

            for i in range(4):
                left[warp, g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = get(a[i])
            for i in range(2):
                right[warp, 2 * t + half + 8 * i, g] = get(b[i])
        product = left @ right
        return [bits32(product[warp, g + 8 * (i // 2), 2 * t + i % 2] + f32(c[i])) for i in range(4)]


def snippet(text, inputs, outputs):
    """Registers ``$0..`` of an inline snippet after its run over all lanes of ``inputs`` ({number: uint64 array})."""
    machine = Ptx(text, len(next(iter(inputs.values()))))
    machine.regs |= {f"${n}": v for n, v in inputs.items()}
    machine.run()
    return [machine.regs[f"${n}"] for n in outputs]


E2M1 = np.array(E2M1_VALUES)
SCALES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def bf16(bits):
    return f32(bits << np.uint64(16)).astype(np.float64)


def test_bf16_snippets_give_every_code_times_every_scale_in_place():
    """All scales x words in which one code takes every value and the others are its complement."""
    scale, place, code = (v.ravel() for v in np.meshgrid(np.arange(0x7F), np.arange(8), np.arange(16), indexing="ij"))
    codes = np.where(np.arange(8) == place[:, None], code[:, None], 15 - code[:, None])
    word = sum(codes[:, i].astype(np.uint64) << np.uint64(4 * i) for i in range(8))
    (lifted,) = snippet(gemm.SCALE_BF16.value, {1: scale.astype(np.uint64)}, [0])
    assert (bf16(lifted & np.uint64(0xFFFF)) == SCALES[scale] * 2.0**117).all() and (lifted >> np.uint64(16)).all() == (
        lifted & np.uint64(0xFFFF)
    ).all()
    out = snippet(gemm.DEQUANT_BF16.value, {8: word, 9: lifted}, range(8))
    for i in range(8):
        assert (bf16(out[i]) == E2M1[codes[:, i]] * SCALES[scale] * 2.0**-9).all(), i


def test_e4m3_snippet_unpacks_every_byte_in_place():
    place, byte = (v.ravel() for v in np.meshgrid(np.arange(4), np.arange(256), indexing="ij"))
    packed = np.where(np.arange(4) == place[:, None], byte[:, None], 255 - byte[:, None]).astype(np.uint8)
    out = snippet(gemm._UNPACK_E4M3.value, {2: packed.view(np.uint32)[:, 0].astype(np.uint64)}, range(2))
    for codes, word in ((packed & 15, out[0]), (packed >> 4, out[1])):
        values = torch.from_numpy(word.astype(np.uint32).view(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        assert (values.reshape(-1, 4) * 2.0**6 == E2M1[codes]).all()


HIDDEN, INTERMEDIATE, TOP_K, FAR = 512, 256, 2, 16500
ROW = 2**30  # elements between two rows of activations: the third begins beyond 2^31


@pytest.fixture(scope="module")
def layer():
    """Four random experts; as the last of a layer whose bytes before them pass 2^31, in memory never touched."""
    few = random_experts(4, HIDDEN, INTERMEDIATE, "cpu", torch.Generator().manual_seed(3))
    assert (FAR - 4) * few.w13[0].nbytes > 2**31
    far = []
    for tensor in (few.w13, few.w13_scale, few.w13_global, few.w2, few.w2_scale, few.w2_global):
        raw = tensor.view(torch.uint8).numpy().reshape(4, -1)
        buffer = np.zeros((FAR, raw.shape[1]), np.uint8)
        buffer[-4:] = raw
        far.append(buffer.reshape(-1))
    return few, far


def spread(x):
    """BF16 rows [T, K] as a buffer with ROW elements from row to row."""
    buffer = np.zeros(((len(x) - 1) * ROW + x.shape[1]) * 2, np.uint8)
    for i, row in enumerate(x.view(torch.uint8).numpy()):
        buffer[i * ROW * 2 :][: row.size] = row
    return buffer


@pytest.mark.parametrize(("arch", "m", "tile"), [(90, 8, DecodeTile(64, 4)), (120, 16, DecodeTile(128, 8))], ids=str)
@pytest.mark.parametrize("part", ["up", "down"])
def test_decode_kernel(layer, part, arch, m, tile, monkeypatch):
    """Two routes of one expert and one of another, blocks of no expert and beyond the end, far offsets everywhere."""
    few, (w13, s13, g13, w2, s2, g2) = layer
    monkeypatch.setattr(sass, "HIDDEN", HIDDEN)
    monkeypatch.setattr(sass, "INTERMEDIATE", INTERMEDIATE)
    gated = part == "up"
    n, k, top_k = (2 * INTERMEDIATE, HIDDEN, 8) if gated else (HIDDEN, INTERMEDIATE, 1)  # as sass compiles it
    g = torch.Generator().manual_seed(5)
    routes = [row * top_k for row in (0, 2, 1)]
    x = torch.randn(3, k, generator=g).bfloat16()
    weights = torch.rand(24, generator=g)
    valid = routes[1] + 1
    sorted_ids = np.full((4, m), valid, np.int32)
    sorted_ids[0, :2], sorted_ids[1, 0], sorted_ids[2:, 0] = routes[:2], routes[2], 0
    out_row = ROW // top_k
    columns = n // 2 if gated else n
    out = np.zeros((2 * ROW + columns) * 2, np.uint8)
    memory = [
        np.zeros(1, np.uint8),
        spread(reorder(x, DECODE_ORDER)),
        *((w13, s13, g13) if gated else (w2, s2, g2)),
        out,
        weights.numpy().view(np.uint8),
        sorted_ids.reshape(-1).view(np.uint8),
        np.array([FAR - 1, FAR - 3, -1, FAR - 2], np.int32).view(np.uint8),
        np.array([3 * m], np.int32).view(np.uint8),
    ]
    pointers = [i << SEGMENT for i in range(1, len(memory))]
    ptx = sass.compile_kernel(arch, False, gated, m, tile).asm["ptx"]
    for block in range(4 * (n // tile.n)):
        Ptx(ptx, 32 * tile.warps, memory, [*pointers, valid, ROW, out_row, 0, 0], block).run()
    for route, expert in zip(routes, (3, 3, 1), strict=True):
        dense = {"up": (few.w13, few.w13_scale, few.w13_global), "down": (few.w2, few.w2_scale, few.w2_global)}[part]
        y = x[route // top_k].double() @ dequantize(*(t[expert] for t in dense)).T
        if gated:
            gate, up = y.chunk(2)
            y = reorder(torch.nn.functional.silu(gate) * up, DECODE_ORDER)
        else:
            y = y * weights[route].double()
        got = torch.from_numpy(out[route * out_row * 2 :][: columns * 2].copy()).view(torch.bfloat16)
        assert relative_error(got, y.bfloat16()) <= 1e-3
