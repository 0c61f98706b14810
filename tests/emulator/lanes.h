// Loops over the 32 lanes of a warp, which the compiler turns into vector instructions.
//
// An operation is a lambda without captures, given as a template argument. It is computed for all
// lanes, as it must not trap; only active lanes' results are written.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace emulator {

template <class T>
inline T* lanes(const Warp& warp, Row row) {
  return static_cast<T*>(__builtin_assume_aligned(warp.row<T>(row), 64));
}

// Writes the active lanes' elements of `values`.
template <class T>
inline void write(const Warp& warp, T* to, const T* values) {
  const uint32_t active = warp.active;
  if (active == kAllLanes) {
    std::memcpy(to, values, kLanes * sizeof(T));
    return;
  }
  for (int i = 0; i < kLanes; ++i) to[i] = active >> i & 1 ? values[i] : to[i];
}

// d[i] = apply(i) in active lanes. apply(i) may read element i of the row d, and no other.
template <class T, class Apply>
inline void for_lanes(const Warp& warp, Row d, Apply apply) {
  T* to = lanes<T>(warp, d);
  if (warp.active == kAllLanes) {
#pragma GCC ivdep
    for (int i = 0; i < kLanes; ++i) to[i] = apply(i);
    return;
  }
  alignas(64) T values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = apply(i);
  write(warp, to, values);
}

template <class D, class A, auto operation>
void unary(Warp& warp, const Instr& in) {
  const A* a = lanes<A>(warp, in.a);
  for_lanes<D>(warp, in.d, [&](int i) { return static_cast<D>(operation(a[i])); });
}

template <class D, class A, class B, auto operation>
void binary(Warp& warp, const Instr& in) {
  const A* a = lanes<A>(warp, in.a);
  const B* b = lanes<B>(warp, in.b);
  for_lanes<D>(warp, in.d, [&](int i) { return static_cast<D>(operation(a[i], b[i])); });
}

template <class D, class A, class B, class C, auto operation>
void ternary(Warp& warp, const Instr& in) {
  const A* a = lanes<A>(warp, in.a);
  const B* b = lanes<B>(warp, in.b);
  const C* c = lanes<C>(warp, in.c);
  for_lanes<D>(warp, in.d, [&](int i) { return static_cast<D>(operation(a[i], b[i], c[i])); });
}

// The mask of lanes for which apply(i) holds.
template <class Apply>
inline uint32_t mask_of(Apply apply) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(apply(i)) << i;
  return mask;
}

// Calls body(lane) for each lane of a mask.
template <class Body>
inline void each_lane(uint32_t mask, Body body) {
  for (; mask; mask &= mask - 1) body(__builtin_ctz(mask));
}

inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

}  // namespace emulator
