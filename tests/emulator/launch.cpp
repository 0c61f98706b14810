// A launch of a kernel: its blocks, and who runs when.
#include "launch.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <sstream>

#include "async.h"
#include "races.h"
#include "text.h"
#include "warp.h"

namespace emulator {
namespace {

using Dimensions = std::array<uint32_t, 3>;

// What shared memory holds before a kernel writes it: a NaN in every floating-point format.
constexpr uint8_t kPoison = 0xff;
constexpr uint32_t kThreadsOfMultiprocessor = 2048;
constexpr uint32_t kMaxSharedBytes = 232448;
// So many instructions without an end of a block, and another cluster becomes resident: the
// resident ones may wait for it in global memory.
constexpr uint64_t kPatience = 4'000'000;
// So many rounds of all warps with deferred work and without any of it done, and one piece is done:
// a warp may poll for it instead of waiting.
constexpr int kMaxDeferredRounds = 1000;

uint64_t count(const Dimensions& dimensions) {
  return uint64_t{dimensions[0]} * dimensions[1] * dimensions[2];
}

Dimensions coordinates(uint64_t index, const Dimensions& of) {
  return {static_cast<uint32_t>(index % of[0]), static_cast<uint32_t>(index / of[0] % of[1]),
          static_cast<uint32_t>(index / of[0] / of[1])};
}

// A cluster with its blocks and warps, and the memory of their registers.
struct ResidentCluster {
  Cluster cluster;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<AlignedBytes> storage;

  bool done() const {
    return std::all_of(blocks.begin(), blocks.end(),
                       [](const auto& block) { return block->live_warps == 0; });
  }
};

class Runner {
 public:
  Runner(Program& program, const Dimensions& grid, const Dimensions& block, uint32_t dynamic_shared,
         uint32_t multiprocessors, const Options& options, RaceLog& races)
      : program_(program),
        options_(options),
        races_(races),
        shared_bytes_(program.dynamic_shared + dynamic_shared) {
    launch_.grid = grid;
    launch_.block = block;
    launch_.cluster = program.function.cluster;
    launch_.multiprocessors = multiprocessors;
    launch_.late = options.late;
    launch_.seed = options.seed;
    launch_.random.seed(options.seed);
    launch_.limit = options.limit;
    for (int axis = 0; axis < 3; ++axis) {
      if (grid[axis] == 0 || block[axis] == 0) throw Failure("a grid or block of 0");
      if (grid[axis] % launch_.cluster[axis])
        throw Failure("the grid is not a multiple of the cluster");
      clusters_[axis] = grid[axis] / launch_.cluster[axis];
    }
    if (count(block) > 1024) throw Failure("a block of more than 1024 threads");
    if (shared_bytes_ - kSharedBase > kMaxSharedBytes)
      throw Failure("a block of more shared memory than a multiprocessor has");
    const auto threads = static_cast<uint32_t>(count(block) * count(launch_.cluster));
    most_resident_ =
        std::max(1u, multiprocessors * std::max(1u, kThreadsOfMultiprocessor / threads));
    resident_limit_ = std::min(std::max(1u, options.resident), most_resident_);
    for (uint32_t rank = 0; rank < count(launch_.cluster); ++rank) name_shared_memory(rank);
  }

  void run() {
    while (next_cluster_ < count(clusters_) || !resident_.empty()) {
      while (next_cluster_ < count(clusters_) && resident_.size() < resident_limit_) add_cluster();
      if (!round() && !do_deferred() && !more_resident()) deadlock();
      if (launch_.instructions > patience_end_) {
        more_resident();
        patience_end_ = launch_.instructions + kPatience;
      }
      if (launch_.limit && launch_.instructions > launch_.limit)
        throw Failure("more than " + std::to_string(launch_.limit) + " instructions of warps\n" +
                      positions());
    }
    while (do_deferred()) {
    }
  }

