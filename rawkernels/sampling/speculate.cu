// Speculative sampling: which draft tokens of a row are accepted, and the token drawn after them.
//
// draft_tokens and parents (rows, drafts), draft_probs (rows, drafts, vocab), target_probs (rows,
// drafts + 1, vocab) float32
// -> tokens (rows, drafts + 1), accepted (rows,). A cluster of Config::cluster blocks shares a row;
// grid (rows * cluster).
//
// After rejections, the residual distribution by which the next sibling is judged is computed anew
// from the probabilities wherever it is needed: nothing of the size of the vocabulary is stored.
#include "sampling/gumbel_max.cuh"
#include "sampling/params.cuh"

constexpr int kMaxDrafts = 256;  // of a tree; in a chain no second draft is rejected

// A probability; a negative one counts as 0, a NaN as a NaN.
__device__ __forceinline__ float probability(float p) { return ptx::max_nan(p, 0.0f); }

struct SpeculateParams {
  const int* draft_tokens;
  const int* parents;  // null: a chain
  const float* draft_probs;
  const float* target_probs;
  int* tokens;
  int* accepted;
  RowSeeds seed;
  RowValue<unsigned long long> offset;
  int drafts, vocab;
};

struct Smem {
  GumbelSmem gumbel;
  double sums[2][kWarps];
  int rejected[kMaxDrafts];  // drafts, since the last accepted token
  double left[kMaxDrafts];   // what each rejection left of the residual's sum
};

ROW_KERNEL speculate(const SpeculateParams params) {
  __shared__ Smem smem;
  const int row = blockIdx.x / Config::cluster;
  const bool writes = threadIdx.x == 0 && rank_in_cluster() == 0;
  const Segment segment = own_segment(params.vocab);
  const long long vocab = params.vocab;
  const int* const drafted = params.draft_tokens + static_cast<long long>(row) * params.drafts;
  const int* const parents =
      params.parents ? params.parents + static_cast<long long>(row) * params.drafts : nullptr;
  const float* const proposals = params.draft_probs + row * params.drafts * vocab;
  const float* const targets = params.target_probs + row * (params.drafts + 1) * vocab;
  int* const tokens = params.tokens + static_cast<long long>(row) * (params.drafts + 1);
  const PhiloxKey key = {params.seed[row], params.offset[row]};
  arrive_cluster();

  int node = -1, accepted = 0, rejected = 0;
  const auto residual = [&](int i) {
    double p = probability(targets[(node + 1) * vocab + i]);
    for (int r = 0; r < rejected; ++r) {
      const double rest = p - double(probability(proposals[smem.rejected[r] * vocab + i]));
      p = (rest > 0.0 || rest != rest ? rest : 0.0) / smem.left[r];
    }
    return p;
  };

  wait_cluster();
  int sums = 0;
  for (int draft = 0; draft < params.drafts; ++draft) {
    const int token = drafted[draft];
    if ((parents ? parents[draft] : draft - 1) != node || token < 0 || token >= params.vocab)
      continue;
    const float* const proposal = proposals + draft * vocab;
    const double u = philox_uniform(key, kAcceptStream, draft);
    if (u * double(probability(proposal[token])) < residual(token)) {
      if (writes) tokens[accepted] = token;
      ++accepted;
      node = draft;
      rejected = 0;
      continue;
    }
    double sum = 0.0;
    const auto add = [&](double p, float q) {
      const double rest = p - double(q);
      sum += rest > 0.0 || rest != rest ? rest : 0.0;
    };
    const int first = segment.begin + threadIdx.x;
    if (rejected > 0) {
      for (int i = first; i < segment.end; i += Config::threads) {
        add(residual(i), probability(proposal[i]));
      }
    } else {
      const float* const target = targets + (node + 1) * vocab;
      const auto load = [&](int i) -> float2 {
        return {probability(target[i]), probability(proposal[i])};
      };
      for_each_ahead<8>(first, segment.end, Config::threads, load,
                        [&](int, float2 each) { add(each.x, each.y); });
    }
    sum = reduce_cluster(sum, Add(), 0.0, smem.sums[sums++ % 2]);
    if (sum > 0.0) {  // else rounding left nothing, and the proposal was the target
      if (threadIdx.x == 0) {
        smem.rejected[rejected] = draft;
        smem.left[rejected] = sum;
      }
      ++rejected;
      __syncthreads();
    }
  }

  const float* const target = targets + (node + 1) * vocab;
  const float* const proposal = rejected ? proposals + smem.rejected[0] * vocab : nullptr;
  const auto load = [&](int i) {
    float rest;
    if (rejected > 1) {
      rest = residual(i);
    } else {  // always in a chain; the sum that divides the whole residual does not matter
      rest = probability(target[i]) - (proposal ? probability(proposal[i]) : 0.0f);
      rest = rest < 0.0f ? 0.0f : rest;
    }
    return 0.6931471805599453f * ptx::lg2(rest);
  };
  const auto scaled = [&](int i, float) { return log(residual(i)); };
  int token;
  if (gumbel_max(load, scaled, segment, kLog2e, key, smem.gumbel, token)) tokens[accepted] = token;
  if (writes) {
    for (int i = accepted + 1; i <= params.drafts; ++i) tokens[i] = -1;
    params.accepted[row] = accepted;
  }
  sync_cluster();  // no block leaves while its sums may be read
}
