// A few neighbouring numbers that are read and written at once.
#pragma once

namespace tile {

template <class Number, int n>
struct alignas(n * sizeof(Number) < 16 ? n * sizeof(Number) : 16) Vec {
  Number x[n];
};

}  // namespace tile
