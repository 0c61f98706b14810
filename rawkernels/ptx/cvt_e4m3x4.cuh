// Conversion of a word of four e4m3 codes to two pairs of float16, exactly.
#pragma once

namespace ptx {

// By 16-bit registers: a shift would be an instruction, which ptxas does not need for them.
__device__ __forceinline__ void cvt_e4m3x4(unsigned (&pairs)[2], unsigned codes) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(codes));
}

}  // namespace ptx
