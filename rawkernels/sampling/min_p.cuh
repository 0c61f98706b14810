// What min-p keeps, as float64 decides it.
#pragma once

#include "sampling/row.cuh"

// Whether the probability of a logit is at least min_p, which is above 0, times that of `high`.
__device__ __forceinline__ bool reaches_min_p(float x, float high, float temperature, float min_p) {
  return (double(x) - double(high)) / double(temperature) >= log(double(min_p));
}

// The least logit that reaches min_p. Found by bisection of what float64's rounding leaves open:
// two or three numbers, but very many where the least logit is near 0.
__device__ __forceinline__ float min_p_logit(float high, float temperature, float min_p) {
  const double bound = log(double(min_p)), reach = bound * double(temperature);
  const double guess = double(high) + reach, error = 4e-15 * (fabs(double(high)) - reach);
  unsigned least = ordered(fmaxf(__double2float_rd(guess - error), -kMaxFloat));
  unsigned kept = ordered(fminf(__double2float_ru(guess + error), high));
  while (least < kept) {
    const unsigned middle = least + (kept - least) / 2;
    if ((double(from_ordered(middle)) - double(high)) / double(temperature) >= bound)
      kept = middle;
    else
      least = middle + 1;
  }
  return from_ordered(kept);
}
