// Attention backward on mma.sync: dq, or dk and dv, on any GPU from Ampere on, float16 and
// bfloat16.
//
//   q, k, v, dout: rows of whole 16-byte chunks at multiples of 16 bytes; lse and delta as in
//   gradients/backward_simt.cu, whose two passes these are: results are the same bits in every run.
//   Sums are float; P and dS are rounded to the inputs' type, as operands of the last products.
//
//   A block has kTileM rows, queries or keys (keys_stationary), 16 a warp, and walks over columns,
//   kTileN at a time: keys, or the queries of all heads that share its keys. Scores of a warp,
//   dP = dout v^T and the results stay in its registers; P and dS are repacked accumulators, as P
//   is in attention/forward_sm80.cu. cp.async brings the next columns meanwhile.
//
//   Where registers do not suffice for dk and dv together, a pass each computes them (first,
//   second).
//
//   With Config::repairs a few blocks do what a whole grid does, but only if
//   BackwardParams::nonfinite is set: where a faster kernel's results are not finite, they may be
//   so because of values that a mask hides.
//
//   0 · NaN is NaN: where a result is not finite, the block walks over its columns again
//   (tile::Content): with finite values alone in the last products, and for dv, whose weights are
//   finite, with ones where dout is NaN or inf, and where it is NaN or -inf.
#include "gradients/block_sm80.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/nonfinite.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"

extern __shared__ __align__(128) unsigned char smem[];

// S += A B^T of a warp's 16 rows of A and the kTileN rows of B.
template <class Tile, int kSteps>
__device__ __forceinline__ void multiply_rows(float (&s)[kTileN / 2], unsigned a, unsigned b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned frag_a[4];
    ptx::ldmatrix_x4(frag_a, Tile::at_chunks(a, step));
#pragma unroll
    for (int n = 0; n < kTileN / 16; ++n) {
      unsigned frag_b[4];
      ptx::ldmatrix_x4(frag_b, Tile::at_chunks(b, step) + n * 16 * Tile::kRowBytes);
      ptx::mma_m16n8k16<T>(&s[8 * n], frag_a, frag_b[0], frag_b[1]);
      ptx::mma_m16n8k16<T>(&s[8 * n + 4], frag_a, frag_b[2], frag_b[3]);
    }
  }
}

// O += P B of a warp's 16 rows of P, packed, and the kTileN rows of B.
template <class Tile, int kColumns>
__device__ __forceinline__ void multiply_columns(float (&o)[kColumns / 2],
                                                 const unsigned (&p)[kTileN / 4], unsigned b) {
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
    const unsigned frag_p[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      unsigned frag_b[4];
      ptx::ldmatrix_x4_trans(frag_b, Tile::at_chunks(b, n) + step * 16 * Tile::kRowBytes);
      ptx::mma_m16n8k16<T>(&o[8 * n], frag_p, frag_b[0], frag_b[1]);
      ptx::mma_m16n8k16<T>(&o[8 * n + 4], frag_p, frag_b[2], frag_b[3]);
    }
  }
}

// A lane's first query and key: the warp's rows begin at `row`, the columns at `column`.
struct Place {
  int query, key;

  __device__ __forceinline__ Place(int row, int column) {
    const int lane = ptx::thread_index() % 32;
    row += tile::lane_row(lane);
    column += tile::lane_column(lane);
    query = kKeysStationary ? column : row;
    key = kKeysStationary ? row : column;
  }
  __device__ __forceinline__ int query_of(int i) const {
    return query + (kKeysStationary ? tile::fragment_column(i) : tile::fragment_row(i));
  }
  __device__ __forceinline__ int key_of(int i) const {
    return key + (kKeysStationary ? tile::fragment_row(i) : tile::fragment_column(i));
  }
};

