#include "graphs.h"

#include <algorithm>
#include <stdexcept>

namespace fake {

int64_t Graphs::begin(int slot, int64_t pool) {
  if (current_) throw std::runtime_error("CUDA error: a capture is under way");
  current_ = next_++;
  slot_ = slot;
  thread_ = std::this_thread::get_id();
  graphs_[current_] = Graph{pool, {}};
  return current_;
}

void Graphs::end() { current_ = 0; }

void Graphs::drop(int64_t graph) {
  if (graph == current_) current_ = 0;
  graphs_.erase(graph);
}

bool Graphs::is_pool_in_use(int64_t pool) const {
  return std::any_of(graphs_.begin(), graphs_.end(), [&](const auto& each) { return each.second.pool == pool; });
}

}  // namespace fake
