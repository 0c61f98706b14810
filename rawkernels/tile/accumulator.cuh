// The type that sums of a type are kept in (float, or double for float64), and its infinities.
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

template <class Number = float>
__device__ __forceinline__ Number infinity() {
  return static_cast<Number>(__int_as_float(0x7f800000));
}
template <class Number = float>
__device__ __forceinline__ Number negative_infinity() {
  return static_cast<Number>(__int_as_float(0xff800000));
}

}  // namespace tile
