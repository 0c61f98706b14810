// Attention backward on mma.sync: dq, or dk and dv and the sums of dq, on any GPU from Ampere on,
// float16 and bfloat16.
//
//   q, k, v, dout: rows of whole 16-byte chunks at multiples of 16 bytes; lse and delta as in
//   gradients/backward_simt.cu, whose two passes these are: results are the same bits in every run,
//   dq that is added up in memory apart. Sums are float; P and dS are rounded to the inputs' type,
//   as operands of the last products.
//
//   A block has kTileM rows, queries or keys (keys_stationary), kRows a warp, and walks over
//   columns, kTileN at a time: keys, or the queries of all heads that share its keys. Scores of a
//   warp, dP = dout v^T and the results stay in its registers; P and dS are repacked accumulators,
//   as P is in attention/forward_sm80.cu. cp.async brings the next columns meanwhile.
//
//   Where registers do not suffice for dk and dv together, a pass each computes them (first,
//   second).
//
//   Where dq may be summed in any order, the pass for dk adds its parts to sums in memory
//   (adds_dq, add_dq_sm80.cuh): five products in all instead of seven. sums_sm80.cu clears and
//   rounds them.
//
//   With Config::repairs a few blocks do what a whole grid does, but only if
//   BackwardParams::nonfinite is set: where a faster kernel's results are not finite, they may be
//   so because of values that a mask hides.
//
//   0 · NaN is NaN: where a result is not finite, the block walks over its columns again
//   (tile::Content): with finite values alone in the last products, and for dv, whose weights are
//   finite, with ones where dout is NaN or inf, and where it is NaN or -inf.
#include "gradients/add_dq_sm80.cuh"
#include "gradients/scores_sm80.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/nonfinite.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"

extern __shared__ __align__(128) unsigned char smem[];

using Scores = float[kBlocks][kTileN / 2];

// S += A B^T of a warp's rows of A and the kTileN rows of B.
template <class Tile, int kSteps>
__device__ __forceinline__ void multiply_rows(Scores& s, unsigned a, unsigned b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned frag_a[kBlocks][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
      ptx::ldmatrix_x4(frag_a[m], Tile::at_chunks(a, step) + m * 16 * Tile::kRowBytes);
#pragma unroll
    for (int n = 0; n < kTileN / 16; ++n) {
      unsigned frag_b[4];
      ptx::ldmatrix_x4(frag_b, Tile::at_chunks(b, step) + n * 16 * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        ptx::mma_m16n8k16<T>(&s[m][8 * n], frag_a[m], frag_b[0], frag_b[1]);
        ptx::mma_m16n8k16<T>(&s[m][8 * n + 4], frag_a[m], frag_b[2], frag_b[3]);
      }
    }
  }
}

// O += P B of a warp's rows of P, packed, and the kTileN rows of B.
template <class Tile, int kColumns>
__device__ __forceinline__ void multiply_columns(float (&o)[kBlocks][kColumns / 2],
                                                 const Weights& p, unsigned b) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      unsigned frag_b[4];
      ptx::ldmatrix_x4_trans(frag_b, Tile::at_chunks(b, n) + step * 16 * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const unsigned frag_p[4] = {p[m][4 * step], p[m][4 * step + 1], p[m][4 * step + 2],
                                    p[m][4 * step + 3]};
        ptx::mma_m16n8k16<T>(&o[m][8 * n], frag_p, frag_b[0], frag_b[1]);
        ptx::mma_m16n8k16<T>(&o[m][8 * n + 4], frag_p, frag_b[2], frag_b[3]);
      }
    }
  }
}

