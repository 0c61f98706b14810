// Rotates rows as the keys of a quantised cache are rotated: scores with the rotated keys are then
// what they were (tile/quantized.cuh).
//
//   x (pages, tokens, heads, head_dim); the results are in the place of codes, of x's type.
#include "quantization/params.cuh"

using T = Config::dtype;
using Row = tile::WarpRow<Config::columns>;

extern "C" __global__ void __launch_bounds__(Config::threads)
    rotate_rows(const __grid_constant__ QuantizeParams params) {
  const quantization::Place at =
      quantization::place_of<Row>(params, blockIdx.x * (Config::threads / Row::kRowLanes));
  const PageStrides &from = params.x_stride, &to = params.codes_stride;
  Row row;
  row.load(static_cast<const T*>(params.x) + at.page * from.page + at.token * from.seq +
               at.head * from.head,
           params.head_dim, tile::RowRope<T>{});
  row.prepare(nullptr, true, params.head_dim);
  if (!at.exists) return;
  row.store(reinterpret_cast<T*>(static_cast<char*>(params.codes) + at.page * to.page +
                                 at.token * to.seq + at.head * to.head),
            params.head_dim);
}
