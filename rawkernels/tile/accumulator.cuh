// What sums of a type are kept in: float, or double for float64.
#pragma once

namespace tile {

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace tile
