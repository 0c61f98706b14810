// mma.sync: D (16×8, float) += A (16×16) · B (16×8) by one warp. With g = lane / 4 and t = lane % 4
// a thread holds
//   D: d[0,1] = row g, columns 2t, 2t+1;  d[2,3] = row g + 8
//   A: a[0] = row g, columns 2t, 2t+1;  a[1] = row g + 8;  a[2,3] = these rows, columns 2t+8, 2t+9
//   B: b0 = rows 2t, 2t+1 of column g;  b1 = rows 2t+8, 2t+9
// so the packed pairs of two neighbouring D are the A of a next product.
#pragma once

namespace ptx {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float* d, const unsigned (&a)[4], unsigned b0,
                                             unsigned b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float* d, const unsigned (&a)[4], unsigned b0,
                                                     unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float* d, const unsigned (&a)[4],
                                                            unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
