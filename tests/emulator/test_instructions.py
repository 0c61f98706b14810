"""Ordinary instructions, each compared with NumPy; how lanes, warps and blocks run beside each
other; and what a kernel is told when it goes wrong. They run with --emulate alone."""

from __future__ import annotations

import fractions
import re

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: By letter: the register's constraint in inline assembly, the CUDA type, the dtype.
TYPES = {
    "H": ("h", "unsigned short", np.dtype(np.uint16)),
    "U": ("r", "unsigned", np.dtype(np.uint32)),
    "I": ("r", "int", np.dtype(np.int32)),
    "L": ("l", "unsigned long long", np.dtype(np.uint64)),
    "S": ("l", "long long", np.dtype(np.int64)),
    "F": ("f", "float", np.dtype(np.float32)),
    "D": ("d", "double", np.dtype(np.float64)),
}
THREADS = 512


@pytest.fixture(autouse=True)
def emulated(request):
    if not request.config.getoption("emulate"):
        pytest.skip("of the emulator itself")


def run(text: str, *arguments, blocks=(1,), threads=(THREADS,)) -> None:
    options = ("-std=c++17", "-arch=sm_90a")
    module = cupy.RawModule(code="#include <cuda_fp16.h>\n" + text, options=options)
    module.get_function("example")(blocks, threads, arguments)


def wide(x):
    """Python's integers, which do not overflow."""
    return x.astype(object)


def wrapped(x, dtype):
    """Integers modulo the range of a dtype."""
    bits = 8 * dtype.itemsize
    unsigned = np.array([int(v) % (1 << bits) for v in np.ravel(x)], np.dtype(f"u{dtype.itemsize}"))
    return unsigned.view(dtype)


def halves(x):
    """The float16 numbers in 32-bit registers, (n, 2)."""
    return x.view(np.float16).reshape(-1, 2).astype(np.float64)


