// The step in which keys and values, as a cache stores them, become operands of a product: the
// identity for elements of the queries' type. Codes of quantised caches will be expanded here.
#pragma once

#include "ptx/ldmatrix.cuh"

namespace tile {

// For products of scalars.
template <class Acc, class Stored>
__device__ __forceinline__ Acc to_operand(Stored element) {
  return static_cast<Acc>(element);
}

// For mma.sync, from shared memory: 16 keys × 16 features as the A of Sᵀ = K Qᵀ, and 16 features ×
// 16 keys as the A of Oᵀ = Vᵀ Pᵀ. `address` is the lane's, in Swizzled's row-major order for keys
// and in its column-major order for values.
__device__ __forceinline__ void keys_to_operand(unsigned (&a)[4], unsigned address) {
  ptx::ldmatrix_x4(a, address);
}
__device__ __forceinline__ void values_to_operand(unsigned (&a)[4], unsigned address) {
  ptx::ldmatrix_x4_trans(a, address);
}

}  // namespace tile
