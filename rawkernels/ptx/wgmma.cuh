// wgmma: D (64 x N, float registers of a warpgroup) += A (64 x 16) B (16 x N), asynchronously. B
// comes from shared memory through a matrix descriptor, A from shared memory or from registers.
// Element (row, column) of D: with warp w of the warpgroup, g = lane / 4 and t = lane % 4, d[4j +
// 0, 1] is row 16w + g, columns 8j + 2t and + 1; d[4j + 2, 3] is row 16w + g + 8. A in registers
// has the same layout in 16-bit pairs, so that D of one product, packed in order, is A of the next.
#pragma once

#include "ptx/shared.cuh"

namespace ptx {

// Orders this thread's accesses to the registers of a wgmma before it. Needed ahead of every
// product, or ptxas serialises (C7519).
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to a wgmma's registers across the asynchronous region.
template <int n>
__device__ __forceinline__ void wgmma_keep(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of registers that are A: they are written before a wgmma_fence() that follows, or ptxas
// serialises (C7519).
template <int n>
__device__ __forceinline__ void wgmma_keep(unsigned (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Descriptor of an operand in shared memory with TMA's 128-byte swizzle. Bytes:
// `leading` between the 64-column panels of an MN-major operand (ignored for a K-major one),
// `stride` between groups of 8 rows.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* tile, int leading,
                                                               int stride) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<unsigned long long>(stride >> 4) << 32 |
         static_cast<unsigned long long>(leading >> 4) << 16 |
         (shared_address(tile) & 0x3FFFF) >> 4;
}

// The descriptor of what lies `bytes` further.
__device__ __forceinline__ unsigned long long wgmma_advance(unsigned long long descriptor,
                                                            int bytes) {
  return descriptor + (bytes >> 4);
}

template <int kN, class T>
struct Wgmma;  // A and B of type T; one specialisation for each N in use, below

// Eight registers of D as operands, and the names of operands 8i to 8i + 7 of an asm statement.
#define D8(i)                                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_8 D8(0)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8, D8(8)
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16, D8(16)
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24, D8(24)
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_40 REGISTERS_32, D8(32)
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_48 REGISTERS_40, D8(40)
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_56 REGISTERS_48, D8(48)
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_64 REGISTERS_56, D8(56)
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_72 REGISTERS_64, D8(64)
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_80 REGISTERS_72, D8(72)
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_88 REGISTERS_80, D8(80)
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_96 REGISTERS_88, D8(88)
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_104 REGISTERS_96, D8(96)
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS_112 REGISTERS_104, D8(104)
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_120 REGISTERS_112, D8(112)
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_128 REGISTERS_120, D8(120)
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// N: columns. R: registers, N / 2. a to g: the numbers R, R + 1, ... of the operands that follow
// them.
#define WGMMA(N, R, TYPE, PTX_TYPE, a, b, c, e, f, g, h)                                           \
  template <>                                                                                      \
  struct Wgmma<N, TYPE> {                                                                          \
    /* A and B in shared memory; kTransA, kTransB: the operand is MN-major. accumulate: D += A B,  \
     * not D = A B. */                                                                             \
    template <bool kTransA, bool kTransB>                                                          \
    __device__ __forceinline__ static void shared_shared(float (&d)[R], unsigned long long a_tile, \
                                                         unsigned long long b_tile,                \
                                                         bool accumulate) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                         \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE         \
                   " {" NAMES_##R "}, %" #a ", %" #b ", p, 1, 1, %" #e ", %" #f ";\n}"             \
                   : REGISTERS_##R                                                                 \
                   : "l"(a_tile), "l"(b_tile), "r"(int(accumulate)), "n"(int(kTransA)),            \
                     "n"(int(kTransB)));                                                           \
    }                                                                                              \
    /* A in registers. */                                                                          \
    template <bool kTransB>                                                                        \
    __device__ __forceinline__ static void register_shared(float (&d)[R], const unsigned* x,       \
                                                           unsigned long long b_tile,              \
                                                           bool accumulate) {                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                         \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE         \
                   " {" NAMES_##R "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f                  \
                                  ", p, 1, 1, %" #h ";\n}"                                         \
                   : REGISTERS_##R                                                                 \
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(b_tile),                      \
                     "r"(int(accumulate)), "n"(int(kTransB)));                                     \
    }                                                                                              \
  };
#define WGMMA_BOTH(N, R, ...)             \
  WGMMA(N, R, __half, "f16", __VA_ARGS__) \
  WGMMA(N, R, __nv_bfloat16, "bf16", __VA_ARGS__)

WGMMA_BOTH(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_BOTH(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMA_BOTH
#undef WGMMA

}  // namespace ptx
