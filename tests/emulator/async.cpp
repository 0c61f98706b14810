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
  Cluster& cluster = *warp.block->cluster;
  async_of(cluster);
  launch.deferred.push_back([work = std::move(work), alive = std::weak_ptr<void>(cluster.async)] {
    if (alive.expired()) fail("asynchronous work that no one waited for when its block ended");
    work();
  });
}

}  // namespace emulator
