// cp.async.bulk.tensor: TMA copies boxes of a tensor from shared to global memory, in groups that
// the thread commits and waits for (ptx/bulk.cuh). What lies outside of the tensor is not written.
#pragma once

#include "ptx/tma.cuh"

namespace ptx {

__device__ __forceinline__ void tma_store(const TensorMap& map, const void* source, int c0, int c1,
                                          int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, const void* source, int c0, int c1,
                                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(&map),
      "r"(shared_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace ptx
