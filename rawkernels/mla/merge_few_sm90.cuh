// Merges what the thread blocks of mla/decode_few_sm90.cu have of a tile of rows, in the same
// launch, through global memory.
//
// A task is a piece of a row, of so many columns that there are about as many tasks as thread
// blocks. Each thread block leaves a partial result of all rows, and sends every task a packet of
// 16 bytes with the row's maximum and sum there, and with the launch's id. So a thread block polls
// packets that only it reads, and then reads its columns of all partial results.
//
// No deadlock: a thread block waits for others only if the last one has begun, before which all
// others have. Else it leaves its tasks to the last one, and says so in the packet that it sends
// there. The last one waits for thread blocks that come before it in the grid, and that are
// resident or have ended.
#pragma once

#include "mla/layout_few_sm90.cuh"
#include "mla/schedule.cuh"
#include "ptx/acquire_release.cuh"

namespace mla {

// O of a thread block's keys as float16, relative to a maximum with which it fits.
struct FewPart {
  uint4 o[kRows][kLatent / 8];
};

// What a tile of rows has in the workspace of the launch.
struct FewWorkspace {
  FewPart* parts;             // of each thread block
  ptx::B128* packets;         // of each task, from each thread block
  unsigned long long* begun;  // the launch's id, when the last thread block runs

  __device__ __forceinline__ explicit FewWorkspace(const DecodeParams& params) {
    const long long blocks = gridDim.x, tasks = max(static_cast<int>(gridDim.x), kRows);
    const long long bytes =
        blocks * static_cast<long long>(sizeof(FewPart)) + blocks * tasks * 16 + 16;
    unsigned char* const own = static_cast<unsigned char*>(params.workspace) +
                               (blockIdx.z * gridDim.y + blockIdx.y) * bytes;
    parts = reinterpret_cast<FewPart*>(own);
    packets = reinterpret_cast<ptx::B128*>(parts + blocks);
    begun = reinterpret_cast<unsigned long long*>(packets + blocks * tasks);
  }
};

// A thread block's part in merging its tile.
struct FewMerge {
  static constexpr int kRowVecsLog2 = 6;  // of eight columns
  // Partial results that a thread has on their way: its share of those of 132 thread blocks.
  static constexpr int kBatch = kRows / 4 + 1;

  Smem& smem;
  const DecodeParams& params;
  const decoding::Split& split;
  const int rows;    // that exist
  const int blocks;  // thread blocks that have keys
  const FewWorkspace workspace = FewWorkspace(params);
  const unsigned long long id = params.launch_id | 1;
  // A row is cut into 1 << row_shift tasks: of 64 columns at least, a line of memory, and of so
  // many that there is a thread block for each task. Where rows are more, a row is a task.
  const int row_shift = find_row_shift();
  const int tasks = rows << row_shift;
  const Divisor by_blocks = Divisor(blocks);

  // By the last thread block, as soon as it runs, and by those that want to know.
  __device__ __forceinline__ void begin() const {
    if (blocks > 1 && blockIdx.x + 1 == blocks)
      ptx::store_relaxed(workspace.begun, params.launch_id);
  }
  __device__ __forceinline__ unsigned long long load_begun() const {
    return blocks > 1 && threadIdx.x == 0 ? ptx::load_relaxed(workspace.begun) : 0;
  }

