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

// The finite number next to -inf.
template <class Number>
__device__ __forceinline__ Number lowest();
template <>
__device__ __forceinline__ float lowest<float>() {
  return __int_as_float(0xff7fffff);
}
template <>
__device__ __forceinline__ double lowest<double>() {
  return __hiloint2double(0xffefffff, 0xffffffff);
}

// x * log2(e), rounded; but not to -inf what is a number.
template <class Number>
__device__ __forceinline__ Number in_log2(Number x) {
  const Number product = x * static_cast<Number>(1.4426950408889634);
  return product < lowest<Number>() && x >= lowest<Number>() ? lowest<Number>() : product;
}

}  // namespace tile
