// A caching allocator of device memory, which is the host's, and one of pinned memory.
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "device.h"

namespace fake {
namespace {

constexpr size_t kRound = 512, kPage = 4096;
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;

struct Piece {
  size_t size;
  int device, slot;
  int64_t pool;  // of a CUDA graph, or 0
  std::vector<int> other_streams;  // from record_stream
};

using FreeKey = std::tuple<size_t, int, int64_t>;  // bytes, stream, pool

struct Waiting {  // freed, while other streams may still use it
  void* place;
  std::vector<std::shared_ptr<Recorded>> until;
};

struct Caches {
  std::map<void*, Piece> pieces;
  std::map<FreeKey, std::vector<void*>> free;
  std::vector<Waiting> waiting;
  std::map<const char*, size_t> pinned;
  std::map<const char*, std::vector<Mark>> pinned_uses;
  std::vector<std::pair<void*, std::vector<Mark>>> pinned_waiting;
};

Caches& caches() {
  static auto* made = new Caches;  // outlives every tensor
  return *made;
}

void put_back(void* place, const Piece& piece) {
  caches().free[{piece.size, piece.slot, piece.pool}].push_back(place);
}

// As the allocator of torch: memory that another stream used is free once the events of those uses are over.
void take_back_waiting() {
  auto& waiting = caches().waiting;
  auto& all = device();
  if (all.graphs.is_capturing()) return;  // events cannot be asked
  for (auto each = waiting.begin(); each != waiting.end();) {
    const bool is_over = std::all_of(each->until.begin(), each->until.end(),
                                     [&](const auto& recorded) { return all.streams.query(recorded->mark); });
    if (!is_over) {
      ++each;
      continue;
    }
    for (const auto& recorded : each->until) all.order.host_joins(recorded->clock);
    const Piece& piece = caches().pieces.at(each->place);
    put_back(each->place, piece);
    each = waiting.erase(each);
  }
}

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    auto& all = device();
    Locked locked(all.lock);
    const int index = current_device();
    const c10::Device where(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    if (!num_bytes) return {nullptr, nullptr, &nothing, where};
    take_back_waiting();
    const size_t size = (num_bytes + kRound - 1) / kRound * kRound;
    auto& free = caches().free[{size, current_slot(), all.graphs.pool_of(current_slot())}];
    void* place = nullptr;
    if (!free.empty()) {
      place = free.back();
      free.pop_back();
    } else {
      place = reserve(size, index);
    }
    auto& statistics = all.statistics[index];
    statistics.allocated += static_cast<int64_t>(size);
    statistics.max_allocated = std::max(statistics.max_allocated, statistics.allocated);
    return {place, place, &give_back, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

 private:
  static void nothing(void*) {}

  static void* reserve(size_t size, int index) {
    auto& all = device();
    auto& statistics = all.statistics[index];
    const int64_t limit = all.limits[index] ? all.limits[index] : all.total_bytes;
    const auto wanted = static_cast<int64_t>(size);
    if (statistics.reserved + wanted > limit) all.empty_cache();
    TORCH_CHECK_WITH(
        OutOfMemoryError, statistics.reserved + wanted <= limit, "CUDA out of memory. Tried to allocate ", size,
        " bytes. GPU ", index, " has a total capacity of ", limit, " bytes of which ", limit - statistics.reserved,
        " are free.");
    void* place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(place != MAP_FAILED, "no host memory for the fake device");
    statistics.reserved += wanted;
    statistics.max_reserved = std::max(statistics.max_reserved, statistics.reserved);
    const int64_t pool = all.graphs.pool_of(current_slot());
    if (pool) std::memset(place, 0xff, size);  // NaN: nothing runs while a graph is captured
    caches().pieces[place] = {size, index, current_slot(), pool, {}};
    all.order.add_block(place, size, false);
    return place;
  }

  static void give_back(void* place) {
    auto& all = device();
    Locked locked(all.lock);
    Piece& piece = caches().pieces.at(place);
    all.statistics[piece.device].allocated -= static_cast<int64_t>(piece.size);
    if (piece.other_streams.empty()) {
      put_back(place, piece);
      return;
    }
    Waiting waiting{place, {}};
    for (int slot : piece.other_streams)
      waiting.until.push_back(all.streams.record(slot, all.order.clock(slot)));
    piece.other_streams.clear();
    caches().waiting.push_back(std::move(waiting));
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (!num_bytes) return {nullptr, nullptr, &drop, at::kCPU};
    void* place = std::aligned_alloc(kPage, (num_bytes + kPage - 1) / kPage * kPage);
    pin(place, num_bytes);
    return {place, place, &drop, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

 private:
  static void drop(void* place) {
    if (!place) return;
    auto& all = device();
    Locked locked(all.lock);
    auto& waiting = caches().pinned_waiting;
    auto uses = caches().pinned_uses.find(static_cast<const char*>(place));
    waiting.emplace_back(place, uses == caches().pinned_uses.end() ? std::vector<Mark>{} : uses->second);
    if (uses != caches().pinned_uses.end()) caches().pinned_uses.erase(uses);
    caches().pinned.erase(static_cast<const char*>(place));
    all.order.remove_block(place);
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(),
                                 [&](const auto& each) {
                                   for (Mark mark : each.second)
                                     if (!all.streams.is_reached(mark)) return false;
                                   std::free(each.first);
                                   return true;
                                 }),
                  waiting.end());
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceMemory memory;
  return &memory;
}

c10::Allocator* pinned_allocator() {
  static PinnedMemory memory;
  return &memory;
}

void record_stream(const void* place, int slot) {
  Locked locked(device().lock);
  auto found = caches().pieces.find(const_cast<void*>(place));
  if (found != caches().pieces.end() && found->second.slot != slot) found->second.other_streams.push_back(slot);
}

int pin(const void* begin, size_t size) {
  Locked locked(device().lock);
  auto page = [](const void* place) { return reinterpret_cast<uintptr_t>(place) / kPage; };
  const char* first = static_cast<const char*>(begin);
  auto next = caches().pinned.upper_bound(first);
  if (next != caches().pinned.end() && page(next->first) <= page(first + size - 1)) return kAlreadyRegistered;
  if (next != caches().pinned.begin()) {
    const auto& [before, of_before] = *std::prev(next);
    if (page(before + of_before - 1) >= page(first)) return kAlreadyRegistered;
  }
  caches().pinned[first] = size;
  device().order.add_block(begin, size, true);
  return 0;
}

// Memory must not be unpinned while a copy may use it: counted as a write of the host.
int unpin(const void* begin) {
  auto& all = device();
  Locked locked(all.lock);
  auto found = caches().pinned.find(static_cast<const char*>(begin));
  if (found == caches().pinned.end()) return kNotRegistered;
  all.order.host_access({found->first, found->first + found->second}, true, "cudaHostUnregister");
  all.streams.run_all();
  all.order.remove_block(begin);
  caches().pinned.erase(found);
  caches().pinned_uses.erase(static_cast<const char*>(begin));
  return 0;
}

void Device::keep_pinned(const void* place, Mark until) {
  auto found = caches().pinned.upper_bound(static_cast<const char*>(place));
  if (found != caches().pinned.begin()) caches().pinned_uses[std::prev(found)->first].push_back(until);
}

void Device::host_waits_for(Mark mark, const Clock& clock, const char* why) {
  refuse_while_capturing(why);
  counts[std::string("wait: ") + why]++;
  streams.run_until(mark);
  order.host_joins(clock);
}

void Device::refuse_while_capturing(const std::string& what) const {
  TORCH_CHECK(!graphs.is_capturing(), "CUDA error: operation not permitted when stream is capturing: ", what);
}

void Device::refuse_on_captured_stream(int slot, const std::string& what) const {
  TORCH_CHECK(
      !graphs.is_capturing(slot), "CUDA error: operation not permitted when stream is capturing: ", what);
}

void Device::replay(int64_t graph) {
  refuse_while_capturing("a replay");
  const int slot = current_slot();
  order.begin_work(slot);
  counts["graph launches"]++;
  for (const Captured& each : graphs.work_of(graph)) {
    for (const Access& access : each.accesses) order.access(slot, access.bytes, access.writes, each.name);
    std::optional<uint64_t> seed;
    if (each.draw) seed = each.draw();
    streams.post(slot, [run = each.run, seed] { run(seed); });
  }
}

void Device::empty_cache() {
  if (graphs.is_capturing()) return;
  streams.run_all();
  take_back_waiting();
  for (auto& [key, places] : caches().free) {
    const auto [size, slot, pool] = key;
    if (pool && graphs.is_pool_in_use(pool)) continue;
    for (void* place : places) {
      statistics[caches().pieces.at(place).device].reserved -= static_cast<int64_t>(size);
      order.remove_block(place);
      caches().pieces.erase(place);
      munmap(place, size);
    }
    places.clear();
  }
}

}  // namespace fake