 private:
  // The constants of a block: in a cluster, addresses of shared memory name it as its own by rank,
  // as on a GPU, where those bits have to be kept out of the descriptors of wgmma.
  void name_shared_memory(uint32_t rank) {
    AlignedBytes constants(program_.constants.size());
    std::memcpy(constants.data(), program_.constants.data(), constants.size());
    if (count(launch_.cluster) > 1) {
      const uint32_t name = (rank + 1) << kRankShift;
      for (const auto& [place, bytes] : program_.shared_addresses) {
        for (int lane = 0; lane < kLanes; ++lane) {
          uint32_t& address = reinterpret_cast<uint32_t&>(constants.data()[place + lane * bytes]);
          address |= name;
        }
      }
    }
    constants_of_rank_.push_back(std::move(constants));
  }

  void add_cluster() {
    auto resident = std::make_unique<ResidentCluster>();
    const Dimensions place = coordinates(next_cluster_++, clusters_);
    for (int axis = 0; axis < 3; ++axis)
      resident->cluster.first[axis] = place[axis] * launch_.cluster[axis];
    for (uint32_t rank = 0; rank < count(launch_.cluster); ++rank) {
      auto block = std::make_unique<Block>();
      block->launch = &launch_;
      block->cluster = &resident->cluster;
      block->rank = rank;
      const Dimensions within = coordinates(rank, launch_.cluster);
      for (int axis = 0; axis < 3; ++axis)
        block->index[axis] = resident->cluster.first[axis] + within[axis];
      if (!unused_shared_.empty()) {
        block->shared = std::move(unused_shared_.back());
        unused_shared_.pop_back();
      }
      block->shared.assign(shared_bytes_, kPoison);
      const auto threads = static_cast<uint32_t>(count(launch_.block));
      for (uint32_t first = 0; first < threads; first += kLanes) {
        add_warp(*resident, *block, first, std::min<uint32_t>(kLanes, threads - first));
      }
      resident->cluster.blocks.push_back(block.get());
      resident->blocks.push_back(std::move(block));
    }
    if (options_.races || options_.initcheck) {
      follow_races(resident->cluster, races_);
      async_of(resident->cluster).races = resident->cluster.races.get();
    }
    resident_.push_back(std::move(resident));
  }

  // Zeros, in memory of a warp that has ended if there is any: new pages cost more than zeros.
  AlignedBytes new_storage(size_t bytes) {
    if (unused_storage_.empty()) return AlignedBytes(bytes);
    AlignedBytes storage = std::move(unused_storage_.back());
    unused_storage_.pop_back();
    std::memset(storage.data(), 0, storage.size());
    return storage;
  }

  void add_warp(ResidentCluster& resident, Block& block, uint32_t first_thread, uint32_t lanes) {
    const Allocation& allocation = program_.allocation;
    auto warp = std::make_unique<Warp>();
    AlignedBytes storage = new_storage(allocation.bytes + sizeof(uint32_t) * allocation.predicates +
                                       size_t{kLanes} * program_.local_bytes);
    warp->base = {storage.data(), constants_of_rank_[block.rank].data()};
    warp->predicates = reinterpret_cast<uint32_t*>(storage.data() + allocation.bytes);
    warp->predicates[kTruePredicate] = kAllLanes;
    warp->local = reinterpret_cast<uint8_t*>(warp->predicates + allocation.predicates);
    warp->local_bytes = program_.local_bytes;
    warp->block = &block;
    warp->index = static_cast<int>(first_thread / kLanes);
    warp->alive = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp->others.push_back(Group{warp->alive, program_.code.data()});
    for (const auto& [name, place] : program_.specials) {
      uint32_t* row = warp->row<uint32_t>(Row{place});
      const bool differs = name.starts_with("%tid") || name.starts_with("%lane");
      std::fill(row, row + kLanes, special(name, block, first_thread, 0));
      for (uint32_t lane = 1; differs && lane < kLanes; ++lane) {
        row[lane] = special(name, block, first_thread, lane);
      }
    }
    ++block.live_warps;
    block.warps.push_back(std::move(warp));
    resident.storage.push_back(std::move(storage));
  }

