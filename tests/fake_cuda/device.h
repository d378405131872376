// The state of the fake device: its memory, streams, order and counts. All of it is behind one lock.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "graphs.h"
#include "order.h"
#include "streams.h"

namespace fake {

struct Statistics {
  int64_t allocated = 0, max_allocated = 0, reserved = 0, max_reserved = 0;
};

struct Device {
  std::recursive_mutex lock;
  Order order;
  Streams streams;
  Graphs graphs;
  std::map<std::string, int64_t> counts;  // of host waits ("wait: ...") and of work
  std::array<Statistics, kDevices> statistics{};
  std::array<int64_t, kDevices> limits{};
  std::array<int64_t, kDevices> next_stream{};
  int64_t total_bytes = int64_t{16} << 30;
  int num_devices = 1;

  // As CUDA, which ends a capture with an error if the host waits or asks meanwhile.
  void refuse_while_capturing(const std::string& what) const;
  void refuse_on_captured_stream(int slot, const std::string& what) const;
  void replay(int64_t graph);
  void host_waits_for(Mark mark, const Clock& clock, const char* why);
  void empty_cache();
  // Keeps pinned memory until the work posted up to a mark is done, although it may be freed before.
  void keep_pinned(const void* place, Mark until);
};

Device& device();
using Locked = std::lock_guard<std::recursive_mutex>;

int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
inline int current_slot() { return slot_of(current_device(), current_stream(current_device())); }

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void record_stream(const void* place, int slot);
// Return CUDA's errors, 0 if there is none: a page cannot be registered twice, even if it has been unmapped since.
int pin(const void* begin, size_t size);
int unpin(const void* begin);

const at::Generator& default_generator(int device);
// Takes the next seed of a generator of the device, of its default one if there is none.
uint64_t next_seed(const std::optional<at::Generator>& generator);

}  // namespace fake
