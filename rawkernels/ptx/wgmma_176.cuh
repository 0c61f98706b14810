// wgmma (ptx/wgmma.cuh) with N = 176, both operands in shared memory: an instruction that one
// kernel has, in a file of its own, so that the text of the other kernels does not depend on it.
#pragma once

#include "ptx/wgmma.cuh"

namespace ptx {

#define WGMMA_176(TYPE, PTX_TYPE)                                                                  \
  template <>                                                                                      \
  struct Wgmma<176, TYPE> {                                                                        \
    template <bool kTransA, bool kTransB>                                                          \
    __device__ __forceinline__ static void shared_shared(float (&d)[88],                           \
                                                         unsigned long long a_tile,                \
                                                         unsigned long long b_tile,                \
                                                         bool accumulate) {                        \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n"                                             \
          "wgmma.mma_async.sync.aligned.m64n176k16.f32." PTX_TYPE "." PTX_TYPE " {" NAMES_88       \
          "}, %88, %89, p, 1, 1, %91, %92;\n}"                                                     \
          : REGISTERS_88                                                                           \
          : "l"(a_tile), "l"(b_tile), "r"(int(accumulate)), "n"(int(kTransA)), "n"(int(kTransB))); \
    }                                                                                              \
  };
WGMMA_176(__half, "f16")
WGMMA_176(__nv_bfloat16, "bf16")
#undef WGMMA_176

}  // namespace ptx