// Scores from products, and their derivatives by q·k.
__device__ __forceinline__ void apply_score_mod(float (&s)[kTileN / 2],
                                                float (&derivative)[kTileN / 2],
                                                const ForwardParams& params, const Block& block,
                                                int head, const Place& place) {
  const tile::Sequence& seq = block.seq;
  const ScoreMod<T, true, false> score_mod = {score_inputs(params).of_head<T>(seq.index, head)};
  const float slope = score_mod.slope(seq.index, head);
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) derivative[i] = 1.0f;
  score_mod.terms([&](const auto& term) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      const int query = place.query_of(i), key = place.key_of(i);
      const tile::ScoreRow<float> row = {seq.index, head, query,
                                         query + seq.seqlen_k - seq.seqlen_q, slope};
      derivative[i] *= term.derivative(s[i], row, key);
      s[i] = term(s[i], row, key);
    }
  });
}

// What dropout multiplies the probabilities of 16 columns by, the first of them `column`.
__device__ __forceinline__ void dropout_factors(float (&z)[8], const DropoutParams& dropout,
                                                int row, int column, int head) {
  const int lane = ptx::thread_index() % 32;
  if (!kKeysStationary) {
    const tile::DropoutBits bits(dropout.seed, row / 16, column / 16, lane, head);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      z[i] = bits[i] < dropout.threshold ? 0.0f : static_cast<float>(dropout.scale);
  } else {
    // The mask turned round: query 2t + e and key g are half g % 2 of the words of lane 8t + 4e +
    // g / 2. Lanes of keys 2n and 2n + 1 want the same two: each evaluates one of them.
    const int g = lane / 4, t = lane % 4;
    const tile::DropoutBits mine(dropout.seed, column / 16, row / 16, 8 * t + 4 * (g % 2) + g / 2,
                                 head);
    const tile::DropoutBits other = mine.exchanged(4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Entry i: query + 8 (i / 4) + i % 2, key + 8 (i / 2 % 2).
      const int half = 2 * (2 * (i / 2 % 2) + i / 4);
      const unsigned even = mine[half], odd = mine[half + 1];
      const unsigned other_even = other[half], other_odd = other[half + 1];
      const unsigned own_bits = g % 2 == 0 ? even : odd;
      const unsigned other_bits = g % 2 == 0 ? other_even : other_odd;
      const unsigned bits = g % 2 == i % 2 ? own_bits : other_bits;
      z[i] = bits < dropout.threshold ? 0.0f : static_cast<float>(dropout.scale);
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
  const int warp_row = threadIdx.x / 32 * 16;  // within the tile
  const unsigned lane_rows0 = rows0 + warp_row * Tile0::kRowBytes + Tile0::lane_row_major();
  const unsigned lane_rows1 = rows1 + warp_row * Tile1::kRowBytes + Tile1::lane_row_major();
  const int count = block.heads * block.columns;

  const auto head_of = [&](int n) { return block.head * block.heads + n / block.columns; };
  const auto column_of = [&](int n) { return block.first_column + n % block.columns * kTileN; };
  const auto load_columns = [&](int n, int content0, int content1) {
    const unsigned stage = stages + n % 2 * kStageBytes;
    const int head = kKeysStationary ? head_of(n) : block.head / (params.heads_q / params.heads_kv);
    load_pair<!kKeysStationary, kTileN>(params, backward, block, stage, stage + kCols0, head,
                                        column_of(n), content0, content1);
  };
  const auto load_statistics = [&](int n) {
    if (!kKeysStationary || threadIdx.x >= kTileN) return;
    float2* const column_statistics =
        reinterpret_cast<float2*>(smem + kRows0 + kRows1 + n % 2 * kStageBytes + kCols0 + kCols1);
    column_statistics[threadIdx.x] =
        statistics(params, backward, block, head_of(n), column_of(n) + threadIdx.x);
  };

  float2 row_statistics[2] = {};
  if (!kKeysStationary) {
    const int query = block.first_row + warp_row + tile::lane_row(threadIdx.x % 32);
    row_statistics[0] = statistics(params, backward, block, block.head, query);
    row_statistics[1] = statistics(params, backward, block, block.head, query + 8);
  }
  const float scale = static_cast<float>(params.scale);
  const float scale_log2 = kGeneral ? tile::kLog2e : scale * tile::kLog2e;
  double alibi = 0;

#pragma unroll 1
  for (int pass = tile::kValues; pass <= (kSecond ? tile::kNegative : tile::kFinite); ++pass) {
    load_pair<kKeysStationary, kTileM>(params, backward, block, rows0, rows1, block.head,
                                       block.first_row);
    if (count > 0) {
      load_columns(0, tile::kValues, tile::kValues);
      load_statistics(0);
    }
    float first[kDim / 2] = {};
    float second[kDimV / 2] = {};
    alibi = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      ptx::cp_async_wait_all();
      __syncthreads();  // these columns are there, and those before have been used
      if (n + 1 < count) {
        load_columns(n + 1, tile::kValues, tile::kValues);
        load_statistics(n + 1);
      }
      const int head = kKeysStationary ? head_of(n) : block.head;
      const int row = block.first_row + warp_row, column = column_of(n);
      const unsigned stage = stages + n % 2 * kStageBytes;
      const tile::Range some = kKeysStationary ? block.visibility.rows_of_any(row, row + 15)
                                               : block.visibility.keys_of_any(row, row + 15);
      const bool active = row < block.rows && some.overlaps(column, kTileN);
      unsigned p[kTileN / 4] = {}, ds[kTileN / 4] = {};
      if (active) {
        float s[kTileN / 2] = {}, dp[kTileN / 2] = {};
        multiply_rows<Tile0, kDim / 16>(s, lane_rows0, stage + Tile0::lane_column_major());
        if (kFirst)
          multiply_rows<Tile1, kDimV / 16>(dp, lane_rows1,
                                           stage + kCols0 + Tile1::lane_column_major());
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
            reinterpret_cast<const float2*>(smem + kRows0 + kRows1 + n % 2 * kStageBytes + kCols0 +
                                            kCols1) +
            tile::lane_column(ptx::thread_index() % 32);
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
            const float2 known = kKeysStationary ? column_statistics[tile::fragment_column(i)]
                                                 : row_statistics[i / 2 % 2];
            float weight = ptx::ex2(fmaf(s[i], scale_log2, -known.x));
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
        tile::pack_fragment<T>(p, s);
        tile::pack_fragment<T>(ds, dp);
      }
      if (pass != tile::kValues) {
        __syncthreads();  // all have multiplied by these columns as they are
        load_columns(n, tile::kFinite, pass);
        __syncthreads();
      }
      if (active) {
        if (kFirst) multiply_columns<Tile0, kDim>(first, ds, stage + Tile0::lane_row_major());
        if (kSecond)
          multiply_columns<Tile1, kDimV>(second, p, stage + kCols0 + Tile1::lane_row_major());
      }
    }

    ptx::cp_async_wait_all();  // for the rows, where there were no columns
    float zeros = 0.0f;        // NaN where a result is not finite
    if (kFirst) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) zeros = fmaf(first[i], 0.0f, zeros);
    }
    if (kSecond) {
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) zeros = fmaf(second[i], 0.0f, zeros);
    }
    const bool done = !__syncthreads_or(zeros != 0.0f);
    if (pass != tile::kValues || done) {
      const long long index = params.cu_seqlens_q != nullptr ? 0 : block.seq.index;
      const long long row = kKeysStationary
                                ? index * params.seqlen_k + block.seq.begin_k + block.first_row
                                : index * params.seqlen_q + block.seq.begin_q + block.first_row;
      const int heads = kKeysStationary ? params.heads_kv : params.heads_q;
      if (kFirst)
        if (pass < tile::kPositive)
          write_rows<Tile0, kDim>(kKeysStationary ? backward.dk : backward.dq, first,
                                  kGeneral ? 1.0f : scale, smem + warp_row * Tile0::kRowBytes,
                                  block, row, warp_row, heads, params.head_dim, pass);
      if (kSecond)
        write_rows<Tile1, kDimV>(backward.dv, second, 1.0f,
                                 smem + kRows0 + warp_row * Tile1::kRowBytes, block, row, warp_row,
                                 heads, params.head_dim_v, pass);
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
