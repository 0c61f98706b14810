// attention/forward_sm90.cu for blocks of 176 keys: few queries over many keys at head_dim 128,
// where a block's fixed costs weigh more than the keys that a mask hides.
#include "ptx/wgmma_176.cuh"

static_assert(Config::tile_n == 176, "ptx/wgmma.cuh has the products of all other blocks");

#include "attention/forward_sm90.cu"
