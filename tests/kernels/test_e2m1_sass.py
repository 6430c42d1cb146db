"""What the E2M1-K32 kernels compile to for sm_90 and sm_120, read from the machine code.  No GPU is needed.

Every tile that ``pick_tiles`` can choose is cross-compiled (Triton's own ptxas and nvdisasm) for the
published sizes.  Compilation runs in a child process (this file as a script), because kernels imported for the
interpreter cannot be compiled.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "patches/sglang/files/sglang/srt/layers/moe"
SHARED_LIMIT = {90: 227 * 1024, 120: 99 * 1024}
HIDDEN, INTERMEDIATE = 4096, 1024


def kernels() -> dict[str, tuple]:
    """name -> (arch, fp8, gated, rows per block, tile) of every table entry."""
    from e2m1_k32.tiles import DECODE_TILES, FP8_TILES, W4A16_TILES

    found = {}
    for arch in (90, 120):
        for label, table in (("w4a16", W4A16_TILES), ("fp8", FP8_TILES), ("decode", DECODE_TILES)):
            for _, tiles in table[arch]:
                for part, tile in (("up", tiles.up), ("down", tiles.down)):
                    found[f"sm_{arch} {label} {part} m{tiles.m} {tile}"] = (
                        arch,
                        label == "fp8",
                        part == "up",
                        tiles.m,
                        tile,
                    )
    return found


def compile_kernel(arch: int, fp8: bool, gated: bool, m: int, tile):
    import triton
    from e2m1_k32.decode import decode_gemm_kernel
    from e2m1_k32.gemm import grouped_gemm_ahead_kernel, grouped_gemm_kernel
    from e2m1_k32.tiles import DecodeTile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    n, k = (2 * INTERMEDIATE, HIDDEN) if gated else (HIDDEN, INTERMEDIATE)
    const = {"N": n, "K": k, "TOP_K": 8 if gated else 1, "GATED": gated, "BLOCK_M": m, "BLOCK_N": tile.n}
    options = {"num_warps": tile.warps}
    if isinstance(tile, DecodeTile):
        kernel, source = decode_gemm_kernel, GluonASTSource
    else:
        kernel, source = grouped_gemm_ahead_kernel if tile.ahead else grouped_gemm_kernel, ASTSource
        const |= {"FP8": fp8, "PERMUTED": gated and not fp8, "BLOCK_K": tile.k, "USE_ASM": True}
        options |= {"num_stages": tile.stages} | ({"maxnreg": tile.regs} if tile.regs else {})
    types = {
        "a_ptr": "*fp8e4nv" if fp8 else "*bf16", "a_scale_ptr": "*fp32", "w_ptr": "*u8", "ws_ptr": "*u8",
        "wg_ptr": "*fp32", "c_ptr": "*bf16", "topk_w_ptr": "*fp32", "sorted_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32", "num_post_pad_ptr": "*i32", "num_valid": "i32", "stride_am": "i32",
        "stride_cm": "i32",
    }  # fmt: skip
    signature = {name: "constexpr" if name in const else types[name] for name in kernel.arg_names}
    aligned = [
        i for i, t in enumerate(signature.values()) if t.startswith("*") or kernel.arg_names[i].startswith("stride")
    ]
    src = source(
        kernel, signature=signature, constexprs=const, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    return triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)


def opcodes(cubin: bytes) -> Counter:
    """Machine instructions of a cubin by full opcode."""
    import triton

    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([nvdisasm, "-c", f.name], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", text, re.M))


def report() -> dict:
    result = {}
    for name, spec in kernels().items():
        kernel = compile_kernel(*spec)
        ops = opcodes(kernel.asm["cubin"])
        result[name] = {
            "matrix": {o: n for o, n in ops.items() if re.match(r"[HQ]G?MMA", o)},
            "local": sum(n for o, n in ops.items() if o.split(".")[0] in ("LDL", "STL")),
            "shared": kernel.metadata.shared,
            "instructions": sum(ops.values()),
        }
    return result


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(PACKAGE_DIR)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def select(compiled: dict, *words: str) -> dict:
    chosen = {name: r for name, r in compiled.items() if all(w in name.split() for w in words)}
    assert chosen, f"no kernel matches {words}"
    return chosen


def test_sm120_fp8_uses_fp8_tensor_cores(compiled):
    for name, r in select(compiled, "sm_120", "fp8").items():
        assert r["matrix"], name
        assert all(re.fullmatch(r"QMMA\.16832\.F32\.E4M3\.E4M3", o) for o in r["matrix"]), (name, r["matrix"])


@pytest.mark.parametrize("label", ["w4a16", "decode"])
def test_sm120_w4a16_uses_bf16_tensor_cores(compiled, label):
    for name, r in select(compiled, "sm_120", label).items():
        assert set(r["matrix"]) == {"HMMA.16816.F32.BF16"}, (name, r["matrix"])


def test_sm120_does_not_spill(compiled):
    assert not {name: r["local"] for name, r in select(compiled, "sm_120").items() if r["local"]}


def test_sm90_ahead_kernel_does_not_spill(compiled):
    """Reading ahead pays only in registers that are there."""
    assert not {name: r["local"] for name, r in select(compiled, "sm_90", "ahead=True)").items() if r["local"]}


def test_sm90_spills_stay_rare(compiled):
    """Capped registers let two blocks share an SM; the few spills that this costs were timed with the tiles."""
    for name, r in select(compiled, "sm_90").items():
        assert r["local"] <= 0.03 * r["instructions"], (name, r["local"], r["instructions"])


@pytest.mark.parametrize("arch", [90, 120])
def test_shared_memory_fits_a_block(compiled, arch):
    for name, r in select(compiled, f"sm_{arch}").items():
        assert r["shared"] <= SHARED_LIMIT[arch], name


def test_decode_kernel_keeps_weights_out_of_shared_memory(compiled):
    for name, r in select(compiled, "decode").items():
        assert r["local"] == 0, name
        assert r["shared"] <= 1024, (name, r["shared"])


def test_sm90_uses_warpgroup_instructions(compiled):
    for label, opcode in (("fp8", "QGMMA"), ("w4a16", "HGMMA")):
        for name, r in select(compiled, "sm_90", label).items():
            assert r["matrix"] and all(o.startswith(opcode) for o in r["matrix"]), (name, r["matrix"])


if __name__ == "__main__":
    json.dump(report(), sys.stdout, indent=1)