  // What warpgroups' O of a row is multiplied by. By a warp, of which each lane has a row; the
  // first one leaves the row's maximum and sum of this thread block, too, or where its result goes.
  __device__ __forceinline__ float2 add_sums(int row) const {
    const bool leaves = threadIdx.x < kRows;
    float max = tile::negative_infinity(), sum = 0.0f, largest = 0.0f, factors[kWarpgroups];
#pragma unroll
    for (const auto& row_max : smem.row_max) max = fmaxf(max, row_max[row]);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      factors[i] = weight(smem.row_max[i][row], max);
      float its_sum = 0.0f, its_largest = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        its_sum += smem.warp_sum[i][warp][row];
        its_largest = fmaxf(its_largest, smem.warp_max[i][warp][row]);
      }
      sum = fmaf(factors[i], its_sum, sum);
      largest = fmaf(factors[i], its_largest, largest);
    }
    float factor = 0.0f;
    if (blocks > 1) {
      const int rise = HalfNumbers::rise_for(largest);
      factor = HalfNumbers::factor_for(rise);
      if (leaves) smem.max_sum[row] = {max + rise, sum * factor};
    } else if (row < rows) {
      const OutputRow result = output_row<T, kRows>(params, split, row, max, sum);
      if (leaves) {
        put_lse(params, result);
        smem.out_at[row] = result.at;
      }
      factor = result.factor;
    }
    return {factor * factors[0], factor * factors[1]};
  }

  // O from shared memory to where it goes.
  __device__ __forceinline__ void put_rows() const {
    constexpr int kVecs = kLatent / 8, kStep = kThreads / kVecs, kEach = kRows / kStep;
    const int first = threadIdx.x / kVecs, vec = threadIdx.x % kVecs;
    uint4 own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      own[i] = reinterpret_cast<const uint4*>(row_of_o(smem, first + i * kStep))[vec];
    if (blocks > 1) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (first + i * kStep < rows)
          workspace.parts[blockIdx.x].o[first + i * kStep][vec] = own[i];
    } else if (vec * 8 < params.head_dim_v) {
      T* const out = static_cast<T*>(params.out) + vec * 8;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (first + i * kStep < rows)
          *reinterpret_cast<uint4*>(out + smem.out_at[first + i * kStep]) = own[i];
    }
  }

  // Sends what this thread block has of each task, which is in its part by then. By all threads.
  __device__ __forceinline__ void send() const {
    const bool merges = blockIdx.x + 1 == blocks || smem.waits;
#pragma unroll 1
    for (int task = threadIdx.x; task < tasks; task += kThreads) {
      const float2 own = smem.max_sum[row_of(task)];
      ptx::fence_acquire_release();
      ptx::store_relaxed(
          packet(task, blockIdx.x),
          {merges ? id : ~id,
           static_cast<unsigned long long>(__float_as_uint(own.y)) << 32 | __float_as_uint(own.x)});
    }
  }

  // Merges this thread block's tasks, and those that others have left to it.
  __device__ __forceinline__ void run() const {
    const bool last = blockIdx.x + 1 == blocks;
    if (!last && !smem.waits) return;
    int block = blockIdx.x;
    bool some_left = false;  // not to look for them if there are none
#pragma unroll 1
    do {
      some_left |= merge_tasks_of(block);
      if (some_left) __syncthreads();  // what was read may be written again
      block = some_left ? next_left(block) : blocks;
    } while (block < blocks);
    if (last && threadIdx.x == 0) *workspace.begun = 0;  // for a replay in a CUDA graph
  }

 private:
  __device__ __forceinline__ int find_row_shift() const {
    return (rows * 2 <= blocks) + (rows * 4 <= blocks) + (rows * 8 <= blocks);
  }
  __device__ __forceinline__ int row_of(int task) const { return task >> row_shift; }
  __device__ __forceinline__ ptx::B128* packet(int task, int from) const {
    return workspace.packets + task * gridDim.x + from;
  }

  // The next thread block that has left its tasks, first of all of them behind the last one.
  __device__ __forceinline__ int next_left(int block) const {
    int next = block + 1 < blocks ? block + 1 : 0;
    while (next + 1 < blocks && !smem.left[next]) ++next;
    return next + 1 < blocks ? next : blocks;
  }

  // Tasks are dealt out from the last thread block on, which so has one in any case. Whether some
  // thread blocks have left theirs, if it is that one.
  __device__ __forceinline__ bool merge_tasks_of(int block) const {
    const int first = blocks - 1 - block;
    if (first >= tasks) return false;
    const int own = by_blocks.divide_up(tasks - first);
    // A packet for each thread.
    const int its_task = by_blocks.divide(threadIdx.x);
    ptx::B128* const its_packet =
        its_task < own ? packet(first + its_task * blocks, threadIdx.x - its_task * blocks)
                       : nullptr;
    const bool some_left = await(its_packet, first == 0);
    // Eight columns for each thread. All have the same task, and those with the same columns a
    // share of the partial results each; or there are several tasks, whole rows then, for 64
    // threads each.
    const int shift = own > 1 ? kRowVecsLog2 : kRowVecsLog2 - row_shift;
    const int vec = threadIdx.x & (1 << shift) - 1;
    const int shares = own > 1 ? 1 : kThreads >> shift;
#pragma unroll 1
    for (int begin = 0; begin < own << shift; begin += kThreads) {
      const int index = begin + threadIdx.x >> shift;
      const int own_task = own > 1 ? index : 0, share = own > 1 ? 0 : index;
      if (own_task >= own) break;
      const int task = first + own_task * blocks, row = row_of(task);
      const int column = ((task & (1 << row_shift) - 1) << shift) + vec << 3;
      const float2* const max_sum = smem.their_max_sum + own_task * blocks;
      const uint4* const parts = &workspace.parts->o[row][column / 8];
      uint4 words[kBatch];
      request(words, parts, share, shares);
      // While these are on their way: the row's maximum and sum, and what becomes of it.
      const float2 whole = find_max_sum(max_sum);
      const OutputRow result = output_row<T, kRows>(params, split, row, whole.x, whole.y);
      float sum[8] = {};
#pragma unroll 1
      for (int from = share; from < blocks;) {
        add(sum, words, max_sum, whole.x, from, shares);
        from += shares * kBatch;
        if (from < blocks) request(words, parts, from, shares);
      }
      if (share == 0 && column == 0) put_lse(params, result);
      T* const out = static_cast<T*>(params.out) + result.at;
      if (shares > 1) {
        put_shares(out, column - vec * 8, sum, result.factor, shift);
        break;
      }
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = tile::pack<T>(sum[2 * i] * result.factor, sum[2 * i + 1] * result.factor);
      if (column < params.head_dim_v)
        *reinterpret_cast<uint4*>(out + column) = {packed[0], packed[1], packed[2], packed[3]};
    }
    // For a replay of the launch in a CUDA graph, which has the same id.
    if (its_packet != nullptr) ptx::store_relaxed(its_packet, {0, 0});
    return some_left;
  }

  // Waits for a packet, if this thread has one. It needs no initial value, since no stale content
  // is this launch's random id. Whether a thread has one of a thread block that has left its tasks,
  // as is said to the last one.
  __device__ __forceinline__ bool await(const ptx::B128* packet, bool last) const {
    bool left = false;
    if (packet != nullptr) {
      ptx::B128 got;
      do {
        got = ptx::load_acquire(packet);
      } while (got.low != id && got.low != ~id);
      smem.their_max_sum[threadIdx.x] = {__uint_as_float(static_cast<unsigned>(got.high)),
                                         __uint_as_float(static_cast<unsigned>(got.high >> 32))};
      left = last && got.low != id;
      if (last) smem.left[threadIdx.x] = left;
    }
    return __syncthreads_or(left);
  }

  // Requests eight columns of partial results begin, begin + step, …, and adds them.
  __device__ __forceinline__ void request(uint4 (&words)[kBatch], const uint4* parts, int begin,
                                          int step) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int block = begin + i * step;
      words[i] = {};
      if (block < blocks) words[i] = __ldcg(parts + block * (sizeof(FewPart) / 16));
    }
  }
  __device__ __forceinline__ void add(float (&sum)[8], const uint4 (&words)[kBatch],
                                      const float2* max_sum, float max, int begin, int step) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = weight(max_sum[min(begin + i * step, blocks - 1)].x, max);
      const unsigned pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = HalfNumbers::pair(pairs[j]);
        sum[2 * j] = fmaf(factor, x.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(factor, x.y, sum[2 * j + 1]);
      }
    }
  }

  // Adds up the sums of threads whose numbers differ by multiples of 1 << shift, and puts them as
  // the columns from `first` on of a row of the result, two for each thread. By all threads.
  __device__ __forceinline__ void put_shares(T* out, int first, float (&sum)[8], float factor,
                                             int shift) const {
    if (shift <= 3) add_lanes<8>(sum);
    if (shift <= 4) add_lanes<16>(sum);
    // Then those of warps, or of 64 threads.
    const int columns = 8 << shift, vec = threadIdx.x & (1 << shift) - 1;
    const int own = threadIdx.x >> max(shift, 5), all = kThreads >> max(shift, 5);
    float* const sums = reinterpret_cast<float*>(smem.q);
    static_assert(kThreads * 32 <= sizeof(Smem::q), "sums take Q's place");
    if (threadIdx.x % 32 < 1 << shift) {
      float4* const place = reinterpret_cast<float4*>(sums + own * columns + vec * 8);
      place[0] = {sum[0], sum[1], sum[2], sum[3]};
      place[1] = {sum[4], sum[5], sum[6], sum[7]};
    }
    __syncthreads();
    const int column = 2 * threadIdx.x;
    if (column >= columns) return;
    float2 of_others[kThreads / 32];
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i)
      of_others[i] = i < all ? *reinterpret_cast<const float2*>(sums + i * columns + column)
                             : float2{0.0f, 0.0f};
    float2 total = of_others[0];
