#include "async.h"

namespace emulator {
namespace {

template <class State>
State& state_of(std::shared_ptr<void>& async) {
  if (!async) async = std::make_shared<State>();
  return *static_cast<State*>(async.get());
}

}  // namespace

WarpAsync& async_of(Warp& warp) { return state_of<WarpAsync>(warp.async); }

ClusterAsync& async_of(Cluster& cluster) { return state_of<ClusterAsync>(cluster.async); }

void perform(Warp& warp, std::function<void()> work) {
  Launch& launch = *warp.block->launch;
  if (!launch.late || launch.random() % 2 == 0) return work();
  launch.deferred.push_back([work = std::move(work), block = warp.block] {
    if (block->live_warps == 0)
      fail("asynchronous work of a block was under way when the block ended");
    work();
  });
}

}  // namespace emulator