// Sends a warp's 16 rows of a result out in whole chunks, through shared memory of its own. Passes
// after the finite one change what that has left.
template <class Tile, int kColumns>
__device__ __forceinline__ void write_rows(void* result, float (&o)[kColumns / 2], float scale,
                                           unsigned char* staged, const Block& block, long long row,
                                           int warp_row, int heads, int columns, int pass) {
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    const int at = Tile::at(lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4;
    const bool ones =
        pass >= tile::kPositive;  // any weight counts, also one that 16 bits would lose
    const float low = ones ? o[2 * i] != 0.0f : o[2 * i] * scale;
    const float high = ones ? o[2 * i + 1] != 0.0f : o[2 * i + 1] * scale;
    *reinterpret_cast<unsigned*>(staged + at) = tile::pack<T>(low, high);
  }
  __syncwarp();
  T* out = static_cast<T*>(result) + ((row + warp_row) * heads + block.head) * columns;
#pragma unroll 1
  for (int i = lane; i < 16 * (kColumns / 8); i += 32) {
    const int r = i / (kColumns / 8), chunk = i % (kColumns / 8);
    if (block.first_row + warp_row + r >= block.rows || chunk * 8 >= columns) continue;
    const unsigned char* elements = staged + Tile::at(r, chunk);
    T* target = out + static_cast<long long>(r) * heads * columns + chunk * 8;
    if (pass < tile::kPositive) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(elements);
    } else {
      for (int e = 0; e < 8; ++e)
        target[e] = tile::with_nonfinite(target[e], reinterpret_cast<const T*>(elements)[e], pass);
    }
  }
  __syncwarp();
}

