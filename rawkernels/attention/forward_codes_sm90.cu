// attention/forward_sm90.cu over keys and values that are codes of a quantised cache, in pages or
// in one piece: four more warps make 16-bit numbers of the codes of each block, in the
// shared memory that TMA fills otherwise (attention/expand_sm90.cuh).
//
//   k and v are codes of rows of head_dim features, with a bfloat16 scale each, and a minimum where
//   codes have 4 bits. Rotated keys are not rotated back: queries are to be rotated before. The
//   numbers are those of quantization/dequantize.cu, bit for bit.
#include "attention/expand_sm90.cuh"
#include "attention/forward_sm90.cu"
