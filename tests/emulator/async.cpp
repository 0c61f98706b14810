#include "async.h"

namespace emulator {
namespace {

template <class State>
State& state_of(std::shared_ptr<void>& async) {
  if (!async) async = std::make_shared<State>();
  return *static_cast<State*>(async.get());
}

// The block of a cluster that has an address of the host in its shared memory.
const Block* owner_of(const Cluster& cluster, const uint8_t* address) {
  for (const Block* block : cluster.blocks)
    if (address >= block->shared.data() && address < block->shared.data() + block->shared.size())
      return block;
  fail("asynchronous work for memory that no block of the cluster has");
}

}  // namespace

WarpAsync& async_of(Warp& warp) { return state_of<WarpAsync>(warp.async); }

ClusterAsync& async_of(Cluster& cluster) { return state_of<ClusterAsync>(cluster.async); }

void perform(Warp& warp, const uint8_t* to, std::function<void()> work) {
  Launch& launch = *warp.block->launch;
  if (!launch.late || launch.random() % 2 == 0) return work();
  launch.deferred.push_back([work = std::move(work), owner = owner_of(*warp.block->cluster, to)] {
    if (owner->live_warps == 0)
      fail("asynchronous work of a block was under way when the block ended");
    work();
  });
}

}  // namespace emulator
