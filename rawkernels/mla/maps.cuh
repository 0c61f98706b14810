// What TMA copies for the kernels of latent attention. Declared as MLA_MAPS in cuattn/gpu/params.py
// too.
#pragma once

#include "ptx/tma.cuh"

struct Maps {
  // (64 columns, key of a page, panel, page); of codes (columns, key of a page, 1, page).
  ptx::TensorMap latent, rope;
  ptx::TensorMap q, q_rope;  // (columns, head, token, sequence)
};
