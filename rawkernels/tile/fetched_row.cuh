// A row of 32 times a power of two features that neighbouring lanes of a warp share, on its way
// from memory to registers: its numbers as they are stored, RoPE, and the signs of a rotation.
#pragma once

#include "tile/code_row.cuh"
#include "tile/softmax.cuh"

namespace tile {

// Of each quarter of the features lane c of kLanes neighbouring ones has eight, from 8 c on: the
// partners of RoPE, and whatever 2^5 features of a group or of the Hadamard transform are its own.
template <int kLanes>
struct LaneColumns {
  static constexpr int kHeadDim = 32 * kLanes;
  static constexpr int kQuarter = 8 * kLanes;
  static_assert(kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a row must be part of a warp");

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int column(int part) { return part * kQuarter + lane() * 8; }
  // Of a row in slots, the quarter that this lane has in one of them.
  __device__ __forceinline__ static int quarter_of(int slot) { return slot ^ lane() % 4; }
};

template <class T, int kLanes>
struct FetchedRow {
  using Columns = LaneColumns<kLanes>;
  static constexpr int kEach = 16 / sizeof(T);
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "words hold two numbers, or one");

  uint4 words[4][8 / kEach];

  __device__ __forceinline__ void fetch(const T* row) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 8; i += kEach)
        words[part][i / kEach] =
            __ldcs(reinterpret_cast<const uint4*>(row + Columns::column(part) + i));
  }
  // The same of a row in shared memory.
  __device__ __forceinline__ void read(const T* row) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 8; i += kEach)
        words[part][i / kEach] = *reinterpret_cast<const uint4*>(row + Columns::column(part) + i);
  }

  // The same in slots: `words[s]` are the quarter that quarter_of(s) says, so that lanes exchange
  // quarters without choosing between registers.
  __device__ __forceinline__ void read_slots(const T* row) {
    static_assert(sizeof(T) == 2, "a quarter of a lane's is 16 bytes");
#pragma unroll
    for (int slot = 0; slot < 4; ++slot)
      words[slot][0] =
          *reinterpret_cast<const uint4*>(row + Columns::column(Columns::quarter_of(slot)));
  }

  // Of a row in slots: lane c has quarter p's features from 8 c on, and gets those from 8 p on of
  // quarter c (of two lanes: of the quarters with that lowest bit), or the other way around.
  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int slot = 1; slot < 4; ++slot)
      if (slot % kLanes != 0)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word(slot, i) = __shfl_xor_sync(~0u, word(slot, i), slot % kLanes);
  }

  // RoPE, rounded to T, by the angles that `angles` gives for each fourth.
  template <class Fourths>
  __device__ __forceinline__ void turn(const Fourths& angles, bool interleaved) {
    float a[4], b[4];
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Angles at = angles(i);
        get_four(a, i, 0);
        get_four(b, i, 1);
        turn_pair(a[0], a[1], at.cos.x, at.sin.x);
        turn_pair(a[2], a[3], at.cos.y, at.sin.y);
        turn_pair(b[0], b[1], at.cos.z, at.sin.z);
        turn_pair(b[2], b[3], at.cos.w, at.sin.w);
        put_four(a, i, 0);
        put_four(b, i, 1);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Angles at = angles(i);
        get_four(a, i / 2, i % 2);
        get_four(b, i / 2 + 2, i % 2);
        turn_pair(a[0], b[0], at.cos.x, at.sin.x);
        turn_pair(a[1], b[1], at.cos.y, at.sin.y);
        turn_pair(a[2], b[2], at.cos.z, at.sin.z);
        turn_pair(a[3], b[3], at.cos.w, at.sin.w);
        put_four(a, i / 2, i % 2);
        put_four(b, i / 2 + 2, i % 2);
      }
    }
  }

  // The same by angles that are read just before: with one place for both kinds of pairs, registers
  // would be missing.
  __device__ __forceinline__ void turn(const RowRope<T>& rope) {
    const auto angles = [&](int fourth) { return angles_of(rope, fourth); };
    if (rope.interleaved)
      turn(angles, true);
    else
      turn(angles, false);
  }

  // The same of the features of `row` that RoPE turns, one by one, and the others as they are.
  __device__ __forceinline__ void turn_some(const T* row, const RowRope<T>& rope) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        reinterpret_cast<T(&)[kEach]>(words[part][e / kEach])[e % kEach] =
            rope.column(row, Columns::column(part) + e);
  }

  // Gives features the signs of the rotation, two at once.
  __device__ __forceinline__ void change_signs() {
    static_assert(sizeof(T) == 2, "signs are those of two numbers in a word");
    const unsigned signs = paired_signs();
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) word(part, i) ^= signs << (15 - 4 * part - i) & 0x80008000;
  }

  // The same of a quarter, by the signs of its words.
  __device__ __forceinline__ void change_signs(int part, const uint4& signs) {
    word(part, 0) ^= signs.x;
    word(part, 1) ^= signs.y;
    word(part, 2) ^= signs.z;
    word(part, 3) ^= signs.w;
  }
  // Which of the rotation's signs are those of a quarter's words, of this thread's lane.
  __device__ __forceinline__ static uint4 signs_of(int part) {
    const unsigned signs = paired_signs() << (12 - 4 * part);
    return {signs << 3 & 0x80008000, signs << 2 & 0x80008000, signs << 1 & 0x80008000,
            signs & 0x80008000};
  }

  // Features 4 `half`, … of a quarter's eight.
  __device__ __forceinline__ void get_four(float (&x)[4], int part, int half) const {
    if constexpr (sizeof(T) == 2) {
      const float2 low = to_floats<T>(word(part, 2 * half));
      const float2 high = to_floats<T>(word(part, 2 * half + 1));
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = __uint_as_float(word(part, 4 * half + e));
    }
  }

  // All of them.
  __device__ __forceinline__ void get(float (&x)[4][8]) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      get_four(reinterpret_cast<float (&)[4]>(x[part][0]), part, 0);
      get_four(reinterpret_cast<float (&)[4]>(x[part][4]), part, 1);
    }
  }

  // Word i of a quarter's.
  __device__ __forceinline__ unsigned& word(int part, int i) {
    return reinterpret_cast<unsigned (&)[4]>(words[part][i / 4])[i % 4];
  }
  __device__ __forceinline__ unsigned word(int part, int i) const {
    return reinterpret_cast<const unsigned (&)[4]>(words[part][i / 4])[i % 4];
  }

  // All numbers become 0.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
      for (int i = 0; i < 8 / kEach; ++i) words[part][i] = make_uint4(0, 0, 0, 0);
  }

  // Whether RoPE turns some of the features only.
  __device__ __forceinline__ static bool turns_some(const RowRope<T>& rope) {
    return rope.cos != nullptr && 2 * rope.pairs != Columns::kHeadDim;
  }
  // A fourth of the angles of a row whose features are all turned by RoPE.
  struct Angles {
    float4 cos, sin;
  };
  __device__ __forceinline__ static Angles angles_of(const RowRope<T>& rope, int fourth) {
    const int pair = rope.interleaved ? Columns::column(fourth) / 2
                                      : Columns::column(fourth / 2) + fourth % 2 * 4;
    return {__ldg(reinterpret_cast<const float4*>(rope.cos + pair)),
            __ldg(reinterpret_cast<const float4*>(rope.sin + pair))};
  }
  // The same of a row in slots, which `turn` turns as it does quarters: where slots have a pair's
  // second features first, the sine has the other sign. `cos` and `sin` are the row's.
  __device__ __forceinline__ static Angles slot_angles(const float* cos, const float* sin,
                                                       int fourth, bool interleaved) {
    const int pair = interleaved
                         ? Columns::column(Columns::quarter_of(fourth)) / 2
                         : Columns::column(Columns::quarter_of(fourth / 2) % 2) + fourth % 2 * 4;
    Angles at = {__ldg(reinterpret_cast<const float4*>(cos + pair)),
                 __ldg(reinterpret_cast<const float4*>(sin + pair))};
    if (!interleaved && Columns::quarter_of(0) >= 2) {
      at.sin.x = -at.sin.x, at.sin.y = -at.sin.y;
      at.sin.z = -at.sin.z, at.sin.w = -at.sin.w;
    }
    return at;
  }

 private:
  // Two at once: a conversion of one alone is several times as slow.
  __device__ __forceinline__ void put_four(const float (&x)[4], int part, int half) {
    if constexpr (sizeof(T) == 2) {
      word(part, 2 * half) = pack<T>(x[0], x[1]);
      word(part, 2 * half + 1) = pack<T>(x[2], x[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) word(part, 4 * half + e) = __float_as_uint(x[e]);
    }
  }
  __device__ __forceinline__ static void turn_pair(float& a, float& b, float cos, float sin) {
    const float first = RowRope<T>::first(a, b, cos, sin);
    b = RowRope<T>::second(a, b, cos, sin);
    a = first;
  }
  // The rotation's signs of this lane's features: of feature e of quarter p, bit 4 p + e / 2 of the
  // lower half, or of the upper one where e is odd.
  template <int kLane = 0>
  __device__ __forceinline__ static unsigned paired_signs() {
    constexpr unsigned kSigns = paired_signs_of(kLane);
    if constexpr (kLane + 1 == kLanes)
      return kSigns;
    else
      return Columns::lane() == kLane ? kSigns : paired_signs<kLane + 1>();
  }
  __device__ static constexpr unsigned paired_signs_of(int lane) {
    unsigned signs = 0;
    for (int part = 0; part < 4; ++part)
      for (int e = 0; e < 8; ++e) {
        const int channel = part * Columns::kQuarter + lane * 8 + e;
        const unsigned sign = kRotationSigns[channel / 32 % 8] >> channel % 32 & 1;
        signs |= sign << (4 * part + e / 2 + e % 2 * 16);
      }
    return signs;
  }
};

}  // namespace tile