def as_register(x):
    return x.astype(np.float16).view(np.uint32).ravel()


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def permuted(a, b, selector):
    bytes_of = np.stack([a, b], -1).view(np.uint8)  # (n, 8)
    result = np.zeros(len(a), np.uint32)
    for k in range(4):
        digit = (selector >> np.uint32(4 * k)) & 15
        byte = np.take_along_axis(bytes_of, (digit & 7)[:, None].astype(int), 1)[:, 0]
        byte = np.where(digit & 8, np.where(byte & 128, 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * k)
    return result


def shifted(x, n, right, dtype):
    return [wrapped((int(v) >> min(int(c), 200)) if right else int(v) << min(int(c), 200), dtype)[0]
            for v, c in zip(x, n, strict=True)]  # fmt: skip


def exactly(function, *arrays, to=None):
    """A function of fractions, rounded once: to the nearest number or, with `to`, in the direction
    of `to(its sign)`. What is not finite is left to NumPy."""
    dtype = arrays[0].dtype

    def rounded(*numbers):
        if not np.isfinite(numbers).all():
            return function(*numbers)
        exact = function(*(fractions.Fraction(float(x)) for x in numbers))
        nearest = dtype.type(float(exact))
        around = [np.nextafter(nearest, -np.inf, dtype=dtype), nearest]
        around.append(np.nextafter(nearest, np.inf, dtype=dtype))
        finite = [fractions.Fraction(float(x)) if np.isfinite(x) else None for x in around]
        if to is not None:
            limit = to(np.sign(float(exact)))
            return [x for x, y in zip(around, finite, strict=True)
                    if y is not None and (y <= exact if limit < 0 else y >= exact)][
                        -1 if limit < 0 else 0]  # fmt: skip
        even = [x.view(f"u{dtype.itemsize}") & 1 for x in around]
        distance = [(abs(y - exact), odd) for y, odd in zip(finite, even, strict=True)]
        return around[distance.index(min(distance))]

    return np.array([rounded(*numbers) for numbers in zip(*arrays, strict=True)], dtype)


def bits(x):
    return [f"{int(v):b}" for v in x]


# What is run, the letters of the result and of the operands, what NumPy makes of them.
CASES = [
    ("add.s32 %0, %1, %2;", "III", lambda a, b: wrapped(wide(a) + wide(b), a.dtype)),
    ("sub.u64 %0, %1, %2;", "LLL", lambda a, b: wrapped(wide(a) - wide(b), a.dtype)),
    ("add.sat.s32 %0, %1, %2;", "III",
     lambda a, b: np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1)),
    ("mul.lo.s32 %0, %1, %2;", "III", lambda a, b: wrapped(wide(a) * wide(b), a.dtype)),
    ("mul.hi.s32 %0, %1, %2;", "III", lambda a, b: (a.astype(np.int64) * b) >> 32),
    ("mul.hi.u64 %0, %1, %2;", "LLL", lambda a, b: wrapped((wide(a) * wide(b)) >> 64, a.dtype)),
    ("mul.wide.s32 %0, %1, %2;", "SII", lambda a, b: a.astype(np.int64) * b),
    ("mul.wide.u16 %0, %1, %2;", "UHH", lambda a, b: a.astype(np.uint32) * b),
    ("mad.lo.u32 %0, %1, %2, %3;", "UUUU",
     lambda a, b, c: wrapped(wide(a) * wide(b) + wide(c), a.dtype)),
    ("mad.wide.u32 %0, %1, %2, %3;", "LUUL",
     lambda a, b, c: wrapped(wide(a) * wide(b) + wide(c), c.dtype)),
    ("{.reg .u32 l, h, x, y; mov.b64 {l, h}, %1; mov.b64 {x, y}, %2; add.cc.u32 l, l, x;"
     " addc.u32 h, h, y; mov.b64 %0, {l, h};}", "LLL",
     lambda a, b: wrapped(wide(a) + wide(b), a.dtype)),
    ("{.reg .u32 l, h, x, y; mov.b64 {l, h}, %1; mov.b64 {x, y}, %2; sub.cc.u32 l, l, x;"
     " subc.u32 h, h, y; mov.b64 %0, {l, h};}", "LLL",
     lambda a, b: wrapped(wide(a) - wide(b), a.dtype)),
    ("min.s32 %0, %1, %2;", "III", np.minimum),
    ("min.relu.s32 %0, %1, %2;", "III", lambda a, b: np.maximum(np.minimum(a, b), 0)),
    ("max.u64 %0, %1, %2;", "LLL", np.maximum),
    ("abs.s32 %0, %1;", "II", np.abs),
    ("neg.s64 %0, %1;", "SS", lambda a: -a),
    ("div.u32 %0, %1, %2;", "UUU",
     lambda a, b: np.where(b == 0, 2**32 - 1, a // np.maximum(b, 1))),
    ("rem.u32 %0, %1, %2;", "UUU", lambda a, b: np.where(b == 0, a, a % np.maximum(b, 1))),
    ("and.b32 %0, %1, %2;", "UUU", np.bitwise_and),
    ("xor.b64 %0, %1, %2;", "LLL", np.bitwise_xor),
    ("not.b32 %0, %1;", "UU", np.invert),
    ("shl.b32 %0, %1, %2;", "UUB", lambda a, n: shifted(a, n, False, a.dtype)),
    ("shr.u32 %0, %1, %2;", "UUB", lambda a, n: shifted(a, n, True, a.dtype)),
    ("shr.s64 %0, %1, %2;", "SSB", lambda a, n: shifted(a, n, True, a.dtype)),
    ("shf.l.wrap.b32 %0, %1, %2, %3;", "UUUB",
     lambda a, b, n: wrapped([((int(y) << 32 | int(x)) << (int(c) & 31)) >> 32
                              for x, y, c in zip(a, b, n, strict=True)], a.dtype)),
    ("bfe.u32 %0, %1, %2, %3;", "UUBB",
     lambda a, p, n: wrapped([(int(x) >> int(q)) & ((1 << int(m)) - 1)
                              for x, q, m in zip(a, p, n, strict=True)], a.dtype)),
    ("bfi.b64 %0, %1, %2, %3, %4;", "LLLBB",
     lambda a, b, p, n: wrapped(
         [int(y) & ~(((1 << int(m)) - 1) << int(q)) | (int(x) & ((1 << int(m)) - 1)) << int(q)
          for x, y, q, m in zip(a, b, p, n, strict=True)], a.dtype)),
    ("prmt.b32 %0, %1, %2, %3;", "UUUU", permuted),
    ("lop3.b32 %0, %1, %2, %3, 0xCA;", "UUUU", lambda a, b, c: a & b | ~a & c),
    ("popc.b32 %0, %1;", "UU", lambda a: [x.count("1") for x in bits(a)]),
    ("clz.b64 %0, %1;", "UL", lambda a: [64 - len(x) if x != "0" else 64 for x in bits(a)]),
    ("brev.b32 %0, %1;", "UU", lambda a: [int(x.zfill(32)[::-1], 2) for x in bits(a)]),
    ("bfind.u32 %0, %1;", "UU", lambda a: [len(x) - 1 if x != "0" else 2**32 - 1 for x in bits(a)]),
    ("dp4a.s32.s32 %0, %1, %2, %3;", "IIII",
     lambda a, b, c: wrapped(
         (a.view(np.int8).reshape(-1, 4).astype(int) * b.view(np.int8).reshape(-1, 4)).sum(1)
         + c, c.dtype)),
    ("add.rn.f32 %0, %1, %2;", "FFF", np.add),
    ("mul.ftz.f32 %0, %1, %2;", "FFF", lambda a, b: flushed(flushed(a) * flushed(b))),
    ("fma.rn.f32 %0, %1, %2, %3;", "FFFF",
     lambda a, b, c: exactly(lambda x, y, z: x * y + z, a, b, c)),
    ("fma.rn.f64 %0, %1, %2, %3;", "DDDD",
     lambda a, b, c: exactly(lambda x, y, z: x * y + z, a, b, c)),
    ("add.rz.f32 %0, %1, %2;", "FFF",
     lambda a, b: exactly(lambda x, y: x + y, a, b, to=lambda s: -np.sign(s) * np.inf)),
    ("add.rm.f32 %0, %1, %2;", "FFF",
     lambda a, b: exactly(lambda x, y: x + y, a, b, to=lambda s: -np.inf)),
    ("div.rn.f32 %0, %1, %2;", "FFF", np.divide),
    ("sqrt.rn.f64 %0, %1;", "DD", lambda a: np.sqrt(a)),
    ("max.f32 %0, %1, %2;", "FFF", np.fmax),
    ("min.NaN.f32 %0, %1, %2;", "FFF", np.minimum),
    ("copysign.f32 %0, %1, %2;", "FFF", lambda a, b: np.copysign(b, a)),
    ("ex2.approx.ftz.f32 %0, %1;", "FF", lambda a: flushed(np.exp2(flushed(a)))),
    ("lg2.approx.f32 %0, %1;", "FF", lambda a: np.log2(a.astype(np.float64))),
    ("add.f16x2 %0, %1, %2;", "UUU", lambda a, b: as_register(halves(a) + halves(b))),
    ("fma.rn.f16x2 %0, %1, %2, %3;", "UUUU",
     lambda a, b, c: as_register(halves(a).astype(np.longdouble) * halves(b) + halves(c))),
    ("max.f16x2 %0, %1, %2;", "UUU", lambda a, b: as_register(np.fmax(halves(a), halves(b)))),
    ("{.reg .pred p; setp.lt.s32 p, %1, %2; selp.u32 %0, 7, 9, p;}", "UII",
     lambda a, b: np.where(a < b, 7, 9)),
    ("{.reg .pred p; setp.geu.f32 p, %1, %2; selp.u32 %0, 7, 9, p;}", "UFF",
     lambda a, b: np.where(~(a < b), 7, 9)),
    ("{.reg .pred p, q; setp.eq.u32 q, %3, 0; setp.hi.xor.u32 p, %1, %2, !q;"
     " selp.u32 %0, 7, 9, p;}", "UUUU", lambda a, b, c: np.where((a > b) != (c != 0), 7, 9)),
    ("set.le.u32.f32 %0, %1, %2;", "UFF", lambda a, b: np.where(a <= b, 2**32 - 1, 0)),
    ("slct.s32.f32 %0, %1, %2, %3;", "IIIF", lambda a, b, c: np.where(c >= 0, a, b)),
    ("cvt.rn.f16.f32 %0, %1;", "HF", lambda a: a.astype(np.float16).view(np.uint16)),
    ("cvt.f32.f16 %0, %1;", "FH", lambda a: a.view(np.float16).astype(np.float32)),
    ("cvt.rn.bf16.f32 %0, %1;", "HF", lambda a: a.astype(BFLOAT16).view(np.uint16)),
    ("cvt.rn.f16x2.f32 %0, %1, %2;", "UFF",
     lambda a, b: np.stack([b, a], -1).astype(np.float16).view(np.uint32).ravel()),
    ("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;", "HFF",
     lambda a, b: eight_bits(b, a, ml_dtypes.float8_e4m3fn)),
    ("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;", "HFF",
     lambda a, b: eight_bits(b, a, ml_dtypes.float8_e5m2)),
    ("cvt.rn.f16x2.e4m3x2 %0, %1;", "UH",
     lambda a: a.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)),
    ("cvt.rzi.s32.f32 %0, %1;", "IF",
     lambda a: np.clip(np.trunc(np.nan_to_num(a.astype(np.float64))), -(2**31), 2**31 - 1)),
    ("cvt.rni.u32.f32 %0, %1;", "UF",
     lambda a: np.clip(np.rint(np.nan_to_num(a.astype(np.float64))), 0, 2**32 - 1)),
    ("cvt.rmi.f32.f32 %0, %1;", "FF", np.floor),
    ("cvt.rn.f32.u64 %0, %1;", "FL", lambda a: a.astype(np.float32)),
    ("cvt.rn.f32.f64 %0, %1;", "FD", lambda a: a.astype(np.float32)),
    ("cvt.s32.s8 %0, %1;", "II", lambda a: a.astype(np.int8)),
    ("cvt.sat.u8.s32 %0, %1;", "UI", lambda a: np.clip(a, 0, 255)),
    ("cvt.sat.f32.f32 %0, %1;", "FF", lambda a: np.nan_to_num(np.clip(a, 0, 1), nan=0.0)),
    ("{.reg .b16 a, b, c, d; mov.b64 {a, b, c, d}, %1; mov.b64 %0, {d, c, b, a};}", "LL",
     lambda a: a.view(np.uint16).reshape(-1, 4)[:, ::-1].copy().view(np.uint64).ravel()),
]  # fmt: skip


def eight_bits(low, high, dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    pairs = np.stack([np.clip(low, -most, most), np.clip(high, -most, most)], -1)
    return pairs.astype(dtype).view(np.uint16).ravel()


def inputs(rng, letter):
    """Random numbers and those at which an instruction may differ from its like."""
    if letter == "B":  # positions and lengths
        return rng.integers(0, 40, THREADS).astype(np.uint32)
    dtype = TYPES[letter][2]
    if dtype.kind == "f":
        x = rng.standard_normal(THREADS) * 10.0 ** rng.integers(-6, 7, THREADS)
        special = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 1e-41, np.inf, -np.inf, np.nan]
        x[rng.permutation(THREADS)[:60]] = rng.choice(special, 60)
        return x.astype(dtype)
    x = rng.integers(0, 256, (THREADS, dtype.itemsize), np.uint8).view(dtype).ravel()
    special = np.array([0, 1, 2, 255, -1, -2, 1 << (8 * dtype.itemsize - 1)], object)
    x[rng.permutation(THREADS)[:60]] = wrapped(rng.choice(special, 60), dtype)
    return x


def same(got, expected, dtype):
    """Bit for bit, but that NaN is NaN."""
    expected = np.asarray(expected)
    expected = expected.astype(dtype) if expected.dtype != dtype else expected
    return np.array_equal(got, expected, equal_nan=dtype.kind == "f")


@pytest.mark.parametrize(("instruction", "letters", "expected"), CASES, ids=[c[0] for c in CASES])
@np.errstate(all="ignore")
def test_instructions(instruction, letters, expected, rng):
    types = [TYPES["U" if letter == "B" else letter] for letter in letters]
    arrays = [inputs(rng, letter) for letter in letters[1:]]
    if "f16x2" in instruction and "cvt" not in instruction:
        half = [rng.standard_normal(2 * THREADS).astype(np.float16) for _ in arrays]
        arrays = [x.view(np.uint32) for x in half]
    if "e4m3x2" in instruction and letters == "UH":
        arrays = [rng.integers(0, 127, 2 * THREADS).astype(np.uint8).view(np.uint16)]
    parameters = ", ".join(f"const {types[k + 1][1]}* in{k}" for k in range(len(arrays)))
    reads = ", ".join(f'"{types[k + 1][0]}"(in{k}[threadIdx.x])' for k in range(len(arrays)))
    text = f"""extern "C" __global__ void example({types[0][1]}* out, {parameters}) {{
      {types[0][1]} result;
      asm volatile("{instruction}" : "={types[0][0]}"(result) : {reads});
      out[threadIdx.x] = result;
    }}"""
    out = cupy.zeros(THREADS, types[0][2])
    run(text, out, *map(cupy.asarray, arrays))
    got, wanted = cupy.asnumpy(out), expected(*arrays)
    if re.search(r"bf16|f16\.f32|x2\.f32", instruction):
        numbers = ~np.any([np.isnan(x) for x in arrays], axis=0)  # the bits of NaN differ
        got, wanted = got[numbers], np.asarray(wanted)[numbers]
    if re.match("lg2|ex2", instruction):
        np.testing.assert_allclose(got, wanted.astype(np.float32), rtol=2e-7, atol=1e-37)
    else:
        assert same(got, wanted, types[0][2])


def test_lanes_come_together_after_branches_and_loops(rng):
    text = """extern "C" __global__ void example(const int* n, int* out, unsigned* masks) {
      int sum = 0;
      for (int i = 0; i < n[threadIdx.x]; ++i) {
        if (i % 3 == 0) continue;
        if (i == 17) break;
        sum += i & 1 ? i : -1;
      }
      masks[threadIdx.x] = __activemask();
      out[threadIdx.x] = sum;
    }"""
    n = rng.integers(0, 30, THREADS).astype(np.int32)
    out, masks = cupy.zeros(THREADS, np.int32), cupy.zeros(THREADS, np.uint32)
    run(text, cupy.asarray(n), out, masks)
    ranges = [range(min(count, 17)) for count in n]
    assert cupy.asnumpy(out).tolist() == [
        sum(i if i & 1 else -1 for i in steps if i % 3) for steps in ranges
    ]
    assert (cupy.asnumpy(masks) == 2**32 - 1).all()


def test_lanes_of_a_warp_wait_for_each_other():
    """A lock, which one lane holds while the others of its warp spin."""
    text = """extern "C" __global__ void example(int* lock, int* count) {
      while (atomicCAS(lock, 0, 1) != 0) {}
      *(volatile int*)count = *(volatile int*)count + 1;
      __threadfence();
      atomicExch(lock, 0);
    }"""
    lock, count = cupy.zeros(1, np.int32), cupy.zeros(1, np.int32)
    run(text, lock, count, blocks=(3,), threads=(96,))
    assert int(count[0]) == 3 * 96


def test_blocks_wait_for_blocks_behind_them():
    text = """extern "C" __global__ void example(int* arrived, int* out) {
      __shared__ int seen;
      if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        while (*(volatile int*)arrived < gridDim.x) {}
        seen = *(volatile int*)arrived;
      }
      __syncthreads();
      if (threadIdx.x == 40) out[blockIdx.x] = seen;
    }"""
    arrived, out = cupy.zeros(1, np.int32), cupy.zeros(60, np.int32)
    run(text, arrived, out, blocks=(60,), threads=(64,))
    assert (cupy.asnumpy(out) == 60).all()


def test_named_barriers_and_reductions():
    text = """extern "C" __global__ void example(int* out) {
      __shared__ int turn;
      const int warp = threadIdx.x / 32;
      if (warp == 0) {
        asm volatile("bar.sync 3, 64;" ::: "memory");
        out[0] = turn;
        asm volatile("bar.arrive 4, 64;" ::: "memory");
      } else if (warp == 1) {
        if (threadIdx.x == 32) turn = 5;
        asm volatile("bar.arrive 3, 64;" ::: "memory");
        asm volatile("bar.sync 4, 64;" ::: "memory");
        if (threadIdx.x == 32) turn = 6;
      }
      const int count = __syncthreads_count(threadIdx.x % 3 == 0);
      const int any = __syncthreads_or(threadIdx.x == 100);
      const int all = __syncthreads_and(threadIdx.x < 99);
      if (threadIdx.x == 127) out[1] = count, out[2] = any, out[3] = all, out[4] = turn;
    }"""
    out = cupy.zeros(5, np.int32)
    run(text, out, threads=(128,))
    assert cupy.asnumpy(out).tolist() == [5, 43, 1, 0, 6]


def test_lanes_exchange_values(rng):
    text = """extern "C" __global__ void example(const int* in, int* out) {
      const int lane = threadIdx.x, x = in[lane];
      out[lane] = __shfl_xor_sync(~0u, x, 5);
      out[32 + lane] = __shfl_up_sync(~0u, x, 3, 8);
      out[64 + lane] = __shfl_down_sync(~0u, x, 2, 16);
      out[96 + lane] = __shfl_sync(~0u, x, lane * 7, 32);
      out[128 + lane] = __ballot_sync(~0u, x & 1);
      out[160 + lane] = __reduce_add_sync(~0u, x);
      out[192 + lane] = __match_any_sync(~0u, x & 3);
      if (lane & 4) out[224 + lane] = __reduce_min_sync(0xf0f0f0f0u, x);
      else out[224 + lane] = __any_sync(0x0f0f0f0fu, x == in[1]);
    }"""
    x = rng.integers(-99, 99, 32).astype(np.int32)
    out = cupy.zeros(256, np.int32)
    run(text, cupy.asarray(x), out, threads=(32,))
    lane = np.arange(32)
    up = np.where(lane % 8 >= 3, lane - 3, lane)
    down = np.where(lane % 16 + 2 < 16, lane + 2, lane)
    rows = cupy.asnumpy(out).reshape(8, 32)
    for row, source in zip(rows, (lane ^ 5, up, down, lane * 7 % 32), strict=False):
        assert row.tolist() == x[source].tolist()
    masks = (1 << lane.astype(np.uint64)).astype(np.uint64)
    assert (rows[4].view(np.uint32) == int(masks[x & 1 == 1].sum())).all()
    assert (rows[5] == x.sum()).all()
    assert rows[6].view(np.uint32).tolist() == [int(masks[x & 3 == v & 3].sum()) for v in x]
    assert rows[7].tolist() == [x[lane & 4 != 0].min() if i & 4 else 1 for i in lane]


def test_atomic_sums_are_whole(rng):
    text = """using Long = unsigned long long;
    extern "C" __global__ void example(int* sums, double* total, Long* least) {
      __shared__ int bins[8];
      if (threadIdx.x < 8) bins[threadIdx.x] = 0;
      __syncthreads();
      atomicAdd(&bins[threadIdx.x % 8], threadIdx.x);
      atomicAdd(total, 0.5);
      atomicMin(least, 1000ull - threadIdx.x);
      __syncthreads();
      if (threadIdx.x < 8) atomicAdd(&sums[threadIdx.x], bins[threadIdx.x]);
    }"""
    sums, total = cupy.zeros(8, np.int32), cupy.zeros(1)
    least = cupy.full(1, 10**6, np.uint64)
    run(text, sums, total, least, blocks=(5,), threads=(100,))
    assert cupy.asnumpy(sums).tolist() == [5 * sum(range(b, 100, 8)) for b in range(8)]
    assert float(total[0]) == 250.0
    assert int(least[0]) == 901


def test_functions_tables_and_local_arrays():
    text = """__constant__ int table[4] = {3, 1, 4, 1};
    __device__ __noinline__ int collatz(int n) {
      int steps = 0;
      for (; n != 1; ++steps) n = n % 2 ? 3 * n + 1 : n / 2;
      return steps;
    }
    extern "C" __global__ void example(int* out, int stride) {
      int places[16];
      for (int i = 0; i < 16; ++i) places[i * stride % 16] = i;
      int* generic = &places[threadIdx.x % 16];
      out[threadIdx.x] = collatz(threadIdx.x + 1) * 100 + *generic * 10 + table[threadIdx.x % 4];
    }"""
    out = cupy.zeros(64, np.int32)
    run(text, out, np.int32(5), threads=(64,))

    def steps(n):
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    places = {i * 5 % 16: i for i in range(16)}
    assert cupy.asnumpy(out).tolist() == [
        steps(i + 1) * 100 + places[i % 16] * 10 + (3, 1, 4, 1)[i % 4] for i in range(64)
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x[blockDim.x + threadIdx.x] = 1;", "outside of all allocations"),
        ("*(int*)((char*)x + 2) = 1;", "not a multiple of 4"),
        ("if (threadIdx.x == 9) asm volatile(\"trap;\");", r"trap \(lane 9\)"),
        ("if (threadIdx.x < 32) asm volatile(\"bar.sync 1, 64;\");", "deadlock"),
        ("if (threadIdx.x % 2) __syncwarp(0xffffffffu); else __syncwarp(0x3u);", "mask|deadlock"),
        ("extern __shared__ int y[]; y[threadIdx.x] = 1;", "outside of the block's"),
        ("asm volatile(\"bar.sync 1, 33;\");", "not a multiple of 32"),
    ],
)  # fmt: skip
def test_what_a_kernel_does_wrong_is_named(body, message):
    text = f'extern "C" __global__ void example(int* x) {{ {body} }}'
    with pytest.raises(Exception, match=message) as error:
        run(text, cupy.zeros(64, np.int32), threads=(64,))
    assert "PTX line" in str(error.value)


@pytest.mark.parametrize("given_back", [88, 96])
def test_registers_are_shared_by_a_block(given_back):
    """384 threads begin with 168 registers each: two warpgroups get 208 if the third keeps 88."""
    text = f"""extern "C" __global__ void __launch_bounds__(384, 1) example(int* x) {{
      if (threadIdx.x < 128)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 {given_back};");
      else
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
      x[threadIdx.x] = 1;
    }}"""
    x = cupy.zeros(384, np.int32)
    if given_back == 88:
        run(text, x, threads=(384,))
        assert (x == 1).all()
    else:
        with pytest.raises(Exception, match="registers that other warps give back"):
            run(text, x, threads=(384,))
