// How a warp goes on: which of its lanes run, and until when.
#pragma once

#include "machine.h"

namespace emulator {

// Runs up to `slice` instructions of a warp and returns how many it completed; 0: all its lanes
// wait. Failures get the instruction's text and line added.
uint32_t run(Warp& warp, uint32_t slice);

}  // namespace emulator
