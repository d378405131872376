// CUDA graphs: work of one stream that is noted down instead of done, and done at each replay.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "order.h"

namespace fake {

struct Access {
  Bytes bytes;
  bool writes;
};

// One kernel or copy. `draw` takes the seed of a replay, for a kernel that draws random numbers.
struct Captured {
  std::string name;
  std::vector<Access> accesses;
  std::function<void(std::optional<uint64_t>)> run;
  std::function<uint64_t()> draw;
};

class Graphs {
 public:
  int64_t new_pool() { return ++pools_; }
  int64_t begin(int slot, int64_t pool);
  void end();
  void drop(int64_t graph);
  const std::vector<Captured>& work_of(int64_t graph) const { return graphs_.at(graph).work; }

  // Whether this thread captures: capture_error_mode="thread_local".
  bool is_capturing() const { return current_ != 0 && thread_ == std::this_thread::get_id(); }
  bool is_capturing(int slot) const { return current_ != 0 && slot == slot_; }
  void add(Captured work) { graphs_.at(current_).work.push_back(std::move(work)); }
  // Returns the pool of what a stream allocates, 0 outside of a capture.
  int64_t pool_of(int slot) const { return is_capturing(slot) ? graphs_.at(current_).pool : 0; }
  bool is_pool_in_use(int64_t pool) const;

 private:
  struct Graph {
    int64_t pool;
    std::vector<Captured> work;
  };
  std::map<int64_t, Graph> graphs_;
  int64_t current_ = 0, next_ = 1, pools_ = 0;
  int slot_ = 0;
  std::thread::id thread_;
};

}  // namespace fake