  // The value of a special register that stays the same while a thread runs.
  uint32_t special(const std::string& name, const Block& block, uint32_t first_thread,
                   uint32_t lane) const {
    const size_t dot = std::min(name.find('.'), name.size());
    const std::string stem = name.substr(1, dot - 1);
    const int axis = dot < name.size() ? name[dot + 1] - 'x' : 0;
    const auto of = [&](const Dimensions& values) { return values[axis]; };
    const Dimensions within = coordinates(block.rank, launch_.cluster);
    if (stem == "tid") return of(coordinates(first_thread + lane, launch_.block));
    if (stem == "ntid") return of(launch_.block);
    if (stem == "ctaid") return of(block.index);
    if (stem == "nctaid") return of(launch_.grid);
    if (stem == "laneid") return lane;
    if (stem == "warpid") return first_thread / kLanes;
    if (stem == "nwarpid")
      return static_cast<uint32_t>((count(launch_.block) + kLanes - 1) / kLanes);
    if (stem == "smid") return linear(block) % launch_.multiprocessors;
    if (stem == "nsmid") return launch_.multiprocessors;
    if (stem == "gridid") return 0;
    if (stem == "lanemask_eq") return 1u << lane;
    if (stem == "lanemask_lt") return (1u << lane) - 1;
    if (stem == "lanemask_le") return (2u << lane) - 1;
    if (stem == "lanemask_gt") return ~((2u << lane) - 1);
    if (stem == "lanemask_ge") return ~((1u << lane) - 1);
    if (stem == "clusterid") return block.index[axis] / launch_.cluster[axis];
    if (stem == "nclusterid") return of(clusters_);
    if (stem == "cluster_ctaid") return of(within);
    if (stem == "cluster_nctaid") return of(launch_.cluster);
    if (stem == "cluster_ctarank") return block.rank;
    if (stem == "cluster_nctarank") return static_cast<uint32_t>(count(launch_.cluster));
    if (stem == "is_explicit_cluster") return program_.function.has_cluster;
    if (stem == "dynamic_smem_size") return shared_bytes_ - program_.dynamic_shared;
    if (stem == "total_smem_size") return shared_bytes_ - kSharedBase;
    if (stem == "clock" || stem == "clock64" || stem == "globaltimer" || stem == "clock_hi")
      return 0;  // read by mov itself
    throw Failure("the special register '" + name + "' is not known to the emulator");
  }

  uint32_t linear(const Block& block) const {
    return block.index[0] + launch_.grid[0] * (block.index[1] + launch_.grid[1] * block.index[2]);
  }

  // A slice of every warp. False: none of them could do anything.
  bool round() {
    turns_.clear();
    for (const auto& cluster : resident_) {
      for (const auto& block : cluster->blocks) {
        for (const auto& warp : block->warps) {
          if (warp->alive) turns_.push_back(warp.get());
        }
      }
    }
    if (launch_.seed) std::shuffle(turns_.begin(), turns_.end(), launch_.random);
    uint64_t done = 0;
    for (Warp* warp : turns_) {
      // With a seed slices differ in length, so that warps meet at other places each time.
      const uint32_t slice = launch_.seed
                                 ? 1 + static_cast<uint32_t>(launch_.random() % options_.slice)
                                 : options_.slice;
      try {
        done += emulator::run(*warp, slice);
      } catch (const Failure& failure) {
        throw Failure(failure.what() + ("\n  " + describe(*warp)));
      }
    }
    launch_.instructions += done;
    finish_clusters();
    if (launch_.deferred.empty()) {
      deferred_rounds_ = 0;
    } else if (++deferred_rounds_ > kMaxDeferredRounds) {
      do_deferred();
    }
    return done > 0;
  }

  void finish_clusters() {
    for (auto& cluster : resident_) {
      if (!cluster->done()) continue;
      // Work that is still under way may write to the cluster's shared memory.
      while (do_deferred()) {
      }
      std::move(cluster->storage.begin(), cluster->storage.end(),
                std::back_inserter(unused_storage_));
      for (auto& block : cluster->blocks) unused_shared_.push_back(std::move(block->shared));
      cluster.reset();
      patience_end_ = launch_.instructions + kPatience;
    }
    std::erase(resident_, nullptr);
  }

