// wgmma (ptx/wgmma.cuh) with N = 16 or 32: instructions that few kernels have, in a file of their
// own, so that the text of the other kernels does not depend on them.
#pragma once

#include "ptx/wgmma.cuh"

namespace ptx {

// As wgmma_keep() of D, of registers that are A: they are written before a wgmma_fence() that
// follows, or ptxas serialises (C7519).
template <int n>
__device__ __forceinline__ void wgmma_keep(unsigned (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#define WGMMA_NARROW(N, R, TYPE, PTX_TYPE, a, b, c, e, f, g, h)                                    \
  template <>                                                                                      \
  struct Wgmma<N, TYPE> {                                                                          \
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
WGMMA_NARROW(16, 8, __half, "f16", 8, 9, 10, 11, 12, 13, 14)
WGMMA_NARROW(16, 8, __nv_bfloat16, "bf16", 8, 9, 10, 11, 12, 13, 14)
WGMMA_NARROW(32, 16, __half, "f16", 16, 17, 18, 19, 20, 21, 22)
WGMMA_NARROW(32, 16, __nv_bfloat16, "bf16", 16, 17, 18, 19, 20, 21, 22)
#undef WGMMA_NARROW

}  // namespace ptx