// What a thread block does: the one with these indices, in a grid of `blocks` along x.
__device__ __forceinline__ void compute_block(const ForwardParams& params,
                                              const BackwardParams& backward,
                                              const DropoutParams& dropout, int x, int blocks,
                                              int batch) {
  __shared__ Block block;
  {
    const Block found = find_block(params, x, blocks, batch);
    if (found.seq.index >= params.batch) return;
    double* const part = !kKeysStationary && backward.alibi_parts != nullptr && threadIdx.x == 0
                             ? alibi_part(params, backward, found.seq.index)
                             : nullptr;
    if (part != nullptr) *part = 0;
    if (found.seq.tile < 0) return;
    if (threadIdx.x == 0) block = found;
    __syncthreads();
  }
  const unsigned rows0 = ptx::shared_address(smem), rows1 = rows0 + kRows0;
  const unsigned stages = rows1 + kRows1;
  const int warp_row = threadIdx.x / 32 * kRows;  // within the tile
  const unsigned lane_rows0 = rows0 + warp_row * Tile0::kRowBytes + Tile0::lane_row_major();
  const unsigned lane_rows1 = rows1 + warp_row * Tile1::kRowBytes + Tile1::lane_row_major();
  const int count = block.heads * block.columns;

  const int head_kv = kKeysStationary ? 0 : block.head / (params.heads_q / params.heads_kv);
  const auto load_columns = [&](int n, const Columns& columns, int content0, int content1) {
    const unsigned stage = stages + n % 2 * kStageBytes;
    load_pair<!kKeysStationary, kTileN>(params, backward, block, stage, stage + kCols0,
                                        kKeysStationary ? columns.head : head_kv, columns.first,
                                        content0, content1);
  };
  const bool whole_rows = params.head_dim == kDim && params.head_dim_v == kDimV;
  // Of the columns, where these are queries: a thread loads those of one query.
  const bool has_column = kKeysStationary && threadIdx.x < kTileN;
  const auto load_column = [&](const Columns& columns) {
    return load_statistics(params, backward, block, columns.head, columns.first + threadIdx.x);
  };
  const auto store_column = [&](int n, const float2& loaded) {
    float2* const column_statistics =
        reinterpret_cast<float2*>(smem + kRows0 + kRows1 + n % 2 * kStageBytes + kCols0 + kCols1);
    column_statistics[threadIdx.x] = for_exponential(loaded);
  };

  float2 row_statistics[2 * kBlocks] = {};
  if (!kKeysStationary) {
    const int query = block.first_row + warp_row + tile::lane_row(threadIdx.x % 32);
#pragma unroll
    for (int half = 0; half < 2 * kBlocks; ++half)
      row_statistics[half] =
          for_exponential(load_statistics(params, backward, block, block.head, query + 8 * half));
  }
  const float scale = static_cast<float>(params.scale);
  const float scale_log2 = kGeneral ? tile::kLog2e : scale * tile::kLog2e;
  double alibi = 0;

#pragma unroll 1
  for (int pass = tile::kValues; pass <= (kSecond ? tile::kNegative : tile::kFinite); ++pass) {
    load_pair<kKeysStationary, kTileM>(params, backward, block, rows0, rows1, block.head,
                                       block.first_row);
    Columns columns(block);
    ColumnSource source(params, backward, block, kKeysStationary ? columns.head : head_kv,
                        columns.first);
    if (count > 0) {
      load_columns(0, columns, tile::kValues, tile::kValues);
      if (has_column) store_column(0, load_column(columns));
    }
    float first[kBlocks][kDim / 2] = {};
    float second[kBlocks][kDimV / 2] = {};
    alibi = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      ptx::cp_async_wait_all();
      __syncthreads();  // these columns are there, and those before have been used
      float2 loaded;    // stored when they have arrived, after the products
      if (n + 1 < count) {
        const Columns next = columns.after(block);
        if (next.first > columns.first)
          source.advance(params, backward);
        else
          source = ColumnSource(params, backward, block, next.head, next.first);
        if (whole_rows &&
            next.first + kTileN <= (kKeysStationary ? block.seq.seqlen_q : block.seq.seqlen_k)) {
          const unsigned stage = stages + (n + 1) % 2 * kStageBytes;
          source.load(params, backward, stage, stage + kCols0);
        } else {
          load_columns(n + 1, next, tile::kValues, tile::kValues);
        }
        if (has_column) loaded = load_column(next);
      }
      const int head = columns.head, column = columns.first;
      const int warp_first = block.first_row + warp_row;
      const int warp_last = warp_first + kRows - 1;
      const unsigned stage = stages + n % 2 * kStageBytes;
      const tile::Range some = kKeysStationary
                                   ? block.visibility.rows_of_any(warp_first, warp_last)
                                   : block.visibility.keys_of_any(warp_first, warp_last);
      const bool active = warp_first < block.rows && some.overlaps(column, kTileN);
      Weights p = {}, ds = {};
      if (active) {
        Scores all_s = {}, all_dp = {};
        multiply_rows<Tile0, kDim / 16>(all_s, lane_rows0, stage + Tile0::lane_column_major());
        if (kFirst)
          multiply_rows<Tile1, kDimV / 16>(all_dp, lane_rows1,
                                           stage + kCols0 + Tile1::lane_column_major());
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          const int row = warp_first + 16 * m;
          float (&s)[kTileN / 2] = all_s[m];
          float (&dp)[kTileN / 2] = all_dp[m];
          const Place place(row, column);
          float derivative[kTileN / 2];
          if (kGeneral) apply_score_mod(s, derivative, params, block, head, place);
          const tile::Range all = kKeysStationary ? block.visibility.rows_of_all(row, row + 15)
                                                  : block.visibility.keys_of_all(row, row + 15);
          if (!all.contains(column, kTileN) || row + 16 > block.rows) {
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i) {
              const tile::Range seen = block.visibility.keys(place.query_of(i));
              const int key = place.key_of(i);
              if (key < seen.begin || key >= seen.end) s[i] = tile::negative_infinity();
            }
          }
          const float2* const column_statistics =
              reinterpret_cast<const float2*>(smem + kRows0 + kRows1 + n % 2 * kStageBytes +
                                              kCols0 + kCols1) +
              tile::lane_column(ptx::thread_index() % 32);
          const auto known_of = [&](int i) {
            return kKeysStationary ? column_statistics[tile::fragment_column(i)]
                                   : row_statistics[2 * m + i / 2 % 2];
          };
          if (!kGeneral && pass == tile::kValues) {
            // A branch of its own: the selections of other passes are four instructions a score.
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i) {
              const float2 known = known_of(i);
              s[i] = exponential(s[i], scale_log2, known.x);
              dp[i] = s[i] * (dp[i] - known.y);
            }
          } else {
            float alibi_sum = 0.0f;
#pragma unroll
            for (int begin = 0; begin < kTileN / 2; begin += 8) {
              float z[8];
              if (kGeneral && dropout.threshold != 0) {
                dropout_factors(z, dropout, row, column + 2 * begin,
                                block.seq.index * params.heads_q + head);
              } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) z[i] = 1.0f;
              }
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                const int i = begin + e;
                const float2 known = known_of(i);
                float weight = exponential(s[i], scale_log2, known.x);
                // lse of a query that does not see the key may be NaN, and so may the other factor.
                if (pass != tile::kValues && s[i] == tile::negative_infinity()) weight = 0.0f;
                float dx = weight * ((kGeneral ? z[e] * dp[i] : dp[i]) - known.y);
                if (pass != tile::kValues && weight == 0.0f) dx = 0.0f;
                if (kGeneral && !kKeysStationary && backward.alibi_parts != nullptr) {
                  const int distance =
                      place.query_of(i) + block.seq.seqlen_k - block.seq.seqlen_q - place.key_of(i);
                  alibi_sum = fmaf(-dx, static_cast<float>(abs(distance)), alibi_sum);
                }
                if (kGeneral) dx *= derivative[i];
                if (kGeneral && pass != tile::kValues && weight == 0.0f) dx = 0.0f;
                s[i] = kGeneral ? weight * z[e] : weight;
                dp[i] = dx;
              }
            }
            alibi += alibi_sum;
          }
          tile::pack_fragment<T>(p[m], s);
          tile::pack_fragment<T>(ds[m], dp);
        }
      }
      if (pass != tile::kValues) {
        __syncthreads();  // all have multiplied by these columns as they are
        load_columns(n, columns, tile::kFinite, pass);
        __syncthreads();
      }
      if (active) {
        if (kFirst) multiply_columns<Tile0, kDim>(first, ds, stage + Tile0::lane_row_major());
        if (kSecond)
          multiply_columns<Tile1, kDimV>(second, p, stage + kCols0 + Tile1::lane_row_major());
      }
      if (kAddsDq && pass == tile::kValues)
        add_dq(params, backward, block, ds, rows0, smem + kRows0 + kRows1 + 2 * kStageBytes,
               columns, scale);
      if (has_column && n + 1 < count) store_column(n + 1, loaded);
      columns = columns.after(block);
    }

    ptx::cp_async_wait_all();  // for the rows, where there were no columns
    float zeros = 0.0f;        // NaN where a result is not finite
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      if (kFirst) {
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) zeros = fmaf(first[m][i], 0.0f, zeros);
      }
      if (kSecond) {
#pragma unroll
        for (int i = 0; i < kDimV / 2; ++i) zeros = fmaf(second[m][i], 0.0f, zeros);
      }
    }
    const bool done = !__syncthreads_or(zeros != 0.0f);
    if (pass != tile::kValues || done) {
      const long long index = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
      const long long row = kKeysStationary
                                ? index * params.seqlen_k + block.seq.begin_k + block.first_row
                                : index * params.seqlen_q + block.seq.begin_q + block.first_row;
      const int heads = kKeysStationary ? params.heads_kv : params.heads_q;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const int block_row = warp_row + 16 * m;
        if (kFirst)
          if (pass < tile::kPositive)
            write_rows<Tile0, kDim>(kKeysStationary ? backward.dk : backward.dq, first[m], scale,
                                    smem + block_row * Tile0::kRowBytes, block, row, block_row,
                                    heads, params.head_dim, pass);
        if (kSecond)
          write_rows<Tile1, kDimV>(backward.dv, second[m], 1.0f,
                                   smem + kRows0 + block_row * Tile1::kRowBytes, block, row,
                                   block_row, heads, params.head_dim_v, pass);
      }
    }
    if (pass == tile::kValues && done) break;
    __syncthreads();
  }

  if (kGeneral && !kKeysStationary && backward.alibi_parts != nullptr) {
    __shared__ double sums[kThreads / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      alibi += __shfl_xor_sync(~0u, alibi, distance);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = alibi;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kThreads / 32; ++warp) alibi += sums[warp];
      *alibi_part(params, backward, block.seq.index) = alibi;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, Config::blocks_per_sm)
    backward_sm80(const __grid_constant__ ForwardParams params,
                  const __grid_constant__ BackwardParams backward,
                  const __grid_constant__ DropoutParams dropout) {
  if constexpr (Config::repairs) {
    // The whole grid's blocks, by a few.
    if (*backward.nonfinite == 0) return;
    const bool ragged = params.cu_seqlens_q != nullptr;
    const int rows = kKeysStationary ? params.seqlen_k : params.seqlen_q;
    const int slots = ragged ? rows / kTileM + params.batch : (rows + kTileM - 1) / kTileM;
    const int blocks = slots * (kKeysStationary ? params.heads_kv : params.heads_q);
    for (int batch = 0; batch < (ragged ? 1 : params.batch); ++batch)
      for (int x = blockIdx.x; x < blocks; x += gridDim.x) {
        compute_block(params, backward, dropout, x, blocks, batch);
        __syncthreads();
      }
  } else {
    compute_block(params, backward, dropout, blockIdx.x, gridDim.x,
                  blockIdx.z * gridDim.y + blockIdx.y);
  }
}