  bool do_deferred() {
    deferred_rounds_ = 0;
    if (launch_.deferred.empty()) return false;
    const size_t chosen = launch_.seed ? launch_.random() % launch_.deferred.size() : 0;
    const auto work = std::move(launch_.deferred[chosen]);
    launch_.deferred.erase(launch_.deferred.begin() + static_cast<std::ptrdiff_t>(chosen));
    work();
    return true;
  }

  bool more_resident() {
    if (next_cluster_ >= count(clusters_) || resident_limit_ >= most_resident_) return false;
    ++resident_limit_;
    return true;
  }

  std::string describe(const Warp& warp) const {
    std::ostringstream text;
    const Dimensions& index = warp.block->index;
    text << "block (" << index[0] << ", " << index[1] << ", " << index[2] << "), warp "
         << warp.index;
    return text.str();
  }

  // Where the warps are, for a message.
  std::string positions() const {
    std::ostringstream text;
    int shown = 0;
    for (const auto& cluster : resident_) {
      for (const auto& block : cluster->blocks) {
        for (const auto& warp : block->warps) {
          for (const Group& group : warp->others) {
            constexpr int kMaxShown = 40;
            if (++shown > kMaxShown) continue;
            text << describe(*warp) << ", lanes 0x" << std::hex << group.lanes << std::dec << ": ";
            text << (group.waits_for ? std::string("wait for ") + group.waits_for : "can run")
                 << "\n  ";
            text << (group.next->statement ? place(*group.next->statement) : "") << "\n";
          }
        }
      }
    }
    return text.str();
  }

  [[noreturn]] void deadlock() const {
    throw Failure("a deadlock: no warp can go on\n" + positions());
  }

  Program& program_;
  Options options_;
  RaceLog& races_;
  Launch launch_;
  Dimensions clusters_{};
  uint32_t shared_bytes_;
  uint32_t most_resident_ = 1, resident_limit_ = 1;
  uint64_t next_cluster_ = 0;
  uint64_t patience_end_ = kPatience;
  int deferred_rounds_ = 0;
  std::vector<std::unique_ptr<ResidentCluster>> resident_;
  std::vector<Warp*> turns_;
  std::vector<AlignedBytes> unused_storage_;
  std::vector<AlignedBytes> constants_of_rank_;
  std::vector<std::vector<uint8_t>> unused_shared_;
};

}  // namespace

Options read_options(const std::string& text) {
  Options options;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    uint64_t value = 0;
    try {
      value = std::stoull(equals == std::string::npos ? "" : word.substr(equals + 1));
    } catch (const std::exception&) {
      throw Failure("the option '" + word + "' has no number");
    }
    if (name == "seed") {
      options.seed = value;
    } else if (name == "late") {
      options.late = value != 0;
    } else if (name == "races") {
      options.races = value != 0;
    } else if (name == "initcheck") {
      options.initcheck = value != 0;
    } else if (name == "limit") {
      options.limit = value;
    } else if (name == "resident") {
      options.resident = static_cast<uint32_t>(value);
    } else if (name == "slice") {
      options.slice = std::max<uint32_t>(1, static_cast<uint32_t>(value));
    } else {
      throw Failure("there is no option '" + name +
                    "': seed, late, races, initcheck, limit, resident, slice");
    }
  }
  return options;
}

void launch(Program& program, const Dimensions& grid, const Dimensions& block,
            uint32_t dynamic_shared, void* const* arguments, uint32_t multiprocessors,
            const Options& options) {
  for (size_t i = 0; i < program.parameter_places.size(); ++i) {
    const auto [address, bytes] = program.parameter_places[i];
    std::memcpy(program.parameters.data() + address, arguments[i], bytes);
  }
  RaceLog races{program.code.data(), options.initcheck};
  const std::string title = "races in shared memory";
  try {
    Runner(program, grid, block, dynamic_shared, std::max(1u, multiprocessors), options, races)
        .run();
  } catch (const Failure& failure) {
    if (races.text.empty()) throw;
    throw Failure(failure.what() + ("\n" + title) + races.text);
  }
  if (!races.text.empty()) throw Failure(title + races.text);
}

}  // namespace emulator