#pragma unroll
    for (int i = 1; i < kThreads / 32; ++i) {
      total.x += of_others[i].x;
      total.y += of_others[i].y;
    }
    if (first + column < params.head_dim_v)
      *reinterpret_cast<unsigned*>(out + first + column) =
          tile::pack<T>(total.x * factor, total.y * factor);
  }
  template <int kDistance>
  __device__ __forceinline__ static void add_lanes(float (&sum)[8]) {
#pragma unroll
    for (float& x : sum) x += __shfl_xor_sync(~0u, x, kDistance);
  }

  // Maximum and sum of a row, from those of its partial results. By a warp.
  __device__ __forceinline__ float2 find_max_sum(const float2* of_parts) const {
    const int lane = threadIdx.x % 32;
    float max = tile::negative_infinity(), sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < blocks; i += 32) max = fmaxf(max, of_parts[i].x);
    max = from_ordered(__reduce_max_sync(~0u, ordered(max)));
#pragma unroll 1
    for (int i = lane; i < blocks; i += 32)
      sum = fmaf(weight(of_parts[i].x, max), of_parts[i].y, sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return {max, sum};
  }
  // Integers in the order of floats, which warps have an instruction for; and back.
  __device__ __forceinline__ static int ordered(float x) {
    return __float_as_int(x) ^ (__float_as_int(x) >> 31 & 0x7FFFFFFF);
  }
  __device__ __forceinline__ static float from_ordered(int x) {
    return __int_as_float(x ^ (x >> 31 & 0x7FFFFFFF));
  }
  __device__ __forceinline__ static float weight(float own, float max) {
    return ptx::ex2(own - tile::OnlineSoftmax::offset(max, 1.0f));
  }
};

}  // namespace mla
